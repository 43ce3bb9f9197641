"""Kernels called by the engine on the strict stand-in for CuPy: what they ask of CuPy beside their launches exists, the
numbers are those of the host, and the launches are counted. Triton's interpreter takes the GPU's place."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, kernels, ledger, nn
from minitorch_dist.autodiff.primitive import Into
from minitorch_dist.kernels import bias_gelu, softmax_cross_entropy
from minitorch_dist.nn.transformer import FAMILIES

from ..device.fake_cupy import cupy, launches, transfers
from .eight_bit_cases import OPTIONS, check_steps
from .harness import on_stand_in, random

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
LINEAR = {"bias_gelu": 1, "bias_gelu_backward": 1, "column_sums": 1}


@pytest.fixture(autouse=True)
def gpu():
    with on_stand_in():
        yield


def passes(function, arrays, device):
    """(the output and the gradients, on the host; launches of kernels)."""
    leaves = [mt.tensor(a, requires_grad=True, device=device) for a in arrays]
    with ledger.record() as book:
        y = function(*leaves)
        y.backward(mt.tensor(random(*y.shape, seed=9), device=device))
    return [t.cpu().numpy() for t in (y.detach(), *(leaf.grad for leaf in leaves))], dict(book.launches)


def close(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        assert g.shape == w.shape and np.linalg.norm(g - w) <= 2e-6 * np.linalg.norm(w)


def test_a_linear_layer_with_gelu_is_one_launch_forward():
    arrays = random(3, 7, 6), random(10, 6, seed=1), random(10, seed=2)

    def layer(x, weight, bias):
        return mt.linear_gelu(x, weight, bias, "tanh")
    with ledger.record() as book:
        layer(*[backend.to(a, "cuda") for a in arrays])
    assert dict(book.launches) == {"bias_gelu": 1} and dict(launches) == {"matmul": 1}
    got, counts = passes(layer, arrays, "cuda")
    assert counts == LINEAR
    close(got, passes(layer, arrays, "cpu")[0])


def test_swiglu_is_one_launch_each_way():
    got, counts = passes(mt.nn.SwiGLU(), [random(3, 7, 12)], "cuda")
    assert counts == {"swiglu": 1, "swiglu_backward": 1}
    close(got, passes(mt.nn.SwiGLU(), [random(3, 7, 12)], "cpu")[0])


def test_the_weights_gradient_is_written_to_its_place_and_only_what_is_wanted_is_made():
    arrays = random(7, 6), random(10, 6, seed=1), random(10, seed=2)
    wanted, _ = passes(mt.linear_gelu, arrays, "cpu")
    x, weight, bias, ct = (backend.to(a, "cuda") for a in (*arrays, random(7, 10, seed=9)))
    place = cupy.zeros((10, 6), np.float32)
    y, aux = bias_gelu.linear_gelu(x, weight, bias, False)
    cotangents = bias_gelu.linear_gelu_pullback(ct, (False, Into(place), False), x, weight, bias, False, aux)
    assert cotangents[1] is place and cotangents[0] is cotangents[2] is None
    close([place.get()], wanted[2:3])


@pytest.mark.parametrize("index", [np.array([[3, 0, 3], [-1, 4, 3]]), np.array([1], np.int32), np.array(2)], ids=str)
@pytest.mark.parametrize("shape", [(6, 5), (6,), (6, 2, 3)], ids=str)
def test_rows_are_added_up_in_order(index, shape):
    """The host's bits: no segment is longer than a stretch."""
    (_, got), counts = passes(lambda x: x[index], [random(*shape)], "cuda")
    assert counts == {"outside": 1, "segment_order": 1, "segment_sums": 1}
    np.testing.assert_array_equal(got, passes(lambda x: x[index], [random(*shape)], "cpu")[0][1])
    assert not launches["add.at"]


def by_definition(logits, labels, ct, ignore):
    """(losses, cotangents of the logits) in float64, of those rows alone that count."""
    losses, gradient, counted = np.zeros(len(labels)), np.zeros(logits.shape), labels != ignore
    logits, labels, ct = logits[counted].astype(float), labels[counted], ct[counted]
    losses[counted] = softmax_cross_entropy.definition(logits, labels)
    gradient[counted] = softmax_cross_entropy.gradient(ct, logits, labels)
    return losses, gradient


@pytest.mark.parametrize("labels, ignore", [
    ([3, -100, 0, 6, -100], -100), ([3, 1, 0, 6, 2], -100), ([-100] * 5, -100), ([3, 1, 0, 3, 2], 3)], ids=str)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.filterwarnings("ignore")      # NumPy speaks of what GPUs don't
def test_labels_that_are_ignored_cost_no_launch(reduction, labels, ignore):
    """Not even where their logits are no numbers. (A mean over nothing is NaN on a GPU, which nobody waits for.)"""
    labels, logits, ct = np.array(labels), random(5, 7), random(5, seed=1).astype(float)
    number = np.count_nonzero(labels != ignore)
    weights = {"none": ct, "sum": np.ones(5), "mean": np.ones(5) / number if number else np.full(5, np.nan)}[reduction]
    losses, gradient = by_definition(logits, labels, weights, ignore)
    wanted = losses if reduction == "none" else (losses * weights).sum()
    logits[labels == ignore] = np.nan
    x = mt.tensor(logits, requires_grad=True, device="cuda")
    transfers.clear()
    launches.clear()
    with ledger.record() as book:
        loss = nn.cross_entropy(x, given := backend.to(labels, "cuda"), reduction, ignore)
        loss.backward(mt.tensor(ct.astype("f4"), device="cuda") if reduction == "none" else None)
    assert dict(book.launches) == {"outside": 1, "cross_entropy": 1, "cross_entropy_backward": 1}
    assert not launches["where"] and launches["not_equal"] == (reduction == "mean") and +transfers == {"up": 1 + (
        reduction == "none")} and given.size == 5
    np.testing.assert_allclose(loss.cpu().numpy(), wanted, rtol=2e-6, atol=1e-12)
    np.testing.assert_allclose(x.grad.cpu().numpy(), gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", ["int64", "uint8"])
def test_a_label_out_of_range_is_refused_beside_ignored_ones(dtype):
    """Of unsigned ones none is -100, not even the one that has its bits."""
    labels = np.array([3, -100 if dtype == "int64" else 0, -99]).astype(dtype)
    loss = nn.cross_entropy(mt.tensor(random(3, 7), device="cuda"), backend.to(labels, "cuda"), "sum")
    with pytest.raises(ValueError, match="some of the labels are out of range: there are 7 classes, 0 to 6"):
        loss.item()
    loss = nn.cross_entropy(mt.tensor(random(2, 7), device="cuda"), backend.to(labels[:2], "cuda"), "sum")
    assert np.isfinite(loss.item())


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_adam_of_8_bits(options):
    """The host's steps, in one launch each."""
    check_steps("cuda", 3, **options)


def test_a_step_of_gpt():
    """Every kernel of its passes, by count: per block two norms, attention, and the MLP's first layer; sums of columns
    are the gradients of norms and of biases."""
    tokens, labels = np.random.default_rng(0).integers(0, 11, (2, 2, 5))
    ends = []
    for device in ("cpu", "cuda"):
        mt.manual_seed(0)
        model = nn.GPT(11, 5, layers=2, heads=2, dim=8).to(device)
        transfers.clear()
        with ledger.record() as book:
            loss = nn.cross_entropy(model(backend.to(tokens, device)), backend.to(labels, device))
            loss.backward()
        assert +transfers == ({"up": 2} if device == "cuda" else {})        # tokens and labels
        asked = dict(launches)
        ends.append([loss.item(), {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}])
    for name, wanted in ends[0][1].items():
        assert np.linalg.norm(ends[1][1][name] - wanted) <= 1e-5 * max(np.linalg.norm(wanted), 1e-3), name
    assert abs(ends[1][0] - ends[0][0]) < 1e-6
    assert dict(book.launches) == {
        "norm": 5, "norm_backward": 5, "bias_gelu": 2, "bias_gelu_backward": 2, "column_sums": 5 + 4 * 2,
        "flash_attention": 2, "flash_attention_queries": 2, "flash_attention_sources": 2,
        "cross_entropy": 1, "cross_entropy_backward": 1, "segment_order": 1, "segment_sums": 1,
        "outside": 2}       # tokens and labels
    # Of CuPy: every product is one of two matrices, three for each of 4 layers in 2 blocks and for the last. Added are:
    # the bias of three of the 4; residuals, there and back; positions; both gradients of the weight that is used twice.
    assert asked["matmul"] == 3 * (4 * 2 + 1) and "matmul of many" not in asked
    assert asked["add"] == 3 * 2 + 2 * (2 * 2) + 1 + 1


@pytest.mark.parametrize("family, more", [("llama", {}), ("deepseek", {"latent": {"rope_size": 2, "value_size": 3}})])
def test_a_step_of_a_llama_on_documents(family, more):
    """Numbers of documents and places in them are worked out where the tokens are; attention is by its kernels."""
    tokens, labels = np.random.default_rng(0).integers(0, 11, (2, 2, 7))
    documents = np.array([[0, 0, 0, 1, 1, 2, -1], [0, 1, 1, 1, 1, 1, 2]])
    ends = []
    for device in ("cpu", "cuda"):
        mt.manual_seed(0)
        model = nn.GPT(11, 7, layers=1, heads=2, dim=8, hidden=8, **FAMILIES[family] | more).to(device)
        transfers.clear()
        with ledger.record() as book:
            loss = nn.cross_entropy(model(*(backend.to(x, device) for x in (tokens, documents))),
                                    backend.to(labels, device))
            loss.backward()
        assert +transfers == ({"up": 3} if device == "cuda" else {})
        ends.append([loss.item(), {name: p.grad.cpu().numpy() for name, p in model.named_parameters()}])
    assert {name: n for name, n in book.launches.items() if "flash" in name} == {
        "flash_attention": 1, "flash_attention_queries": 1, "flash_attention_sources": 1}
    assert abs(ends[1][0] - ends[0][0]) < 1e-6
    for name, wanted in ends[0][1].items():
        assert np.linalg.norm(ends[1][1][name] - wanted) <= 1e-5 * max(np.linalg.norm(wanted), 1e-3), name
