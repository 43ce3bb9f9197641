"""Lists and numbers in the places of arrays: out comes what NumPy's arrays give, and what can't be one is named."""

import inspect
import math
import pickle

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff import ops
from minitorch_dist.autodiff.lists import ARRAYS, taking_lists

rng = np.random.default_rng(3)
IMAGES, KERNELS = rng.uniform(0.5, 2, (1, 2, 4, 4)), rng.uniform(0.5, 2, (2, 2, 3, 3))
HEADS = rng.uniform(0.5, 2, (1, 2, 3, 4))
SQUARE, OTHER = rng.uniform(0.5, 2, (3, 3)), rng.uniform(0.5, 2, (3, 3))
LABELS = np.array([2, 0, 1])

# What a function is given behind or in place of x = SQUARE and y = OTHER.
GIVEN = {
    "astype": [SQUARE, "float32"], "avg_pool1d": [IMAGES[0], 2], "avg_pool2d": [IMAGES, 2],
    "block_attention": [HEADS, HEADS + 1, HEADS - 1, 1, 2], "broadcast_to": [SQUARE, (2, 3, 3)],
    "chunk": [SQUARE, 2], "clip": [SQUARE, 0.7, 1.0],
    "conv1d": [IMAGES[..., 0], KERNELS[..., 0], SQUARE[0, :2]], "conv2d": [IMAGES, KERNELS],
    "conv_transpose1d": [IMAGES[..., 0], KERNELS[..., 0]], "conv_transpose2d": [IMAGES, KERNELS],
    "dot": [SQUARE[0], OTHER[0]], "dropout": [SQUARE, 0.0],
    "embedding": [LABELS, SQUARE], "expand_dims": [SQUARE, 1], "getitem": [SQUARE, (slice(2), 1)],
    "grouped_matmul": [SQUARE, IMAGES[0, :, :3], (1, 2)], "grouped_outer": [SQUARE, OTHER, (1, 2)],
    "layer_norm": [SQUARE, 3, OTHER[0], OTHER[1]], "linear": [SQUARE, OTHER, OTHER[0]],
    "linear_cross_entropy": [SQUARE, OTHER, LABELS], "linear_gelu": [SQUARE, OTHER, OTHER[0]],
    "logical_and": [SQUARE > 1, OTHER > 1], "logical_or": [SQUARE > 1, OTHER > 1],
    "logical_xor": [SQUARE > 1, OTHER > 1], "logical_not": [SQUARE > 1], "max_pool1d": [IMAGES[0], 2],
    "max_pool2d": [IMAGES, 2], "moveaxis": [SQUARE, 0, 1], "one_hot": [LABELS, 3], "pad": [SQUARE, 1],
    "repeat": [SQUARE, 2], "reshape": [SQUARE, 1, 9], "rms_norm": [SQUARE, 3, OTHER[0]],
    "scaled_dot_product_attention": [HEADS, HEADS + 1, HEADS - 1], "scatter_add": [SQUARE, LABELS, (3, 3)],
    "softmax_cross_entropy": [SQUARE, LABELS], "split": [SQUARE, 3], "squeeze": [SQUARE[:1]],
    "swapaxes": [SQUARE, 0, 1], "take": [SQUARE, LABELS], "take_along_axis": [SQUARE, LABELS[:, None]],
    "tile": [SQUARE, 2], "to_device": [SQUARE, "cpu"], "topk": [SQUARE, 2], "transpose": [SQUARE],
    "where": [SQUARE > 1, SQUARE, OTHER],
    "einsum": ["ij,jk", SQUARE, OTHER], "concatenate": [(SQUARE, OTHER)], "stack": [(SQUARE, OTHER)],
    "binary_cross_entropy_with_logits": [SQUARE, OTHER], "cross_entropy": [SQUARE, LABELS],
    "mse_loss": [SQUARE, OTHER],
}
FUNCTIONS = {**{name: getattr(mt, name) for name in (*ops.__all__, "ones_like", "zeros_like")},
             **{f"nn.{name}": getattr(mt.nn, name) for name in (
                 "binary_cross_entropy_with_logits", "cross_entropy", "linear_cross_entropy", "mse_loss")}}
FAIL_AT_NOTHING = ("to_device", "where")      # where it is already; of any objects, as in NumPy


def given(name):
    name = name.removeprefix("nn.")
    required = [p for p in inspect.signature(FUNCTIONS.get(name) or getattr(mt.nn, name)).parameters.values()
                if p.default is p.empty]
    return GIVEN.get(name) or [SQUARE, OTHER][:len(required)]


def as_list(value):
    if isinstance(value, tuple):
        return tuple(map(as_list, value))
    return value.tolist() if isinstance(value, np.ndarray) else value


def same(got, expected):
    if isinstance(expected, tuple):
        return len(got) == len(expected) and all(map(same, got, expected))
    got, expected = (x.numpy() if isinstance(x, mt.Tensor) else np.asarray(x) for x in (got, expected))
    return got.dtype == expected.dtype and np.array_equal(got, expected)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_lists_are_taken_as_arrays(name):
    function, arguments = FUNCTIONS[name], given(name)
    assert same(function(*map(as_list, arguments)), function(*arguments))


def test_a_list_is_not_repeated():
    with pytest.raises(ValueError):
        mt.dot([1, 2], [1, 2, 3])
    assert mt.dot([1, 2], 3) == 9


@pytest.mark.parametrize("name", sorted({*FUNCTIONS} - {*FAIL_AT_NOTHING}))
@pytest.mark.parametrize("wrong", [None, "text", {"a": 1}, ["a", "b"], [mt.ones(2)] * 2],
                         ids=["None", "text", "a dict", "a list of text", "a list of tensors"])
def test_what_can_not_be_an_array_is_named(name, wrong):
    arguments, several = given(name), name in ("concatenate", "stack")
    if several and isinstance(wrong, list) and isinstance(wrong[0], mt.Tensor):
        return      # that is what they are for
    i = 1 if name == "einsum" else 0
    arguments = [*arguments[:i], wrong, *arguments[i + 1:]]
    with pytest.raises(TypeError, match=rf"^{FUNCTIONS[name].__name__}: (can't take|takes)"):
        FUNCTIONS[name](*arguments)


def test_numbers_are_arrays_of_no_axes():
    assert mt.sum(3) == 3 and mt.reshape(2.5, 1, 1).tolist() == [[2.5]] and mt.nn.mse_loss(1.0, 3.0) == 4
    assert mt.sigmoid(0) == 0.5 and abs(mt.erf(2.0) - math.erf(2.0)) < 1e-15 and mt.rsqrt(4) == 0.5


def test_a_list_beside_a_tensor_is_a_constant_of_the_tape():
    weight = mt.tensor(OTHER, requires_grad=True)
    mt.linear(SQUARE.tolist(), weight).sum().backward()
    assert np.allclose(weight.grad.numpy(), np.tile(SQUARE.sum(0), (3, 1)))


def test_another_mistake_stays_what_it_is():
    with pytest.raises(TypeError, match="axis='a'"):
        mt.sum(SQUARE, "a")
    with pytest.raises(TypeError, match=r"^mean\(\) got an unexpected keyword argument 'axes'"):
        mt.mean(SQUARE, axes=1)
    with pytest.raises(TypeError, match="subscripts come first"):
        mt.einsum(SQUARE, OTHER)


def test_functions_keep_their_signature_and_can_be_pickled():
    for name in (*ops.__all__, "ones_like"):
        bare = getattr(ops, name, None) or mt.autodiff.create.ones_like
        assert inspect.signature(getattr(mt, name)) == inspect.signature(bare)
    assert pickle.loads(pickle.dumps(mt.mean)) is mt.mean is not ops.mean and mt.add is ops.add and mt.tanh is ops.tanh


def test_parameters_called_otherwise_are_no_arrays():
    @taking_lists
    def f(xs, shape=()):
        return xs.shape
    assert "xs" not in ARRAYS
    with pytest.raises(AttributeError, match="'list' object has no attribute 'shape'"):
        f([1])
