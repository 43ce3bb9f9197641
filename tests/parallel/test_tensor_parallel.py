"""A model that is cut between ranks is the whole model: against NumPy by hand, and against one process's training.

As in test_collectives.py only the ranks import minitorch_dist.parallel.collectives.
"""

import numpy as np
import pytest

from tests.crews import crews

CASES = "tests.parallel.tensor_cases:"


def values(shape, *key):
    """As the ranks make them."""
    return np.random.default_rng(list(key)).standard_normal(shape)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_layers_that_are_cut_are_whole_layers(n):
    """tanh of a column-parallel, then row-parallel, gathered and cut again, by hand; 7 and 4 rows on 3 ranks."""
    for rank, (whole, y, dx, grads) in enumerate(crews.call(CASES + "layers", n)):
        w1, b1, w2, b2, w3, w4, b4 = whole
        x, u = values((3, 5), 2), values((3, 2), 3)
        h = np.tanh(x @ w1.T + b1)
        k = (h @ w2.T + b2) @ w3.T
        dk = u @ w4
        dm = dk @ w3
        dh = (dm @ w2) * (1 - h * h)

        def part(count, rank=rank):
            return slice(count * rank // n, count * (rank + 1) // n)
        expected = [(dh.T @ x)[part(7)], dh.sum(0)[part(7)], (dm.T @ h)[:, part(7)], dm.sum(0),
                    (dk.T @ (h @ w2.T + b2))[part(6)], (u.T @ k)[:, part(6)], u.sum(0)]
        for got, wanted in zip([y, dx, *grads], [k @ w4.T + b4, dh @ w1, *expected], strict=True):
            np.testing.assert_allclose(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("n, shift", [(1, 0.0), (2, 1e4), (3, 0.0)])
def test_the_loss_of_divided_logits(n, shift):
    x, u = values((4, 3, 11), 4) * 3 + shift, values((4, 3), 6)
    labels = np.random.default_rng(5).integers(0, 11, (4, 3))
    z = x - x.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    losses = -np.log(np.take_along_axis(p, labels[..., None], -1))[..., 0]
    slope = (p - np.eye(11)[labels]) * u[..., None]
    found = crews.call(CASES + "loss_of_parts", n, args=(shift,))
    for mean, each, _ in found:
        np.testing.assert_allclose(each, losses, rtol=1e-10, atol=1e-10)
        assert abs(mean - losses.mean()) < 1e-10
    np.testing.assert_allclose(np.concatenate([grad for *_, grad in found], -1), slope, rtol=1e-10, atol=1e-10)


@pytest.fixture(scope="module")
def one_process():
    """{setting: what training a whole model in one process gives}."""
    return crews.call(CASES + "train_whole", 1)[0]


@pytest.mark.parametrize(("setting", "n", "size"), [("tied", 2, 2), ("tied", 4, 2), ("rotary, untied", 2, 2),
                                                    ("logits stay apart", 2, 2)])
def test_one_curve_on_any_mesh(one_process, setting, n, size):
    """AdamW, dropout, clipping, float64: the parameters of one process, within 1e-10, on every rank."""
    losses, wanted, nbytes = one_process[setting]
    for got_losses, got, got_nbytes in crews.call(CASES + "train", n, args=(setting, size)):
        np.testing.assert_allclose(got_losses, losses, rtol=1e-10)
        assert set(got) == set(wanted)
        for name, value in wanted.items():
            np.testing.assert_allclose(got[name], value, rtol=1e-10, atol=1e-10, err_msg=name)
        # all but the norms, the biases of row-parallel layers and the table of positions is divided
        assert nbytes / size < got_nbytes < nbytes / size * 1.25


@pytest.mark.parametrize(("n", "options"), [(2, {}), (4, {}), (2, {"mlp": "swiglu", "hidden": 10, "bias": False})])
def test_a_block_sends_two_all_reduces_each_way(n, options):
    """A ring's worth of bytes each: 2(n - 1)/n of the output."""
    for found, nbytes in crews.call(CASES + "counted", n, args=(options,)):
        each = {"all_reduce": (2, 2 * (2 * (n - 1) * nbytes // n))}
        assert found == {"forward": each, "backward": each}


def test_it_writes_what_the_whole_model_writes_and_its_state_is_whole():
    for (whole, cut), same in crews.call(CASES + "written", 2):
        np.testing.assert_array_equal(whole, cut)
        assert same


def test_errors_say_what_to_do():
    expected = {
        "way": ("ValueError", "'columns' is unknown; one of column, "),
        "path": ("ValueError", "'block.*' meets no module"),
        "kind": ("TypeError", "blocks.0.mlp is a FeedForward; 'row' cuts a Linear"),
        "tied": ("ValueError", "0 shares a parameter with 1"),
        "gated": ("ValueError", "mlp.0 makes a gate and what passes it, side by side: its way is 'column, gated'"),
        "gated later": ("ValueError", "1 makes a gate and what passes it, side by side: its way is 'column, gated'"),
        "not gated": ("ValueError", "mlp.0 is before a GELU, and makes no gate: its way is 'column'"),
        "halves": ("ValueError", "'column, gated' of 7 outputs, which are no two halves"),
        "heads": ("ValueError", "2 ranks must divide the 3 heads"),
        "gathered": ("ValueError", "rank 1's would be [3, 4, 5], not [5, 4, 3]"),
        "scattered": ("ValueError", "RowParallelLinear: input_is_parallel=False lays the ranks' shares"),
        "nested": ("ValueError", "blocks.0.attention and blocks.0.attention.qkv inside of it both stand in the plan"),
        "rows": ("ValueError", "1 rows can't be shared by 2 ranks"),
        "late": ("RuntimeError", "cut the model before making those"), "number": ("ValueError", "there are 5 rows"),
        "labels": ("ValueError", "labels of shape (3,) for logits of shape (4, 3)"),
        "label": ("ValueError", "there are 6 classes"), "reduction": ("ValueError", "'avg' must be"),
        "norm": ("ValueError", "(2, 3) of (4, 3), (2,) of (4,) …) and don't say which ranks have the others"),
        "scaler": ("ValueError", "GradScaler: 2 of these parameters are this rank's parts of larger ones"),
    }
    for found in crews.call(CASES + "errors", 2):
        assert set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and words in found[name][1], found[name]


def test_a_copy_is_cut_over_the_same_ranks():
    assert crews.call(CASES + "copied", 2) == [(True, True, True)] * 2
