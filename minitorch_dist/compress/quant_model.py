"""Post-training quantisation of whole models.

    small = quantize_model(model, "weight-only")                                # a copy; the model stays as it is
    small = quantize_model(model, Scheme("integer", bits=4, observer="mse"), calibration=batches)
    print(describe(small))                                                      # layer by layer: how, bytes, error

The copy has the model's names, so that a checkpoint of it is one like any other: its arrays are integers and scales. To
read one, quantise a model of the same kind by the same scheme, calibrated with anything, and load.

Linear layers, convolutions and average pooling are quantised; where they stand in a Sequential, ReLU, max pooling and
reshapes between them work on integers too. Everything else (attention, norms, other activations, sums of a model's own)
stays in floating numbers, and is listed by `describe`.
"""

import copy
from dataclasses import dataclass

from ..autodiff.modes import no_grad
from ..autodiff.primitive import lower
from ..backend import on_host, weak, xp
from ..nn.containers import Sequential
from ..nn.conv import AvgPool2d
from ..nn.layers import Linear
from ..nn.models import ResidualBlock
from ..nn.module import Parameter
from ..nn.norm import BatchNorm
from ..tables import aligned
from .prune import check_whole
from .quant_layers import (
    WEIGHTED,
    Dynamic,
    Folded,
    Integer,
    IntegerAvgPool2d,
    IntegerSequential,
    Quantized,
    WeightOnly,
    plain,
)
from .quant_observers import OBSERVERS
from .quantize import WIDTHS, check_bits

KINDS = {"weight-only": WeightOnly, "dynamic": Dynamic, "integer": Integer}
MOST_BITS = max(WIDTHS)     # of weights and activations


@dataclass(frozen=True)
class Scheme:
    """How a model is quantised; print it.

    kind              "weight-only": weights alone. "dynamic": activations too, by each batch's range. "integer":
                      activations too, in ranges from calibration
    bits              of weights, 2 to 8, symmetric
    activation_bits   2 to 8, affine; per tensor
    per_channel       one scale per output channel, or per tensor
    observer          of activations, "integer": one of OBSERVERS
    weight_observer   "minmax" or "mse"
    skip              names of layers, or of modules with layers in them, that stay as they are
    """

    kind: str = "integer"
    bits: int = 8
    activation_bits: int = 8
    per_channel: bool = True
    observer: str = "minmax"
    weight_observer: str = "minmax"
    skip: tuple = ()

    def __post_init__(self):
        for name, value, known in (("kind", self.kind, KINDS), ("observer", self.observer, OBSERVERS),
                                   ("weight_observer", self.weight_observer, ("minmax", "mse"))):
            if value not in known:
                raise ValueError(f"Scheme: {name}={value!r}; there is {', '.join(map(repr, known))}")
        for name in ("bits", "activation_bits"):
            object.__setattr__(self, name, check_bits(getattr(self, name), MOST_BITS))
        object.__setattr__(self, "skip", (self.skip,) if isinstance(self.skip, str) else tuple(self.skip))


def quantize_model(model, scheme="integer", calibration=None, fold=True):
    """A copy of the model with its layers quantised, in evaluation mode.

    model        a Module on the CPU, in floating numbers; wrappers (DistributedDataParallel) have theirs in `.module`
    scheme       a Scheme, or the name of a kind
    calibration  for "integer": batches, each what the model is called with: an array, or a tuple of arguments
                 (on several ranks, the same for all of them: nothing is sent)
    fold         fold BatchNorms first, see fold_batch_norm

    Parameters that stay are frozen, but for those of "weight-only", whose layers can be differentiated. Raises
    ValueError where there is nothing to quantise, a name in `skip` is unknown, or calibration is missing, empty,
    doesn't reach a layer or holds NaN; OverflowError where a sum could leave int32.
    """
    scheme = Scheme(scheme) if isinstance(scheme, str) else scheme
    model = prepared(model, fold)
    layers = chosen(model, scheme.skip, (*WEIGHTED, AvgPool2d) if scheme.kind == "integer" else WEIGHTED)
    inputs = dict.fromkeys(layers)
    if scheme.kind == "integer":
        inputs = calibrated(model, layers, calibration, scheme)
    elif calibration is not None:
        raise ValueError(f"calibration is for 'integer'; {scheme.kind!r} takes no ranges from data")
    found = {}
    for name, layer in layers.items():
        found[id(layer)] = made(name, layer, scheme, inputs[name])
    model = replaced(model, found, IntegerSequential if scheme.kind == "integer" else None)
    return frozen_if(scheme.kind != "weight-only", model)


def frozen_if(integers, model):
    """The model; its parameters frozen, if gradients can't pass through its layers."""
    for p in model.parameters() if integers else ():
        p.requires_grad_(False)
    return model


def made(name, layer, scheme, input_params):
    """What takes a layer's place."""
    if type(layer) is AvgPool2d:
        return IntegerAvgPool2d(name, layer, input_params)
    return KINDS[scheme.kind](name, layer, scheme, input_params)


def prepared(model, fold):
    """A copy in evaluation mode, BatchNorms folded. ValueError for one that isn't on the CPU."""
    for name, p in model.named_parameters():
        if not on_host(lower(p)):
            raise ValueError(f"{name} is on {p.device}: quantised layers run on the CPU; take model.cpu()")
    check_whole(model, "quantisation")
    model = copy.deepcopy(model).eval()
    return fold_batch_norm(model) if fold else model


def chosen(model, skip, types):
    """{path: layer} of these types exactly, each once, but for those skipped."""
    paths = dict(model.named_modules(remove_duplicate=False))
    if unknown := [name for name in skip if name not in paths]:
        raise ValueError(f"skip: the model has no {', '.join(unknown)}; it has {', '.join(p for p in paths if p)}")
    kept = {id(inner) for name in skip for inner in paths[name].modules()}
    found = {}
    for path, module in paths.items():
        # One whose forward was exchanged does something that is not known here.
        if type(module) in types and id(module) not in kept and "forward" not in vars(module):
            found.setdefault(id(module), (path, module))
    if not any(type(layer) in WEIGHTED for _, layer in found.values()):
        raise ValueError(f"there is no {', '.join(t.__name__ for t in WEIGHTED)} to quantise in this model"
                         + (f" outside of {', '.join(skip)}" if skip else ""))
    return dict(found.values())


def replaced(model, found, sequential=None):
    """The model with modules exchanged by {id: module}, and each plain Sequential by `sequential`(its layers)."""
    def of(module):
        if id(module) not in found:
            for name, child in list(module._modules.items()):
                if (new := of(child)) is not child:
                    module.add_module(name, new)
            found[id(module)] = (sequential(module._modules) if sequential and type(module) is Sequential else module)
        new = found[id(module)]
        if new is not module:
            object.__setattr__(new, "_hooks", module._hooks)
            new.training = module.training
        return new
    new = of(model)
    object.__setattr__(new, "_name", "")
    return new


def calibrated(model, layers, batches, scheme):
    """{path: QuantParams of the layer's input}, from what the model is called with."""
    observers = {path: OBSERVERS[scheme.observer](scheme.activation_bits) for path in layers}
    handles = [layer.register_forward_pre_hook(lambda _, inputs, o=observers[path]: o.observe(inputs[0]))
               for path, layer in layers.items()]
    count = 0
    try:
        with no_grad():
            for batch in as_batches(batches):
                model(*batch)
                count += 1
    finally:
        for handle in handles:
            handle.remove()
    if not count:
        raise ValueError("'integer' needs calibration: some batches like those that the model will see, to choose the "
                         "ranges of activations from; a few hundred samples will do")
    if unseen := [path for path, observer in observers.items() if observer.range is None]:
        raise ValueError(f"calibration never reached {', '.join(unseen)}: give batches that use it, or leave it in "
                         f"float with skip={tuple(unseen)!r}")
    return {path: observer.params() for path, observer in observers.items()}


def as_batches(batches):
    """Each batch as a tuple of arguments. One array is one batch."""
    if hasattr(batches, "dtype"):
        batches = [batches]
    for batch in batches if batches is not None else ():
        yield batch if isinstance(batch, tuple) else (batch,)


# ---------------------------------------------------------------- batch norm

# Which BatchNorm follows which convolution, where it isn't the order of a Sequential that says so.
FOLLOWS = {ResidualBlock: (("conv1", "norm1"), ("conv2", "norm2"))}


def fold_batch_norm(model):
    """A copy of the model in which each BatchNorm that follows a Linear or a convolution, in a Sequential or by
    FOLLOWS, has become part of it: by its running statistics, W' = W·γ/√(var + ε), b' = (b - mean)·γ/√(var + ε) + β.
    In its place stands a Folded, so that all other names stay. Source: Jacob et al. 2018, 3.2."""
    model = copy.deepcopy(model)
    paths = list(model.modules())
    uses = [id(child) for module in paths for child in module._modules.values()]
    found = {}
    for module in paths:
        for layer, norm in pairs(module):
            # What is used elsewhere too can't be changed for one of its uses.
            once = uses.count(id(layer)) == uses.count(id(norm)) == 1
            plain = layer._hooks is None and norm._hooks is None and "forward" not in vars(layer)
            if once and plain and type(layer) in WEIGHTED and type(norm) is BatchNorm \
                    and norm.num_features == layer.weight.shape[0]:
                fold(layer, norm)
                found[id(norm)] = Folded(2 if type(layer) is Linear else None)
    return replaced(model, found)


def pairs(module):
    """(layer, what follows it) among a module's children."""
    if type(module) is Sequential:
        layers = list(module)
        return list(zip(layers, layers[1:], strict=False))
    return [tuple(module._modules[name] for name in names) for names in FOLLOWS.get(type(module), ())]


def fold(layer, norm):
    """Change a layer's weight and bias to what it and the BatchNorm after it do."""
    weight, mean, trained = lower(layer.weight), norm.running_mean, layer.weight.requires_grad
    scale = lower(norm.weight) / xp.sqrt(norm.running_var + weak(norm.eps, norm.running_var))
    bias = xp.zeros_like(mean) if layer.bias is None else lower(layer.bias)
    for name, value in (("weight", weight * scale.reshape((-1,) + (1,) * (weight.ndim - 1))),
                        ("bias", (bias - mean) * scale + lower(norm.bias))):
        layer._register(layer._parameters, name, Parameter(value).requires_grad_(trained))     # a frozen one as well


# ---------------------------------------------------------------- what became of it

@dataclass(frozen=True)
class Row:
    """One layer: path, type, how it is kept, bytes before and after, the greatest error of a weight."""

    path: str
    layer: str
    scheme: str
    before: int
    after: int
    max_error: float | None


@dataclass(frozen=True)
class Description:
    """A quantised model's rows, and their sums; print it."""

    rows: list

    @property
    def before(self):
        return sum(row.before for row in self.rows)

    @property
    def after(self):
        return sum(row.after for row in self.rows)

    @property
    def floating(self):
        """The paths of what stays in floating numbers."""
        return [row.path for row in self.rows if row.scheme == "float"]

    def __str__(self):
        lines = [("path", "layer", "kept as", "bytes before", "after", "max |Δweight|")]
        lines += [(row.path or "(model)", row.layer, row.scheme, f"{row.before:,}", f"{row.after:,}",
                   "" if row.max_error is None else f"{row.max_error:.3g}") for row in self.rows]
        share = self.after / self.before if self.before else 1.0
        lines.append(("total", "", f"{share:.3f} of the bytes", f"{self.before:,}", f"{self.after:,}", ""))
        return "\n".join(aligned(lines, left=3))


def describe(model):
    """The Description of a quantised model. Its rows are the quantised layers, and everything that computes beside
    them, attention or a model's own sums for instance; what only holds others in order has none."""
    rows, passing = [], passing_layers(model)
    for path, module in model.named_modules():
        if type(module) in (Sequential, IntegerSequential, Folded):
            continue
        if isinstance(module, Quantized):
            rows.append(Row(path, module.layer.partition("(")[0], module.scheme, module.bytes_before, module.nbytes,
                            module.max_error))
            continue
        own = sum(lower(values).nbytes for values in (*module._parameters.values(), *module._buffers.values())
                  if values is not None)
        if isinstance(module, IntegerAvgPool2d):
            rows.append(Row(path, "AvgPool2d", module.scheme, 0, own, None))
        else:
            scheme = "passes integers" if id(module) in passing else "float"
            rows.append(Row(path, type(module).__name__, scheme, own, own, None))
    return Description(rows)


def passing_layers(model):
    """The ids of the layers without scales of their own that work on integers."""
    found = set()

    def walk(module, integers, into):
        for layer, goal in zip(module, module.goals(into)[1:], strict=True):
            if isinstance(layer, IntegerSequential):
                integers = walk(layer, integers, goal)
            elif isinstance(layer, (Integer, IntegerAvgPool2d)):
                integers = goal is not None
            elif integers and plain(layer):
                found.add(id(layer))
        return integers
    inner = {id(child) for module in model.modules() if isinstance(module, IntegerSequential)
             for child in module._modules.values()}
    for module in model.modules():
        if isinstance(module, IntegerSequential) and id(module) not in inner:
            walk(module, False, None)
    return found
