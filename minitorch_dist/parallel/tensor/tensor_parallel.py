"""Tensor parallelism: the ranks of a group hold parts of each matrix, and work on the same samples.

    y = W₂ gelu(W₁ x), on ranks 0 and 1:

        x ──copy_to──┬── gelu(A₀ x) ── B₀ ──┐                 A₀, A₁: upper and lower rows of W₁  (column parallel)
                     └── gelu(A₁ x) ── B₁ ──┴─ reduce_from    B₀, B₁: left and right columns of W₂  (row parallel)

A part of the rows makes a part of the outputs, for which the columns of the next matrix wait: between the two nothing
is sent. An attention's heads are divided in the same way, W₁ being the queries', keys' and values' and W₂ the output's.
So a transformer block sends two all-reduces forward, of its output's size, and two backward. (In the literature x is a
row and W₁ is cut by columns: hence the names.)

    model = nn.GPT(…)                                       # alike on all ranks
    parallelize_module(model, mesh["tp"], plan_of(model))   # now each has its part; the same numbers come out
    DistributedDataParallel(model, mesh["dp"])              # the other axis divides the samples

With sequence_parallel=True what lies between is divided as well, along the sequence (sequence_parallel.py), and with
tp_comm_overlap=True products hide the messages that this takes (collective_matmul.py). Otherwise, everything else
(norms, the output layer's bias, dropout's masks) is the same on all ranks, and stays so, since all get the same
gradients. Source: Shoeybi et al. 2019, "Megatron-LM".
"""

import functools

import numpy as np

from ...autodiff import ops
from ...autodiff.ops.indexing import check_numbers, numbers_in
from ...autodiff.primitive import lower
from ...backend import module_of, to, to_device_of
from ...comm.mesh import check_no_mesh
from ...data.loader import share
from ...nn.attention import MultiHeadAttention
from ...nn.decoding import by_matrix, by_position
from ...nn.layers import Linear
from ...nn.loss import IGNORED
from ...nn.module import Module, Parameter
from ...nn.moe import MoE
from ...nn.transformer import GPT, Embedding, TransformerBlock, is_gated
from ..collectives import copy_to, gather_from, reduce_from, scatter_to
from ..fsdp.fully_sharded import FullySharded
from ..full_state import full_state_dict as pieces_together
from ..same_model import agreed
from ..wrapping import check_not_annotated
from . import between, mixtures, plans
from . import sequence_parallel as sequences
from .collective_matmul import all_gather_matmul, matmul_reduce_scatter
from .parts import Part
from .vocabulary import Shares, here
from .vocabulary import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy


def _rows(count, comm):
    """The numbers of this rank's share of so many rows."""
    return np.arange(*share(count, comm.rank, comm.size))


def _default(given, count, comm, in_order, what):
    """The given numbers, or (None) this rank's share of `count`. ValueError on all ranks where only these, in their
    order, fit; then collective."""
    share_of_all = _rows(count, comm)
    if given is None:
        return share_of_all
    if in_order:
        for rank, other in enumerate(comm.all_gather_object(
                None if np.array_equal(given, share_of_all) else np.asarray(given).tolist())):
            if other is not None:
                raise ValueError(f"{what} lays the ranks' shares one after another, and rank {rank}'s would be "
                                 f"{np.arange(*share(count, rank, comm.size)).tolist()}, not {other}: leave these out, "
                                 "or what wants them in order")
    return given


class _Part(Module):
    """A module that holds a part of another one's parameters.

    parts               {parameter: (axis, the indices along it that this rank holds, how many there are of it on all
                        ranks)}
    sequence_parallel   whether what is called the same on all ranks below is this rank's part of the sequence instead,
                        (batch, time/t, features); see parallelize_module
    tp_comm_overlap     whether products hide the messages of that; see parallelize_module
    """

    is_part = True

    def _take(self, whole, comm, sequence_parallel, tp_comm_overlap=False, **parts):
        """Cut the parameters of a whole module; parts: name=(axis, indices). None as axis: all of it, on all ranks."""
        super().__init__()
        sequences.check_choice(type(self).__name__, sequence_parallel, tp_comm_overlap)
        self.comm, self.parts = comm, {}
        self.sequence_parallel, self.tp_comm_overlap = sequence_parallel, tp_comm_overlap
        for name, (axis, indices) in parts.items():
            value = getattr(whole, name)
            if value is not None and value.leaf is not None and value.leaf.flat is not None:
                raise RuntimeError(f"{type(self).__name__}: {name} lives in the flat buffer of an optimizer or of "
                                   "DistributedDataParallel already: cut the model before making those")
            if value is not None and axis is not None:
                self.parts[name], trained = (axis, indices, value.shape[axis]), value.requires_grad
                shape, tied = value.shape, value.leaf and value.leaf.tied
                mine = value.data[(slice(None),) * axis + (to_device_of(indices, value.data),)]
                value = Parameter(module_of(mine).ascontiguousarray(mine))      # a frozen one is broadcast as it is
                if comm.size > 1:
                    value.leaf.part_of, value.leaf.part = shape, Part(comm, *self.parts[name])
                value.leaf.tied = tied
                value.requires_grad_(trained)
            self._register(self._parameters, name, value)       # a frozen one as well

    def _overlaps(self, product):
        """Whether the product is to hide messages. ValueError for others than ops.linear, which are of all positions at
        once."""
        if self.tp_comm_overlap and product is not ops.linear:
            raise ValueError(f"{type(self).__name__}: product {product} can't be made in {self.comm.size} parts, which "
                             "tp_comm_overlap wants: cut the model without it")
        return self.tp_comm_overlap

    def _linear(self, x, bias=None, product=ops.linear):
        """x Wᵀ + b of what lies between the parts: Megatron's f, and a product."""
        if self._overlaps(product):
            return all_gather_matmul(x, self.weight, self.comm, bias, self.sequence_parallel == "regather")
        return self._entered(x, bias, product)

    def _entered(self, x, bias, product):
        if self.sequence_parallel:
            return sequences.linear(x, self.weight, bias, self.comm, self.sequence_parallel == "regather", product)
        return product(copy_to(x, self.comm), self.weight, bias)

    def _losses(self, x, targets, z_loss):
        """-log softmax(x Wᵀ)[target], W being all ranks' rows, which share the classes in order; see nn.GPT.losses."""
        shares, targets = Shares(self.comm, self.parts["weight"][2]), numbers_in(targets)
        shape = tuple(x.shape[:-1])
        if self.sequence_parallel:
            sequences.check_axes(f"{type(self).__name__}'s losses", x)
            shape = (shape[0], shape[1] * self.comm.size)
        if tuple(targets.shape) != shape:
            raise ValueError(f"{type(self).__name__}: targets {tuple(targets.shape)} for positions {shape}: they must "
                             "be as many, and the same on all ranks")

        def losses(x, weight, _):       # behind an axis more, in a result's place
            rows = ops.reshape(x, (targets.size, x.shape[-1])) if len(x.shape) != 2 else x
            found = shares.linear_losses(rows, weight, targets.reshape(-1), IGNORED, z_loss)
            return ops.reshape(found, (*x.shape[:-1], 1))
        return ops.reshape(self._entered(x, None, losses), shape)

    def _sum(self, y):
        """The sum of all ranks' y, for what lies between the parts: Megatron's g."""
        return (sequences.reduce_scatter_sequence if self.sequence_parallel else reduce_from)(y, self.comm)

    def extra_repr(self):
        axis, indices, count = self.parts["weight"]
        return f"{', '.join(map(str, self.weight.shape))}, which are {len(indices)} of {count} along axis {axis}" + \
            (f", sequence_parallel={self.sequence_parallel!r}" if self.sequence_parallel else "") + \
            ", tp_comm_overlap=True" * self.tp_comm_overlap + \
            (f", {product}" if (product := getattr(self, "product", ops.linear)) is not ops.linear else "")


class ColumnParallelLinear(_Part):
    """This rank's outputs of a Linear: x, the same on all ranks, (…, in_features) -> (…, this rank's share).

    linear         the whole layer, the same on all ranks
    rows           the outputs that this rank makes (default: its share, in order)
    gather_output  give all of them on all ranks, (…, out_features); ValueError for rows other than by default
    product        product(x, weight, bias), in ops.linear's place: an attribute to be set alike on all ranks
    """

    def __init__(self, linear, comm, rows=None, gather_output=False, sequence_parallel=False, tp_comm_overlap=False):
        rows = _default(rows, linear.weight.shape[0], comm, gather_output, "ColumnParallelLinear: gather_output=True")
        self._take(linear, comm, sequence_parallel, tp_comm_overlap, weight=(0, rows), bias=(0, rows))
        self.gather_output, self.product = gather_output, ops.linear

    @by_matrix
    def forward(self, x):
        y = self._linear(x, self.bias, self.product)
        return gather_from(y, self.comm, -1, self.parts["weight"][2]) if self.gather_output else y

    def losses(self, x, targets, z_loss=0.0):
        """Linear's, on all ranks, of outputs that they share in order: ValueError for others, and for a product that is
        not ops.linear."""
        _, rows, count = self.parts["weight"]
        if self.product is not ops.linear or not np.array_equal(rows, _rows(count, self.comm)):
            raise ValueError("ColumnParallelLinear: losses are of plain products of rows that the ranks share in "
                             f"order: not of product={self.product}, rows={rows.tolist()}; take the loss of the logits")
        return self._losses(x, targets, z_loss)


class RowParallelLinear(_Part):
    """A Linear whose inputs are divided: this rank's share (…, share of in_features) -> (…, out_features) on all ranks.

    columns            the inputs that this rank has (default: its share, in order)
    input_is_parallel  False: x comes whole, (…, in_features), the same on all ranks, and is cut here; ValueError for
                       columns other than by default
    product            as ColumnParallelLinear's
    ValueError for an x with another number of features.
    """

    def __init__(self, linear, comm, columns=None, input_is_parallel=True, sequence_parallel=False,
                 tp_comm_overlap=False):
        if sequence_parallel and not input_is_parallel:
            raise ValueError("RowParallelLinear: with sequence_parallel the input is this rank's share of in_features "
                             "of whole sequences; input_is_parallel=False can't be had")
        columns = _default(columns, linear.weight.shape[1], comm, not input_is_parallel,
                           "RowParallelLinear: input_is_parallel=False")
        self._take(linear, comm, sequence_parallel, tp_comm_overlap, weight=(1, columns), bias=(None, None))
        self.input_is_parallel, self.product = input_is_parallel, ops.linear

    @by_position
    def forward(self, x):
        x = x if self.input_is_parallel else scatter_to(x, self.comm, -1)
        self._check(x)
        if between.waiting:
            between.check(self, x)
        y = matmul_reduce_scatter(x, self.weight, self.comm) if self._overlaps(self.product) else \
            self._sum(self.product(x, self.weight))
        if self.bias is None:
            return y
        return y + (copy_to(self.bias, self.comm) if self.sequence_parallel else self.bias)

    def _check(self, x):
        """ValueError unless x has this rank's part of the features."""
        (_, here), (_, _, count), there = self.weight.shape, self.parts["weight"], x.shape[-1]
        if there == here:
            return
        why = ("; what a 'column' makes with sequence_parallel are whole sequences, (batch, time, features): take the "
               "shape from that, not from its input" if self.sequence_parallel else
               "; it came whole: call the layer before it 'column', or, where that is to stay whole, make this one by "
               "RowParallelLinear(…, input_is_parallel=False)" if there == count else "")
        raise ValueError(f"RowParallelLinear: x {tuple(x.shape)} has {there} features, and this rank takes its {here} "
                         f"of {count}, as a 'column' before it makes them{why}")


class VocabParallelEmbedding(_Part):
    """An Embedding of which each rank holds a share of the rows: integers (…) -> (…, embedding_dim) on all ranks.

    gather_output  whether attend(x), the output layer of tied weights, gives the scores of all rows on all ranks, or
                   (False) this rank's: for vocab_parallel_cross_entropy
    """

    def __init__(self, embedding, comm, gather_output=True, sequence_parallel=False, tp_comm_overlap=False):
        count = embedding.weight.shape[0]
        if count < comm.size:
            raise ValueError(f"VocabParallelEmbedding: {count} rows can't be shared by {comm.size} ranks")
        self._take(embedding, comm, sequence_parallel, tp_comm_overlap, weight=(0, _rows(count, comm)))
        self.gather_output, self.num_embeddings = gather_output, count

    @by_position
    def forward(self, indices):
        indices = to_device_of(lower(indices), self.weight.data)
        check_numbers("embedding", indices, self.num_embeddings)
        mine, row = here(indices, self.num_embeddings, self.comm)
        return self._sum(ops.where(mine[..., None], ops.embedding(row, self.weight), 0.0))

    def attend(self, x):
        """x Wᵀ: (…, embedding_dim) -> (…, num_embeddings), or this rank's share of them."""
        y = self._linear(x)
        return gather_from(y, self.comm, -1, self.num_embeddings) if self.gather_output else y

    def losses(self, x, targets, z_loss=0.0):
        """Embedding's, on all ranks."""
        return self._losses(x, targets, z_loss)


# ---------------------------------------------------------------- whole models

def _heads(attention, comm, **options):
    from .heads import share_of_heads
    return share_of_heads(attention, comm, **options)


def _gated(linear, comm, **options):
    """A Linear before a SwiGLU: this rank's share of the gate, and the same share of what passes it."""
    features, odd = divmod(linear.weight.shape[0], 2)
    if odd:
        raise ValueError(f"parallelize_module: 'column, gated' of {2 * features + 1} outputs, which are no two halves")
    gate = _rows(features, comm)
    return ColumnParallelLinear(linear, comm, np.concatenate([gate, features + gate]), **options)


def _experts(moe, comm, **_):
    from ..experts.moe import share_of_experts
    return {"experts": share_of_experts(moe, comm)}


# How a plan calls it: (the class of the whole module, what makes a rank's part of it: a Module to stand in its place,
# or {attribute: value} to be changed).
WAYS = {
    "column": (Linear, ColumnParallelLinear),
    "column, gathered": (Linear, functools.partial(ColumnParallelLinear, gather_output=True)),
    "column, gated": (Linear, _gated),
    "row": (Linear, RowParallelLinear),
    "heads": (MultiHeadAttention, _heads),
    "vocabulary": (Embedding, VocabParallelEmbedding),
    "vocabulary, not gathered": (Embedding, functools.partial(VocabParallelEmbedding, gather_output=False)),
    "experts": (MoE, _experts),     # over an axis of their own; see experts/moe.py
    sequences.WAY: (Module, lambda module, comm, **_: sequences.on_part(module, comm)),
    sequences.WHOLE: (MoE, lambda moe, comm, **_: mixtures.SequenceParallelMoE(moe, comm)),
}


def plan_of(model):
    """{path of a module: way}, of the transformer blocks and of a GPT's embedding and output layer."""
    plan = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, TransformerBlock):
            plan |= {f"{prefix}{name}": "heads" for name in ("attention", "cross_attention") if name in module._modules}
            if not isinstance(module.mlp, MoE):     # which stays whole, the same on all ranks
                plan |= {f"{prefix}mlp.0": "column, gated" if is_gated(module.mlp) else "column",
                         f"{prefix}mlp.2": "row"}
        elif isinstance(module, GPT):
            plan |= {f"{prefix}embed": "vocabulary"} | ({} if module.head is None
                                                        else {f"{prefix}head": "column, gathered"})
    return plan


def parallelize_module(module, comm, plan, sequence_parallel=False, tp_comm_overlap=False):
    """Cut a module, the same on all ranks of comm (checked, to the bit), in place; returns it. Collective.

    plan               {path of a module below it, with * and ? as in file names: way}; WAYS has the ways. A "column" is
                       a stretch of a Linear's outputs: where these are several things side by side, such as queries,
                       keys and values, take a Linear for each, or a MultiHeadAttention, whose way is "heads"; of a
                       Linear before a SwiGLU the way is "column, gated". What lies between a column and a row works on
                       a rank's part of the features: element by element, no parameters, no random numbers, nothing
                       over the features (softmax, norms, means). A parameter there is found in the row's first
                       forward, a RuntimeError; a Dropout in one Sequential with the two drops its part of what one
                       process drops; the rest nobody sees
    sequence_parallel  True: cut what lies between the plan's parts along the sequence, which the ranks must share
                       equally (so generate() wants a model without); "regather": keep less for backward, too, for
                       another all-gather per column-parallel layer. Norms, dropouts and positions of transformer
                       blocks and GPT are found, and a MoE, which gets "whole sequences"; the plan must say "sequence"
                       of whatever else works on each position by itself, and what the forward of one's own modules
                       does between them must do so. A GPT takes and gives what it did; any other module gets and gives
                       this rank's part, (batch, time/t, dim): scatter_to(x, comm, 1), gather_from(y, comm, 1)
    tp_comm_overlap    True, beside sequence_parallel: products of the plan's parts are made for one rank's positions
                       after the other's, while the next are on their way, forward and backward; the same bytes, as
                       messages. What an embedding sums, and "column, gathered" gathers behind its product, is sent as
                       before. ValueError for such parts in lora.add and convert_to_low_precision_training; for
                       checkpoint's save= these products are "all_gather_matmul" and "matmul_reduce_scatter"
    To be done before an optimizer or DistributedDataParallel is made: RuntimeError afterwards. ValueError where a path
    meets nothing, a way is unknown, or the ranks can't share a module so, and on all ranks where their models or plans
    differ; TypeError where a way doesn't fit the module; nothing is cut then.
    """
    check_no_mesh("parallelize_module", comm, "share the matrices", "tp")
    sequences.check_choice("parallelize_module", sequence_parallel, tp_comm_overlap)
    check_not_annotated(module, "parallelize_module", "leave one out; annotate.megatron(model) is "
                        "tensor parallelism by annotations")
    modules = dict(module.named_modules(remove_duplicate=False))

    def look():
        chosen = plans.chosen_by((sequences.between(module) if sequence_parallel else {}) | plan, modules, WAYS,
                                 sequence_parallel)
        dropouts = between.dropouts(modules, chosen)
        chosen = {path: way for path, way in chosen.items() if path not in dropouts}
        if sequence_parallel:
            sequences.check_plan({path: m for path, m in modules.items() if path not in dropouts}, chosen)
        mixtures.check(module, chosen, comm)
        plans.check_separate(modules, chosen)
        return (chosen, dropouts), plans.described(module, comm, chosen, sequence_parallel=sequence_parallel,
                                       tp_comm_overlap=tp_comm_overlap)
    chosen, dropouts = agreed(comm, look, "parallelize_module: the ranks' models or plans differ",
                    "Build the model from the same seed, and cut it by the same plan, on all ranks.")
    made = {}       # all of them, before the first is put in its place: what can't be cut raises until then
    for path in sorted(chosen, key=lambda path: chosen[path] == sequences.WAY):     # this changes what is below, last
        made[path] = WAYS[chosen[path]][1](modules[path], comm, sequence_parallel=sequence_parallel,
                                           tp_comm_overlap=tp_comm_overlap)
    for path, part in made.items():
        if isinstance(part, Module):
            parent, _, name = path.rpartition(".")
            modules[parent].add_module(name, part)
        else:
            for name, value in part.items():
                setattr(modules[path], name, value)
    for path, (column, passed) in dropouts.items() if comm.size > 1 else ():
        between.tell(modules[path], made[column], passed)
    mixtures.route_own(module)
    between.watch([m for m in module.modules() if isinstance(m, RowParallelLinear) and m.comm.size > 1],
                  [(name, p) for name, p in module.named_parameters() if p.leaf is not None and p.leaf.part is None])
    return module


def parts_of(model):
    """{name of a parameter: (communicator, axis, indices, extent)} of those of which each rank has a part."""
    return {f"{path}.{name}" if path else name: (module.comm, *part) for path, module in model.named_modules()
            if isinstance(module, _Part) for name, part in module.parts.items()}


def apart(model):
    """parts_of, of what stays parts where fully_shard collects its pieces: it collects experts' shares as well."""
    if not isinstance(model, FullySharded):
        return parts_of(model)
    tensors = dict(model.module.named_parameters())
    return {name: part for name, part in parts_of(model).items() if model.grid_of(tensors[name]).over is None}


def full_state_dict(model):
    """model.state_dict() with whole parameters, as before it was cut. Collective; every rank gets all of it, of a
    fully_shard model the rank 0 of each of its groups; {} on the others."""
    state = pieces_together(model) if isinstance(model, FullySharded) else model.state_dict()
    for name, (comm, axis, indices, extent) in apart(model).items() if state else ():
        shape = list(state[name].shape)
        shape[axis] = extent
        whole = np.empty(shape, state[name].dtype)
        for theirs, values in comm.all_gather_object((indices, state[name])):
            whole[(slice(None),) * axis + (theirs,)] = values
        state[name] = whole
    for name, comm in mixtures.collected(model).items() if state else ():      # where all experts are, on one rank
        state[name] = comm.broadcast_object(state.get(name))
    return state


def load_full_state_dict(model, state):
    """Write {name: whole array} into a model that is cut: each rank takes its part. Of a fully_shard model the state
    counts that the rank 0 of each of its groups has."""
    parts = apart(model)
    model.load_state_dict({name: to(value, "cpu").take(parts[name][2], parts[name][1]) if name in parts else value
                           for name, value in state.items()})
