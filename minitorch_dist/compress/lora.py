"""LoRA and QLoRA: a trained model is fine-tuned by small matrices beside its frozen ones.

    y = W x + b + (alpha/r) · B A dropout(x)        W (out, in) frozen;  A (r, in), B (out, r) trained

    x ──┬───────────── W ─────────── + ── y         in B's place are zeros at the beginning: y is the model's own
        └─ dropout ─ A ─ B · alpha/r ┘              r · (in + out) numbers are trained in the place of in · out

    model.load_state_dict(pretrained)
    lora.add(model, rank=8)                                 # QLoRA: lora.add(model, rank=8, quantize="nf4")
    optimizer = optim.AdamW(lora.parameters(model), 1e-3)
    …
    np.savez("adapters.npz", **lora.state_dict(model))      # or: lora.merge(model), and it is a plain model

What is frozen has no gradient (backward makes none), no state in the optimizer, and nothing of it is sent by data
parallelism, but for fully_shard's stage 3, which cuts it over the ranks, and gathers it for forward and for backward.
In QLoRA it has 4 bits (nf4.py), and is taken apart for each product.

A model is cut first (parallelize_module), then it gets adapters, then it is cut into stages and wrapped; then comes the
optimizer. Beside a matrix that tensor parallelism has cut, the adapter is cut as well, so that its product is a part of
the same sum, and no activation is sent for it:

    column parallel     B is cut as W's rows are, A is whole        row parallel     A is cut as W's columns, B is whole

What is whole gets a sum over the ranks for its gradient, of r · in or r · out numbers.

Sources: Hu et al. 2021, "LoRA"; Dettmers et al. 2023, "QLoRA"; Kalajdzievski 2023, "A rank stabilization scaling factor
for fine-tuning with LoRA"; the initial values of A are those of the PEFT library.
"""

import fnmatch
import math
from dataclasses import dataclass

from .. import backend
from ..autodiff import ops
from ..autodiff.modes import no_grad
from ..autodiff.primitive import lower
from ..backend import in_float32, number, to_device_of, xp
from ..nn.decoding import by_matrix
from ..nn.layers import Dropout, Linear
from ..nn.module import Module, Parameter
from ..parallel.collectives import copy_to
from ..parallel.context.context import Context
from ..parallel.fsdp.fully_sharded import FullySharded
from ..parallel.positions import of_part
from ..parallel.tensor.mixtures import SequenceParallelMoE
from ..parallel.tensor.parts import Part, check_products
from ..parallel.tensor.sequence_parallel import SequenceParallel, dropouts_on_part
from ..parallel.tensor.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from ..parallel.wrapping import ReducingModule, check_not_annotated
from .low_precision import few_bits
from .nf4 import NF4Weight
from .quant_model import replaced

TARGETS = ("*attention.*", "*mlp.0", "*mlp.2")      # of a transformer block
NAMES = ("lora_A", "lora_B")
PARTS = (ColumnParallelLinear, RowParallelLinear)


@dataclass(frozen=True)
class Adapter:
    """What an adapter is like, beside its matrices: rank, alpha, dropout and rslora as lora.add's."""

    rank: int = 8
    alpha: float = 16
    dropout: float = 0.0
    rslora: bool = False

    def __post_init__(self):
        if self.rank < 1 or self.rank % 1:
            raise ValueError(f"lora: rank is {self.rank}; it must be a whole number, at least 1")
        object.__setattr__(self, "rank", int(self.rank))
        object.__setattr__(self, "alpha", number(self.alpha))
        if not 0 <= self.dropout < 1:
            raise ValueError(f"lora: dropout is {self.dropout}; a probability to drop must be in [0, 1)")
        if not math.isfinite(self.alpha):
            raise ValueError(f"lora: alpha is {self.alpha}; it must be finite")

    @property
    def scale(self):
        """What B A is multiplied by: alpha/r, with rslora alpha/√r."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)

    def matrices(self, path, shape, like):
        """A (r, in) and B (out, r) for a weight (out, in), in the dtype and on the device of `like`: U(±1/√in), and 0.
        A's numbers are keyed by the library's seed and the layer's path: whichever stages a model is cut into, and
        whatever was added before, they are the same."""
        out, inside = shape
        stream = backend.stream("lora", backend.random_state.seed, path)
        a = stream.uniform(-1 / math.sqrt(inside), 1 / math.sqrt(inside), (self.rank, inside)).astype(like.dtype)
        return to_device_of(a, like), to_device_of(xp.zeros((out, self.rank), like.dtype), like)

    def product(self, layer, x, a, b, shape=None):
        """(…, in) -> (…, out): what the layer adds, of its dropout and these A and B. shape: that of x as sequences,
        (batch, time, in), which dropout is of, where x is their rows; None: x is as it was."""
        if layer.lora_dropout is not None:
            x = layer.lora_dropout(x) if shape is None else ops.reshape(
                layer.lora_dropout(ops.reshape(x, shape)), x.shape)
        return ops.linear(self.scale * ops.linear(x, a), b)

    def __str__(self):
        return f"rank={self.rank}, alpha={self.alpha:g}" + f", dropout={self.dropout}" * bool(self.dropout) + \
            ", rslora" * self.rslora


class LoRALinear(Module):
    """A frozen Linear and what is learnt beside it: (…, in_features) -> (…, out_features).

    weight   the Linear's, or an NF4Weight; bias: the Linear's, or None; both frozen
    lora_A   (rank, in_features); lora_B (out_features, rank), zeros at the beginning; lora_dropout: a Dropout, or None
    A mixture's router, which gets rows, is told the `shape` of their sequences: whose parts are dropped counts there.
    """

    by_sequence = True

    def __init__(self, linear, adapter, path="", quantize=None, double=True):
        super().__init__()
        weight, self.adapter = linear.weight, adapter
        if quantize is None:
            self._register(self._parameters, "weight", weight)      # a frozen one as well
        else:
            self.weight = NF4Weight(weight, double)
        self._register(self._parameters, "bias", linear.bias)
        for name, values in zip(NAMES, adapter.matrices(path, weight.shape, lower(weight)), strict=True):
            setattr(self, name, Parameter(values))
        self.lora_dropout = Dropout(adapter.dropout) if adapter.dropout else None
        self.train(linear.training)

    @by_matrix
    def forward(self, x, shape=None):
        if isinstance(self.weight, NF4Weight):
            y = self.weight.linear(x)
            y = y if self.bias is None else y + ops.astype(self.bias, y.dtype)
        else:
            y = ops.linear(x, self.weight, self.bias)
        return y + self.adapter.product(self, x, self.lora_A, self.lora_B, shape)

    def merged(self):
        """A Linear of the weight W + (alpha/r) B A, in the adapter's dtype, frozen; it remembers this layer."""
        linear = object.__new__(Linear)
        Module.__init__(linear)
        dtype = self.lora_A.dtype
        with no_grad():
            whole = self.weight.dequantize(dtype) if isinstance(self.weight, NF4Weight) else lower(self.weight)
            values = in_float32(lambda w, a, b: w + self.adapter.scale * backend.matmul(b, a), whole,
                                lower(self.lora_A), lower(self.lora_B))
        linear._register(linear._parameters, "weight", Parameter(values, requires_grad=False))
        linear._register(linear._parameters, "bias", self.bias)
        linear.training = self.training
        object.__setattr__(linear, "unmerged", self)        # no module of it: not in its state
        return linear

    def extra_repr(self):
        out, inside = self.weight.shape
        return f"{inside}, {out}, {self.adapter}" + ("" if self.bias is not None else ", bias=False")


class AdaptedPart:
    """The product of a matrix that tensor parallelism has cut, with its adapter's: in ops.linear's place there.

    layer   a ColumnParallelLinear or RowParallelLinear, which gets this rank's part of A or B, and all of the other
    """

    by_position = by_sequence = True

    def __init__(self, layer, adapter, path):
        self.layer, self.adapter, self.axis = layer, adapter, layer.parts["weight"][0]
        axis, indices, extent = layer.parts["weight"]
        shape = list(layer.weight.shape)
        shape[axis] = extent
        for name, values in zip(NAMES, adapter.matrices(path, shape, lower(layer.weight)), strict=True):
            cut = name == ("lora_B", "lora_A")[axis]
            p = Parameter(values.take(to_device_of(indices, values), axis) if cut else values)
            if cut:
                layer.parts[name] = axis, indices, extent
            if cut and layer.comm.size > 1:
                p.leaf.part_of, p.leaf.part = values.shape, Part(layer.comm, axis, indices, extent)
            setattr(layer, name, p)
        layer.lora_dropout = Dropout(adapter.dropout).train(layer.training) if adapter.dropout else None
        if adapter.dropout and axis:
            of_part(layer.lora_dropout, features=(indices, extent))

    def __call__(self, x, weight, bias=None, shape=None):
        layer, comm, y = self.layer, self.layer.comm, ops.linear(x, weight, bias)
        a, b = layer.lora_A, layer.lora_B
        a, b = (copy_to(a, comm), b) if self.axis == 0 else (a, copy_to(b, comm))
        return y + self.adapter.product(layer, x, a, b, shape)

    def __repr__(self):
        return str(self.adapter)


# ---------------------------------------------------------------- of models

def add(model, rank=8, alpha=16, dropout=0.0, targets=None, *, rslora=False, quantize=None, double=True):
    """Put adapters beside a model's Linears, in place, and freeze all else. Returns the model; one that is a Linear
    itself comes back as a LoRALinear.

    rank       of B A
    alpha      B A is multiplied by alpha/rank
    dropout    of what A gets, in training
    targets    which Linears: paths with * and ? as in file names, or targets(linear, its path) -> whether. Default:
               TARGETS, the transformer blocks'
    rslora     alpha/√rank instead, with which large ranks learn as fast as small ones
    quantize   "nf4": their weights are kept in 4 bits; double: the scales of these in 8

    Names of parameters stay, but for those of quantised weights; the new ones end with lora_A and lora_B. ValueError
    where a path meets no Linear, for a model that has adapters already, or that is wrapped (add them before that), or
    lies on a mesh; for quantize and a model that parallelize_module has cut: blocks of 64 would be cut.
    """
    adapter = Adapter(rank, alpha, dropout, rslora)
    if quantize not in (None, "nf4"):
        raise ValueError(f"lora.add: quantize={quantize!r}; there is 'nf4', or None")
    _check_untouched(model)
    chosen = _chosen(model, targets)
    context = next((m for m in model.modules() if isinstance(m, Context)), getattr(model, "of_context", None))
    context = context if dropout else None
    _check_parts({path: m for path, m in chosen.items() if isinstance(m, PARTS)}, quantize)
    layers = {id(m): LoRALinear(m, adapter, path, quantize, double) for path, m in chosen.items()
              if not isinstance(m, PARTS)}
    for p in model.parameters():
        p.requires_grad_(False).grad = None
    for path, m in chosen.items():
        if isinstance(m, PARTS):
            m.product = AdaptedPart(m, adapter, path)
    model = replaced(model, layers)
    for m in chosen.values() if context is not None else ():    # of adapters alone: others know their part
        of_part(layers.get(id(m), m).lora_dropout, context=context)
    for m in model.modules():
        if isinstance(m, SequenceParallel) or isinstance(m, SequenceParallelMoE) and m.own:
            dropouts_on_part(m, m.comm)
    return model


def _check_parts(parts, quantize):
    """ValueError for parts of matrices, {path: layer}, that can't have what is asked for."""
    check_products("lora.add", parts)
    if parts and quantize:
        raise ValueError(f"lora.add: {', '.join([*parts][:4])}: cut by tensor parallelism, and quantize={quantize!r} "
                         "has blocks of 64 elements of whole rows: leave one of the two out")


def _check_untouched(model):
    """ValueError for a model that adapters come too late for."""
    check_not_annotated(model, "lora.add", "leave the annotations out, and cut the model by parallelize_module, before "
                        "adapters are added")
    for path, m in model.named_modules():
        path = path or "the model"
        if set(NAMES) & set(m._parameters):
            raise ValueError(f"lora.add: {path} has an adapter already: merge it first, or begin with a fresh model")
        if few_bits(m):
            raise ValueError(f"lora.add: {path} makes its products of few bits, and adapters don't go with that: take "
                             "one of the two")
        if hasattr(m, "unmerged"):
            raise ValueError(f"lora.add: {path} is merged, and could be unmerged: load its state_dict into a fresh "
                             "model, and add adapters there")
        owners = [m, *(getattr(hook, "__self__", None) for p in m._parameters.values() if p is not None and p.leaf
                       for hook in p.leaf.hooks or ())]
        if any(isinstance(owner, ReducingModule) for owner in owners):
            raise ValueError(f"lora.add: {path} is, or belongs to, a wrapper, which looks after the parameters that "
                             "there were: add adapters first, then wrap the model")


def _chosen(model, targets):
    """{path: layer} of the targets, each layer once."""
    plain = {path: m for path, m in model.named_modules() if "forward" not in vars(m)
             and (type(m) is Linear or isinstance(m, PARTS) and m.product is ops.linear)}
    if callable(targets):
        found = {path: m for path, m in plain.items() if targets(m, path)}
    else:
        patterns = TARGETS if targets is None else (targets,) if isinstance(targets, str) else tuple(targets)
        met = {pattern: fnmatch.filter(plain, pattern) for pattern in patterns}
        found = {path: m for path, m in plain.items() if any(path in paths for paths in met.values())}
        if targets is not None and (unmet := [pattern for pattern, paths in met.items() if not paths]):
            raise ValueError(f"lora.add: {', '.join(map(repr, unmet))} meets no Linear; there are {', '.join(plain)}")
    if not found:
        raise ValueError("lora.add: no Linear of this model is " + ("a transformer block's" if targets is None else
                         "a target") + f"; there are {', '.join(plain) or 'none'}: name some with targets=")
    return found


def parameters(model):
    """What is trained, for an optimizer: the adapters' matrices; of a fully_shard model this rank's pieces."""
    return [p for name, p in model.named_parameters() if _is_adapter(name)]


def _is_adapter(name):
    return name.rpartition(".")[2] in NAMES


class Adapters(Module):
    """The adapters of a model as a module by themselves, under their names in the model: for a checkpoint of them
    alone. ValueError where there are none, or where they are cut over ranks."""

    def __init__(self, model):
        super().__init__()
        if any(isinstance(m, FullySharded) for m in model.modules()) or any(
                p.leaf.part_of is not None for p in parameters(model)):
            raise ValueError("lora: these adapters are cut over the ranks. To save: lora.state_dict(model, state), "
                             "with the state that a full_state_dict(model) gives; to load, that state with the "
                             "adapters put into it, by the load_full_state_dict beside it")
        for name, p in model.named_parameters():
            if _is_adapter(name):
                self._register(self._parameters, name, p)
        if not self._parameters:
            raise ValueError("lora: the model has no adapters: they come by lora.add(model)")


def state_dict(model, state=None):
    """{name: NumPy array} of the adapters alone. state: the model's whole one, where it is cut over ranks, as a
    full_state_dict gives it. ValueError as Adapters'."""
    if state is not None:
        return {name: values for name, values in state.items() if _is_adapter(name)}
    return Adapters(model).state_dict()


def load_state_dict(model, adapters):
    """Write what state_dict has given. KeyError or ValueError, and nothing is written, where it doesn't fit."""
    Adapters(model).load_state_dict(adapters)


def merge(model):
    """Put W + (alpha/r) B A in the place of each W and its adapter: the model is a plain one again, of plain Linears
    and of the same outputs but for rounding (and dropout), and says its state in plain names. In place; returns the
    model. The layers are kept beside, for unmerge: load the state_dict into a fresh model to be rid of them.

    ValueError for a model without adapters, and for one that is cut by tensor parallelism."""
    layers = {id(m): m for m in model.modules() if isinstance(m, LoRALinear)}
    if cut := [path for path, m in model.named_modules() if isinstance(getattr(m, "product", None), AdaptedPart)]:
        raise ValueError(f"lora.merge: {', '.join(cut[:4])}: cut by tensor parallelism. Merge a whole model, with "
                         "adapters of its own, that has loaded what parallel.tensor.full_state_dict(model) gives")
    if not layers:
        raise ValueError("lora.merge: the model has no adapters")
    return replaced(model, {key: layer.merged() for key, layer in layers.items()})


def unmerge(model):
    """Take back merge: the layers of before, W with its own bits, and the adapters. In place; returns the model.
    They come in the dtype and on the device that the model has now. ValueError for a model that isn't merged."""
    layers = {id(m): _unmerged(m) for m in model.modules() if hasattr(m, "unmerged")}
    if not layers:
        raise ValueError("lora.unmerge: the model is not merged")
    return replaced(model, layers)


def _unmerged(linear):
    """What a merged Linear was made of, where that is now."""
    return linear.unmerged.train(linear.training).to(linear.weight.dtype).to(linear.weight.device)
