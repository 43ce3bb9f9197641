"""Tensors, modules and errors on a GPU (the stand-in), and the way there and back."""

import copy
import pickle
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.nn.preference import group_advantages

from .fake_cupy import events, installed, ndarray


@pytest.fixture(autouse=True)
def gpu():
    with installed() as cupy:
        yield cupy


def test_there_and_back():
    x = mt.tensor([[1.0, 2.0, 3.0]])
    y = x.to("cuda")
    assert (x.device, y.device, y.to("cuda:1").device, y.cpu().device) == ("cpu", "cuda:0", "cuda:1", "cpu")
    assert type(y.data) is ndarray and y.to("cuda:0") is y and x.cpu() is x and x.cuda().device == "cuda:0"
    assert y.to(np.float64).dtype == np.float64 and y.to("float16").dtype == np.float16
    np.testing.assert_array_equal(y.cpu().numpy(), x.numpy())
    assert y.tolist() == [[1.0, 2.0, 3.0]] and y[0, 1].item() == 2.0 and float(y[0, 2]) == 3.0
    assert repr(y) == "tensor([[1., 2., 3.]], device='cuda:0')"


@pytest.mark.parametrize("turned", [False, True])
def test_a_copy_between_gpus_waits_for_both(turned):
    x = backend.to(np.arange(6.0).reshape(2, 3), "cuda:0")
    events.clear()
    moved = backend.to(x.T if turned else x, "cuda:1")
    (before, _, first), copy, (after, _, second) = events
    assert before == after == "synchronize" and copy == ("copy", 0, 1, True) and (first, second) == (0, 1)
    np.testing.assert_array_equal(moved.get(), x.get().T if turned else x.get())


def test_gradients_flow_back_through_the_move():
    x = mt.tensor([1.0, -2.0, 3.0], requires_grad=True)
    (x.to("cuda") ** 2).sum().backward()
    assert x.grad.device == "cpu"
    np.testing.assert_array_equal(x.grad.numpy(), 2 * x.numpy())
    value, tangent = mt.jvp(lambda z: mt.to_device(z, "cuda") * 2, (x.numpy(),), (np.ones(3, np.float32),))
    assert type(value) is type(tangent) is ndarray
    _, program = mt.linearize(lambda z: mt.to_device(z, "cuda") * 2, x.numpy())
    assert "to_device(a; cpu, cuda:0)" in str(program)
    cotangent, = program.transpose(backend.to(np.ones(3, np.float32), "cuda"))
    assert type(cotangent) is np.ndarray
    with pytest.raises(RuntimeError, match="the gradient .3. lives on cpu, the tensor on cuda:0"):
        mt.tensor(x, requires_grad=True, device="cuda").backward(np.ones(3, np.float32))


@pytest.mark.parametrize("make", [
    lambda device: mt.zeros(2, 3, device=device), lambda device: mt.ones((2, 3), dtype=np.int64, device=device),
    lambda device: mt.full((2,), True, device=device), lambda device: mt.arange(1, 9, 3, device=device),
    lambda device: mt.arange(0.0, 1.0, 0.3, device=device), lambda device: mt.eye(3, device=device),
    lambda device: mt.rand(2, 3, device=device), lambda device: mt.randn(4, device=device),
    lambda device: mt.tensor([1, 2], device=device),
    lambda device: mt.random.normal(backend.stream("x"), (3,), device=device),
    lambda device: mt.random.uniform(backend.stream("x"), (3,), 1, 2, device=device),
    lambda device: mt.random.bernoulli(backend.stream("x"), (30,), device=device),
    lambda device: mt.Tensor(nn.init.he_normal((3, 2), device=device)),
    lambda device: mt.Tensor(nn.init.torch_linear((3, 2), device=device)),
    lambda device: mt.dropout(mt.ones(5, 7, device=device), 0.4)],
    ids="zeros ones full arange floats eye rand randn tensor normal uniform bernoulli he torch_linear dropout".split())
def test_what_is_made_on_a_gpu_is_what_is_made_on_the_host(make):
    mt.manual_seed(3)
    here = make("cpu")
    mt.manual_seed(3)
    there = make("cuda")
    assert there.device == "cuda:0" and there.dtype == here.dtype
    np.testing.assert_array_equal(there.cpu().numpy(), here.numpy())


def test_numpy_of_a_gpu_tensor_says_what_to_do():
    with pytest.raises(TypeError, match=r"cuda:0 is no NumPy array.*\.cpu\(\)\.numpy\(\)"):
        mt.zeros(2, device="cuda").numpy()


def test_derivatives_are_checked_where_the_arguments_live():
    """Of several, of some that are moved, and one that is wrong; the cotangents are the host's."""
    rng = np.random.default_rng(0)
    x, y = backend.to(rng.standard_normal((2, 3)), "cuda"), mt.tensor(rng.standard_normal(3), device="cuda")
    mt.check_grads(lambda x, y: (mt.sin(x) * y, x[0] @ y), (x, y))
    mt.check_grads(lambda x: (x * x).to("cpu"), (x,), order=1)
    doubled = mt.custom_vjp(lambda z: z * 3)
    doubled.defvjp(lambda z: (z * 3, None), lambda residuals, ct: (ct * 2,))
    with pytest.raises(mt.GradientError, match=r"argument 0.*0.6667 times what it should be"):
        mt.check_grads(doubled, (x,), modes=("reverse",))


@pytest.mark.parametrize("gradient", [None, 2.0])
def test_backward_from_a_gpu_that_is_not_current_says_which_to_use(gradient):
    """A gradient to move there is none: the one that is missing would be made on the wrong GPU."""
    with backend.on("cuda:1"):
        w = mt.tensor([1.0, 2.0, 3.0], requires_grad=True, device="cuda:1")
        loss = (w * w).sum()
        given = () if gradient is None else (mt.tensor(gradient, dtype=np.float32, device="cuda:1"),)
    with pytest.raises(RuntimeError, match=r"^backward: \[\] on cuda:1, but the current GPU is cuda:0: call "
                                           r"backend.use\('cuda:1'\), or work inside `with backend.on\('cuda:1'\):`$"):
        loss.backward(*given)
    assert w.grad is None
    with backend.on("cuda:1"):
        loss.backward(*given)
    np.testing.assert_array_equal(w.grad.cpu().numpy(), [2 * (gradient or 1), 4 * (gradient or 1), 6 * (gradient or 1)])


def test_pictures_take_arrays_from_where_they_live(tmp_path):
    pytest.importorskip("matplotlib")
    from minitorch_dist.viz import models
    net, path = nn.lenet().to("cuda"), tmp_path / "a.png"
    kernel = next(p for p in net.parameters() if p.ndim == 4)
    for weight in (kernel, kernel.data):
        models.filters(weight, path)
    models.attention_maps(backend.to(np.eye(3)[None], "cuda"), path)
    models.text_surprise("ab", mt.tensor([0.5, 0.25], device="cuda:1"), path)
    found = models.confusion_matrix(*backend.to(np.array([[0, 1], [1, 1]]), "cuda"), path, classes=2)
    assert found.tolist() == [[0, 1], [0, 1]] and path.exists()


@pytest.mark.parametrize("device", ["cpu", "cuda:0", "cuda:1"])
@pytest.mark.parametrize("as_tensor", [False, True])
def test_a_jacobian_is_filled_where_its_input_lives(tmp_path, monkeypatch, device, as_tensor):
    pytest.importorskip("matplotlib")
    from minitorch_dist.viz import differentiation
    matrices = []
    monkeypatch.setattr(differentiation, "_strip", lambda figure, matrix, *rest: matrices.append(matrix))
    rng = np.random.default_rng(0)
    a, x = rng.standard_normal((3, 2)), rng.standard_normal(2)
    b, z = (mt.tensor(v, device=device) if as_tensor else backend.to(v, device) for v in (a, x))
    assert differentiation.jacobian_filling(lambda z: mt.sin(mt.matmul(b, z)), z, tmp_path / "a.png") == (2, 3)
    for matrix in matrices:
        assert type(matrix) is np.ndarray
        np.testing.assert_allclose(matrix, np.cos(a @ x)[:, None] * a, rtol=1e-12)
    assert len(matrices) == 2


def test_answers_are_compared_where_their_rewards_live(gpu):
    rewards = np.array([1.0, 0.0, 0.5, 1.0, 1.0, 1.0])
    advantages = group_advantages(backend.to(rewards, "cuda"), 3)
    assert type(advantages) is gpu.ndarray
    np.testing.assert_allclose(advantages.get(), group_advantages(rewards, 3), rtol=1e-15)


def hooked(x, y):
    """A sum whose gradient a hook brings from the host."""
    z = x[0] * 2
    z.register_hook(lambda gradient: y)
    return z.sum()


def ruled(x, y):
    """A sum whose gradient a rule makes on the host."""
    three = mt.custom_vjp(lambda z: z * 3)
    three.__name__ = "three"
    three.defvjp(lambda z: (z * 3, None), lambda residuals, ct: (y.numpy(),))
    return three(x[0]).sum()


MIXED = [
    (lambda x, y: x * y, r"mul: arrays of different devices, \[2, 3\] on cuda:0 and \[3\] on cpu"),
    (lambda x, y: y - x, r"sub: .*\[3\] on cpu and \[2, 3\] on cuda:0"),
    (lambda x, y: x @ y, "matmul"),
    (lambda x, y: x + y.numpy(), "add"),
    (lambda x, y: y.numpy() + x, "add"),
    (lambda x, y: mt.where(y > 0, x, x), r"where: .*\[3\] on cpu"),
    (lambda x, y: mt.concatenate([x[0], y]), "concatenate"),
    (lambda x, y: mt.linear(x, mt.ones(4, 3), mt.ones(4, device="cuda")), r"linear: .*\[4, 3\] on cpu and \[4\] on"),
    (lambda x, y: mt.einsum("ij,j->i", x, y), "einsum"),
    (lambda x, y: y[mt.argmax(x, 1)], r"indexing: .*\[3\] on cpu and \[2\] on cuda:0"),
    (lambda x, y: mt.scatter_add(y, mt.argmax(x, 0), (3,)), r"indexing: .*\[3\] on cpu and \[3\] on cuda:0"),
    (lambda x, y: y.at[x[0] > 0].set(0.0), "indexing"),
    (lambda x, y: x.at[np.array([0, 1])].add(y), "indexing"),
    (lambda x, y: mt.jvp(mt.exp, (x.data[0],), (y.numpy(),)), "jvp's primal and tangent"),
    (lambda x, y: mt.hvp(lambda z: (z ** 3).sum(), x.data[0], y.numpy()), "jvp's primal and tangent"),
    (lambda x, y: mt.vjp(mt.exp, x.data[0])[1](y.numpy()), "the cotangent and its value"),
    (lambda x, y: mt.linearize(mt.exp, x.data[0])[1](y.numpy()), "the tangent and its value"),
    (lambda x, y: mt.linearize(mt.exp, x.data[0])[1].transpose(y.numpy()), "the cotangent and its value"),
    (lambda x, y: hooked(x, y).backward(), "the gradient from a hook and its value"),
    (lambda x, y: ruled(x, y).backward(), "the cotangent of argument 0 from the backward of 'three' and its value"),
    (lambda x, y: mt.layer_norm(x, 3, y), "layer_norm"),
    (lambda x, y: mt.scaled_dot_product_attention(*[x[None, None]] * 3, attn_mask=np.ones((2, 2), bool)), "attention"),
    (lambda x, y: mt.scaled_dot_product_attention(*[x[None, None]] * 3, documents=np.ones((1, 2), int)), "attention"),
    (lambda x, y: mt.grad(lambda z: (z * y).sum())(x.data), "mul"),
    (lambda x, y: x * y.to("cuda:1"), r"\[2, 3\] on cuda:0 and \[3\] on cuda:1"),
]


@pytest.mark.parametrize("mix, message", MIXED)
def test_mixed_devices_are_named_with_op_and_shapes(mix, message):
    with pytest.raises(RuntimeError, match=message):
        mix(mt.ones(2, 3, device="cuda", requires_grad=True), mt.ones(3))


def test_one_gpu_at_a_time():
    x = mt.ones(3, device="cuda:1")
    with pytest.raises(RuntimeError, match=r"exp: \[3\] on cuda:1, but the current GPU is cuda:0: call backend.use"):
        x.exp()
    matrix = mt.ones(2, 3, device="cuda:1")
    for product in (lambda: matrix @ x, lambda: mt.linear(matrix, matrix, x[:2].to("cuda:0")), lambda: mt.ones(
            2, 2, device="cuda") @ matrix):     # which CuPy itself doesn't refuse
        with pytest.raises(RuntimeError, match="on cuda:1"):
            product()
    with backend.on("cuda:1"):
        assert x.exp().device == "cuda:1" and mt.ones(2, device="cuda").device == "cuda:1"
    assert mt.ones(2, device="cuda").device == "cuda:0"
    assert backend.use("cuda:1") == "cuda:1" and (x + x).device == "cuda:1"


def test_copies_stay_where_the_array_is():
    """Though another GPU is current."""
    x = mt.tensor([1.0, 2.0], device="cuda:1", requires_grad=True)
    x.grad = mt.tensor([3.0, 4.0], device="cuda:1")
    twin = copy.deepcopy(x)
    assert (twin.device, twin.grad.device, mt.tensor(x).device, mt.tensor(x.data, "f8").device) == ("cuda:1",) * 4
    model = nn.Linear(2, 3).to("cuda:1")
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    assert model.weight.device == "cuda:1"


@pytest.mark.parametrize("name, error, message", [
    ("gpu", ValueError, "'gpu' is unknown"), ("cuda:x", ValueError, "'cuda:x'"), ("cuda:2", RuntimeError, "2 GPUs")])
def test_devices_that_are_none(name, error, message):
    with pytest.raises(error, match=message):
        mt.zeros(2, device=name)
    with pytest.raises(error, match=message):
        mt.zeros(2).to(name)


def test_writes_are_dated_by_device():
    x = mt.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    y = (x * x).sum()
    with mt.no_grad():
        x[0] = 5.0
    with pytest.raises(RuntimeError, match="in-place assignment has overwritten"):
        y.backward()
    z = mt.zeros(2, device="cuda")
    z[...] = np.array([3.0, 4.0], np.float32)       # said to be moved, by assigning it
    assert z.tolist() == [3.0, 4.0]


class Placed:
    """All that byte_range asks of an array: elements at an address of a device."""

    shape, strides, size, itemsize, flags = (3, 2), (-16, 4), 6, 4, SimpleNamespace(c_contiguous=False)

    def __init__(self, address, device):
        self.data = SimpleNamespace(ptr=address, device_id=device)


def test_equal_addresses_of_two_devices_are_two_places():
    (a, b), (c, d) = backend.byte_range(Placed(1000, 0)), backend.byte_range(Placed(1000, 1))
    assert (b - a, d - c) == (40, 40) and not (a < d and c < b) and a > 1 << 63
    assert a == backend.byte_range(Placed(0, 0))[0] + 1000


def test_copies_and_pickles_stay_on_their_device():
    x = mt.tensor([1.0, 2.0], device="cuda", requires_grad=True)
    (x * x).sum().backward()
    twin = copy.deepcopy(x)
    assert twin.device == twin.grad.device == "cuda:0" and twin.grad.tolist() == [2.0, 4.0]
    back = pickle.loads(pickle.dumps(x))
    assert back.device == "cuda:0" and back.requires_grad and back.tolist() == [1.0, 2.0]


def test_saved_tensors_hooks_see_gpu_arrays():
    seen = []
    x = mt.ones(3, device="cuda", requires_grad=True)
    with mt.saved_tensors_hooks(lambda a: (seen.append(type(a)), backend.to(a, "cpu"))[1],
                                lambda a: backend.to(a, "cuda")):
        y = (x.exp() * x).sum()
    y.backward()
    assert seen and set(seen) == {ndarray}
    np.testing.assert_allclose(x.grad.cpu().numpy(), 2 * np.exp(np.ones(3)), rtol=1e-6)


# ---------------------------------------------------------------- modules

def test_module_to_moves_parameters_gradients_and_buffers():
    net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm(4), nn.Dropout(0.5))
    before, state = list(net.parameters()), net.state_dict()
    net(np.ones((5, 3), np.float32)).sum().backward()
    assert net.to("cuda") is net and [id(p) for p in net.parameters()] == [id(p) for p in before]
    assert {p.device for p in net.parameters()} == {p.grad.device for p in net.parameters()} == {"cuda:0"}
    assert type(net[1].running_mean) is ndarray
    net(mt.ones(5, 3, device="cuda")).sum().backward()
    after = net.state_dict()
    assert all(type(v) is np.ndarray for v in after.values()) and not np.array_equal(after["1.running_mean"], 0)
    net.load_state_dict(state)
    assert all(np.array_equal(v, state[k]) for k, v in net.state_dict().items()) and type(net[1].running_var) is ndarray
    net.cpu().to(np.float64)
    assert all(p.dtype == p.grad.dtype == np.float64 and p.device == "cpu" for p in net.parameters())
    net(np.ones((5, 3))).sum().backward()


def test_tied_weights_stay_tied():
    net = nn.GPT(11, 6, layers=1, heads=2, dim=8)
    names = [name for name, _ in net.named_parameters()]
    net.cuda()
    assert [name for name, _ in net.named_parameters()] == names


@pytest.mark.parametrize("take", [
    lambda net: optim.SGD(net.parameters(), lr=0.1), lambda net: FlatBuffer(net.parameters()),
    mt.parallel.DistributedDataParallel], ids=["optimizer", "flat buffer", "DDP"])
def test_a_model_that_was_laid_out_does_not_move(take):
    net = nn.Linear(3, 2)
    holder = take(net)      # noqa: F841  (it lives)
    with pytest.raises(RuntimeError, match=r"Linear.to\('cuda'\): weight lives in the flat buffer.*before making"):
        net.to("cuda")
    assert net.weight.device == "cpu" and net.to("cpu") is net


def test_flat_buffers_hold_one_device():
    a, b = mt.ones(3, requires_grad=True), mt.ones(3, device="cuda", requires_grad=True)
    with pytest.raises(ValueError, match="one device, got .'cpu', 'cuda:0'."):
        FlatBuffer([a, b])
    sgd = optim.SGD([a, b], lr=0.5)
    ((a * a).sum() + (b * b).sum().cpu()).backward()
    sgd.step()
    assert a.tolist() == b.tolist() == [0.0, 0.0, 0.0] and b.device == b.grad.device == "cuda:0"


def test_memory_info():
    mt.ones(1, device="cuda")
    assert backend.memory_info()["cuda:1"] == {"used": 4096, "held": 8192, "free": 3 << 30, "total": 4 << 30}
