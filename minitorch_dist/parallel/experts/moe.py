"""Expert parallelism: the ranks hold different experts, and tokens travel to them and back.

    rank 0   tokens ─ dispatch ─ rows for experts 0 1 2 3 ─┐            ┌─ experts 0 1 ─┐            ┌─ combine
                                                           ├ all_to_all ┤               ├ all_to_all ┤
    rank 1   tokens ─ dispatch ─ rows for experts 0 1 2 3 ─┘            └─ experts 2 3 ─┘            └─ combine

Each rank routes its own tokens, by nn.MoE as in one process. A layer makes two all-to-alls forward and two backward. In
each a rank sends (n - 1)/n of experts · groups · capacity · size elements, whatever its tokens choose: these are
k · capacity_factor · tokens · size, but for rounding. Without a capacity it sends what its tokens have chosen, behind a
few integers that say how many rows come, and a rank has as much work as tokens want its experts:

    from rank 0, for experts 0, 1    0 0 1           sorted by experts     0 0 0 1 1 1 1       and back
    from rank 1                      0 1 1 1

    mesh = comm.DeviceMesh(dp=-1, ep=4)
    model = nn.GPT(…, moe={"experts": 8})                       # alike on all ranks
    parallelize_module(model, mesh["ep"], plan_of(model))       # now each has its experts
    model = DistributedDataParallel(model, mesh["dp", "ep"])    # both axes divide the samples

The ranks along ep have samples of their own. So the gradients of everything but the experts are summed over all ranks,
and each expert's over those along dp, which hold the same: its tokens from along ep have come to it. Distributed-
DataParallel, wrapped around ALL these ranks, does both; around a part of ep's ranks it raises, and so does training
without. fully_shard(model, mesh["dp", "ep"]) cuts as well: experts over those along dp, all else over all ranks. With
exact=True both give one process's bits: rows of each rank are multiplied by themselves, and what experts get from each
is a leaf of exact mode's tree (parallel/exact.py), in n gradient buffers instead of one.
All ranks along ep go through the layer together, in evaluation too, and where there is a capacity with equally many
tokens: else a MismatchError; data.Loader(…, drop_last=True) leaves an uneven last batch out. Shared experts stay whole
on each rank, as the router does, and biases (expert_bias.py) are the same on all.
Sources: Lepikhin et al. 2021, "GShard"; Gale et al. 2022, "MegaBlocks".
"""

from functools import partial

import numpy as np

from ...autodiff import ops
from ...autodiff.autocast import lowered
from ...autodiff.primitive import lower
from ...backend import to, zeros_like
from ...data.loader import share
from ...nn.decoding import by_position
from ...nn.module import Module
from ...nn.moe import Experts, MoE, answers
from ..collectives import all_to_all
from ..encodings import Blocks
from ..tensor.tensor_parallel import _Part
from ..wrapping import check_summed
from .once import trips

TILE = 128      # features that have a scale in common, as in DeepSeek-V3


class ExpertParallel(_Part):
    """This rank's share of Experts: rows for all of them, (experts, rows, size) -> their answers, the same shape; or,
    with `counts` of each one's rows, (all rows, size) -> the same.

    comm            the Communicator over whose ranks experts are divided
    divided_over    that of those of them that have samples of their own: DistributedDataParallel and fully_shard ask
                    for it. All, but for ranks that share sequences (tensor/mixtures.py)
    summed          whether somebody sums the gradients: these set it, and whoever does it otherwise has to
    sources         exact mode's Sources: rows of each rank are multiplied by themselves
    dispatch        the Blocks in which rows come to the experts, and gradients of answers; None: as they are
    once            whether a token goes to a rank once (once.py): forward then takes tokens (tokens, size) with the
                    `expert` (tokens, k) that each has chosen and the `gates`, and gives their answers

    ValueError unless the ranks can share the experts equally.
    """

    def __init__(self, experts, comm):
        count = experts.up.shape[0]
        if count % comm.size:
            raise ValueError(f"ExpertParallel: {comm.size} ranks of {comm.name!r} can't share {count} experts equally")
        rows = np.arange(*share(count, comm.rank, comm.size))
        self._take(experts, comm, False, **dict.fromkeys(experts._parameters, (0, rows)))
        self.mlp, self.divided_over, self.summed, self.sources = experts.mlp, comm, False, None
        self.dispatch, self.once = None, False

    @by_position
    def forward(self, x, counts=None, expert=None, gates=None):
        if expert is not None:
            return self._once(x, to(expert, "cpu"), gates)
        if counts is not None:
            return self._any_number(x, np.array(counts).reshape(self.comm.size, -1))
        count, rows, size = x.shape
        ranks = self.comm.size
        here = count // ranks
        x = ops.reshape(all_to_all(x, self.comm, forth=self.dispatch), (ranks, here, rows, size))
        if self.sources is not None:
            y = self._by_source(x, ops.matmul, self.sources.each)
            return all_to_all(ops.reshape(y, (count, rows, size)), self.comm, back=self.dispatch)
        x = ops.reshape(ops.transpose(x, (1, 0, 2, 3)), (here, ranks * rows, size))
        y = ops.reshape(Experts.forward(self, x), (here, ranks, rows, size))
        check_summed(self, y)
        y = ops.reshape(ops.transpose(y, (1, 0, 2, 3)), (count, rows, size))
        return all_to_all(y, self.comm, back=self.dispatch)

    def _any_number(self, x, mine):
        """mine: integers (ranks, experts of each), how many of x's rows they get."""
        theirs = np.empty_like(mine)        # how many of each rank's rows each expert here gets
        self.comm.all_to_all(theirs, mine)
        sent, received = mine.sum(1), theirs.sum(1)
        x = all_to_all(x, self.comm, sent, received, forth=self.dispatch)
        if self.sources is not None:
            y = self._by_source(x, partial(ops.grouped_matmul, counts=theirs.reshape(-1)), self.sources.in_a_row)
            return all_to_all(y, self.comm, received, sent, back=self.dispatch)
        order = by_experts(theirs)
        y = Experts.forward(self, x[order], theirs.sum(0))
        check_summed(self, y)
        return all_to_all(y[np.argsort(order)], self.comm, received, sent, back=self.dispatch)

    def _once(self, x, expert, gates):
        """x: tokens, of which each has chosen `expert` (tokens, k)."""
        if self.sources is not None:
            raise ValueError("dispatch_once: in exact mode a row goes for each choice, for one process adds up a "
                             "token's answers one by one: leave out one of both")
        mine = trips(expert, self.parts["up"][2], self.comm.size)
        table = np.empty((self.comm.size, mine.counts.shape[1] + 1), int)      # rows of each rank, and their choices
        self.comm.all_to_all(table, np.concatenate([mine.rows[:, None], mine.counts], 1))
        received, theirs = table[:, 0], np.ascontiguousarray(table[:, 1:])
        chosen, asked = mine.counts.sum(1), theirs.sum(1)
        row = np.empty(asked.sum(), np.int32)
        self.comm.all_to_all(row, mine.row, chosen, asked)
        x = all_to_all(lowered(x[mine.tokens]), self.comm, mine.rows, received, forth=self.dispatch)
        gates = all_to_all(ops.reshape(gates, (-1,))[mine.choices], self.comm, chosen, asked)
        order = by_experts(theirs)
        row = (row + np.repeat(received.cumsum() - received, asked))[order]
        y = Experts.forward(self, x[row], theirs.sum(0))
        check_summed(self, y)
        weighted = y * ops.reshape(gates[order], (-1, 1))
        answers = ops.astype(ops.scatter_add(weighted, row, x.shape), y.dtype)      # travelling in no more bits than y
        answers = all_to_all(answers, self.comm, received, mine.rows, back=self.dispatch)
        return ops.scatter_add(ops.astype(answers, weighted.dtype), mine.tokens, (len(expert), x.shape[1]))

    def _by_source(self, x, product, of):
        y = answers(self, x, product, of)
        self.sources.let_go()
        check_summed(self, y)
        return y

    def extra_repr(self):
        return Experts.extra_repr(self) + f", which are {self.up.shape[0]} of {self.parts['up'][2]} experts"


def by_experts(counts):
    """The order in which rows that come from ranks, sorted by experts within each, are so among all: integers (rows,).
    counts: (ranks, experts)."""
    return np.argsort(np.repeat(np.tile(np.arange(counts.shape[1]), len(counts)), counts.reshape(-1)), kind="stable")


def share_of_experts(moe, comm):
    """This rank's share of a MoE's experts."""
    if isinstance(moe.experts, ExpertParallel):
        raise ValueError(f"parallelize_module: the experts are divided already, over {moe.experts.comm.name!r}")
    return ExpertParallel(moe.experts, comm)


def plan_of(model):
    """{path of a MoE: "experts"} of all below a model, for parallelize_module."""
    return {path: "experts" for path, module in model.named_modules() if path and isinstance(module, MoE)}


def dispatched_in(width, bits):
    """The Blocks of 8 or 4 bits in which rows of so many features travel: TILE of them have a scale, or all of fewer.
    ValueError where they aren't made of whole ones."""
    if width % min(width, TILE):
        raise ValueError(f"rows of {width} features aren't made of blocks of {TILE}: take a width that is, or below")
    return Blocks(bits, min(width, TILE))


def dispatch_in_few_bits(model, bits=8):
    """Let rows come to the experts of all divided mixtures in the model in few bits, and gradients of their answers;
    answers and the rows' gradients go back as they are. Call it alike on all ranks. ValueError where there are none.

    Of four all-to-alls two so have a quarter of float32's bytes, or half of 16 bits', and scales. Source: DeepSeek-AI
    2024, "DeepSeek-V3", 3.3.3 (there FP8, whose steps are finer for small numbers than these).
    """
    shares = [m for m in model.modules() if isinstance(m, ExpertParallel)]
    if not shares:
        raise ValueError("dispatch_in_few_bits: there are no divided experts here: parallelize_module divides them")
    for m in shares:
        m.dispatch = dispatched_in(m.up.shape[1], bits)


def dispatch_once(model):
    """Let a token go to each rank once, however many of its experts are there, and one row come back (once.py). Call it
    alike on all ranks. ValueError where there are no divided experts, or some have a capacity: then as many rows travel
    as there are places, whoever is in them; in exact mode forward raises one, for sums have another order here.
    Source: DeepSeek-AI 2024, "DeepSeek-V3", 3.2.2."""
    found = [m for m in model.modules() if isinstance(m, MoE) and isinstance(m.experts, ExpertParallel)]
    if not found:
        raise ValueError("dispatch_once: there are no divided experts here: parallelize_module divides them")
    for m in found:
        if m.capacity_factor is not None:
            raise ValueError(f"dispatch_once: capacity_factor={m.capacity_factor}: all places of the experts travel, "
                             "the empty ones too, and none is saved: take capacity_factor=None")
        m.experts.once = True


def joined(y):
    """What a stage sends on of blocks with experts, or of what comes before them: y (…, size), or a pair of it and the
    auxiliary loss, as one tensor (…, size + 1), which has the loss as one more feature."""
    y, aux = y if isinstance(y, tuple) else (y, zeros_like(lower(y), ()))
    return ops.concatenate([y, ops.broadcast_to(aux, (*y.shape[:-1], 1))], -1)


def parted(x):
    """The pair again of what `joined` has made one tensor; of no rows there is no loss, and the sum of none is 0."""
    return x[..., :-1], x[(0,) * (x.ndim - 1) + (-1,)] if x.shape[0] else ops.sum(x[..., -1])


class OneTensor(Module):
    """A pipeline's stage of blocks with experts, which give pairs, as one that takes and gives one tensor: between the
    stages the auxiliary loss travels as one more feature, and its cotangent back. A first stage may end before the
    first block. It adds nothing to names. (cut_gpt's stages do so by themselves.)

    first, last    the first stage's input, and the last one's output, are left as they are
    """

    def __init__(self, stage, first=False, last=False):
        super().__init__()
        self.add_module("", stage)
        self.first, self.last = first, last

    def forward(self, x, *more):
        y = self._modules[""](x if self.first else parted(x), *more)
        return y if self.last else joined(y)
