"""Reverse mode: the backward pass.

The whole idea on numbers, before arrays, dtypes and safety come in:

    >>> class Value:
    ...     def __init__(self, data, parents=(), slopes=()):
    ...         self.data, self.parents, self.slopes, self.grad = data, parents, slopes, 0.0
    ...     def __add__(self, other):
    ...         return Value(self.data + other.data, (self, other), (1.0, 1.0))
    ...     def __mul__(self, other):
    ...         return Value(self.data * other.data, (self, other), (other.data, self.data))
    >>> def backward(output):
    ...     uses, stack = {output: 0}, [output]         # 1. how often is each value used?
    ...     while stack:
    ...         for parent in stack.pop().parents:
    ...             if parent not in uses:
    ...                 uses[parent] = 0
    ...                 stack.append(parent)
    ...             uses[parent] += 1
    ...     output.grad, ready = 1.0, [output]          # 2. each value after all its users
    ...     while ready:
    ...         value = ready.pop()
    ...         for parent, slope in zip(value.parents, value.slopes):
    ...             parent.grad += slope * value.grad   #    the chain rule: sum over the paths
    ...             uses[parent] -= 1
    ...             if uses[parent] == 0:
    ...                 ready.append(parent)
    >>> x = Value(3.0); y = x * x + x
    >>> backward(y); x.grad                             # d(x² + x)/dx = 2x + 1
    7.0

Why count uses? A value's gradient is complete only when every path through it
has arrived. Passing it on earlier would pass on a part of the sum.

`run` below is the same loop on arrays: the slope has become a LinearOp with a
residual, multiplying by it the LinearOp's transpose.
"""

from ..backend import DEVICE_ARRAYS, check_devices, device_of, module_of, xp
from ..ledger import NOTHING, keep, now, open_ledgers, span
from .hooks import RemovableHandle, without
from .ops.elementwise import astype
from .ops.reduction import unbroadcast
from .primitive import TRACED, Into, Primitive, lower, mode, place, state
from .saved import FREED
from .tensor import Leaf, Lifted, Tensor, outputs
from .traced import explain
from .writes import log, wrote

hooked = False      # whether any tensor ever had a hook on its gradient: most programs never look further


def backward_from(output, gradient, retain=False, create=False, before=()):
    """Tensor.backward: check the cotangent, run the loop, leave gradients on the leaves. before: [(leaf, array)], what
    of their gradients is there already: this pass adds to it."""
    if output.level:
        raise RuntimeError("backward() on a value inside a transform (grad, vjp, …): use grad or vjp there too")
    if output.node is None:
        raise RuntimeError("backward on a tensor that no gradient reaches: no input had requires_grad, "
                           "or it was made under no_grad()")
    if DEVICE_ARRAYS:
        check_devices("backward", (output.data,))
    if gradient is None:
        if output.size != 1:
            raise RuntimeError(f"backward on a tensor of shape {output.shape}: only a one-element tensor has a "
                               "gradient of its own; pass gradient=, or take .sum() first")
        gradient = module_of(output.data).ones(output.shape, output.dtype)
    check_cotangent(gradient, output.shape, output.dtype)
    if device_of(lower(gradient)) != output.device:
        raise RuntimeError(f"backward: the gradient {list(gradient.shape)} lives on {device_of(lower(gradient))}, the "
                           f"tensor on {output.device}: move it there with .to({output.device!r})")
    if create:      # a tensor, so that all that follows is recorded
        gradient = gradient if isinstance(gradient, Tensor) else Tensor(gradient)
    else:
        gradient = lower(gradient)
        if gradient.base is not None:   # perhaps some leaf's grad_view, which this pass writes into
            gradient = gradient.copy()

    with one_pass("backward"):
        if create:      # records, under no_grad too
            with mode(off=-1):
                run([*before, (output.node, gradient)], retain, create)
        else:
            run([*before, (output.node, gradient)], retain, create)


class one_pass:
    """What runs inside is one backward pass: for hooks, which may ask for something at its end, and for timelines. Its
    ops run in the dtypes that forward has chosen, under autocast too."""

    __slots__ = ("name", "outer", "modes", "begin")

    def __init__(self, name):
        self.name = name

    def __enter__(self):
        self.outer, state.callbacks = state.callbacks, []
        self.modes = NOTHING
        if state.autocast is not None:
            state.autocast.casts.clear()    # stale soon: who has gradients writes parameters, perhaps unseen
            self.modes = mode(autocast=None)
        self.modes.__enter__()
        self.begin = now() if open_ledgers else None

    def __exit__(self, kind, *error):
        try:
            if kind is None:
                if self.begin is not None:
                    span("compute", self.name, self.begin)
                for callback in state.callbacks:
                    callback()
        finally:
            state.callbacks = self.outer
            self.modes.__exit__(None, None, None)


def at_end_of_backward(callback):
    """From a gradient hook: run callback() once, when the backward pass now under way is through.

    Returns True if this pass has not heard of it before. A pass that raises runs no callbacks.
    """
    if state.callbacks is None:
        raise RuntimeError("at_end_of_backward outside of a backward pass")
    new = callback not in state.callbacks
    if new:
        state.callbacks.append(callback)
    return new


def check_cotangent(ct, shape, dtype, name="cotangent", like=None):
    """Raise unless a cotangent has its value's shape and dtype, and lives where `like` does."""
    if getattr(ct, "shape", None) != shape or ct.dtype != dtype:
        got = f"shape {ct.shape} and dtype {ct.dtype}" if hasattr(ct, "dtype") else f"a {type(ct).__name__}"
        raise ValueError(f"the {name} has {got}, the value has shape {shape} and dtype {dtype}: they must be equal")
    if DEVICE_ARRAYS and like is not None:
        check_devices(f"the {name} and its value", (lower(ct), lower(like)))


def run(seeds, retain=False, create=False, into=None, stops=()):
    """Walk the tape from `seeds` [(node, cotangent)], each node after all its users, without recursion.

    retain  keep saved values for another pass
    create  cotangents are recorded: saved arrays come back as tensors
    into    {leaf: cotangent} to fill (functional transforms); None stores gradients on the leaves' tensors
    stops   nodes to treat as leaves
    """
    if state.autocast is not None:      # inside a transform, which hasn't come by one_pass
        with mode(autocast=None):
            return run(seeds, retain, create, into, stops)
    uses = count_uses(seeds, stops)
    partial = {}    # node -> the sum of the contributions that have arrived so far
    for node, ct in seeds:
        partial[node] = partial[node] + ct if node in partial else ct
    ready = []      # (node, complete cotangent; None where no gradient flows)
    for node in [n for n in partial if not uses[n]]:
        if node.primitive is None or node in stops:
            finish_leaf(node, partial.pop(node), False, create, into, stops)
        else:
            ready.append((node, partial.pop(node)))

    while ready:
        node, ct = ready.pop()
        saved, primitive = node.saved, node.primitive
        if saved.__class__ is not tuple:
            again = create or ct.__class__ in TRACED        # if this pass is differentiated too, it reads more
            saved = saved.open(node, None if again else [p is not None for p in node.parents])
        if log.newest > node.date:
            check_stale(node, saved)
        if create:
            saved = revive(node, saved)
        if hooked and ct is not None:
            ct = run_hooks(node, ct)
        pulls = primitive.pulls or primitive.cotangents(node, saved, ct, [
            p is not None and (create or into is not None or p in partial or uses[p] > 1 or destination(p))
            for p in node.parents])
        i = 0
        for parent in node.parents:
            if parent is not None:
                g = None
                if ct is not None:
                    pull = pulls[i]
                    g = ct if pull is None else pull(ct, saved)
                    if state.anomaly:
                        check_backward(node, ct, g)
                    if g is not None and (g.shape != parent.shape or g.dtype != parent.dtype):
                        g = fit(g, parent)
                owned = primitive.fresh[i]
                if parent in partial:       # a sum is an array of our own, a lone contribution perhaps not
                    before, owned = partial.pop(parent), g is not None
                    last = uses[parent] == 1 and parent.primitive is None and not create and into is None
                    g = before if g is None else added(before, g, parent) if last else before + g
                left = uses[parent] - 1
                if left:
                    uses[parent] = left
                    if g is not None:
                        partial[parent] = g
                elif parent.primitive is not None and (not stops or parent not in stops):
                    ready.append((parent, g))
                elif g is not None:     # at once, so that a hook runs as soon as its gradient is complete
                    finish_leaf(parent, g, owned, create, into, stops)
            i += 1
        if not retain:
            node.saved = FREED


def count_uses(seeds, stops=()):
    """{node: how many of the nodes between it and the seeds use it}."""
    uses, stack = {}, []
    for node, _ in seeds:
        if node not in uses:
            uses[node] = 0
            stack.append(node)
    while stack:
        node = stack.pop()
        if stops and node in stops:
            continue
        for parent in node.parents:
            if parent is not None:
                if parent in uses:
                    uses[parent] += 1
                else:
                    uses[parent] = 1
                    stack.append(parent)
    return uses


def fit(ct, parent):
    """The one place where broadcasting is undone and dtypes are cast back."""
    if parent.shape is None:        # the node of a multi-output op takes a Bundle
        return ct
    if ct.shape != parent.shape:
        ct = unbroadcast(ct, parent.shape)
    return ct if ct.dtype == parent.dtype else astype(ct, parent.dtype)


# ---------------------------------------------------------------- leaves

def finish_leaf(leaf, ct, owned, create, into, stops):
    """A leaf's last contribution has arrived: keep the sum, then run the hooks."""
    if hooked and leaf not in stops:    # at a stop it is a part of the sum only: the outer pass has all of it
        ct = run_hooks(leaf, ct)
        owned = owned and not getattr(leaf, "grad_hooks", ())       # a hook may have kept the array
    if into is not None:
        into[leaf] = ct
        return
    tensor = leaf.tensor()
    if tensor is None:              # nobody can see this gradient any more
        return
    if create:
        tensor._grad = own(ct if tensor.grad is None else tensor.grad + ct)
    else:
        accumulate(leaf, tensor, ct, owned)
    if state.counting:
        keep(tensor.grad.data, "gradient")
    for hook in leaf.hooks or ():
        hook(tensor)


def own(gradient):
    """A tensor's gradient, which may be on the tape, in an array of its own: the next one is added to it in place, and
    other leaves, or who gave the cotangent, may have this array. (NumPy's scalars can't be written.)"""
    if gradient.__class__ in TRACED and gradient.__class__ is not Tensor:       # no array of its own to be written
        return gradient
    data, node = (gradient.data, gradient.node) if gradient.__class__ is Tensor else (gradient, None)
    return Tensor(module_of(data).array(data), node)


def added(x, y, parent):
    """x + y, the last two contributions to a leaf: written where its gradient shall lie, if that is known."""
    where = place(destination(parent), x.dtype)
    return x + y if where is None else xp.add(x, y, out=where)


def destination(parent):
    """Into(the array that a leaf's last or only contribution may be written to at once); True where there is none."""
    if parent.primitive is None and parent.grad_view is not None:
        tensor = parent.tensor()
        if tensor is not None and tensor.grad is None:
            return Into(parent.grad_view)
    return True


def accumulate(leaf, tensor, ct, owned):
    """tensor.grad += ct, in place; the first one goes into the leaf's grad_view where it has one."""
    grad, view = tensor.grad, leaf.grad_view        # (tensor.node is None where it was frozen since)
    if grad is not None:
        target = grad.data
        xp.add(target, ct, out=target)
    elif view is not None:
        target = view
        if ct is not view:
            target[...] = ct
        tensor._grad = Tensor(view)
    else:
        # A gradient is an array of its own: what is shared, or a scalar that can't be written, is copied.
        tensor._grad = Tensor(ct if owned and not isinstance(ct, xp.generic) else module_of(ct).array(ct))
        return
    wrote(target, "gradient accumulation")


def add_hook(node, hook):
    """Put a hook on the gradient of a node's tensor. Returns a RemovableHandle."""
    global hooked
    hooked = True
    node.grad_hooks = (*getattr(node, "grad_hooks", ()), hook)

    def take_away():
        node.grad_hooks = without(node.grad_hooks, hook)
    return RemovableHandle(take_away)


def run_hooks(node, ct):
    """The cotangent after the hooks on this node's tensor have seen it, and may have replaced it."""
    for hook in getattr(node, "grad_hooks", ()):
        if state.capture is not None:
            raise state.capture.refusal("a hook on a gradient")
        replaced = hook(ct if ct.__class__ in TRACED else Tensor(ct))
        if replaced is not None:
            check_cotangent(replaced, node.shape, node.dtype, "gradient from a hook", ct)
            ct = replaced if ct.__class__ in TRACED else lower(replaced)
    return ct


def check_backward(node, ct, g):
    """Under detect_anomaly: raise if the backward of this op has turned a finite cotangent into inf or NaN."""
    def finite(value):      # a Bundle by its parts
        return all(xp.isfinite(lower(c)).all() for c in getattr(value, "parts", (value,)) if c is not None)

    if hasattr(g, "dtype") and not finite(g) and finite(ct):
        g = lower(next(c for c in getattr(g, "parts", (g,)) if c is not None and not finite(c)))
        what = "NaN" if xp.isnan(g).any() else "inf"
        where = getattr(node, "where", "a line outside of detect_anomaly")
        raise FloatingPointError(f"the backward of {node.primitive.name!r} made {what} out of a finite cotangent; "
                                 f"the op was called at {where}")


# ---------------------------------------------------------------- saved values

def check_stale(node, saved, user="backward of"):
    """Raise if one of the node's saved arrays was written after the node was made."""
    for name, value in zip(node.primitive.layout, saved, strict=False):
        value = lower(value)
        if hasattr(value, "strides"):
            write = log.since(value, node.date)
            if write:
                raise RuntimeError(
                    f"the {user} {node.primitive.name!r} needs its {name!r} of shape {value.shape}, but "
                    f"{write[1]} has overwritten it since: call backward() before the write, or give the op a copy")


def revive(node, saved):
    """The saved values as tensors on the tape again, so that rules evaluated on them are recorded."""
    if not isinstance(node.primitive, Primitive):
        return saved        # a checkpointed segment or a custom function looks after itself
    saved = list(saved)
    if saved[0] is not None:
        if node.primitive.multi:
            saved[0] = outputs(node, saved[0], 0)
        else:
            saved[0] = Tensor(saved[0], node)
    for i, parent in enumerate(node.parents, 1):
        if parent is not None and saved[i] is not None:
            saved[i] = Tensor(saved[i], parent)
    return saved


# ---------------------------------------------------------------- fused ops

def fused_cotangents(node, saved, ct, wanted):
    """A fused op's cotangents, all at once: by its kernel on raw arrays, else by its definition."""
    primitive = node.primitive
    n = len(primitive.inputs)
    if ct is None:
        return (None,) * n
    inputs = saved[1:1 + n]
    parts = ct.parts if primitive.multi else (ct,)
    if any(x.__class__ in TRACED for x in (*parts, *inputs)):
        if primitive.definition is None:
            raise RuntimeError(f"{primitive.name!r} has no definition in ordinary ops, so it can be "
                               "differentiated once only")
        params = saved[1 + n:-1] if primitive.aux else saved[1 + n:]
        gs = pull_definition(primitive.definition, inputs, params, wanted, parts)
    else:
        pullback = primitive.pullback if state.capture is None else state.capture.pullback_of(primitive)
        gs = pullback(ct, wanted, saved)
    return ready_made(gs)


def ready_made(gs):
    """Pulls that give cotangents which are known already."""
    return [(lambda ct, saved, g=g: g) for g in gs]


def pull_definition(definition, inputs, params, wanted, cts):
    """Cotangents of the inputs through a definition in ordinary ops, at a level of its own; `cts` has one per output,
    None where none has arrived."""
    with new_level() as level:
        leaves = [Leaf(x.shape, x.dtype) if w else None for x, w in zip(inputs, wanted, strict=True)]
        out = definition(*[x if leaf is None else Lifted(x, leaf, level)
                           for x, leaf in zip(inputs, leaves, strict=True)], *params)
    found = {}
    outs = out if isinstance(out, tuple) else (out,)
    run([(o.node, ct) for o, ct in zip(outs, cts, strict=True) if ct is not None], retain=True, into=found)
    return [None if leaf is None else found.get(leaf) for leaf in leaves]


class new_level:
    """Enter a functional transform: values lifted to the new level are told apart from all outer ones."""

    def __enter__(self):
        state.level += 1
        return state.level

    def __exit__(self, kind, error, trace):
        state.level -= 1
        explain(error)
