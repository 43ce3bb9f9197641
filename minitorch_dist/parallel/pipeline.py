"""Pipeline parallelism: the ranks hold different layers, and the batch goes through them in pieces.

    stages = cut_sequential(model, mesh["pp"].size)                         # alike on all ranks
    stage = DistributedDataParallel(stages[mesh.coords["pp"]], mesh["dp"])  # the other axis divides the samples
    pipeline = Pipeline([stage], mesh["pp"], one_forward_one_backward(mesh["pp"].size, 8))
    for step, batch in enumerate(loader.epoch(0)):
        optimizer.zero_grad()
        loss = pipeline.run(batch, loss_sum, seed=0, step=step, over=mesh["dp"])
        optimizer.step()

What a stage sends is its output forward and its input's gradient backward, of one micro-batch each; backward ends at
the lowest stage that has something to train. Gradients add up over the micro-batches. With
DistributedDataParallel(exact=True) its micro-shards are the micro-batches, and the bits are those of one process in
exact mode.

    stage = fully_shard(stages[mesh.coords["pp"]], mesh["dp"], stage=1)     # instead: ZeRO inside of a pipeline

Of a chunk that is fully_shard's the parameters are gathered once a step, in its first forward; in stage 3 they stay
until its last backward is through, instead of travelling for each micro-batch. Gradients add up whole, in all stages,
and are reduced once, as the last backward completes them. Sent per step, of a chunk's ψ elements, whatever the number
of micro-batches: 2ψ · (N-1)/N. Between steps a rank holds what its stage says. Llama 3 was trained so (Dubey et al.
2024, "The Llama 3 herd of models", 3.3.2), Megatron-LM's distributed optimizer is stage 1.

Where a schedule cuts backward in two (zb_h1), the gradient of a stage's input is sent as soon as it is there, and the
gradients of weights are made later, without doing anything twice (autodiff/input_first.py). The first stage sends none:
all of its backward is in W.

Where it combines a forward with a backward (dual_pipe_v), the two take turns at their all-to-alls (turns.py); the
forward begins.

A step of training ends for all ranks together. run() returns the mean loss everywhere, by a broadcast, for which ranks
that are through wait for the others; only then come the norm for clipping, a GradScaler's agreement, the optimizer. So
zb_h2 and zb_v, whose ranks are at work for the same time each but begin and end one after the other, wait here for
(p-1)·T_F per step. In their paper ranks begin the next batch meanwhile, with an optimizer step that is taken back if it
turns out that some rank had a NaN or too large a norm ("post-validation"). Nothing is taken back here, and no number
depends on the schedule.
"""

from contextlib import nullcontext
from functools import partial

import numpy as np

from ..autodiff import ops, reverse
from ..autodiff.input_first import InputFirst
from ..autodiff.primitive import lower, state
from ..autodiff.tensor import Tensor
from ..backend import as_dtype, device_of, dtype_code, module_of, random_scope, to, xp
from ..comm.mesh import check_no_mesh
from ..data.loader import cut
from ..data.packing import apart
from ..ledger import spanning
from ..nn.containers import Sequential
from ..optim.clip import clip_stages, is_part_of_pipeline, tree_sum
from . import documents, tied
from .context_parallel import Context
from .documents import Stage
from .fully_sharded import FullySharded
from .pipeline_checks import check_chunks, check_links, described, is_trained
from .same_model import check_same
from .schedule_steps import BACKWARD, FORWARD, INPUT, WEIGHT, combined, placement_of
from .schedules import play
from .turns import in_turns
from .wrapping import ReducingModule

SPEC_BYTES = 128


def balanced(costs, parts):
    """Bounds [0, …, len(costs)] that cut the costs into so many stretches, none empty, with the least greatest sum."""
    n = len(costs)
    if not 1 <= parts <= n:
        raise ValueError(f"{n} layers can't be cut into {parts} stages")
    sums = np.concatenate([[0], np.cumsum(costs)])
    # best[k][j]: the least greatest sum of the first j costs in k + 1 stretches, and where the last of these begins
    best = [[(sums[j], 0) for j in range(n + 1)]]
    for k in range(1, parts):
        before = best[-1]
        best.append([min(((max(before[i][0], sums[j] - sums[i]), i) for i in range(k, j)), default=(np.inf, 0))
                     for j in range(n + 1)])
    bounds = [n]
    for row in reversed(best):
        bounds.append(row[bounds[-1]][1])
    return bounds[::-1]


def cut_sequential(model, stages, costs=None):
    """A Sequential as a list of so many Stages, one after another. Their layers keep their names, so that all
    parameters are called as they were, and random numbers, which are keyed by names, are the same. A stage that shares
    a parameter with an earlier one is a copy (tied.py).

    costs   what each layer costs (default: its number of parameters, at least 1)
    """
    if not isinstance(model, Sequential):
        raise TypeError(f"cut_sequential cuts an nn.Sequential between its layers; got a {type(model).__name__}")
    layers = list(model._modules.items())
    costs = [max(1, sum(p.size for p in layer.parameters())) for _, layer in layers] if costs is None else costs
    if len(costs) != len(layers):
        raise ValueError(f"cut_sequential: {len(costs)} costs for {len(layers)} layers")
    bounds, found = balanced(costs, stages), []
    context = next((m for m in model.modules() if isinstance(m, Context)), None)
    for lo, hi in zip(bounds, bounds[1:], strict=False):
        stage = Stage(context=context)
        for name, layer in layers[lo:hi]:
            stage.add_module(name, layer)
        found.append(stage)
    return tied.apart(found)


def full_state_dict(chunks, comm):
    """{name: NumPy array} of all ranks' chunks together, the state of the whole model, on every rank. Collective, over
    those that share a chunk, or have parts of its matrices, too."""
    from .tensor_parallel import full_state_dict as whole  # it brings further ops
    mine = {}
    for chunk in chunks:
        state, copies = whole(chunk), [name for name, p in chunk.named_parameters() if tied.is_copy(p)]
        state = chunk.comm.broadcast_object(state) if isinstance(chunk, FullySharded) else state
        mine |= {name: value for name, value in state.items() if name not in copies}
    return {name: value for part in comm.all_gather_object(mine) for name, value in part.items()}


def _summed(losses, labels):
    """The sum of what a last stage has made of targets."""
    losses, aux = losses if isinstance(losses, tuple) else (losses, None)
    return ops.sum(losses) if aux is None else ops.sum(losses) + labels.size * aux


class Pipeline:
    """This rank's part of a model that is cut by layers.

    chunks     its modules: stages placement_of(schedule)[comm.rank], in this order; plain, DistributedDataParallel or
               fully_shard
    comm       the Communicator along the pipeline
    schedule   for comm.size ranks: gpipe(…), one_forward_one_backward(…), interleaved(…), zb_h1(…), zb_h2(…), zb_v(…),
               v_half(…), v_min(…), dual_pipe_v(…) or a list of one's own. Exact mode takes the micro-batches' gradients
               in their order
    live       the greatest number of micro-batches (of a stage) whose activations this rank has held at once
    waiting    the greatest number of those for which it has held what W needs
    Every output's first axis is the samples, and the rest of its shape depends on the inputs' shape alone. Collective.
    A parameter that several stages share gets the sum of their gradients (tied.py). ValueError for a schedule that
    isn't for these ranks, or can't be done, or isn't everybody's.
    """

    def __init__(self, chunks, comm, schedule):
        check_no_mesh("Pipeline", comm, "have the stages of one pipeline", "pp")
        check_same(comm, described(schedule), "Pipeline: the ranks have different schedules",
                   "Make it from the same settings on all of them.")
        placement = placement_of(schedule)
        trained, self.exact, self.reads = check_chunks(chunks, comm)
        counts = [*map(len, trained)]
        if counts != [len(stages) for stages in placement]:
            raise ValueError(f"Pipeline: a schedule for {len(schedule)} ranks whose stages are {placement}, on "
                             f"{comm.size} ranks, which have {', '.join(map(str, counts))} chunks")
        play(schedule)      # raises if it can't be done
        self.chunks, self.comm, self.steps = list(chunks), comm, schedule[comm.rank]
        for chunk in chunks:
            if isinstance(chunk, FullySharded) and sum(counts) > 1:     # one stage is no pipeline: it does as it would
                chunk.set_reshard_after_backward(False)
        self._check_order(schedule)
        # stage: (its rank, its place among that rank's chunks)
        self.places = {stage: (rank, chunk) for rank, stages in enumerate(placement)
                       for chunk, stage in enumerate(stages)}
        self.micro_batches = 1 + max(step.micro_batch for step in self.steps)
        self.last = len(self.places) - 1
        # The lowest stage that has something to train: it sends no gradient down, and none below it gets one.
        self.lowest = min((stage for stage, (rank, chunk) in self.places.items() if trained[rank][chunk]),
                          default=self.last)
        self.device = next((device_of(lower(p)) for chunk in chunks for p in chunk.parameters()), "cpu")
        stages = {stage: self.chunks[chunk] for stage, (rank, chunk) in self.places.items() if rank == comm.rank}
        self.ties, self.chains = tied.Ties(stages, comm, self.exact), None
        if self.exact:
            check_links(self.ties, schedule)
            self.chains = tied.Chains(self.ties, stages, comm, self.micro_batches, self.device, self._tag_of_spec(
                self.last) + len(self.places))
        if comm.size > 1:
            is_part_of_pipeline([p for chunk in chunks for p in chunk.parameters()])
        self.specs, self.told = {}, set()       # chunk: (dtype, shape of a sample); stages that know theirs
        self.kind = None        # of the batches for which they have been told: autocast's dtype, a sample's, its shape
        self.live = self.waiting = 0
        self.under_way = False      # a run that hasn't come to its end

    def _check_order(self, schedule):
        """ValueError, on all ranks, if exact mode's sums, which are one tree over the micro-batches, would get them in
        another order on one of them."""
        if not self.exact:
            return
        for rank, row in enumerate(schedule):
            for stage in {step.stage for step in row}:
                order = [step.micro_batch for step in row if step.stage == stage and step.kind in (BACKWARD, WEIGHT)]
                if order != sorted(order):
                    raise ValueError("Pipeline: exact mode adds gradients up in the order of the micro-batches, and on "
                                     f"rank {rank} of this schedule B or W come in the order "
                                     f"{', '.join(map(str, order))}: sort these, or leave exact mode")

    def run(self, batch, loss_sum, *, seed, step, units=1, micro_shards=8, over=None, scaler=None, packed=False):
        """Forwards and backwards of a global batch; then all gradients are complete. Returns its mean loss, everywhere.

        batch      of a Loader whose rank and size are those of the other axis: a pipeline's ranks have the same rows
        loss_sum   loss_sum(output, labels) -> the SUM of the losses, a one-element Tensor; called on the last stage.
                   None: the last stage is given the labels as `targets`, and gives losses, whose sum is taken
                   (cut_gpt's do, without logits); with experts a pair, of which the second, an auxiliary loss, is added
                   as often as there are labels
        units      losses per sample: the sum is divided by batch.count · units
        over       the Communicator of the axis that divides the samples, mesh["dp"]; None: the batch is whole
        scaler     a GradScaler that scales the loss which backward begins from; its comm has all ranks of the pipeline
        packed     whether the inputs are packed rows (data/packing.py), whose documents the stages take (documents.py)
        Unless all of that fits, and rows and documents are the same ones on all ranks of the pipeline, all get an
        error, before anything is sent.
        """
        self._agree(batch, scaler, packed, loss_sum)
        if self.under_way:
            raise RuntimeError("an earlier run() of this pipeline has raised, and what it has sent is still on its "
                               "way: it would be taken for this batch's. Start again from a checkpoint")
        self.under_way = True
        self.kept, self.halves, self.sends, self.here = {}, {}, [], {}
        self.loss_sum, self.losses, self.scale, self.scaler = loss_sum, [], 1 / (batch.count * units), scaler
        if scaler is not None:      # a stage with nothing to train hears of no GPU otherwise, and the others' are there
            scaler.move_to(self.device)
        first = self.shards[0].inputs
        kind = state.autocast and state.autocast.dtype, first.dtype, first.shape[1:]
        if kind != self.kind:
            self.specs, self.told, self.kind = {}, set(), kind
        self.statistics = {}        # exact mode: of (chunk, micro-batch), until its gradients come
        self.left = [self.micro_batches] * len(self.chunks)
        self.random = seed, step, batch.count, micro_shards
        self.ties.begin()
        for steps in combined(self.steps):
            works = [partial(self._do, *step) for step in steps]
            if len(works) == 1:
                works[0]()
            else:
                in_turns(*works, device=self.device)
        for work in self.sends:
            work.wait()
        self.sends, self.shards = [], None
        if self.chains is not None:
            self.chains.finish()
        self.ties.add_up()
        loss = self._mean_loss(over)
        self.under_way = False
        return loss

    def _do(self, kind, k, stage):
        """A step."""
        _, chunk = self.places[stage]
        if kind == FORWARD:
            seed, step, count, micro_shards = self.random
            with random_scope(seed, step, count, self.shards[k].rows, micro_shards):
                self._forward(stage, chunk, k)
        elif kind == INPUT:
            self._input_gradient(stage, chunk, k)
        else:
            self._weight_gradients(kind, stage, chunk, k)

    def _agree(self, batch, scaler, packed, loss_sum):
        """Before anything is sent: that all ranks have the same rows, and none an error. One that all have is raised,
        of another a MismatchError tells all of them."""
        said, problem = None, None
        try:
            self._check_scaler(scaler)
            self._check_frozen()
            self._check_loss(loss_sum)
            self.shards, self.packed = self._shards_of(batch), packed
            said = (f"rows {self.shards[0].rows[0]} to {self.shards[-1].rows[1]} of {batch.count}, "
                    f"{documents.told(self.chunks, batch.inputs, packed, self.reads)}")
        except (RuntimeError, TypeError, ValueError) as error:
            said, problem = str(error), error
        self.comm.agree("Pipeline.run", detail=said)
        if problem is not None:
            raise problem

    def _check_scaler(self, scaler):
        if scaler is not None and scaler.enabled and not set(self.comm.world_ranks) <= set(
                scaler.comm.world_ranks if scaler.comm is not None else ()):
            raise ValueError("Pipeline: a GradScaler that looks at this rank's stages only would leave out other steps "
                             "than the others do: make it with comm=…, all ranks that train the model")

    def _check_frozen(self):
        if thawed := [stage for stage, (rank, chunk) in self.places.items()
                      if rank == self.comm.rank and stage < self.lowest and is_trained(self.chunks[chunk])]:
            raise RuntimeError(f"Pipeline: stage {thawed[0]} has something to train, and had nothing when the Pipeline "
                               f"was made: gradients end at stage {self.lowest}. Make the Pipeline anew, on all ranks")
        self.ties.check()

    def _check_loss(self, loss_sum):
        rank, chunk = self.places[self.last]
        if loss_sum is None and rank == self.comm.rank and not documents.takes_targets(self.chunks[chunk]):
            raise ValueError("Pipeline.run: loss_sum=None, and the last stage's forward takes no `targets` of which to "
                             "make losses: give loss_sum, or take stages of cut_gpt")

    def _shards_of(self, batch):
        """The batch's micro-batches."""
        shards = batch.shards if len(batch.shards) > 1 else cut(batch.shards[0], self.micro_batches)
        if len(shards) != self.micro_batches:
            raise ValueError(f"Pipeline: the schedule has {self.micro_batches} micro-batches, and this rank's batch "
                             f"comes in {len(shards)} micro-shards")
        return shards

    def _mean_loss(self, over):
        """Of the whole batch, which the last stage knows, on all ranks."""
        total = xp.array([tree_sum(self.losses)])
        self.comm.broadcast(total, self.places[self.last][0])
        if over is not None:
            over.all_reduce(total, exact=self.exact)
        return float(total[0]) * self.scale

    def clip_grad_norm_(self, max_norm, error_if_nonfinite=True):
        """optim.clip_grad_norm_ of the whole model, after run(): of all ranks' stages. Returns the norm before; in
        exact mode it has the bits of one process. Collective."""
        mine = {stage: self.chunks[chunk].parameters() for stage, (rank, chunk) in self.places.items()
                if rank == self.comm.rank}
        return clip_stages(mine, max_norm, self.comm, error_if_nonfinite)

    def _forward(self, stage, chunk, k):
        shard, module, numbers = self.shards[k].to(self.device), self.chunks[chunk], None
        self.live = max(self.live, len(self.kept) + 1)
        x = shard.inputs
        if self.packed:
            x, numbers = apart(x)
            numbers = documents.of_chunk(module, numbers)
        if stage:
            x = Tensor(self._receive(FORWARD, stage, chunk, k, len(shard.inputs)))
            x.requires_grad_(stage > self.lowest)
        wrapped, ends = isinstance(module, ReducingModule), stage == self.last and self.loss_sum is None
        with nullcontext() if wrapped else spanning("compute", "forward"):      # a wrapper notes its own
            y = documents.call(module, x, numbers, **{"targets": shard.labels} if ends else {})
        if stage == self.last:
            y = _summed(y, shard.labels) if ends else self.loss_sum(y, shard.labels)
            self.losses.append(y.item())
            y = y * self.scale
            y = y if self.scaler is None else self.scaler.scale(y)
        elif not hasattr(y, "shape"):
            raise TypeError(f"Pipeline: stage {stage} gives a {type(y).__name__}; what goes from stage to stage is one "
                            "array: put several together along the last axis, and take them apart in the next stage")
        elif y.shape[:1] != (len(shard.inputs),):
            raise ValueError(f"Pipeline: stage {stage} makes {list(y.shape)} of {len(shard.inputs)} samples; the first "
                             "axis must be the samples")
        else:
            self._send(FORWARD, stage + 1, k, lower(y))
        self.kept[chunk, k] = x, y
        if wrapped and module.exact:        # a micro-shard's statistics go with its gradients
            self.statistics[chunk, k] = module.statistics.exchange()

    def _weight_gradients(self, kind, stage, chunk, k):
        """B, or W: those of the chunk's last micro-batch complete its gradients, and a wrapper reduces them."""
        self.left[chunk] -= 1
        module = self.chunks[chunk]
        if (chunk, k) in self.statistics:
            module.statistics.exchange(self.statistics.pop((chunk, k)))
        later = self.left[chunk] and isinstance(module, ReducingModule) and not module.exact
        with (module.no_sync() if later else nullcontext(),
              nullcontext(()) if self.chains is None else self.chains.backward(stage, k) as before):
            if kind == BACKWARD:
                self._backward(stage, chunk, k, before)
            elif halves := self.halves.pop((chunk, k)):
                halves.weights(before)
            else:
                self._no_gradients(chunk, before)

    def _backward(self, stage, chunk, k, before):
        x, y, arrived = self._from_behind(stage, chunk, k)
        if stage > self.lowest:     # at once: a wrapper's backward ends when its gradients are summed
            x.register_post_accumulate_grad_hook(lambda x: self._send(BACKWARD, stage - 1, k, lower(x.grad)))
        if getattr(y, "requires_grad", False):      # not so of first stages with nothing to train
            reverse.backward_from(y, None if arrived is None else Tensor(arrived), before=before)
        else:
            self._no_gradients(chunk, before)
        if stage > self.lowest and x.grad is None:
            self._send(BACKWARD, stage - 1, k, xp.zeros_like(lower(x)))

    def _no_gradients(self, chunk, before):
        """A first stage that has used no parameter for this micro-batch: a wrapper counts it all the same."""
        module = self.chunks[chunk]
        if before:
            with reverse.one_pass("backward"):
                reverse.run(before)
        elif isinstance(module, ReducingModule) and any(p.requires_grad for p in module.parameters()):
            module.backward_without_gradients()

    def _input_gradient(self, stage, chunk, k):
        x, y, arrived = self._from_behind(stage, chunk, k)
        halves = found = None
        if getattr(y, "requires_grad", False):
            halves = InputFirst(y, x if stage > self.lowest else None)
            found = halves.input(xp.ones_like(lower(y)) if arrived is None else arrived)
        if stage > self.lowest:
            self._send(BACKWARD, stage - 1, k, xp.zeros_like(lower(x)) if found is None else found)
        self.halves[chunk, k] = halves
        self.waiting = max(self.waiting, len(self.halves))

    def _from_behind(self, stage, chunk, k):
        """A micro-batch's input and output, and what the next stage says of the latter: None for the last one, and for
        those that get no gradient."""
        x, y = self.kept.pop((chunk, k))
        ends = stage == self.last or stage < self.lowest
        return x, y, None if ends else self._receive(BACKWARD, stage, chunk, k, None, like=lower(y))

    # ------------------------------------------------------------ messages

    def _tag(self, kind, stage, k):
        """Of what is for a stage: each message of a batch to a rank has its own."""
        return (self.places[stage][1] * 2 + (kind == BACKWARD)) * self.micro_batches + k

    def _tag_of_spec(self, stage):
        """Of what a stage's input looks like: it goes with whichever micro-batch comes first."""
        return 2 * len(self.places) * self.micro_batches + self.places[stage][1]

    def _send(self, kind, stage, k, array):
        """Post an array to a stage; one of this rank's own finds it here."""
        array, (dst, _) = module_of(array).ascontiguousarray(array), self.places[stage]
        if dst == self.comm.rank:
            self.here[kind, stage, k] = array
            return
        self.sends = [work for work in self.sends if not work.is_completed()]
        if kind == FORWARD and stage not in self.told:      # before the first: what it looks like
            self.told.add(stage)
            text = f"{dtype_code(array.dtype)} {' '.join(map(str, array.shape[1:]))}".encode()
            spec = np.frombuffer(text.ljust(SPEC_BYTES), np.uint8).copy()
            self.sends.append(self.comm.isend(spec, dst, self._tag_of_spec(stage)))
        self.sends.append(self.comm.isend(array, dst, self._tag(kind, stage, k)))

    def _receive(self, kind, stage, chunk, k, samples, like=None):
        """What the neighbour has for this stage."""
        src, _ = self.places[stage + (1 if kind == BACKWARD else -1)]
        if src == self.comm.rank:
            return self.here.pop((kind, stage, k))
        if like is None:
            if chunk not in self.specs:
                spec = np.empty(SPEC_BYTES, np.uint8)
                self.comm.recv(spec, src, self._tag_of_spec(stage))
                dtype, *shape = spec.tobytes().decode().split()
                self.specs[chunk] = as_dtype(dtype), tuple(map(int, shape))
            dtype, shape = self.specs[chunk]
            array = to(np.empty((samples, *shape), dtype), self.device)
        else:
            array = module_of(like).empty(like.shape, like.dtype)
        self.comm.recv(array, src, self._tag(kind, stage, k))
        return array
