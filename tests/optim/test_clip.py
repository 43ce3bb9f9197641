"""Clipping by global norm, against the norm in float64."""

import functools
import math
import operator

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.flat import BLOCK, FlatBuffer, flat_buffers
from minitorch_dist.optim import clip_grad_norm_
from minitorch_dist.optim.clip import block_sums, tables, tree_sum

SHAPES = [(7, 11), (13,), (91, 97), (), (2, 3, 5)]


def params_with_gradients(dtype=np.float32, shapes=SHAPES, scale=1.0):
    random = np.random.default_rng(3)
    params = [mt.tensor(random.standard_normal(shape).astype(dtype)[()], requires_grad=True) for shape in shapes]
    grads = [(scale * random.standard_normal(shape)).astype(dtype)[()] for shape in shapes]
    for p, g in zip(params, grads, strict=True):
        p.grad = mt.tensor(g)
    return params, grads


def norm_of(grads):
    return math.sqrt(math.fsum(float(x) ** 2 for g in grads for x in np.ravel(g)))


@pytest.mark.parametrize("moved", [False, True], ids=["loose", "in a flat buffer"])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("scale", [1e-15, 1.0, 1e15])
def test_clipped_to_the_norm(scale, dtype, moved):
    params, grads = params_with_gradients(dtype, scale=scale)
    if moved:
        FlatBuffer(params)
    norm = norm_of(grads)
    returned = clip_grad_norm_(iter(params), 1e-3 * scale)
    assert isinstance(returned, float) and math.isclose(returned, norm, rel_tol=1e-14)
    wanted = 1e-3 * scale / (norm + 1e-6)       # torch's epsilon
    eps = np.finfo(dtype).eps
    for p, g in zip(params, grads, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), g * dtype(wanted), rtol=4 * eps, atol=0)
    if scale > 1e-3:
        assert math.isclose(norm_of([p.grad.numpy() for p in params]), 1e-3 * scale, rel_tol=1e-5)


def test_it_is_torchs():
    torch = pytest.importorskip("torch")
    params, grads = params_with_gradients()
    theirs = [torch.nn.Parameter(torch.tensor(p.numpy())) for p in params]
    for p, g in zip(theirs, grads, strict=True):
        p.grad = torch.tensor(g)
    norm = torch.nn.utils.clip_grad_norm_(theirs, 0.7)
    assert math.isclose(clip_grad_norm_(params, 0.7), norm.item(), rel_tol=1e-6)
    for p, t in zip(params, theirs, strict=True):
        np.testing.assert_allclose(p.grad.numpy(), t.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("factor", [1.0, 1.5, math.inf])
def test_a_small_norm_leaves_every_bit(factor):
    params, grads = params_with_gradients()
    clip_grad_norm_(params, factor * clip_grad_norm_(params, math.inf))
    for p, g in zip(params, grads, strict=True):
        assert (p.grad.numpy() == g).all()


def test_a_norm_just_above_is_clipped():
    params, grads = params_with_gradients()
    norm = norm_of(grads)
    clip_grad_norm_(params, 0.99 * norm)
    assert math.isclose(norm_of([p.grad.numpy() for p in params]), 0.99 * norm, rel_tol=1e-6)


def test_missing_gradients_count_as_zero_and_stay_missing():
    params, grads = params_with_gradients()
    FlatBuffer(params)
    for p in params:
        p.grad[...] = 55        # left from an earlier step
    for p, g in zip(params, grads, strict=True):
        p.grad = mt.tensor(g)
    params[2].grad = None
    grads[2] = np.zeros(())
    assert math.isclose(clip_grad_norm_(params, 0.5), norm_of(grads), rel_tol=1e-14)
    assert params[2].grad is None


def test_of_a_part_of_a_buffer_only_that_part_is_clipped():
    params, grads = params_with_gradients()
    FlatBuffer(params)
    chosen = [params[1], params[3]]
    norm = norm_of([grads[1], grads[3]])
    assert math.isclose(clip_grad_norm_(chosen, 0.1), norm, rel_tol=1e-14)
    for k, (p, g) in enumerate(zip(params, grads, strict=True)):
        wanted = g * np.float32(0.1 / (norm + 1e-6)) if k in (1, 3) else g
        np.testing.assert_allclose(p.grad.numpy(), wanted, rtol=1e-6)


def test_all_dtypes_have_one_norm():
    narrow, few = params_with_gradients(np.float32)
    wide, many = params_with_gradients(np.float64, scale=3.0)
    norm = norm_of([*few, *many])
    assert math.isclose(clip_grad_norm_([*narrow, *wide], 1.0), norm, rel_tol=1e-14)
    np.testing.assert_allclose(wide[0].grad.numpy(), many[0] / (norm + 1e-6), rtol=1e-12)
    np.testing.assert_allclose(narrow[0].grad.numpy(), few[0] / np.float32(norm), rtol=1e-6)


def test_frozen_and_repeated_parameters():
    params, grads = params_with_gradients()
    params[0].requires_grad_(False)
    norm = norm_of(grads[1:])
    assert math.isclose(clip_grad_norm_([*params, params[1]], 1.0), norm, rel_tol=1e-14)
    np.testing.assert_allclose(params[1].grad.numpy(), grads[1] / np.float32(norm), rtol=1e-6)
    assert (params[0].grad.numpy() == grads[0]).all()
    assert clip_grad_norm_([], 1.0) == 0 == clip_grad_norm_(params[:1], 1.0)


def test_one_tensor_named_ones_and_no_leaf():
    params, grads = params_with_gradients()
    assert math.isclose(clip_grad_norm_(params[1], 1e9), norm_of(grads[1:2]), rel_tol=1e-14)
    assert math.isclose(clip_grad_norm_([(str(p.shape), p) for p in params], 1e9), norm_of(grads), rel_tol=1e-14)
    with pytest.raises(ValueError, match="no leaf"):
        clip_grad_norm_([params[0], params[1] * 2.0], 1.0)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_norm_that_is_not_finite_raises_and_changes_nothing(bad):
    params, grads = params_with_gradients()
    grads[1][5] = bad
    params[1].grad = mt.tensor(grads[1])
    with pytest.raises(ValueError, match="inf or NaN .*GradScaler.*error_if_nonfinite=False"):
        clip_grad_norm_(params, 1.0)
    assert not math.isfinite(clip_grad_norm_(params, 1.0, error_if_nonfinite=False))
    for p, g in zip(params, grads, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), g)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_norm_to_clip_to_is_not_negative(max_norm):
    params, _ = params_with_gradients()
    with pytest.raises(ValueError, match="max_norm"):
        clip_grad_norm_(params, max_norm)


def test_clipped_to_0_nothing_is_left():
    params, grads = params_with_gradients()
    assert math.isclose(clip_grad_norm_(params, 0), norm_of(grads), rel_tol=1e-14)
    assert all(not p.grad.numpy().any() for p in params)


def test_the_tape_hears_of_it():
    params, _ = params_with_gradients(shapes=[(4,)])
    FlatBuffer(params)
    y = (params[0].grad * params[0]).sum()
    clip_grad_norm_(params, 1e-3)
    with pytest.raises(RuntimeError, match="clip_grad_norm_"):
        y.backward()


# ---------------------------------------------------------------- the same bits in any sharding

def balanced(values):
    if len(values) == 1:
        return values[0]
    return balanced(values[:len(values) // 2]) + balanced(values[len(values) // 2:])


def test_blocks_are_those_of_each_parameter_in_any_flat_buffers():
    """Whichever neighbours a parameter has in its buffer: the same bits, and those of a sum by hand."""
    shapes = [(2 * BLOCK + 40,), (3, 7), (BLOCK,), (0, 3), (), (17, BLOCK // 16)]
    found = []
    for together in ([[0, 1, 2, 3, 4, 5]], [[5, 3], [1, 0], [4, 2]], [[2], [1, 5, 0, 4, 3]], []):
        params, grads = params_with_gradients(shapes=shapes)
        for some in together:
            FlatBuffer([params[i] for i in some])
        tabled = tables(flat_buffers(params), {id(p) for p in params})
        sums = block_sums(tabled)
        found.append([sums[id(p)].tobytes() for p in params])
        for p, g in zip(params, grads, strict=True):
            g = np.ravel(g)
            blocks = [g[i:i + BLOCK] for i in range(0, g.size, BLOCK)]
            np.testing.assert_allclose(sums[id(p)], [math.fsum(float(x) ** 2 for x in b) for b in blocks], rtol=1e-13)
    assert all(f == found[0] for f in found)


def test_what_is_known_of_a_buffer_is_not_taken_for_another_choice():
    params, grads = params_with_gradients()
    FlatBuffer(params)
    for some in ([0, 1, 2, 3, 4], [1, 3], [0, 3], [4], [1, 3]):
        assert math.isclose(clip_grad_norm_([params[i] for i in some], 1e9), norm_of([grads[i] for i in some]),
                            rel_tol=1e-14)


def test_nor_is_what_is_known_of_a_parameter_without_elements_taken_for_the_one_that_begins_there():
    """As a rank has pieces of parameters of which other ranks have everything."""
    params, grads = params_with_gradients(shapes=[(0, 3), (7, 11), (0, 3), (13,)])
    FlatBuffer(params)
    for some in ([0], [1], [2], [3], [0, 3], [1, 3]):
        assert math.isclose(clip_grad_norm_([params[i] for i in some], 1e9), norm_of([grads[i] for i in some]),
                            rel_tol=1e-14)


@pytest.mark.parametrize("n", [1, 2, 4, 64])
def test_tree_sum_is_the_balanced_tree(n):
    values = (np.random.default_rng(n).standard_normal(n) * 10.0 ** np.arange(n)[::-1].clip(0, 9)).tolist()
    assert tree_sum(values) == balanced(values)
    for ranks in {1, 2, n}:
        if ranks <= n:
            size = n // ranks
            assert tree_sum(tree_sum(values[r * size:(r + 1) * size]) for r in range(ranks)) == tree_sum(values)
    if n == 64:
        # The data can tell the tree from a sum in order (which the built-in sum is no longer, from Python 3.12 on).
        assert tree_sum(values) != functools.reduce(operator.add, values)


@pytest.mark.parametrize("n", [0, 3, 7, 13])
def test_tree_sum_of_any_number(n):
    values = np.random.default_rng(n).integers(1, 1000, n).tolist()
    assert tree_sum(values) == sum(values)
