"""Derivatives of functions: vjp, jvp, grad, value_and_grad.

They take functions of arrays (or of nested tuples, lists and dicts of arrays),
nest in any order to any depth, and leave no trace on the arrays.
"""

from ..backend import DEVICE_ARRAYS, check_devices, is_floating, is_whole, module_of, wholes, xp, zeros_like
from .forward import Dual
from .primitive import TRACED, lower
from .reverse import check_cotangent, new_level, run
from .tensor import Leaf, Lifted, Tensor
from .tree import flatten, refuse_sharded


def _array(value, what):
    """A differentiable input as a floating array or traced value; Python floats become float64 arrays."""
    if value.__class__ not in TRACED and not hasattr(value, "dtype"):
        value = xp.asarray(value)
    refuse_sharded([value], what)
    if not is_floating(value.dtype):
        raise TypeError(f"{what} has dtype {value.dtype}: only floating arrays can be differentiated; "
                        "cast it, or leave it out with argnums")
    return value


def check_function(name, f, call=None):
    """TypeError for what can't be called, in the place of a function: the one that `name` makes another one of, or the
    first of the arguments that `call` shows."""
    if not callable(f):
        more = "; of what is computed already, a loss, the gradients are loss.backward()'s" * (f.__class__ in TRACED)
        wanted = f"first, {name}({call})" if call else f"and gives one, {name}(f)(x)"
        raise TypeError(f"{name} takes a function {wanted}; got a {type(f).__name__}{more}")


def positions(argnums, args):
    """Which arguments argnums, a tuple, means, counted from the front. ValueError for one that isn't there, or is named
    twice: of two values in one place the first would have no derivative."""
    n = len(args)
    if any(not -n <= i < n for i in argnums):
        raise ValueError(f"argnums={argnums}: the function was called with {n} arguments by position; what is "
                         "differentiated must be one of them, and not given by name")
    found = tuple(i % n for i in argnums)
    if len({*found}) < len(found):
        raise ValueError(f"argnums={argnums} names an argument twice")
    return found


def _outputs(out):
    """flatten(what the function has returned)."""
    outs, rebuild = flatten(out)
    refuse_sharded(outs, "what the function has returned")
    return outs, rebuild


def _zeros(value):
    value = lower(value)
    value = value if hasattr(value, "dtype") else xp.asarray(value)
    return zeros_like(value)


def _at_level(y, kind, level):
    return y.__class__ is kind and y.level == level


def apart(values, others):
    """The values, copied where they lie in the memory of one before, or of one of the others: what is passed on as it
    is, is one array for all, and who writes into one gradient means no other."""
    seen, found = {id(_memory(lower(x))) for x in others}, []
    for value in values:
        if value.__class__ is xp.ndarray or value.__class__ in DEVICE_ARRAYS:
            value = value.copy() if id(_memory(value)) in seen else value
            seen.add(id(_memory(value)))
        found.append(value)
    return found


def _memory(array):
    """The array that a view is one of."""
    while getattr(array, "base", None) is not None:
        array = array.base
    return array


def vjp(f, *primals):
    """(f(*primals), pull): pull(cotangents like the output) -> tuple of cotangents like the primals.

    One reverse pass per call of pull, which may be called again. Raises
    ValueError for a cotangent of another shape or dtype than the output's.
    """
    check_function("vjp", f, "f, *primals")
    values, rebuild = flatten(primals)
    values = [_array(v, f"input {i}") for i, v in enumerate(values)]
    with new_level() as level:
        leaves = [Leaf(v.shape, v.dtype) for v in values]
        out = f(*rebuild([Lifted(v, leaf, level) for v, leaf in zip(values, leaves, strict=True)]))
    outs, rebuild_out = _outputs(out)
    nodes = [y.node if _at_level(y, Lifted, level) else None for y in outs]
    outs = [y.data if _at_level(y, Lifted, level) else y for y in outs]

    def pull(cotangents):
        cts, _ = flatten(cotangents)
        if len(cts) != len(outs):
            raise ValueError(f"the function has {len(outs)} outputs, got {len(cts)} cotangents")
        for ct, y in zip(cts, outs, strict=True):
            check_cotangent(ct, y.shape, y.dtype, like=y)
        found = {}
        run([(n, ct) for n, ct in zip(nodes, cts, strict=True) if n is not None], retain=True, into=found)
        gs = [found.get(leaf) for leaf in leaves]
        gs = apart([_zeros(v) if g is None else g for g, v in zip(gs, values, strict=True)], cts)
        return rebuild([Tensor(g) if v.__class__ is Tensor and g.__class__ not in TRACED else g
                        for g, v in zip(gs, values, strict=True)])

    return rebuild_out(outs), pull


def jvp(f, primals, tangents):
    """(f(*primals), its derivative along `tangents`): one forward pass, no tape. Both tuples of equal nesting.

    Raises ValueError for a tangent of another shape or dtype than its primal's.
    """
    check_function("jvp", f, "f, primals, tangents")
    values, rebuild = flatten(tuple(primals))
    directions, _ = flatten(tuple(tangents))
    if len(values) != len(directions):
        raise ValueError(f"{len(values)} primals, {len(directions)} tangents: there must be one for each")
    values = [_array(v, f"primal {i}") for i, v in enumerate(values)]
    directions = [_array(t, f"tangent {i}") for i, t in enumerate(directions)]
    for t, v in zip(directions, values, strict=True):
        if t.shape != v.shape or t.dtype != v.dtype:
            raise ValueError(f"a tangent of shape {t.shape} and dtype {t.dtype} for a primal of shape {v.shape} and "
                             f"dtype {v.dtype}: they must be equal")
        if DEVICE_ARRAYS:
            check_devices("jvp's primal and tangent", (lower(v), lower(t)))
    with new_level() as level:
        out = f(*rebuild([Dual(v, t, level) for v, t in zip(values, directions, strict=True)]))
    outs, rebuild_out = _outputs(out)
    return (rebuild_out([y.primal if _at_level(y, Dual, level) else y for y in outs]),
            rebuild_out(apart([y.tangent if _at_level(y, Dual, level) else _zeros(y) for y in outs], directions)))


def value_and_grad(f, argnums=0, has_aux=False):
    """A function that returns (f(…), gradient with respect to argument(s) argnums).

    f must return one number (an array of one element); with has_aux, a pair
    (number, anything), and the result is ((number, anything), gradient).
    argnums: an int gives one gradient, a tuple of ints a tuple of gradients. ValueError for an argument that isn't
    there, or is named twice.
    """
    check_function("value_and_grad", f)
    named = wholes("argnums", argnums)

    def differentiated(*args, **kwargs):
        extra, chosen = [], positions(named, args)

        def of_chosen(*values):
            full = list(args)
            for i, v in zip(chosen, values, strict=True):
                full[i] = v
            out = f(*full, **kwargs)
            if has_aux:
                out, more = out
                extra.append(more)
            return out

        y, pull = vjp(of_chosen, *[args[i] for i in chosen])
        if getattr(y, "shape", None) is None or lower(y).size != 1:
            raise TypeError(f"grad needs a function that returns one number, {getattr(f, '__name__', f)} returned "
                            f"{'shape ' + str(y.shape) if hasattr(y, 'shape') else type(y).__name__}; use vjp or sum()")
        grads = pull(module_of(lower(y)).ones(y.shape, y.dtype))
        grads = grads[0] if is_whole(argnums) else grads
        return ((y, extra[0]) if has_aux else y), grads

    differentiated.__name__ = f"value_and_grad({getattr(f, '__name__', 'f')})"
    return differentiated


def grad(f, argnums=0, has_aux=False):
    """A function that returns the gradient of f with respect to argument(s) argnums; see value_and_grad."""
    check_function("grad", f)
    both = value_and_grad(f, argnums, has_aux)

    def differentiated(*args, **kwargs):
        value, grads = both(*args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    differentiated.__name__ = f"grad({getattr(f, '__name__', 'f')})"
    return differentiated
