"""When a kernel is taken, by which table, and what a machine without a GPU never loads."""

import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import kernels
from minitorch_dist.autodiff.primitive import OPS, Primitive
from minitorch_dist.autodiff.tensor import Tensor


class DeviceLike(np.ndarray):
    """Host memory that the engine takes for a GPU's."""


def device(*shape):
    return np.arange(1.0, 1 + np.prod(shape), dtype=np.float32).reshape(shape).view(DeviceLike)


def test_a_cpu_imports_neither_cupy_nor_triton():
    program = ("import sys, minitorch_dist as mt; from minitorch_dist import doctor, __main__\n"
               "m = mt.nn.Sequential(mt.nn.Linear(3, 4), mt.nn.LayerNorm(4)); o = mt.optim.Adam(m.parameters())\n"
               "mt.softmax_cross_entropy(mt.gelu(m(mt.tensor([[1.0, 2, 3]]))), mt.tensor([1])).sum().backward()\n"
               "o.step()\n"
               "print([n for n in ('cupy', 'triton', 'torch') if n in sys.modules])")
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_every_entry_names_an_op_and_a_module_that_serves_it():
    for name, entry in kernels.OPS.items():
        assert name in OPS and OPS[name].definition
        op = kernels.load(entry.module).OPS[name]
        assert callable(op.forward) and callable(op.pullback) and callable(op.fits)
    served = {(module, op) for module in kernels.MODULES for op in getattr(kernels.load(module), "OPS", {})}
    assert served == {(entry.module, name) for name, entry in kernels.OPS.items()}


def test_kernels_have_one_name_each_and_a_definition():
    names = [k.name for module in kernels.MODULES for k in kernels.load(module).KERNELS]
    assert sorted(names) == sorted(kernels.table())
    for module in map(kernels.load, kernels.MODULES):
        assert module.__doc__ and [name for name in vars(module) if name.startswith("definition")
                                   or name.endswith("_definition")]


@pytest.fixture
def double(monkeypatch):
    """A fused op 2x, kernels that serve it with and without a side result, and what they were asked."""
    seen = []

    def forward(x):
        seen.append("forward")
        return x * 2 if not aux else (x * 2, kernels.Kept((x, "mine")))

    def pullback(ct, wanted, aux):
        seen.append(("kernel", aux))
        return (ct * 2,)

    def pullback_of_x(ct, wanted, x):
        seen.append("pullback")
        return (ct * 2,)

    aux = True
    serving = SimpleNamespace(OPS={"double": kernels.Op(forward, pullback, lambda x: x.shape != (7,))})
    plain = Primitive("double", lambda x: (x * 2, "cupy's"), aux=True, listed=False, definition=lambda x: x * 2,
                      pullback=lambda ct, wanted, aux: (seen.append(("cupy", aux)), (ct * 2,))[1])
    bare = Primitive("double", lambda x: x * 2, listed=False, definition=lambda x: x * 2,
                     pullback=lambda ct, wanted, ans: (seen.append("cupy"), (ct * 2,))[1])

    def without_aux():
        nonlocal aux
        aux = False
        serving.OPS = {"double": kernels.Op(forward, pullback_of_x)}
        return bare
    monkeypatch.setattr(kernels, "OPS", {"double": kernels.Entry("doubling", wins_from=4)})
    monkeypatch.setattr(kernels, "load", lambda module: serving)
    return SimpleNamespace(primitive=plain, without_aux=without_aux, seen=seen)


def both_ways(primitive, x, between=lambda: None):
    from minitorch_dist.autodiff.primitive import bind
    x = Tensor(x).requires_grad_()
    y = bind(primitive, (x,))
    between()
    y.backward(Tensor(np.ones(x.shape, x.dtype).view(type(x.data))))
    assert (x.grad.data == 2).all() and (y.data == 2 * x.data).all()


def test_a_kernel_is_taken_where_it_wins(double):
    both_ways(double.primitive, device(5))
    (first, (who, aux)) = double.seen
    assert (first, who, aux[1], type(aux)) == ("forward", "kernel", "mine", kernels.Kept)


@pytest.mark.parametrize("x", [np.ones(5, np.float32), device(3), device(7), device(5).astype(np.float64)],
                         ids=["NumPy's own", "too small", "doesn't fit", "float64"])
def test_elsewhere_it_is_not(double, x):
    both_ways(double.primitive, x)
    assert double.seen == [("cupy", "cupy's")]


def test_disabled_for_a_while(double):
    with kernels.disable():
        both_ways(double.primitive, device(5))
        with kernels.enable():
            both_ways(double.primitive, device(5))
        both_ways(double.primitive, device(5))
    both_ways(double.primitive, device(5))
    assert [s[0] for s in double.seen if s != "forward"] == ["cupy", "kernel", "cupy", "kernel"]


def test_backward_follows_the_forward_that_was(double):
    """Whoever disables kernels between the two passes gets the pullback that understands the side result."""
    with kernels.enable():
        both_ways(double.primitive, device(5), between=kernels.disable)
    assert double.seen[-1][0] == "kernel"
    with kernels.disable():
        both_ways(double.primitive, device(5), between=kernels.enable)
    assert double.seen[-1] == ("cupy", "cupy's")


def test_an_op_without_side_result(double):
    both_ways(double.without_aux(), device(5))
    assert double.seen == ["forward", "pullback"]


def test_without_triton_nothing_is_asked(monkeypatch):
    monkeypatch.setattr(kernels._State, "triton", False)
    assert not kernels.usable(device(5))


def test_the_interpreter_never_gets_a_gpus_addresses():
    class Cupys:
        dtype, size = np.dtype(np.float32), 100
    assert kernels.interpreting() != kernels.usable(Cupys())
    assert kernels.usable(device(5)) and not kernels.usable(np.ones(5)) and not kernels.usable(np.float64(1))


def test_mt_kernels_is_there():
    assert mt.kernels is kernels
    with pytest.raises(KeyError, match="no kernel module 'nothing'"):
        kernels.load("nothing")
