"""check_grads is itself checked: a wrong rule of each kind must be rejected, with a message that helps."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.dispatch import binary
from minitorch_dist.autodiff.ops.elementwise import negate, same, scale
from minitorch_dist.autodiff.ops.reduction import spread
from minitorch_dist.autodiff.ops.shape import transpose
from minitorch_dist.autodiff.primitive import LINEAR, OPS, LinearOp, Primitive, bind

rng = np.random.default_rng(11)
A, B = rng.standard_normal((3, 4)), rng.standard_normal((3, 4))


@pytest.fixture(autouse=True)
def clean_tables():
    """Wrong entries leave with the test that made them."""
    before = dict(OPS), dict(LINEAR)
    yield
    for table, old in zip((OPS, LINEAR), before, strict=True):
        table.clear()
        table.update(old)


def op(*args, constants=(), **spec):
    primitive = Primitive("test_wrong", *args, **spec)
    return lambda *xs: bind(primitive, xs, constants)


def wrong_sign():
    return op(np.sin, x=(scale, lambda x: -mt.cos(x))), (A,)


def wrong_factor():
    return op(np.square, x=(scale, "x")), (A,)


def wrong_side_of_minus():
    return op(np.subtract, "x y", broadcasts=True, x=(negate, None), y=(same, None)), (A, B)


def residual_of_the_wrong_value():
    return op(np.exp, x=(scale, "x")), (A,)


def wrong_operand():
    return op(np.multiply, "x y", broadcasts=True, x=(scale, "x"), y=(scale, "y")), (A, B)


def ignored_cotangent():
    ignoring = LinearOp("test_ignoring", lambda t, r: t * r, lambda c, r: r * 1.0)
    return op(np.sin, x=(ignoring, lambda x: mt.cos(x))), (A,)


def permutation_not_inverted():
    wrong = LinearOp("test_permuted", lambda t, p: transpose(t, p), lambda c, p: transpose(c, p))
    return op(lambda x, p: x.transpose(p), params="p", x=(wrong, "p"), constants=((1, 2, 0),)), (
        rng.standard_normal((2, 2, 2)),)


def spread_over_the_wrong_axis():
    wrong = LinearOp("test_summed", lambda t, r: mt.sum(t, 0), lambda c, r: spread(c, (3, 3), 1))
    return op(lambda x: x.sum(axis=0), x=(wrong, None)), (rng.standard_normal((3, 3)),)


def gradient_cut_off():
    return op(np.square), (A,)


def repeated_index_overwrites():
    def scatter(c, index):
        out = np.zeros((3, 4))
        out[index] = c
        return out
    wrong = LinearOp("test_gathered", lambda t, i: t[i], scatter)
    return op(lambda x, index: x[index], params="index", x=(wrong, "index"), constants=(np.array([0, 0, 2]),)), (A,)


def pullback_that_forgets_a_term():
    return op(lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True), definition=lambda x: mt.softmax(x, 1),
              pullback=lambda ct, wanted, ans: (ct * ans,)), (A,)


def forward_mode_only_wrong():
    wrong = LinearOp("test_doubled", lambda t, r: 2 * t * r, lambda c, r: c * r)
    return op(np.sin, x=(wrong, lambda x: mt.cos(x))), (A,)


def second_order_cut_off():
    return op(np.sin, x=(scale, lambda x: np.cos(mt.autodiff.primitive.lower(x)))), (A,)


def stride_ignored():
    """Convolution whose backward reads the windows one after another."""
    from minitorch_dist.autodiff.ops.windows import view, windows
    wrong = LinearOp("test_windows", lambda t, r: windows(t, (2,), (2,), (1,)),
                     lambda c, r: sum(mt.pad(c[:, i, k:k + 1], ((0, 0), (i + k, 4 - i - k))) for i in range(2)
                                      for k in range(2)))
    return op(lambda x: view(x, (2,), (2,), (1,)).copy(), x=(wrong, None)), (rng.standard_normal((3, 5)),)


def gather_takes_the_last_of_a_repeated_index():
    def scatter(c, index):
        out = np.zeros((3, 4))
        np.put_along_axis(out, index, c, 1)
        return out
    wrong = LinearOp("test_along", lambda t, i: mt.take_along_axis(t, i, 1), scatter)
    return op(lambda x, i: np.take_along_axis(x, i, 1), params="i", x=(wrong, "i"),
              constants=(np.array([[0, 0], [1, 3], [2, 2]]),)), (A,)


def cumsum_not_reversed():
    wrong = LinearOp("test_cumsum", lambda t, r: mt.cumsum(t, 1), lambda c, r: mt.cumsum(c, 1))
    return op(lambda x: x.cumsum(1), x=(wrong, None)), (A,)


def prod_divides_by_zero():
    wrong = op(lambda x: x.prod(axis=1), definition=lambda x: mt.prod(x, 1),
               pullback=lambda ct, wanted, ans, x: (np.where(x, (ct * ans)[:, None] / np.where(x, x, 1), 0),))
    return wrong, (np.where(np.eye(3, 4), 0.0, A),)


def pooling_gives_everyone_the_gradient():
    return op(lambda x: mt.max_pool1d(x, 2), definition=lambda x: mt.max_pool1d(x, 2),
              pullback=lambda ct, wanted: (np.repeat(ct, 2, 2),)), (A[None],)


def layer_norm_forgets_the_mean():
    def pullback(ct, wanted, ans, x):
        r = 1 / np.sqrt(x.var(1, keepdims=True) + 1e-5)
        return (r * (ct - ans * (ct * ans).mean(1, keepdims=True)),)
    return op(lambda x: mt.layer_norm(x, 4), definition=lambda x: mt.layer_norm(x, 4), pullback=pullback), (A,)


def attention_forgets_the_mask():
    """The backward of a causal softmax(x xᵀ), unmasked."""
    def pullback(ct, wanted, x):
        scores = np.exp(x @ x.T)
        p = scores / scores.sum(1, keepdims=True)
        g = p * (ct - (ct * p).sum(1, keepdims=True))
        return (g @ x + g.T @ x,)

    def definition(x):
        return mt.softmax(mt.where(np.tri(3, dtype=bool), x @ mt.transpose(x), -1e300))
    return op(definition, definition=definition, pullback=pullback), (A,)


WRONG = [stride_ignored, gather_takes_the_last_of_a_repeated_index, cumsum_not_reversed, prod_divides_by_zero,
         pooling_gives_everyone_the_gradient, layer_norm_forgets_the_mean, attention_forgets_the_mask,
         wrong_sign, wrong_factor, wrong_side_of_minus, residual_of_the_wrong_value, wrong_operand, ignored_cotangent,
         permutation_not_inverted, spread_over_the_wrong_axis, gradient_cut_off, repeated_index_overwrites,
         pullback_that_forgets_a_term, forward_mode_only_wrong, second_order_cut_off]


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_a_wrong_rule_is_rejected(make):
    f, args = make()
    with pytest.raises(mt.GradientError):
        mt.check_grads(f, args)


def test_the_message_names_op_argument_index_got_and_expected():
    f, args = wrong_operand()
    with pytest.raises(mt.GradientError) as error:
        mt.check_grads(f, args, name="mul")
    got, expected = (A * OneCotangent(A))[0, 0], (B * OneCotangent(A))[0, 0]
    text = str(error.value)
    assert "mul: the reverse-mode derivative is wrong for argument 0, index (0, 0)" in text
    assert f"got {got:.6g}"[:10] in text and f"expected {expected:.6g}"[:14] in text
    assert "12 of 12 elements are off" in text


def OneCotangent(a):
    """The cotangent that check_grads draws first at order 2 and seed 0."""
    return mt.backend.stream("check_grads", 0, 2).standard_normal(a.shape)


def test_a_tangent_that_only_broadcasts_to_the_right_one_is_rejected():
    every = np.ones((3, 1))
    short = LinearOp("test_short", lambda t, r: mt.sum(t, 0), lambda c, r: every * mt.sum(c, 0))
    with pytest.raises(mt.GradientError, match=r"forward-mode derivative for .* has shape \(4,\), expected \(3, 4\)"):
        mt.check_grads(op(lambda x: every * x.sum(0), x=(short, None)), (A,), order=1)


def test_a_common_factor_is_named():
    double = op(np.square, x=(scale, lambda x: 4 * x))
    with pytest.raises(mt.GradientError, match="it is 2 times what it should be"):
        mt.check_grads(double, (A,))


def test_a_missing_unbroadcast_is_rejected(monkeypatch):
    """The one place that undoes broadcasting, broken: it drops the copies instead of adding them up."""
    from minitorch_dist.autodiff import reverse
    monkeypatch.setattr(reverse, "unbroadcast", lambda c, shape: c[0].reshape(shape))
    with pytest.raises(mt.GradientError, match="argument 1"):
        mt.check_grads(mt.add, (A, B[0]))


def test_nan_is_not_right():
    nan = op(np.sin, x=(scale, lambda x: x * np.nan))
    with pytest.raises(mt.GradientError, match="not finite"):
        mt.check_grads(nan, (A,))


def test_a_right_rule_passes():
    mt.check_grads(op(np.square, x=(scale, lambda x: 2 * x)), (A,))


def test_a_rule_that_asks_for_an_unknown_name_is_refused():
    with pytest.raises(TypeError, match=r"asks for \['z'\]; there is ans, x"):
        Primitive("test_unknown", np.sin, x=(scale, lambda z: z))


@pytest.mark.parametrize("make, error, message", [
    (lambda: Primitive("test_unknown", np.sin, y=(scale, "x")), TypeError,
     r"test_unknown: rules for \['y'\], which are not among its inputs \('x',\)"),
    (lambda: Primitive("sin", np.sin), ValueError, "there is an op 'sin' already"),
    (lambda: LinearOp("scale", lambda t, r: t, lambda c, r: c), ValueError, "there is a LinearOp 'scale' already"),
    (lambda: binary("test_half", np.add, (same, None), None, ""), TypeError, "test_half: .* both of its inputs or"),
])
def test_entries_that_cannot_be_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_a_pullback_without_a_definition_is_for_first_derivatives_in_reverse():
    f = op(np.square, pullback=lambda ct, wanted, x: (2 * ct * x,))
    x = mt.tensor(A, requires_grad=True)
    f(x).sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), 2 * A)
    with pytest.raises(RuntimeError, match="'test_wrong' has a pullback only .* forward mode"):
        mt.jvp(f, (A,), (A,))
    with pytest.raises(RuntimeError, match="'test_wrong' has no definition in ordinary ops, .* once only"):
        f(x).sum().backward(create_graph=True)


def test_functions_of_tensors_and_what_they_close_over():
    weight = mt.tensor(B.T, requires_grad=True)

    def loss(x):
        return (x @ weight).log_softmax(dim=-1).square().sum()
    mt.check_grads(loss, (A,))
    mt.check_grads(lambda x: (x.max(dim=0), x.mean()), (mt.tensor(A),))
    with pytest.raises(mt.GradientError, match="argument 0"):
        mt.check_grads(lambda x: (mt.stop_gradient(x) * x @ weight).sum(), (A,), order=1)
