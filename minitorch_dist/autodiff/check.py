"""check_grads: is a derivative right?

Forward and reverse mode share one rule, so they agree even where the rule is
wrong. Only the central difference (f(x+h) - f(x-h)) / 2h is independent of it,
and decides. Cotangents and tangents are random: with ones, errors that cancel
in a sum would pass.
"""

from ..backend import module_of, stream, to, to_device_of, xp
from .primitive import lower
from .tensor import Tensor
from .transforms import check_function, jvp, vjp
from .tree import flatten


class GradientError(AssertionError):
    """A derivative is wrong; the message names function, argument, index, what came and what was expected."""


def check_grads(f, args, order=2, modes=("forward", "reverse"), step=1e-5, rtol=1e-5, atol=1e-7, seed=0, name=None):
    """Compare derivatives of f at args with central differences, to the given order, in float64.

    f      a function of tensors that returns a tensor or a nested tuple of them, or arrays
    args   floating arrays or tensors, on any device; they are taken in float64
    order  2 checks reverse over reverse and forward over reverse as well
    step   h of the central difference, relative to max(1, |x|); its error is of order h² + 1e-16/h,
           and grows from order to order, as the tolerances then do (by 10 each)

    Raises GradientError at the first element that is off by more than atol + rtol·|expected|.
    """
    check_function("check_grads", f, "f, args")
    if not isinstance(args, (list, tuple)):
        raise TypeError(f"check_grads: args is a {type(args).__name__}, and must be a list of f's arguments: [x]")
    name = name or getattr(f, "__name__", "function")
    args = [in_float64(a, copy=True) for a in args]
    rng = stream("check_grads", seed, order)
    outs = _outputs(f, args)
    cts = [to_device_of(rng.standard_normal(y.shape), y) for y in outs]

    if "reverse" in modes:
        y, pull = vjp(lambda *xs: tuple(flatten(f(*xs))[0]), *args)
        for i, got in enumerate(pull(tuple(cts))):
            _compare(name, "reverse", f"argument {i}", got, _numeric_vjp(f, args, i, cts, step), rtol, atol)
    if "forward" in modes:
        directions = [to_device_of(rng.standard_normal(a.shape), a) for a in args]
        _, tangents = jvp(f, args, directions)
        expected = _numeric_jvp(f, args, directions, step)
        for k, (got, want) in enumerate(zip(flatten(tangents)[0], expected, strict=True)):
            _compare(name, "forward", f"output {k} along a random direction", got, want, rtol, atol)
    if order > 1:
        def gradient(*xs):
            _, pull = vjp(lambda *zs: tuple(flatten(f(*zs))[0]), *xs)
            return pull(tuple(cts))
        check_grads(gradient, args, order - 1, modes, step, 10 * rtol, 10 * atol, seed, f"the gradient of {name}")


def in_float64(x, copy=False):
    """An array where it lives; of a tensor, a number or a list, too."""
    x = lower(x)
    module = module_of(x)
    return module.array(x, dtype=xp.float64) if copy else module.asarray(x, dtype=xp.float64)


def _outputs(f, args):
    """f's results at arrays. It meets tensors, as in training: it may call their methods, and close over parameters."""
    return [in_float64(y) for y in flatten(f(*map(Tensor, args)))[0]]


def _numeric_vjp(f, args, i, cts, step):
    """Σ ct·f differentiated by every element of argument i, two calls of f each."""
    result = xp.empty(args[i].shape)
    for index in xp.ndindex(args[i].shape):
        h = step * max(1.0, abs(float(args[i][index])))
        sides = []
        for signed in (h, -h):
            moved = args[i].copy()
            moved[index] += signed
            sides.append(_outputs(f, [*args[:i], moved, *args[i + 1:]]))
        result[index] = sum(float(((up - down) * ct).sum()) for up, down, ct in zip(*sides, cts, strict=True)) / (2 * h)
    return result


def _numeric_jvp(f, args, directions, step):
    """d f(args + t·directions) / dt at t = 0."""
    up = _outputs(f, [a + step * d for a, d in zip(args, directions, strict=True)])
    down = _outputs(f, [a - step * d for a, d in zip(args, directions, strict=True)])
    return [(u - d) / (2 * step) for u, d in zip(up, down, strict=True)]


def _compare(name, mode, where, got, expected, rtol, atol):
    got, expected = (xp.asarray(to(lower(x), "cpu")) for x in (got, expected))
    if got.shape != expected.shape:
        raise GradientError(f"{name}: the {mode}-mode derivative for {where} has shape {got.shape}, "
                            f"expected {expected.shape}")
    # Written so that a NaN counts as wrong.
    wrong = ~(xp.abs(got - expected) <= atol + rtol * xp.abs(expected))
    if wrong.any():
        index = tuple(int(i) for i in xp.argwhere(wrong)[0])
        raise GradientError(
            f"{name}: the {mode}-mode derivative is wrong for {where}, index {index}: got {float(got[index]):.10g}, "
            f"expected {float(expected[index]):.10g} (central difference); {int(wrong.sum())} of {wrong.size} "
            f"elements are off{_signature(got, expected)}")


def _signature(got, expected):
    """What a wrong derivative looks like, where one factor explains all of it."""
    if not xp.isfinite(got).all():
        return "; it is not finite"
    mask = xp.abs(expected) > 1e-6
    if not mask.any():
        return ""
    if not got[mask].any():
        return "; it is zero everywhere"
    ratio = got[mask] / expected[mask]
    return f"; it is {ratio.mean():.4g} times what it should be" if xp.ptp(ratio) < 1e-4 * abs(ratio.mean()) else ""
