"""What a graph can't hold runs uncompiled: with the right answer, counted by reason, told once."""

import warnings

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn

from .compare import EMITS, arrays

X = np.random.default_rng(0).standard_normal((3, 4))


def item(x, w):
    return x * (x * w).sum().item()


def truth(x, w):
    return x * w if (x * w).sum() > 0 else x - w


def truth_of_a_loop(x, w):
    while (x * x).sum() > 1.0:
        x = x * 0.5
    return x * w


def as_float(x, w):
    return x * float(mt.max(x * w))


def as_int(x, w):
    return (x * w)[:int(mt.sum(mt.greater(x[:, 0], -9.0)))]


def printed(x, w):
    return x * len(str(x * w))


def formatted(x, w):
    return x * float(f"{(x * w).sum().item():.1f}")


def as_list(x, w):
    return x * sum((x * w).tolist()[0])


def as_array(x, w):
    return x * np.array((x * w).numpy()).sum()


def numpys_function(x, w):
    return x * float(np.linalg.norm((x * w).numpy()))


def into_a_new_array(x, w):
    y = np.zeros((3, 4))
    y[...] = (x * w).numpy()
    return x + y


def assignment(x, w):
    y = x * w
    with mt.no_grad():
        y = y.detach()
        y[0] = 1.0
    return y * w


def in_place_sum(x, w):
    y = (x * w).detach().numpy().copy()
    y += 1.0
    return x * mt.from_numpy(y)


def backward_inside(x, w):
    v = mt.tensor(X, requires_grad=True)
    (v * w).sum().backward()
    return x * v.grad


def gradient_of_an_argument(x, w):
    return x * w if x.grad is None else x + w


def gradient_is_set(x, w):
    x.grad = None
    return x * w


def shape_from_values(x, w):
    return (x * w)[(x > 0).numpy()].sum() * x


def mask_of_ones_own(x, w):
    return (x * w)[MASK] * w[MASK]


def a_list_that_grows(x, w):
    GROWN.append(len(GROWN))
    return x * w * len(GROWN[-1:])


def hooks_of_a_module(x, w):
    return HOOKED(x) * w


MASK, GROWN, HOOKED = X > 0, [], nn.Linear(4, 4, dtype=np.float64)
HOOKED.register_forward_hook(lambda module, inputs, output: output * 3.0)
BREAKS = (item, truth, truth_of_a_loop, as_float, as_int, printed, formatted, as_list, as_array, numpys_function,
          into_a_new_array, assignment, backward_inside, gradient_of_an_argument, gradient_is_set, shape_from_values,
          mask_of_ones_own, hooks_of_a_module)
MAY_BREAK = (in_place_sum, a_list_that_grows)


def call(function):
    """(results, gradients) of two calls; the second with other values, for which the function does something else."""
    found = []
    for factor in (1.0, -1.0):
        x, w = mt.tensor(X * factor, requires_grad=True), mt.tensor(np.cos(X), requires_grad=True)
        y = function(x, w)
        if y.requires_grad:
            y.sum().backward()
        found += [y, *(np.zeros(0) if t.grad is None else t.grad for t in (x, w))]
    return arrays(found)


def equal(found, expected):
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("function", BREAKS, ids=lambda f: f.__name__)
def test_runs_uncompiled_and_says_so(function):
    compiled = mt.compile(function, emit="numpy")
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = call(compiled)
        found_again = call(compiled)
    expected = call(function)
    equal(found, expected)
    equal(found_again, expected)
    told = [str(w.message) for w in told if "uncompiled" in str(w.message)]
    assert sum(compiled.breaks.values()) == 4 and len(compiled.breaks) == 1
    reason, = compiled.breaks
    assert told == [f"compile({function.__name__}) runs uncompiled: {reason}"]
    with pytest.raises(RuntimeError, match="it runs uncompiled"):
        compiled.show()


@pytest.mark.parametrize("function", MAY_BREAK, ids=lambda f: f.__name__)
def test_right_whether_compiled_or_not(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        equal(call(mt.compile(function, emit="numpy")), call(function))


def test_what_a_function_does_beside_is_done_once_per_call():
    """It is run uncompiled; or told to have been run one time more, while it was captured, which must not be seen."""
    calls, last = [], {}

    def f(x):
        calls.append(x.shape)
        last["h"] = mt.exp(x)
        return last["h"] * 2.0
    compiled = mt.compile(f, emit="numpy")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for k in (1, 2, 3):
            y = compiled(mt.tensor(X * k))
            np.testing.assert_allclose(y.numpy(), np.exp(X * k) * 2, rtol=1e-14)
            np.testing.assert_allclose(last["h"].numpy(), np.exp(X * k), rtol=1e-14)
    assert compiled.breaks


def test_reasons_name_the_line():
    compiled = mt.compile(truth, emit="numpy")
    with pytest.warns(UserWarning, match=r"value of something.*test_breaks\.py:\d+"):
        call(compiled)


def test_other_kinds_of_calls_are_compiled_still():
    """One kind of call breaks, the others have graphs."""
    def f(x, asked):
        y = mt.exp(x)
        return y * y.sum().item() if asked else y * 2.0
    compiled, x = mt.compile(f, emit="numpy"), mt.tensor(X)
    with pytest.warns(UserWarning, match="uncompiled"):
        for asked in (True, False, True, False):
            np.testing.assert_array_equal(compiled(x, asked).numpy(), f(x, asked).numpy())
    assert sum(compiled.breaks.values()) == 2 and "exp" in compiled.show("captured")


def test_what_made_it_break_is_gone():
    """A break is a guess about the state in which it came."""
    table = {"asked": True}
    asked = True

    def f(x):
        y = mt.exp(x)
        return y * y.sum().item() if asked else y * 2.0
    compiled, x = mt.compile(f, emit="numpy"), mt.tensor(X)
    with pytest.warns(UserWarning, match="uncompiled"):
        compiled(x)
    asked = not table["asked"]
    np.testing.assert_array_equal(compiled(x).numpy(), f(x).numpy())
    assert sum(compiled.breaks.values()) == 1


@pytest.mark.parametrize("emit", EMITS)
def test_errors_of_the_function_come_out(emit):
    """Its own errors, once per call, and those of ops as eager says them."""
    calls = []

    def f(x, how):
        calls.append(how)
        if how == "raise":
            raise KeyError("mine")
        if how == "shapes":
            return x @ x
        if how == "index":
            return x[:, [0, 9]]
        return mt.embedding(np.array([0, 7]), x)
    compiled, x = mt.compile(f, emit=emit), mt.tensor(X, requires_grad=True)
    for how in ("raise", "shapes", "index", "label"):
        with pytest.raises(Exception) as eager:
            f(x, how)
        calls.clear()
        for _ in range(2):
            with pytest.raises(type(eager.value)):
                compiled(x, how)
    np.testing.assert_array_equal(mt.exp(x).numpy(), np.exp(X))     # nothing of the capture is left behind
    with pytest.raises(ValueError, match="emit="):
        mt.compile(f, emit="rust")
    with pytest.raises(RuntimeError, match="no graph yet"):
        mt.compile(f, emit=emit).show()
