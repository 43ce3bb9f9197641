"""What a model consists of: a table of its layers with shapes, parameters and FLOPs."""

import math
from dataclasses import dataclass

from ..autodiff.ops.attention import pieces
from ..autodiff.tensor import Leaf, Tensor
from ..autodiff.writes import tick
from ..backend import is_floating
from ..tables import ruled


def _matmul(shape, x=None, y=None, w=None, **_):
    return 2 * math.prod(shape) * (x.shape[-1] if x is not None else (w if y is None else y).shape[-2])


def _linear(shape, weight, **_):
    return 2 * math.prod(shape) * weight.shape[1]


def _nf4(shape, size, **_):
    return 2 * math.prod(shape) * size[1]


def _attention(shape, q, k, band, mask=None, **_):
    cut = [] if mask is not None else pieces(q.shape[2], k.shape[2], band)
    pairs = sum((t.stop - t.start) * (s.stop - s.start) for t, s, _ in cut) if cut else q.shape[2] * k.shape[2]
    return 2 * math.prod(q.shape[:2]) * pairs * (q.shape[3] + shape[-1])


def _block_attention(shape, q, k, size, count, **_):
    """And its choice."""
    return 2 * math.prod(q.shape[:3]) * (count * size * (q.shape[3] + shape[-1]) + k.shape[2] // size * q.shape[3])


def _ring_attention(shape, q, k, comm, band, **_):
    left, right = band
    seen = k.shape[2] * comm.size       # each rank's keys come by
    seen = seen if left is None or right is None else min(seen, left + right + 1)
    return 2 * math.prod(q.shape[:3]) * seen * (q.shape[3] + shape[-1])


FLOPS = {   # op -> (shape of its output, **what the tape keeps of it by name) -> floating-point operations
    "matmul": _matmul,
    "linear": _linear,
    "linear_gelu": _linear,
    "linear_cross_entropy": lambda shape, weight, **_: 2 * shape[0] * math.prod(weight.shape),
    "nf4_linear": _nf4,
    "conv": lambda shape, weight, **_: 2 * math.prod(shape) * math.prod(weight.shape[1:]),
    "attention": _attention,
    "block_attention": _block_attention,
    "ring_attention": _ring_attention,
    "all_gather_matmul": _linear,
    "matmul_reduce_scatter": lambda shape, weight, comm, **_: comm.size * _linear(shape, weight),   # of all positions
    "grouped_matmul": _matmul,
    "grouped_outer": lambda shape, x=None, y=None, **_: 2 * len(y if x is None else x) * math.prod(shape[1:]),
    "einsum": lambda shape, work, x1=None, **_: 2 * work,
}


@dataclass(frozen=True)
class Row:
    """One layer: path, type, shape of what it gave last (None if never called), its own parameters and FLOPs, those of
    the layers in it left out."""

    path: str
    layer: str
    shape: tuple | None
    parameters: int
    flops: int


@dataclass(frozen=True)
class Summary:
    """A model's rows, and the totals.

    positions        rows of the output: samples, or tokens
    flops            of a forward pass
    training_flops   3 · flops: backward makes two products for each one of forward, where all is trained (with a frozen
                     weight one, or none). Of what evaluation calls: MultiTokenPrediction's further depths aren't there
    rule_of_thumb    6 · parameters · positions (Kaplan et al. 2020), which counts each parameter once per position:
                     too little for convolutions, which use it at many places, and for attention, which uses none
    """

    rows: list
    positions: int

    @property
    def parameters(self):
        return sum(row.parameters for row in self.rows)

    @property
    def flops(self):
        return sum(row.flops for row in self.rows)

    @property
    def training_flops(self):
        return 3 * self.flops

    @property
    def rule_of_thumb(self):
        return 6 * self.parameters * self.positions

    def __str__(self):
        lines = [("path", "layer", "output", "parameters", "FLOPs")]
        lines += [(row.path or "(model)", row.layer, "not called" if row.shape is None else
                   " × ".join(map(str, row.shape)), f"{row.parameters:,}", f"{row.flops:,}") for row in self.rows]
        lines.append(("total", "", "", f"{self.parameters:,}", f"{self.flops:,}"))
        left_out = any(row.shape is None and row.parameters for row in self.rows)
        return "\n".join([ruled(lines, left=3), "",
                          f"a training step: {self.training_flops:,} FLOPs (3 × forward"
                          f"{', but for the layers not called' * left_out}); by the rule of thumb 6·N·D "
                          f"with D = {self.positions:,}: {self.rule_of_thumb:,}"])


def summary(model, *inputs):
    """The Summary of a model that is called once, in evaluation mode, with these example inputs; print it.

    FLOPs are counted op by op on the tape, two per multiply-add of matrix products, convolutions, attention and einsum;
    elementwise ops are left out, as in torch's FlopCounterMode: they are bound by memory. Ops whose inputs depend on no
    parameter (and a checkpoint's inside) are not on the tape, and not counted; those of frozen parameters are. A
    function with a rule by hand counts as its `flops` says (custom_vjp). A layer without parameters, FLOPs or layers in
    it has a row too. Raises RuntimeError under no_grad().
    """
    calls, handles, frozen = [], [], []        # calls: (first date, last date, module, outputs)
    modes = [(module, module.training) for module in model.modules()]
    try:
        for module in model.modules():
            starts, own = [], [p for p in module._parameters.values() if p is not None and not p.requires_grad
                               and is_floating(p.dtype)]
            frozen += own

            def begins(_, inputs, starts=starts, own=own):      # not before: a wrapper looks who is frozen
                starts.append(tick())
                _want_gradients(own, True)

            def ends(module, _, output, starts=starts, own=own):
                calls.append((starts.pop(), tick(), module, output))
                _want_gradients(own, False)
            handles += [module.register_forward_pre_hook(begins), module.register_forward_hook(ends)]
        out = model.eval()(*inputs)
    finally:
        _want_gradients(frozen, False)
        for handle in handles:
            handle.remove()
        for module, training in modes:
            module.training = training
    if any(True for _ in model.parameters()) and all(o.node is None for *_, output in calls for o in _tensors(output)):
        raise RuntimeError("summary counts on the tape, and nothing was recorded: call it outside of no_grad()")
    first = out[0] if isinstance(out, tuple) else out
    return Summary(_rows(model, calls), math.prod(first.shape[:-1]))


def _want_gradients(params, flag):
    for p in params:
        p.requires_grad_(flag)


def _tensors(output):
    return [o for o in (output if isinstance(output, tuple) else (output,)) if isinstance(o, Tensor)]


def _rows(model, calls):
    flops, shapes = {}, {}
    for *_, module, output in calls:
        first = output[0] if isinstance(output, tuple) else output
        shapes[module] = getattr(first, "shape", ())
    for node in _nodes(o.node for *_, output in calls for o in _tensors(output)):
        inside = [(last - first, module) for first, last, module, _ in calls if first < node.date < last]
        if inside:
            innermost = min(inside, key=lambda call: call[0])[1]
            flops[innermost] = flops.get(innermost, 0) + _flops(node)
    rows, seen = [], set()
    for path, module in model.named_modules():
        own = {id(p): p.size for p in module._parameters.values() if id(p) not in seen}
        seen |= set(own)        # (a shared layer counts under its first path)
        row = Row(path, type(module).__name__, shapes.get(module), sum(own.values()), flops.pop(module, 0))
        if row.parameters or row.flops or not module._modules:
            rows.append(row)
    return rows


def _nodes(starts):
    found, stack = {}, [node for node in starts if node is not None]    # in one order on all ranks: reading may gather
    while stack:
        node = stack.pop()
        if node not in found and not isinstance(node, Leaf):
            found[node] = True
            stack.extend(p for p in node.parents if p is not None)
    return found


def _flops(node):
    count, by_hand = FLOPS.get(node.primitive.name), getattr(node.primitive, "flops", None)
    if not (count or by_hand) or (node.primitive.name == "einsum" and len(node.parents) < 2):
        return 0
    saved = node.saved if isinstance(node.saved, tuple) else node.saved.open(node)      # packed
    if by_hand:
        return by_hand(saved)
    kept = zip(node.primitive.layout, saved, strict=True)
    return count(node.shape, **{name: value for name, value in kept if value is not None})
