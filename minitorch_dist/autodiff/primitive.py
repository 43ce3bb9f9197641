"""One op, one place, one rule.

A Primitive names its forward on arrays and, for each input, a rule: which
LinearOp, with which residual, is the derivative with respect to that input.

    tanh = Primitive("tanh", np.tanh, x=(scale, lambda ans: 1 - ans * ans))
    mul = Primitive("mul", np.multiply, "x y", x=(scale, "y"), y=(scale, "x"))

reads "d tanh(x) = scale by 1 - ans²", "d(x·y)/dx = scale by y". Forward mode
applies the LinearOp to a tangent; reverse mode applies its transpose to a
cotangent. So a derivative is written once, and only the few LinearOps know how
to be transposed.

A residual is a function, the name of a saved value ("shape axes": a tuple of
two), a pair (names, function of their values), or None. These names, or those
of the function's parameters, say what must be kept for backward: inputs by
their names, `ans` the output, `aux` the forward's side result, and the
primitive's own constants (`params`). An input without a rule has no derivative.

Residuals use the same functions that users call. On raw arrays these run bare;
on traced values they record: one rule is fast at first order, and right at any.
"""

import inspect
import threading
from contextlib import contextmanager

from .. import kernels
from ..backend import adds_in_float32, check_devices, in_float32, is_floating, is_half, is_short, xp
from .traced import TRACED, Traced, lower  # noqa: F401

OPS = {}      # name -> Primitive: every op there is
LINEAR = {}   # name -> LinearOp: every linear map there is, each with its transpose

SILENT, GENERAL = "silent", "general"   # for state.special


class State(threading.local):
    """Per-thread modes; `mode` changes them for a while.

    level      how many functional transforms are running
    off        the highest level that does not record: no_grad sets it to the level it was called at
    pack       None, or the (pack, unpack) pair of saved_tensors_hooks
    anomaly    whether detect_anomaly is on
    counting   whether the ledger counts the bytes that are kept
    again      whether a checkpointed segment is being run for the second time
    notes      None, or the Notes of the checkpointed segment that runs (checkpointing.py)
    again_in   None, or a function to call where a checkpoint is made, with the date at which its segment began. It
               returns two functions: one makes a context for the second run, the other says of an array whether that
               context brings it, so that it needn't be kept
    recall     None, or the Recall of a checkpoint that saves the results of some ops
    capture    None, or the Capture that ops become a part of instead of being run (compiler/capture.py)
    autocast   None, or the Region that chooses the precision in which each op runs (autocast.py)
    special    what the fast paths look at: GENERAL where any of these needs the general path, SILENT where ops just
               aren't recorded, else None
    callbacks  what to run when the backward pass now under way is through
    """

    level = 0
    off = -1
    pack = None
    anomaly = False
    counting = False
    again = False
    notes = None
    again_in = None
    recall = None
    capture = None
    autocast = None
    special = None
    callbacks = None


state = State()


@contextmanager
def mode(**changes):
    """Change entries of the state inside the block."""
    old = {name: getattr(state, name) for name in changes}

    def put(values):
        for name, value in values.items():
            setattr(state, name, value)
        general = (state.pack is not None or state.anomaly or state.counting or state.capture is not None
                   or state.autocast is not None or state.recall is not None)
        state.special = GENERAL if general else SILENT if state.off >= 0 else None
    put(changes)
    try:
        yield
    finally:
        put(old)


class LinearOp:
    """A linear map t ↦ apply(t, residual) and its transpose c ↦ transpose(c, residual).

    `fresh` says whether transpose returns a new array that nobody else holds;
    a gradient may then be stored as it is.
    """

    __slots__ = ("name", "apply", "transpose", "fresh")

    def __init__(self, name, apply, transpose, fresh=True, listed=True):
        self.name, self.apply, self.transpose, self.fresh = name, apply, transpose, fresh
        if listed:
            if name in LINEAR:
                raise ValueError(f"there is a LinearOp {name!r} already: take another name")
            LINEAR[name] = self

    def __repr__(self):
        return f"<LinearOp {self.name}>"


class Rule:
    """The derivative with respect to one input: a LinearOp and how to work out its residual.

    residual(saved)   from a node's saved values, or from all values in forward mode
    pull(ct, saved)   the transpose applied to a cotangent; None stands for "pass it on as it is"
    """

    __slots__ = ("linear", "residual", "pull", "places")

    def __init__(self, primitive, linear, residual):
        self.linear, transpose = linear, linear.transpose
        if residual is None or isinstance(residual, str):
            names = (residual or "").split()
        elif isinstance(residual, tuple):
            names, residual = residual[0].split(), residual[1]
        else:
            names = list(inspect.signature(residual).parameters)
        self.places = places = primitive.places(names)
        # The common forms of a rule are composed here: one Python call fewer per op in backward.
        if residual is None:
            self.residual = lambda saved: None
            self.pull = None if linear.name == "same" else lambda ct, saved: transpose(ct, None)
        elif len(places) == 1:
            i, = places
            if isinstance(residual, str):
                self.residual = lambda saved: saved[i]
                self.pull = lambda ct, saved: transpose(ct, saved[i])
            else:
                self.residual = lambda saved: residual(saved[i])
                self.pull = lambda ct, saved: transpose(ct, residual(saved[i]))
        else:
            function = (lambda *values: values) if isinstance(residual, str) else residual
            self.residual = lambda saved: function(*[saved[i] for i in places])
            self.pull = lambda ct, saved: transpose(ct, function(*[saved[i] for i in places]))


class Into:
    """An entry of a pullback's `wanted`: yes, and the cotangent will end up in this array. Always true."""

    __slots__ = ("array",)

    def __init__(self, array):
        self.array = array


def place(wanted, dtype):
    """The array that a cotangent of this dtype may be written into, by its entry in `wanted`; None where there is
    none. (NumPy's and CuPy's out= takes both.)"""
    return wanted.array if wanted.__class__ is Into and wanted.array.dtype == dtype else None


class Primitive:
    """One entry of the op table.

    name        as users and error messages say it
    forward     (*inputs, *params) -> array; with `aux` -> (array, side result);
                with `multi` -> tuple of arrays
    inputs      names of the differentiable positions, e.g. "x y"
    params      names of the constants that follow them, e.g. "shape axes"
    definition  fused ops: the same function in ordinary ops. It stands in for the op wherever
                the kernel cannot: in forward mode, and when backward is itself differentiated
    pullback    fused ops: (ct, wanted, …named values) -> one cotangent per input, None where
                `wanted` is False. Where it is an Into, the cotangent may be written into that
                array and returned as it, which saves a copy
    reads       fused ops that make their cotangents independently: {input: names of what its cotangent is made of}.
                Default: each is made of all that pullback names
    own_sums    fused ops: it computes floats of 16 bits in float32 itself; all others are given them as float32
    wide        fused ops: they are given as float32 on a GPU as well, where no kernel stands in for the op: squares
                and the like may be beyond float16's range
    rules       per input: (LinearOp, residual), or nothing where there is no derivative

    A primitive has either rules or, if it is fused, a pullback; without a definition that cannot be
    differentiated twice, and says so. An input of a fused op may be left out by giving None.
    On the host (see own_sums, wide) forward and pullback of a fused op get floats of 16 bits as float32, and their
    results are rounded; so does its definition, on any device.
    """

    __slots__ = ("name", "forward", "inputs", "rules", "needs", "pulls", "fresh", "aux", "multi",
                 "definition", "pullback", "reads", "own_sums", "wide", "layout", "broadcasts", "differentiable",
                 "kept", "known")

    def __init__(self, name, forward, inputs="x", params="", *, aux=False, multi=False, broadcasts=False,
                 definition=None, pullback=None, reads=None, own_sums=False, wide=False, listed=True, **rules):
        self.name, self.inputs, self.own_sums, self.wide = name, tuple(inputs.split()), own_sums, wide
        self.forward = self._bind_forward(forward) if pullback else forward
        self.aux, self.multi, self.broadcasts = aux, multi, broadcasts
        self.definition = definition if definition is None or own_sums else rounded_once(definition, len(self.inputs))
        # Where each name stands in a node's list of saved values.
        self.layout = ("ans", *self.inputs, *params.split()) + (("aux",) if aux else ())
        if unknown := set(rules) - set(self.inputs):
            raise TypeError(f"{name}: rules for {sorted(unknown)}, which are not among its inputs {self.inputs}")
        for i, rule in rules.items():
            if rule is not None and not (isinstance(rule, tuple) and len(rule) == 2 and isinstance(rule[0], LinearOp)):
                raise TypeError(f"{name}: the rule of {i} is {rule!r}; it must be a LinearOp and its residual, "
                                f"{i}=(mt.LINEAR[\"scale\"], lambda {i}: …), or None")
        self.rules = tuple(rules.get(i) and Rule(self, *rules[i]) for i in self.inputs)
        self.needs = tuple(frozenset(rule.places) if rule else frozenset() for rule in self.rules)
        self.pulls = None if pullback else tuple(rule and rule.pull for rule in self.rules)
        self.fresh = tuple(rule is None or rule.linear.fresh for rule in self.rules)
        self.pullback = pullback and self._bind_pullback(pullback)
        self.reads = reads and tuple(frozenset(self.places(reads[i].split())) for i in self.inputs)
        self.differentiable = tuple(bool(rule or pullback) for rule in self.rules)   # per input: is there a derivative?
        self.kept, self.known = {}, {}      # what `keeps` and `read` have worked out already
        if listed:
            if name in OPS:
                raise ValueError(f"there is an op {name!r} already: take another name")
            OPS[name] = self

    def __call__(self, *args):
        """The op of its inputs, and of its params behind them."""
        return bind(self, args[:len(self.inputs)], args[len(self.inputs):])

    def places(self, names):
        """Where the named values stand in a node's list of saved values."""
        if unknown := [n for n in names if n not in self.layout]:
            raise TypeError(f"{self.name}: a rule asks for {unknown}; there is {', '.join(self.layout)}")
        return tuple(self.layout.index(n) for n in names)

    def keeps(self, wanted):
        """Per place of `layout`: whether backward needs it, where `wanted` says per input if a gradient flows to it."""
        if wanted not in self.kept:
            self.kept[wanted] = self._among(self.needs, wanted)
        return self.kept[wanted]

    def _among(self, places, wanted):
        """Per place of `layout`: whether it is one of the wanted inputs' places."""
        found = frozenset().union(*(p for p, w in zip(places, wanted, strict=True) if w))
        return tuple(i in found for i in range(len(self.layout)))

    def read(self, wanted):
        """Per place of `layout`: whether the cotangents of these inputs are made of it. Of a fused op that may be less
        than `keeps`, which has what a second derivative needs as well."""
        wanted = tuple(map(bool, wanted))
        if wanted not in self.known:
            self.known[wanted] = self._among(self.reads or self.needs, wanted)
        return self.known[wanted]

    def _bind_forward(self, forward):
        """A fused op's forward: a GPU kernel's, where kernels/ has one that wins on these arguments."""
        def forward_or_kernel(*args):
            x = args[0]
            if x.__class__ is not xp.ndarray and not isinstance(x, xp.generic):     # (NumPy's sums are scalars)
                if kernel := kernels.for_op(self.name, args):
                    return kernel.forward(*args)
                if self.wide and adds_in_float32(x):
                    return in_float32(forward, *args)
            elif x.itemsize == 2 and is_half(x) and not self.own_sums:
                return in_float32(forward, *args)
            return forward(*args)
        return forward_or_kernel

    def _bind_pullback(self, pullback):
        places = self.places(list(inspect.signature(pullback).parameters)[2:])
        # The definition needs every input and parameter, should backward be differentiated.
        needed = frozenset(places) | frozenset(range(1, len(self.layout) - self.aux))
        self.needs = tuple(needed for _ in self.inputs)
        last = len(self.layout) - self.aux
        by_kernel = {}      # a kernel's Op -> the places of what its pullback asks for

        def widened(ct, wanted, saved):
            return in_float32(lambda ct, *values: pullback(ct, wanted, *values), ct, *[saved[i] for i in places])

        def pull(ct, wanted, saved):
            if ct.__class__ is not xp.ndarray:
                made_by_kernel = saved[last].__class__ is kernels.Kept if self.aux else True
                if made_by_kernel and (kernel := kernels.for_op(self.name, saved[1:last], made=self.aux)):
                    if kernel not in by_kernel:
                        by_kernel[kernel] = self.places(list(inspect.signature(kernel.pullback).parameters)[2:])
                    return kernel.pullback(ct, wanted, *[saved[i] for i in by_kernel[kernel]])
                if self.wide and adds_in_float32(ct):
                    return widened(ct, wanted, saved)
                if self.multi and not self.own_sums and any(part is not None and is_half(part) for part in ct.parts):
                    bundle = type(ct)
                    return in_float32(lambda parts, *values: pullback(bundle(parts), wanted, *values), ct.parts,
                                      *[saved[i] for i in places])
            elif ct.itemsize == 2 and is_half(ct) and not self.own_sums:
                return widened(ct, wanted, saved)
            return pullback(ct, wanted, *[saved[i] for i in places])
        return pull

    def cotangents(self, node, saved, ct, wanted):
        """What stands in for `pulls` in a fused op: its cotangents are made all at once."""
        from .reverse import fused_cotangents
        return fused_cotangents(node, saved, ct, wanted)

    def __repr__(self):
        return f"<Primitive {self.name}>"


def rounded_once(definition, count):
    """A fused op's definition, of `count` inputs, which computes floats of 16 bits as in_float32 does."""
    def cast(x, dtype):
        return bind(OPS["astype"], (x,), (x.dtype, xp.dtype(dtype)))

    def widened(*args):
        floats = {a.dtype for a in args[:count] if hasattr(a, "dtype") and is_floating(a.dtype)}
        if not any(map(is_short, floats)):
            return definition(*args)
        out = definition(*[cast(a, xp.float32) if hasattr(a, "dtype") and is_short(a.dtype) else a
                           for a in args[:count]], *args[count:])
        if len(floats) > 1:
            return out
        return tuple(cast(part, *floats) for part in out) if isinstance(out, tuple) else cast(out, *floats)
    return widened


class Variadic:
    """A table entry for any number of inputs: `of(n)` is its Primitive for n of them, made when first asked for.

    forward  (inputs as one tuple, *params) -> array
    rule     (i, n) -> the rule of input i out of n, which are called x0, x1, …
    """

    inputs = ("*xs",)

    def __init__(self, name, forward, params, rule):
        self.name, self.forward, self.params, self.rule, self.by_count = name, forward, params, rule, {}
        OPS[name] = self

    def of(self, n):
        """The Primitive for n inputs."""
        if n not in self.by_count:
            names = [f"x{i}" for i in range(n)]
            self.by_count[n] = Primitive(self.name, lambda *args: self.forward(args[:n], *args[n:]), " ".join(names),
                                         self.params, listed=False,
                                         **{name: self.rule(i, n) for i, name in enumerate(names)})
        return self.by_count[n]

    def __repr__(self):
        return f"<Variadic {self.name}>"


def bind(primitive, args, params=()):
    """Apply a primitive to values of any kind: the one dispatch."""
    general = state.special is GENERAL
    if general and state.autocast is not None:
        return state.autocast.bind(primitive, args, params)
    level = -1
    for a in args:
        if a.__class__ in TRACED and a.level > level:
            level, top = a.level, a
    if level < 0:
        if general and state.capture is not None:
            if definition := state.capture.definition(primitive, args, params):
                return definition(*args, *params)
            out = state.capture.apply(primitive, args, params)
        else:
            try:        # forward_itself, without the call
                out = primitive.forward(*args, *params)
            except Exception as error:
                check_devices(primitive.name, args, error)
                raise
        return out[0] if primitive.aux else out
    return top.process(primitive, args, params, level)


def run_forward(primitive, raw, params):
    """A primitive's forward on raw arrays, or what stands in for it."""
    if state.capture is not None:
        return state.capture.apply(primitive, raw, params)
    if state.recall is not None and primitive.name in state.recall.ops:
        return state.recall.forward(primitive, raw, params)
    return forward_itself(primitive, raw, params)


def forward_itself(primitive, raw, params):
    """A primitive's forward on raw arrays; arrays of several devices are named, not CuPy's complaint about them."""
    try:
        return primitive.forward(*raw, *params)
    except Exception as error:
        check_devices(primitive.name, raw, error)
        raise


def aux_of(primitive, args, params):
    """The forward's side result. It is piecewise constant, so it is worked out on raw arrays."""
    return primitive.forward(*[lower(a) for a in args], *params)[1]
