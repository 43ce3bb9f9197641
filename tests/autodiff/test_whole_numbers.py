"""NumPy's numbers are as good as Python's wherever a public function or a layer takes one: whole ones, and settings."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.autodiff.tree import flatten
from minitorch_dist.compress import distill, lora
from minitorch_dist.nn import preference

X = np.arange(24.0).reshape(2, 3, 4)
IMAGES = np.linspace(-1, 1, 2 * 4 * 6 * 6).reshape(2, 4, 6, 6)
SIGNALS = np.linspace(-1, 1, 2 * 4 * 9).reshape(2, 4, 9)
KERNEL = np.linspace(-1, 1, 4 * 2 * 3 * 3).reshape(4, 2, 3, 3)
KERNEL_1D = np.linspace(-1, 1, 4 * 2 * 3).reshape(4, 2, 3)
WEIGHTS = np.linspace(-1, 1, 4)
SQUARE = np.arange(16.0).reshape(4, 4)

# What is called, with i for each whole number that is given.
FUNCTIONS = {
    "sum": lambda i: mt.sum(X, i(1)), "sum over two": lambda i: mt.sum(X, (i(0), i(2))),
    "mean": lambda i: mt.mean(X, i(1)), "prod": lambda i: mt.prod(X, i(1)), "max": lambda i: mt.max(X, i(1)),
    "min": lambda i: mt.min(X, i(1)), "var": lambda i: mt.var(X, i(1), correction=i(1)),
    "std": lambda i: mt.std(X, (i(0), i(1)), correction=i(1)), "logsumexp": lambda i: mt.logsumexp(X, i(1)),
    "softmax": lambda i: mt.softmax(X, i(1)), "log_softmax": lambda i: mt.log_softmax(X, i(1)),
    "cumsum": lambda i: mt.cumsum(X, i(1)), "any": lambda i: mt.any(X, i(1)), "all": lambda i: mt.all(X, i(1)),
    "argmax": lambda i: mt.argmax(X, i(1)), "argmin": lambda i: mt.argmin(X, i(1)),
    "argsort": lambda i: mt.argsort(X, i(1)), "sort": lambda i: mt.sort(X, i(1)),
    "topk": lambda i: mt.topk(X, i(2), dim=i(1))[0],
    "reshape": lambda i: mt.reshape(X, i(6), i(4)), "reshape by a tuple": lambda i: mt.reshape(X, (i(6), i(4))),
    "transpose": lambda i: mt.transpose(X, i(2), i(0), i(1)), "moveaxis": lambda i: mt.moveaxis(X, i(0), i(2)),
    "swapaxes": lambda i: mt.swapaxes(X, i(0), i(2)), "expand_dims": lambda i: mt.expand_dims(X, i(1)),
    "squeeze": lambda i: mt.squeeze(X[:1], i(0)), "flatten": lambda i: mt.flatten(mt.tensor(X), i(1), i(2)),
    "flip": lambda i: mt.flip(X, i(1)), "concatenate": lambda i: mt.concatenate([X, X], i(1)),
    "stack": lambda i: mt.stack([X, X], i(1)), "chunk": lambda i: mt.chunk(X, i(2), dim=i(2))[0],
    "split": lambda i: mt.split(X, i(2), axis=i(2))[1], "split at": lambda i: mt.split(X, (i(1), i(3)), axis=i(2))[1],
    "split by size": lambda i: mt.tensor(X).split(i(3), i(2))[0],
    "split by sizes": lambda i: mt.tensor(X).split((i(3), i(1)), i(2))[0],
    "broadcast_to": lambda i: mt.broadcast_to(X, (i(5), i(2), i(3), i(4))),
    "expand": lambda i: mt.tensor(X).expand(i(5), i(2), i(3), i(4)),
    "repeat": lambda i: mt.repeat(X, i(2), axis=i(1)), "tile": lambda i: mt.tile(X, (i(2), i(1), i(1))),
    "tile by a number": lambda i: mt.tile(X, i(2)), "pad by a number": lambda i: mt.pad(X, i(1)),
    "pad": lambda i: mt.pad(X, ((i(1), i(0)), (i(0), i(2)), (i(0), i(0)))),
    "getitem": lambda i: mt.getitem(X, (i(1), slice(i(0), i(2)), i(3))),
    "take": lambda i: mt.take(X, i(1), axis=i(1)), "take_along_axis": lambda i: mt.take_along_axis(
        X, np.zeros((2, 1, 4), int), axis=i(1)),
    "scatter_add": lambda i: mt.scatter_add(WEIGHTS, np.array([0, 2, 2, 1]), (i(3),)),
    "one_hot": lambda i: mt.one_hot(np.array([0, 2]), i(3)), "tensordot": lambda i: mt.tensordot(SQUARE, SQUARE, i(1)),
    "tensordot over axes": lambda i: mt.tensordot(SQUARE, SQUARE, (i(0), i(1))),
    "tensordot over lists": lambda i: mt.tensordot(SQUARE, SQUARE, ([i(0)], [i(1)])),
    "layer_norm": lambda i: mt.layer_norm(X, i(4)), "layer_norm over two": lambda i: mt.layer_norm(X, (i(3), i(4))),
    "rms_norm": lambda i: mt.rms_norm(X, i(4), eps=1e-6),
    "max_pool1d": lambda i: mt.max_pool1d(SIGNALS, i(3), i(2), i(1), i(1)),
    "max_pool2d": lambda i: mt.max_pool2d(IMAGES, i(3), i(2), i(1), i(1)),
    "max_pool2d by pairs": lambda i: mt.max_pool2d(IMAGES, (i(3), i(2)), (i(2), i(1)), (i(1), i(0))),
    "avg_pool1d": lambda i: mt.avg_pool1d(SIGNALS, i(3), i(2), i(1)),
    "avg_pool2d": lambda i: mt.avg_pool2d(IMAGES, i(3), i(2), i(1)),
    "conv1d": lambda i: mt.conv1d(SIGNALS, KERNEL_1D, None, i(2), i(1), i(2), i(2)),
    "conv2d": lambda i: mt.conv2d(IMAGES, KERNEL, None, i(2), i(1), i(2), i(2)),
    "conv2d by pairs": lambda i: mt.conv2d(IMAGES, KERNEL, None, (i(2), i(1)), (i(1), i(0)), (i(1), i(2)), i(2)),
    "conv_transpose1d": lambda i: mt.conv_transpose1d(SIGNALS, KERNEL_1D, None, i(2), i(1), i(1), i(2), i(2)),
    "conv_transpose2d": lambda i: mt.conv_transpose2d(IMAGES, KERNEL, None, i(2), i(1), i(1), i(2), i(2)),
    "softmax_cross_entropy": lambda i: mt.softmax_cross_entropy(SQUARE, np.array([0, 3, 1, 3]), i(3)),
    "zeros": lambda i: mt.zeros(i(2), i(3)), "ones": lambda i: mt.ones((i(2), i(3))), "eye": lambda i: mt.eye(i(3)),
    "full": lambda i: mt.full(i(3), 2.0), "full of a whole number": lambda i: mt.full((i(3),), i(7)),
    "arange": lambda i: mt.arange(i(1), i(7), i(2)),
    "rand": lambda i: mt.rand(i(2), i(3)), "randn": lambda i: mt.randn((i(2), i(3))),
    "grad": lambda i: mt.grad(lambda x, y: mt.sum(x * y * y), i(1))(SQUARE, SQUARE),
    "grad by two": lambda i: mt.grad(lambda x, y: mt.sum(x * y * y), (i(0), i(1)))(SQUARE, SQUARE)[1],
    "value_and_grad": lambda i: mt.value_and_grad(lambda x, y: mt.sum(x * y), i(1))(SQUARE, SQUARE)[1],
    "jacfwd": lambda i: mt.jacfwd(lambda x, y: x * y * y, i(1))(WEIGHTS, WEIGHTS),
    "jacrev": lambda i: mt.jacrev(lambda x, y: x * y * y, i(1))(WEIGHTS, WEIGHTS),
    "hessian": lambda i: mt.hessian(lambda x, y: mt.sum(x * y * y), i(1))(WEIGHTS, WEIGHTS),
}
LAYERS = {
    "Linear": (lambda i: nn.Linear(i(4), i(3)), X), "Embedding": (lambda i: nn.Embedding(i(5), i(3)), np.array([1, 4])),
    "Conv1d": (lambda i: nn.Conv1d(i(4), i(6), i(3), i(2), i(1), i(1), i(2)), SIGNALS),
    "Conv2d": (lambda i: nn.Conv2d(i(4), i(6), i(3), i(2), i(1), i(1), i(2)), IMAGES),
    "Conv2d by pairs": (lambda i: nn.Conv2d(i(4), i(6), (i(3), i(2)), (i(2), i(1)), (i(1), i(0))), IMAGES),
    "MaxPool2d": (lambda i: nn.MaxPool2d(i(3), i(2), i(1)), IMAGES),
    "AvgPool2d": (lambda i: nn.AvgPool2d(i(3), i(2), i(1)), IMAGES),
    "Reshape": (lambda i: nn.Reshape(i(3), i(2), i(2)), X), "LayerNorm": (lambda i: nn.LayerNorm(i(4)), X),
    "LayerNorm over two": (lambda i: nn.LayerNorm((i(3), i(4))), X), "RMSNorm": (lambda i: nn.RMSNorm(i(4)), X),
    "BatchNorm": (lambda i: nn.BatchNorm(i(4)), IMAGES),
    "ResidualBlock": (lambda i: nn.ResidualBlock(i(4), i(6), i(2)), IMAGES),
    "mlp": (lambda i: nn.mlp((i(5), i(4))), np.zeros((2, 784))),
    "MultiHeadAttention": (lambda i: nn.MultiHeadAttention(i(4), i(2), i(1), rotary=True), X),
    "LatentAttention": (lambda i: nn.LatentAttention(i(4), i(2), True, nope_size=i(2), rope_size=i(2), value_size=i(2),
                                                     kv_rank=i(3), q_rank=i(3)), X),
    "LatentAttention by default": (lambda i: nn.LatentAttention(i(4), i(2), nope_size=i(80)), X),   # 4 · 80 > 255
    "TransformerBlock": (lambda i: nn.TransformerBlock(i(4), i(2), i(1), hidden=i(6)), X),
    "MoE": (lambda i: nn.MoE(i(4), i(6), i(4), i(2), shared=i(1)), X),
    "MoE by groups": (lambda i: nn.MoE(i(4), i(6), i(4), i(2), group=i(3), nodes=(i(2), i(1))), X),
    "GPT": (lambda i: nn.GPT(i(7), i(6), i(2), i(2), i(8), i(1), hidden=i(10)), np.array([[1, 2, 6]])),
    "ImageTransformer": (lambda i: nn.ImageTransformer("patches", i(1), i(2), i(8)), np.zeros((2, 784))),
}
KINDS = np.int64, np.int32, np.uint8, np.array


def values(x):
    x = x.data if isinstance(x, mt.Tensor) else x
    return np.asarray(x)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions(name):
    def run(kind):
        mt.manual_seed(0)
        return values(FUNCTIONS[name](kind))
    expected = run(int)
    for kind in KINDS:
        got = run(kind)
        assert got.dtype == expected.dtype and np.array_equal(got, expected), kind


@pytest.mark.parametrize("name", LAYERS)
def test_layers(name):
    make, x = LAYERS[name]
    x = x if x.dtype.kind == "i" else mt.tensor(x.astype(np.float32), requires_grad=True)

    def run(kind):
        mt.manual_seed(0)
        model = make(kind)
        y = model(x)
        y = y[0] if isinstance(y, tuple) else y
        mt.sum(y * y).backward()
        return str(model), values(y), {n: values(p.grad) for n, p in model.named_parameters() if p.grad is not None}
    text, expected, grads = run(int)
    for kind in KINDS:
        printed, got, found = run(kind)
        assert printed == text and np.array_equal(got, expected)
        assert all(np.array_equal(found[n], g) for n, g in grads.items()) and found.keys() == grads.keys()


@pytest.mark.parametrize("call", [
    lambda: mt.sum(X, 1.0), lambda: mt.sum(X, "1"), lambda: mt.softmax(X, 1.0), lambda: mt.flip(X, 1.5),
    lambda: mt.reshape(X, 4.0, 6), lambda: mt.transpose(X, 2.0, 0, 1), lambda: mt.pad(X, 1.5),
    lambda: mt.repeat(X, 1.5), lambda: mt.tile(X, 1.5), lambda: mt.chunk(X, 1.5), lambda: mt.split(X, 1.5),
    lambda: mt.topk(X, 1.5), lambda: mt.zeros(1.5), lambda: mt.conv2d(IMAGES, KERNEL, groups=1.5),
    lambda: mt.layer_norm(X, 4.0), lambda: nn.Linear(4.0, 3), lambda: nn.Embedding(4, 3.0),
    lambda: nn.MultiHeadAttention(8, 2.0), lambda: nn.GPT(7, 8, 2, 2, 8.0), lambda: nn.LayerNorm("4"),
    lambda: mt.grad(mt.sum, 0.0)(X),
    lambda: mt.sum(X, mt.sum(mt.tensor(X))), lambda: mt.take(X, 1, mt.sum(mt.tensor(X)) > 0),   # in no array: NumPy's
])
def test_other_numbers_are_refused(call):
    with pytest.raises(TypeError, match="must be (a )?whole number"):
        call()


@pytest.mark.parametrize("name", ["sum", "mean", "var", "std", "prod", "max", "logsumexp", "softmax", "log_softmax"])
def test_axes_may_be_anything_that_gives_them(name):
    function = getattr(mt, name)
    for several in (list, set, iter, np.array):
        assert np.array_equal(function(X, several([0, 2])), function(X, (0, 2)))


def test_sizes_of_attention_by_latents_are_refused_by_name():
    for name in ("nope_size", "rope_size", "value_size", "kv_rank", "q_rank"):
        with pytest.raises(TypeError, match=f"{name}=2.5: must be a whole number"):
            nn.LatentAttention(8, 2, **{name: 2.5})


def test_full_has_the_dtype_of_its_value():
    for value in (True, np.True_, 3, np.uint8(3), np.array(3), 3.0, np.float64(3)):
        expected = {"b": np.bool_, "f": np.float32}.get(np.asarray(value).dtype.kind, np.int64)
        assert mt.full(2, value).dtype == expected, value


def test_several_may_be_an_array_or_a_list():
    for kind in (np.array, list):
        assert mt.reshape(X, kind([6, -1])).shape == (6, 4) and mt.tensor(X).reshape(kind([6, 4])).shape == (6, 4)
        assert mt.broadcast_to(X, kind([5, 2, 3, 4])).shape == (5, 2, 3, 4)
        assert mt.transpose(X, kind([2, 0, -2])).shape == (4, 2, 3) and mt.sum(X, kind([0, -1])).shape == (3,)
        assert mt.zeros(kind([2, 3])).shape == (2, 3) and mt.tile(X, kind([2, 1, 1])).shape == (4, 3, 4)


@pytest.mark.parametrize("make", [
    lambda: mt.conv2d(IMAGES, KERNEL, stride=1.5, groups=2), lambda: mt.max_pool2d(IMAGES, 2.0),
    lambda: nn.Conv2d(4, 4, 3, padding="same"), lambda: nn.Conv2d(4, 4, 3.0), lambda: nn.MaxPool2d(2, stride=0),
])
def test_windows_say_which_argument_is_wrong(make):
    with pytest.raises(ValueError, match="(stride|kernel_size|padding) .* must be an int or 2 ints, at least"):
        make()


def test_labels_may_be_lists_and_numbers():
    """As one_hot's."""
    logits, table = mt.tensor(SQUARE, requires_grad=True), nn.Embedding(5, 3)
    for given, array in (([0, 3, 1, 3], np.array([0, 3, 1, 3])), ((2, 2, 0, 1), np.array([2, 2, 0, 1]))):
        for loss in (nn.cross_entropy, lambda x, y: mt.sum(mt.softmax_cross_entropy(x, y))):
            assert float(loss(logits, given).numpy()) == float(loss(logits, array).numpy())
        assert np.array_equal(table(given).numpy(), table(array).numpy())
    assert float(nn.cross_entropy(logits[1], 2).numpy()) == float(nn.cross_entropy(logits[1:2], [2]).numpy())
    assert np.array_equal(table(4).numpy(), table.weight.numpy()[4]) and table([[1], [2]]).shape == (2, 1, 3)
    for call in (lambda: nn.cross_entropy(logits, [0.0, 1.0, 2.0, 3.0]), lambda: table([0.5])):
        with pytest.raises(TypeError, match="they must be integers"):
            call()


ROWS = np.linspace(-2, 3, 24, dtype=np.float32).reshape(6, 4)
HEADS = np.sin(np.arange(24, dtype=np.float32)).reshape(1, 2, 3, 4)
LABELS = np.array([0, 1, 2, 3, 0, 1])


def evaluated(layer):
    layer(ROWS)
    return layer.eval()(ROWS), layer.running_mean, layer.running_var


def attending(layer, scale):
    layer.scale = scale
    return layer(mt.tensor(ROWS[None]), mask=np.zeros((6, 6), np.float32))


def clipped(most):
    p = mt.tensor(ROWS, requires_grad=True)
    p.grad = mt.tensor(ROWS)
    optim.clip_grad_norm_([p], most)
    return p.grad


# What is called, with f for each setting.
SETTINGS = {
    "LeakyReLU": lambda f: nn.LeakyReLU(f(0.1))(ROWS), "Dropout": lambda f: nn.Dropout(f(0.3))(ROWS),
    "BatchNorm": lambda f: evaluated(nn.BatchNorm(4, f(1e-3), f(0.3))),
    "LayerNorm": lambda f: nn.LayerNorm(4, f(1e-3))(ROWS), "RMSNorm": lambda f: nn.RMSNorm(4, f(1e-3))(ROWS),
    "GroupNorm": lambda f: nn.GroupNorm(2, 4, f(1e-3))(ROWS),
    "attention": lambda f: mt.scaled_dot_product_attention(HEADS, HEADS, HEADS, scale=f(0.3)),
    "attention's definition": lambda f: mt.jvp(lambda q: mt.scaled_dot_product_attention(q, q, q, scale=f(0.3)),
                                               (HEADS,), (HEADS,)),
    "MultiHeadAttention": lambda f: attending(nn.MultiHeadAttention(4, 2, rotary=True), f(0.3)),
    "cross_entropy": lambda f: nn.cross_entropy(mt.tensor(ROWS), LABELS, label_smoothing=f(0.1)),
    "distillation": lambda f: distill.distillation_loss(mt.tensor(ROWS), ROWS[::-1], f(3.0), LABELS, f(0.3)),
    "lora": lambda f: lora.add(nn.Sequential(nn.Linear(4, 4)), alpha=f(16), targets="*")(mt.tensor(ROWS)),
    "MoE": lambda f: nn.MoE(4, 8, 4, capacity_factor=f(1.25), balance=f(0.1), z=f(0.3), route_scale=f(1.5),
                            sequence_balance=f(0.2))(mt.tensor(ROWS[None])),
    "grpo_loss": lambda f: preference.grpo_loss(mt.tensor(ROWS), ROWS * 0.9, ROWS[:, 0], ROWS > -1, ROWS * 1.1, f(0.2),
                                                f(0.3), f(0.1)),
    "dpo_loss": lambda f: preference.dpo_loss(*[mt.tensor(ROWS[:, i]) for i in range(4)], f(0.3)),
    "multi_token_loss": lambda f: nn.multi_token_loss([mt.tensor(ROWS), mt.tensor(2 * ROWS)], weight=f(0.3)),
    "clip_grad_norm_": lambda f: clipped(f(1.7)),
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_float64_leaves_the_dtype_and_the_bits(name):
    def found(kind):
        mt.manual_seed(0)
        return [np.asarray(lower(leaf)) for leaf in flatten(SETTINGS[name](kind))[0]]
    expected = found(float)
    for one, other in zip(found(np.float64), expected, strict=True):
        assert one.dtype == other.dtype == np.float32
        np.testing.assert_array_equal(one, other)


def test_a_norm_to_clip_to_may_be_a_tensor():
    np.testing.assert_array_equal(clipped(mt.tensor(1.75)).numpy(), clipped(1.75).numpy())
