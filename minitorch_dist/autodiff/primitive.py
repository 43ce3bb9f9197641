"""One op, one place, one rule.

A Primitive names its forward on arrays and, for each input, a rule: which
LinearOp, with which residual, is the derivative with respect to that input.

    tanh = Primitive("tanh", np.tanh, x=lambda ans: (scale, 1 - ans * ans))

reads "d tanh(x) = scale by 1 - ans²". Forward mode applies the LinearOp to a
tangent; reverse mode applies its transpose to a cotangent. So a derivative is
written once, and only the few LinearOps know how to be transposed.

The names of a rule's parameters say what must be kept for backward: inputs by
their names, `ans` the output, `aux` the forward's side result, and the
primitive's own constants (`params`). A rule that takes nothing is written as
the pair itself, and an input without a rule has no derivative.

Rules use the same functions that users call. On raw arrays these run bare; on
traced values they record: one rule gives first-order speed and any order.
"""

import inspect
import threading

OPS = {}      # name -> Primitive: every op there is
LINEAR = {}   # name -> LinearOp: every linear map there is, each with its transpose


class State(threading.local):
    """Per-thread modes. `level`: how many functional transforms are running.
    `off`: the highest level that does not record (no_grad sets it to the level it was called at)."""

    level = 0
    off = -1
    callbacks = None    # what to run when the backward pass now under way is through


state = State()


class LinearOp:
    """A linear map t ↦ apply(t, residual) and its transpose c ↦ transpose(c, residual).

    `fresh` says whether transpose returns a new array that nobody else holds;
    a gradient may then be stored as it is.
    """

    __slots__ = ("name", "apply", "transpose", "fresh")

    def __init__(self, name, apply, transpose, fresh=True):
        self.name, self.apply, self.transpose, self.fresh = name, apply, transpose, fresh
        LINEAR[name] = self

    def __repr__(self):
        return f"<LinearOp {self.name}>"


class Primitive:
    """One entry of the op table.

    name        as users and error messages say it
    forward     (*inputs, *params) -> array; with `aux` -> (array, side result);
                with `multi` -> tuple of arrays
    inputs      names of the differentiable positions, e.g. "x y"
    params      names of the constants that follow them, e.g. "shape axes"
    definition  fused ops: the same function in ordinary ops. It speaks for the op wherever
                the kernel cannot: in forward mode, and when backward is itself differentiated
    pullback    fused ops: (ct, wanted, …named values) -> one cotangent per input, None where
                `wanted` is False
    rules       per input: None, (LinearOp, residual) or a function that returns such a pair

    A fused op has either rules or a pullback; without a definition it cannot be
    differentiated twice, and says so.
    """

    __slots__ = ("name", "forward", "inputs", "rules", "needs", "aux", "multi",
                 "definition", "pullback", "layout", "broadcasts")

    def __init__(self, name, forward, inputs="x", params="", *, aux=False, multi=False, broadcasts=False,
                 definition=None, pullback=None, **rules):
        self.name, self.forward, self.inputs = name, forward, tuple(inputs.split())
        self.aux, self.multi, self.broadcasts = aux, multi, broadcasts
        self.definition = definition
        # Where each name stands in a node's list of saved values.
        self.layout = ("ans", *self.inputs, *params.split()) + (("aux",) if aux else ())
        if unknown := set(rules) - set(self.inputs):
            raise TypeError(f"{name}: rules for {sorted(unknown)}, which are not among its inputs {self.inputs}")
        chosen = [self._bind_rule(rules.get(i)) for i in self.inputs]
        self.rules = tuple(rule for rule, _ in chosen)
        self.needs = tuple(frozenset(places) for _, places in chosen)
        self.pullback = pullback and self._bind_pullback(pullback)
        OPS[name] = self

    def _places(self, function, skip=0):
        names = list(inspect.signature(function).parameters)[skip:]
        if unknown := [n for n in names if n not in self.layout]:
            raise TypeError(f"{self.name}: a rule asks for {unknown}; there is {', '.join(self.layout)}")
        return tuple(self.layout.index(n) for n in names)

    def _bind_rule(self, rule):
        """rule(named values) -> (f(saved), the places in `saved` that it reads)."""
        if rule is None:
            return None, ()
        if isinstance(rule, tuple):
            return (lambda saved: rule), ()
        places = self._places(rule)
        if len(places) == 1:
            i, = places
            return (lambda saved: rule(saved[i])), places
        if len(places) == 2:
            i, j = places
            return (lambda saved: rule(saved[i], saved[j])), places
        return (lambda saved: rule(*[saved[i] for i in places])), places

    def _bind_pullback(self, pullback):
        places = self._places(pullback, skip=2)
        # The definition needs every input, should backward be differentiated.
        needed = frozenset(places) | frozenset(range(1, 1 + len(self.inputs)))
        self.needs = tuple(needed for _ in self.inputs)
        return lambda ct, wanted, saved: pullback(ct, wanted, *[saved[i] for i in places])

    @property
    def differentiable(self):
        """Per input: whether a derivative exists."""
        if self.pullback:
            return (True,) * len(self.inputs)
        return tuple(rule is not None for rule in self.rules)

    def __repr__(self):
        return f"<Primitive {self.name}>"


class Traced:
    """A value that something follows: a tape (Tensor), or a tangent (Dual).

    `level` orders nested transforms: the value with the highest level decides
    who handles an op, so that an inner derivative never sees an outer one's
    perturbation as its own.
    """

    __slots__ = ()
    level = 0
    __array_ufunc__ = None      # ndarray * Traced asks Traced.__rmul__

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        TRACED.add(cls)

    @property
    def ndim(self):
        """Number of axes."""
        return len(self.shape)

    @property
    def size(self):
        """Number of elements."""
        return self.primal_array().size

    @property
    def T(self):
        """All axes reversed, as in NumPy."""
        return self.transpose()

    def primal_array(self):
        """The bare array underneath, through all levels. No derivative flows through it."""
        return lower(self)

    def __bool__(self):
        return bool(lower(self))

    def __float__(self):
        return float(lower(self))

    def __int__(self):
        return int(lower(self))

    def __index__(self):
        return lower(self).__index__()

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a 0-d tensor")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array__(self, dtype=None, copy=None):
        raise TypeError(f"NumPy was handed a {type(self).__name__}, and would lose its derivative: "
                        "use the function of the same name in minitorch_dist, or .numpy() for the bare values")


TRACED = set()


def lower(x):
    """The raw array under a traced value, through all levels; anything else as it is."""
    while x.__class__ in TRACED:
        x = x.lowered()
    return x


def bind(primitive, args, params=()):
    """Apply a primitive to values of any kind: the one dispatch."""
    level = -1
    for a in args:
        if a.__class__ in TRACED and a.level > level:
            level, top = a.level, a
    if level < 0:
        out = primitive.forward(*args, *params)
        return out[0] if primitive.aux else out
    return top.process(primitive, args, params, level)


def aux_of(primitive, args, params):
    """The forward's side result. It is piecewise constant, so it is worked out on raw arrays."""
    return primitive.forward(*[lower(a) for a in args], *params)[1]
