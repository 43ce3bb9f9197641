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
@pytest.mark.parametrize("smoothing, z_loss", [(0.0, 0.0), (0.3, 0.0), (0.0, 1e-2), (0.3, 1e-2)])
def test_the_loss_of_divided_logits(n, shift, smoothing, z_loss):
    x, u = values((4, 3, 11), 4) * 3 + shift, values((4, 3), 6)
    labels = np.random.default_rng(5).integers(0, 11, (4, 3))
    counted = np.ones((4, 3))
    counted[2, 1] = 0       # is ignored
    z = x - x.max(-1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(-1, keepdims=True)
    wanted = (1 - smoothing) * np.eye(11)[labels] + smoothing / 11
    log_sum = np.log(np.exp(z).sum(-1)) + x.max(-1)
    losses = (z_loss * log_sum ** 2 - (wanted * np.log(p)).sum(-1)) * counted
    slope = (p - wanted + (2 * z_loss * log_sum)[..., None] * p) * (u * counted)[..., None]
    found = crews.call(CASES + "loss_of_parts", n, args=(shift, smoothing, z_loss))
    for mean, each, _ in found:
        np.testing.assert_allclose(each, losses, rtol=1e-10, atol=1e-10)
        assert abs(mean - losses.sum() / 11) < 1e-10 * (losses.max() if z_loss else 1)
    np.testing.assert_allclose(np.concatenate([grad for *_, grad in found], -1), slope, rtol=1e-10, atol=1e-10)


def test_numbers_in_bytes_of_more_rows_than_these_have():
    assert crews.call(CASES + "of_bytes", 2) == [(True, True)] * 2


@pytest.mark.parametrize("n, classes, dtype, cut", [(1, 11, "float64", ""), (2, 11, "float64", "not gathered"),
                                                    (3, 1000, "float64", ""), (2, 700, "float32", "")])
def test_losses_by_tiles_of_divided_classes(n, classes, dtype, cut):
    """Against the closed form: d²/dx² is Wᵀ (diag(p) - p pᵀ) W."""
    w, x, u = values((classes, 5), 4), values((4, 3, 5), 7), values((4, 3), 6)
    labels = np.random.default_rng(5).integers(0, classes, (4, 3))
    counted = np.ones((4, 3))
    counted[1, 2] = 0
    z = x @ w.T
    p = np.exp(z - z.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    losses = -np.log(np.take_along_axis(p, labels[..., None], -1))[..., 0] * counted
    g = (p - np.eye(classes)[labels]) * (u * counted)[..., None]
    along = w.sum(1) * u[..., None] * (u * counted)[..., None]      # the change of logits where x moves along u
    second = (p * along - p * (p * along).sum(-1, keepdims=True)) @ w
    found, tolerance = crews.call(CASES + "tiled", n, args=(classes, dtype, cut)), 1e-10 if dtype == "float64" else 2e-4
    for each, dx, _, dxx, forward, backward, kept in found:
        for got, wanted in ((each, losses), (dx, g @ w), (dxx, second)):
            assert got.dtype == dtype
            np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)
        # A ring's all-reduce of three numbers per label, and of x's cotangent.
        size = np.dtype(dtype).itemsize
        if n == 2:
            assert forward == 3 * 12 * size and backward == 60 * size
        # x and labels, whatever they are kept for, and two numbers per label.
        assert kept <= 60 * size + 12 * 8 + 2 * 12 * size
    rows = np.concatenate([dw for _, _, dw, *_ in found])
    np.testing.assert_allclose(rows, g.reshape(12, -1).T @ x.reshape(12, 5), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("options", [{}, {"tied": False}, {"tied": False, "positions": "rotary", "norm": "rms"}],
                         ids=["tied", "untied", "rotary"])
def test_a_gpt_that_is_cut_and_given_targets(options):
    """Losses and gradients of one process's logits, whatever lies between the parts."""
    compare_losses(options, [(False,), (True,), ("regather", False, True), (True, True)])


@pytest.mark.parametrize("options", [{}, {"tied": False}], ids=["tied", "untied"])
def test_a_z_loss_of_a_gpt_that_is_cut(options):
    compare_losses(options, [(False,), (True,), ("regather",), (True, True)], z_loss=0.3)


def compare_losses(options, ways, z_loss=0.0):
    (losses, wanted), = crews.call(CASES + "losses_of", 1, args=(options, None, False, False, z_loss))
    for way in ways:
        for got, grads in crews.call(CASES + "losses_of", 2, args=(options, *(*way, False, False)[:3], z_loss)):
            np.testing.assert_allclose(got, losses, rtol=1e-10, err_msg=str(way))
            for name, gradient in wanted.items():
                np.testing.assert_allclose(grads[name], gradient, rtol=1e-9, atol=1e-11, err_msg=f"{way} {name}")


@pytest.fixture(scope="module")
def one_process():
    """{setting: what training a whole model in one process gives}."""
    return crews.call(CASES + "train_whole", 1)[0]


@pytest.mark.parametrize(("setting", "n", "size"), [("tied", 2, 2), ("tied", 4, 2), ("rotary, untied", 2, 2),
                                                    ("logits stay apart", 2, 2), ("by tiles", 4, 2),
                                                    ("linear", 4, 2), ("delta", 4, 2), ("blocks", 4, 2)])
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
        "labels": ("ValueError", "logits (4, 3), labels (3,): they must be (…, this rank's share of 6), (…)"),
        "ignored": ("ValueError", "the mean loss of an empty batch, or where all labels are ignored"),
        "targets": ("ValueError", "targets (3, 2) for positions (2, 3)"),
        "target": ("ValueError", "there are 6 classes"),
        "order": ("ValueError", "losses are of plain products of rows that the ranks share in order"),
        "product": ("ValueError", "not of product=<function backwards"),
        "label": ("ValueError", "there are 6 classes"), "reduction": ("ValueError", "'avg': use"),
        "norm": ("ValueError", "(2, 3) of (4, 3), (2,) of (4,) …) and don't say which ranks have the others"),
        **{kind: ("ValueError", f"{kind}: 2 of these parameters are this rank's parts of larger ones")
           for kind in ("LAMB", "LARS", "Adafactor")},
        "scaler": ("ValueError", "GradScaler: 2 of these parameters are this rank's parts of larger ones"),
    }
    for found in crews.call(CASES + "errors", 2):
        assert set(found) == set(expected)
        for name, (kind, words) in expected.items():
            assert found[name] is not None, f"{name}: accepted"
            assert found[name][0] == kind and words in found[name][1], found[name]


def test_a_copy_is_cut_over_the_same_ranks():
    assert crews.call(CASES + "copied", 2) == [(True, True, True)] * 2
