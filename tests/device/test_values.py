"""Indices, integers and sums on a GPU (the stand-in): what is checked where, and what is added up in which dtype."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn
from minitorch_dist.autodiff.ops import indexing

from .fake_cupy import installed, transfers


@pytest.fixture(autouse=True)
def gpu():
    with installed() as cupy:
        yield cupy


def test_indices_from_the_host_are_moved_and_checked():
    x = mt.tensor(np.arange(12.0).reshape(4, 3), device="cuda", requires_grad=True)
    y = x[np.array([0, 3, 3])]
    assert y.device == "cuda:0" and not transfers["implicit"]
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.cpu().numpy()[:, 0], [1, 0, 0, 2])
    assert not transfers["implicit"]


def test_lists_go_where_the_other_operand_is():
    x = mt.ones(2, 3, device="cuda", requires_grad=True)
    y = [1.0, 2.0, 3.0] * x + (1, 2, 3)
    y.sum().backward()
    assert y.device == "cuda:0" and y.tolist() == [[2.0, 4.0, 6.0]] * 2 and x.grad.tolist() == [[1.0, 2.0, 3.0]] * 2
    assert (x < [0.5, 2.0, 2.0]).tolist() == [[False, True, True]] * 2


@pytest.mark.parametrize("dtype", ["bool", "int8", "uint8", "int16", "uint16", "int32", "int64"])
def test_integers_of_any_size_are_added_and_set_by_index(dtype):
    """CuPy's add.at knows those of 32 and 64 bits."""
    x, v, index = (np.arange(6).reshape(3, 2) * 100).astype(dtype), np.array([[99, 1]] * 4).astype(dtype), [2, 0, 2, 2]

    def everything(device):
        t, u = mt.tensor(x, device=device), mt.tensor(v, device=device)
        return mt.scatter_add(u, index, (3, 2)), t.at[index].add(u), t.at[[2, 1]].set(u[:2]), t.at[t > 0].set(0)
    for here, there in zip(everything("cpu"), everything("cuda"), strict=True):
        assert here.dtype == there.dtype == dtype
        np.testing.assert_array_equal(here.numpy(), there.cpu().numpy())


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_mean_loss_of_no_samples_raises(device):
    with pytest.raises(ValueError, match="empty batch"):
        nn.cross_entropy(mt.ones(0, 3, device=device), mt.tensor(np.zeros(0, int), device=device))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_assignment_takes_every_index(device):
    x = mt.zeros(3, 2, device=device)
    x[mt.tensor([0, 2], device=device), mt.tensor([1, 0])] = mt.tensor([5.0, 6.0])
    x[[]] = 7.0
    x[[1], :] = 8.0
    assert x.tolist() == [[0.0, 5.0], [8.0, 8.0], [6.0, 0.0]]
    with pytest.raises(IndexError, match="out of"):
        x[np.array([0, 3])] = 1.0
        x.tolist()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("n", [4, 400])
def test_scatter_add_broadcasts(device, n):
    x = mt.tensor(np.arange(n, dtype=np.float32), device=device, requires_grad=True)
    y = mt.scatter_add(x, np.array([2, 0, 2]), (3, n))
    (y * y).sum().backward()
    np.testing.assert_array_equal(y.detach().cpu().numpy(), np.arange(n) * np.array([[1], [0], [2]]))
    np.testing.assert_array_equal(x.grad.cpu().numpy(), 2 * (1 + 2 + 2) * np.arange(n))
    with pytest.raises(ValueError, match="broadcast"):
        mt.scatter_add(x[:-1], np.array([2, 0, 2]), (3, n))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("n", [4, 400])
def test_scatter_add_by_too_many_indices(device, n):
    with pytest.raises(IndexError, match="too many indices"):
        mt.scatter_add(mt.ones(n, device=device), (np.zeros(n, int), np.zeros(n, int)), (3,))
    lines = mt.ops.indexing.as_lines(index := (slice(None), np.zeros(n, int)), (3, 2))
    assert [line.shape for line in lines] == [(3, 1), (n,)] and mt.ops.indexing.as_lines(index, (3,)) is None


@pytest.mark.parametrize("use, error, message", [
    (lambda x: x[np.array([0, 4])], IndexError, r"axis 0 of shape \(4, 3\)"),
    (lambda x: x[..., None, np.array([-4])], IndexError, r"axis 1 of shape \(4, 3\)"),
    (lambda x: mt.embedding(mt.tensor([4], device="cuda"), x), ValueError, "embedding: .*there are 4 rows, 0 to 3"),
    (lambda x: mt.softmax_cross_entropy(x, mt.tensor([0, 1, 2, 3], device="cuda")), ValueError, "3 classes, 0 to 2"),
    (lambda x: x.at[np.array([1, 1])].set(0.0), ValueError, "more than once")])
def test_what_is_out_of_range_raises_when_a_value_comes_to_the_host(use, error, message):
    for look in (lambda y: y.sum().item(), lambda y: y.cpu(), lambda y: y.tolist(), repr, lambda y: float(y.sum())):
        y = use(mt.ones(4, 3, device="cuda"))
        with pytest.raises(error, match=message):
            look(y)
        look(y)     # it has been said
    # From the host's own numbers it raises at once.
    with pytest.raises(ValueError, match="from 4 to 4"):
        mt.embedding(np.array([4]), mt.ones(4, 3, device="cuda"))


SUMS = {        # what adds up thousands of numbers, along the last axis or the first of its transpose
    "sum": lambda x: mt.sum(x, -1), "whole sum": mt.sum, "softmax": mt.softmax, "log_softmax": mt.log_softmax,
    "cumsum": lambda x: mt.cumsum(x, -1),
    "linear": lambda x: mt.linear(x[:1].T * 0, x[:, :1] * 0, x[:, 0]).T,
    "batch_norm": lambda x: mt.batch_norm(x.T * 1000, x[:, 0], x[:, 1])[0],
    "softmax_cross_entropy": lambda x: mt.softmax_cross_entropy(x, np.arange(len(x))),
    "attention": lambda x: mt.scaled_dot_product_attention(x[:, None, :2, None], *[x[:, None, :, None]] * 2)}


@pytest.mark.parametrize("name", SUMS)
def test_floats_of_16_bits_are_added_up_in_32(name):
    """Within the rounding of what is stored in between, forward and backward."""
    x = np.random.default_rng(0).uniform(0.001, 0.002, (3, 4097)).astype(np.float16)
    ends = []
    for dtype, device in ((np.float64, "cpu"), (np.float16, "cuda")):
        leaf = mt.tensor(x.astype(dtype), device=device, requires_grad=True)
        y = SUMS[name](leaf)
        y.backward(mt.tensor(np.random.default_rng(1).uniform(1, 2, y.shape).astype(dtype), device=device))
        ends.append([a.cpu().numpy().astype(np.float64) for a in (y.detach(), leaf.grad)])
    for wanted, found in zip(*ends, strict=True):
        assert np.linalg.norm(found - wanted) <= 3e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("dtype, step", [("float16", 2.0 ** -11), ("bfloat16", 2.0 ** -8)])
def test_batch_norm_s_statistics_of_16_bits_are_rounded_once(dtype, step):
    """The mean at its end; the variance there, and that of centred values, themselves rounded, and of their squares."""
    x = (np.random.default_rng(2).standard_normal((3001, 5)) * 7 + 9).astype(backend.as_dtype(dtype))
    _, mean, var = (y.cpu().numpy().astype("f8") for y in mt.batch_norm(mt.tensor(x, device="cuda")))
    x = x.astype("f8")
    np.testing.assert_allclose(mean, x.mean(0), rtol=1.1 * step)
    np.testing.assert_allclose(var, x.var(0), rtol=3 * step)


BETWEEN = {         # what has squares in it, and other products
    "batch_norm": lambda x: sum(mt.batch_norm(x)[:2]), "layer_norm": lambda x: mt.layer_norm(x, 4),
    "rms_norm": lambda x: mt.rms_norm(x, 4, mt.ones(4, dtype=x.dtype, device=x.device)),
    "swiglu": lambda x: mt.swiglu(x * 2.0 ** -5, x * 2.0 ** -5), "prod": lambda x: mt.prod(x * 2.0 ** -8, 1, True),
    "gelu": mt.gelu, "gelu, tanh": lambda x: mt.gelu(x, "tanh"),
    "linear_gelu": lambda x: mt.linear_gelu(x, *(mt.tensor(w, dtype=x.dtype, device=x.device)
                                                 for w in (np.eye(4), np.ones(4))), "tanh")}


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("name", BETWEEN)
def test_what_is_between_and_beyond_float16_gives_the_host_s_bits(name, dtype):
    """Of 1,000, where no kernel stands in for the op."""
    x = (np.random.default_rng(3).standard_normal((50, 4)) * 1000).astype(backend.as_dtype(dtype))
    ends = []
    for device in ("cpu", "cuda"):
        leaf = mt.tensor(x, device=device, requires_grad=True)
        y = BETWEEN[name](leaf)
        y.backward(mt.tensor(x[::-1, :y.shape[1]] * backend.as_dtype(dtype).type(1 / 64), device=device))
        ends.append([a.cpu().numpy().astype("f4") for a in (y.detach(), leaf.grad)])
    for wanted, found in zip(*ends, strict=True):
        np.testing.assert_array_equal(found, wanted)
        assert np.isfinite(found).all() and found.any()


@pytest.mark.parametrize("attend", [
    lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, mt.ones(1, 4, device=q.device) > 0),
    lambda q, k, v: mt.scaled_dot_product_attention(q, k, v, sinks=mt.zeros(1, device=q.device)),
    lambda q, k, v: mt.block_attention(q, k, v, 1, 3)], ids=["mask", "sinks", "blocks"])
def test_scores_that_only_their_scale_brings_into_float16s_range(attend):
    """As on the host: of products of 102,400 scores of 12,800; two of four sources are alike, the others far less."""
    k, v = np.full((1, 1, 4, 64), 40, np.float16), np.arange(4, dtype=np.float16).reshape(1, 1, 4, 1)
    k[:, :, :2] = 20
    for device in ("cpu", "cuda"):
        q, k_there, v_there = (mt.tensor(x, device=device, requires_grad=True) for x in (k[:, :, 3:], k, v))
        y = attend(q, k_there, v_there)
        y.sum().backward()
        assert y.item() == 2.5 and v_there.grad.cpu().tolist() == [[[[0.0], [0.0], [0.5], [0.5]]]]
        np.testing.assert_array_equal(k_there.grad.cpu().numpy()[0, 0, :, 0], [0, 0, -1.25, 1.25])


def test_put_off_checks_do_not_pile_up():
    x = mt.ones(4, device="cuda")
    for _ in range(2 * backend.MOST):
        x = x[np.array([0, 1, 2, 3])]
    assert len(backend.put_off) <= backend.MOST


@pytest.mark.parametrize("dtype", ["int8", "uint8", "int16", "uint32", "int64", "uint64"])
@pytest.mark.parametrize(("low", "high"), [(0, 5), (-5, 5), (0, 200), (-300, 300), (0, 1 << 40)])
def test_outside_is_a_comparison_with_both_ends(dtype, low, high):
    limits = np.iinfo(dtype)
    for number in {limits.min, limits.max, *range(-6, 7), 127, 199, 200, -300, -301}:
        if limits.min <= number <= limits.max:
            array = np.array([0, number], dtype)
            assert indexing.outside(array, low, high) == (not low <= number < high), number
