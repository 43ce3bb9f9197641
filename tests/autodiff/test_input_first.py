"""Backward in two parts against Tensor.backward: the same bits, the same number of products; what is kept between."""

from unittest.mock import patch

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.autodiff.input_first import InputFirst
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.nn.transformer import TransformerBlock
from tests.device import fake_cupy

F8 = np.float64


def linears(*widths):
    layers = []
    for a, b in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(a, b, dtype=F8), nn.Tanh()]
    return nn.Sequential(*layers)


class Shared(nn.Module):
    """A weight used eight times: by ways of its own, on either side of a product, and first and last as it is."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(np.random.default_rng(3).standard_normal((5, 5)))
        self.scale = nn.Parameter(np.array(0.7))

    def forward(self, x):
        x = mt.matmul(x, self.w)
        for _ in range(3):
            x = mt.tanh(mt.matmul(mt.tanh(self.w) * self.scale, mt.matmul(x, mt.transpose(self.w)).T)).T
        return mt.matmul(x, self.w)


class Parts(nn.Module):
    """An op of several outputs on the way, one of which nobody uses, and one of weights alone."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(np.random.default_rng(4).standard_normal(5))

    def forward(self, x):
        a, b, _ = mt.split(x, [2, 4], axis=1)
        u, v, _ = mt.split(self.w * self.w, [2, 4])
        return mt.concatenate([a * u, b + v * a], axis=1)


@mt.custom_vjp
def scaled(x, w):
    return x * w


scaled.defvjp(lambda x, w: (x * w, (x, w)), lambda kept, ct: (ct * kept[1], (ct * kept[0]).sum(axis=0)))


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(np.random.default_rng(5).standard_normal(5))

    def forward(self, x):
        return scaled(mt.tanh(x), self.w)


class Checkpointed(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.runs = linears(5, 6, 5), 0
        self.inner.add_module("drop", nn.Dropout(0.3))

    def forward(self, x):
        def run(x):
            self.runs += 1
            return self.inner(x)
        return mt.tanh(mt.checkpoint(run)(x))


class Compiled(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = linears(5, 6, 5)
        self.f = mt.compile(lambda x: self.inner(x))

    def forward(self, x):
        return mt.tanh(self.f(x))


class Tiled(nn.Module):
    """A loss by two tiles of 300 classes."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(5, dtype=F8)
        self.weight = nn.Parameter(np.random.default_rng(6).standard_normal((300, 5)))

    def forward(self, x):
        with patch.object(tiled_cross_entropy, "HOST", 1):
            return nn.linear_cross_entropy(self.norm(x), self.weight, np.array([0, 7, 299, -100, 256, 255]), "none")


MODELS = {
    "linear": lambda: linears(5, 7, 4), "without bias": lambda: nn.Linear(5, 4, bias=False, dtype=F8),
    "dropout": lambda: nn.Sequential(linears(5, 7), nn.Dropout(0.4), nn.Linear(7, 3, dtype=F8)),
    "norms": lambda: nn.Sequential(nn.LayerNorm(5, dtype=F8), nn.Linear(5, 6, dtype=F8), nn.BatchNorm(6, dtype=F8)),
    "block": lambda: TransformerBlock(8, 2, dtype=F8), "shared": Shared, "parts": Parts, "rule by hand": Scaled,
    "checkpoint": Checkpointed, "compiled": Compiled,
    "convolution": lambda: nn.Sequential(nn.Conv2d(2, 3, 3, dtype=F8), nn.ReLU(), nn.Flatten()),
    "no weights": nn.Tanh, "nothing": nn.Sequential, "tiles": Tiled,
}
SHAPES = {"block": (2, 3, 8), "convolution": (2, 2, 5, 4)}


def made(name):
    """(model, x, its output, a cotangent): alike each time."""
    mt.manual_seed(7)
    model, random = MODELS[name](), np.random.default_rng(8)
    x = mt.tensor(random.standard_normal(SHAPES.get(name, (6, 5))), requires_grad=True)
    y = model(x)
    return model, x, y, random.standard_normal(y.shape)


def gradients(model):
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def products(monkeypatch):
    """A list that gets an entry for every product of matrices."""
    found = []

    def counted(function):
        return lambda *args, **options: found.append(function.__name__) or function(*args, **options)
    for function in (np.matmul, np.einsum):
        monkeypatch.setattr(np, function.__name__, counted(function))
    return found


@pytest.mark.parametrize("name", MODELS)
def test_two_parts_are_one_pass_to_the_bit(name, products):
    model, x, y, ct = made(name)
    before = len(products)
    y.backward(mt.tensor(ct))
    wanted, whole = gradients(model), len(products) - before
    assert set(wanted) == {key for key, _ in model.named_parameters()}

    again, x2, y2, _ = made(name)
    before = len(products)
    halves = InputFirst(y2, x2)
    got = halves.input(ct)
    assert x2.grad is None and gradients(again) == {}
    halves.weights()
    np.testing.assert_array_equal(got, x.grad.numpy())
    for key, grad in gradients(again).items():
        np.testing.assert_array_equal(grad, wanted[key], err_msg=key)
    twice = 1 if name == "tiles" else 0     # its logits, which here, in backward, are one tile
    assert set(gradients(again)) == set(wanted) and len(products) - before == whole + twice
    if name == "checkpoint":
        assert again.runs == model.runs == 2


@pytest.mark.parametrize("name", MODELS)
def test_a_first_stage_has_weights_alone(name):
    """Its input wants no gradient; and an x that the output doesn't depend on gets none."""
    model, _, y, ct = made(name)
    y.backward(mt.tensor(ct))
    wanted = gradients(model)
    again, _, y2, _ = made(name)
    stranger = mt.tensor(np.ones(3), requires_grad=True)
    halves = InputFirst(y2, stranger if name == "linear" else None)
    assert halves.input(ct) is None and gradients(again) == {}
    halves.weights()
    for key, grad in gradients(again).items():
        np.testing.assert_array_equal(grad, wanted[key], err_msg=key)
    assert set(gradients(again)) == set(wanted)


def test_half_of_the_products_wait(products):
    """Of three linear layers one product each: ct @ W for the input, ctᵀ @ x for the weights."""
    for count, name in ((2, "linear"), (5, "block")):
        _, x, y, ct = made(name)
        halves, before = InputFirst(y, x), len(products)
        halves.input(ct)
        between = len(products)
        halves.weights()
        if name == "linear":
            assert (between - before, len(products) - between) == (count, count)
        else:       # queries, keys and values, projection, two of the MLP, which are fused with GELU; attention's four
            assert len(products) - between == 4 and between - before == 4 + 4


def test_what_is_kept_between():
    """Bytes, but of x, which lives on: forward keeps tanh's results, of which the first is the second layer's input;
    between the parts there are this input and the cotangents of what the layers give; at the end nothing."""
    mt.manual_seed(7)
    with ledger.record(memory=True) as book:
        model, x = linears(5, 7, 4), mt.tensor(np.ones((6, 5)), requires_grad=True)
        y = model(x)
        halves = InputFirst(y, x)
        del y, x
        assert book.live["activation"] == 8 * 6 * (7 + 4)
        halves.input(np.ones((6, 4)))
        assert book.live["activation"] == 8 * 6 * (7 + (7 + 4))
        halves.weights()
        assert book.live["activation"] == 0

        w = mt.tensor(np.ones((300, 5)), requires_grad=True)
        x = mt.tensor(np.ones((6, 5)), requires_grad=True)
        halves = InputFirst(mt.linear_cross_entropy(mt.tanh(x), w, np.zeros(6, int)).sum(), x)
        halves.input(np.ones(()))           # tanh, labels, two numbers per row and a cotangent; nothing of w's size
        assert book.live["activation"] == 8 * 6 * (5 + 1 + 2 + 1)
        halves.weights()

        w = mt.tensor(np.ones((5, 4)), requires_grad=True)
        x = mt.tensor(np.ones((6, 5)), requires_grad=True)
        halves = InputFirst(mt.matmul(x, w * 2.0), x)
        assert book.live["activation"] == 8 * 5 * 4
        halves.input(np.ones((6, 4)))       # 2·w was for x's cotangent
        assert book.live["activation"] == 8 * 6 * 4


def test_hooks_see_each_gradient_once_and_in_its_part():
    model, x, _, ct = made("linear")
    seen = []
    inner = mt.tanh(x)
    y = model(inner)
    inner.register_hook(lambda g: seen.append("inner"))
    x.register_hook(lambda g: seen.append("x") or mt.tensor(2 * g.numpy()))
    for name, p in model.named_parameters():
        p.register_hook(lambda g, name=name: seen.append(name))
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.append(f"{name}, complete"))
    halves = InputFirst(y, x)
    got = halves.input(ct)
    assert seen == ["inner", "x"]
    seen.clear()
    halves.weights()
    names = "2.weight", "2.bias", "0.weight", "0.bias"
    assert seen == [text for name in names for text in (name, f"{name}, complete")]
    wanted = mt.tensor(x.numpy(), requires_grad=True)
    model(mt.tanh(wanted)).backward(mt.tensor(ct))
    np.testing.assert_array_equal(got, 2 * wanted.grad.numpy())


def test_gradients_add_up():
    """Onto those that are there, in place, and into a flat buffer's views."""
    model, x, y, ct = made("linear")
    y.backward(mt.tensor(ct))
    once = gradients(model)
    halves = InputFirst(model(x), x)
    halves.input(ct)
    halves.weights()
    for key, grad in gradients(model).items():
        np.testing.assert_array_equal(grad, 2 * once[key], err_msg=key)


def test_an_output_that_is_a_weight_itself():
    w, ct = mt.tensor(np.ones((2, 3)), requires_grad=True), np.arange(6.0).reshape(2, 3)
    halves = InputFirst(w, None)
    assert halves.input(ct) is None and w.grad is None
    halves.weights()
    np.testing.assert_array_equal(w.grad.numpy(), ct)
    assert not np.shares_memory(w.grad.numpy(), ct)


@pytest.mark.parametrize("layer, first, then", [
    # tanh's result, and a matrix; what it was multiplied by. Of a linear layer with a bias nobody wants that.
    (lambda x, w, b: mt.tanh(mt.linear(x, w, b)), [(6, 7), (7, 5)], [(6, 5)]),
    (lambda x, w, b: mt.tanh(mt.matmul(x, w.T)), [(6, 7), (5, 7)], [(6, 5)]),
    # What GELU keeps, both parts are for: all at once, in the first.
    (lambda x, w, b: mt.linear_gelu(x, w, b), [(6, 5), (7, 5), (7,), (6, 7), (6, 7)], [])],
    ids=["linear", "product", "linear and GELU"])
def test_a_saved_value_that_hooks_keep_elsewhere_is_fetched_once_by_who_wants_it(layer, first, then):
    fetched, draw = [], np.random.default_rng(7).standard_normal

    def unpack(kept):
        fetched.append(kept[0].shape)
        return kept[0]

    def leaves():
        return [mt.tensor(a, requires_grad=True) for a in arrays]
    arrays, ct = [draw((6, 5)), draw((7, 5)), draw(7)], draw((6, 7))
    x, w, b = leaves()
    with mt.saved_tensors_hooks(lambda a: [a], unpack):
        y = layer(x, w, b)
    halves = InputFirst(y, x)
    found = halves.input(ct)
    assert sorted(fetched) == sorted(first)
    fetched.clear()
    halves.weights()
    assert fetched == then
    again = leaves()
    layer(*again).backward(mt.tensor(ct))
    for got, wanted in zip((found, w.grad, b.grad), again, strict=True):
        if wanted.grad is not None:
            np.testing.assert_array_equal(mt.tensor(got).numpy(), wanted.grad.numpy())


def test_what_goes_wrong_is_said():
    model, x, _, ct = made("block")     # whose norms' W wants their weights
    optimizer = optim.SGD(list(model.parameters()), lr=0.1)
    halves = InputFirst(model(x), x)
    with pytest.raises(RuntimeError, match="x is the result of 'mul'"):
        InputFirst(model(2.0 * x), 2.0 * x)
    with pytest.raises(RuntimeError, match="no gradient reaches the output"):
        InputFirst(mt.tensor(1.0), x)
    with pytest.raises(RuntimeError, match="call input"):
        halves.weights()
    with pytest.raises(ValueError, match=r"shape \(6, 5\).*shape \(2, 3, 8\)"):
        halves.input(np.ones((6, 5)))
    halves.input(ct)
    with pytest.raises(RuntimeError, match="second time"):
        halves.input(ct)
    for p in model.parameters():
        p.grad = mt.tensor(np.zeros(p.shape))
    optimizer.step()
    with pytest.raises(RuntimeError, match="overwritten"):      # a step before the last W
        halves.weights()
    with pytest.raises(RuntimeError, match="it has done so"):
        halves.weights()
    with pytest.raises(RuntimeError, match="second time"):      # a part has been used by another pass
        model, x, y, ct = made("linear")
        y.backward(mt.tensor(ct))
        InputFirst(y, x).input(ct)


def test_anomalies_are_named():
    with mt.detect_anomaly():
        w = mt.tensor(np.array([0.0, 1.0]), requires_grad=True)
        x = mt.tensor(np.ones(2), requires_grad=True)
        y = mt.sqrt(w) * x
    halves = InputFirst(y, x)
    with mt.detect_anomaly(), np.errstate(divide="ignore"):
        halves.input(np.ones(2))
        with pytest.raises(FloatingPointError, match="sqrt"):
            halves.weights()


def test_on_a_gpu_s_arrays():
    """The stand-in: the bits of the host, and no hidden copy."""
    model, x, y, ct = made("block")
    y.backward(mt.tensor(ct))
    wanted = {name: p.grad.numpy() for name, p in model.named_parameters()}
    with fake_cupy.installed():
        mt.manual_seed(7)
        there, x2 = MODELS["block"]().to("cuda"), mt.tensor(x.numpy(), device="cuda", requires_grad=True)
        halves = InputFirst(there(x2), x2)
        ct = mt.tensor(ct, device="cuda").data
        fake_cupy.transfers.clear()
        got = halves.input(ct)
        halves.weights()
        assert not fake_cupy.transfers
        np.testing.assert_array_equal(mt.tensor(got).cpu().numpy(), x.grad.numpy())
        for name, p in there.named_parameters():
            np.testing.assert_array_equal(p.grad.cpu().numpy(), wanted[name], err_msg=name)
