"""The model table against numbers counted by hand; module hooks."""

import importlib
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, nn
from minitorch_dist.autodiff.autocast import CLASSES, LOWER
from minitorch_dist.compress import lora
from minitorch_dist.parallel import DistributedDataParallel

summary = importlib.import_module("minitorch_dist.nn.summary")      # (nn.summary is the function)

zeros = np.zeros


def by_path(model, *inputs):
    table = nn.summary(model, *inputs)
    return table, {row.path: (row.shape, row.parameters, row.flops) for row in table.rows}


def test_an_mlp():
    table, rows = by_path(nn.mlp((30, 20), dropout=0.5), zeros((7, 784), "f4"))
    assert rows == {"0": ((7, 30), 784 * 30 + 30, 2 * 7 * 784 * 30), "1": ((7, 30), 0, 0), "2": ((7, 30), 0, 0),
                    "3": ((7, 20), 620, 2 * 7 * 30 * 20), "4": ((7, 20), 0, 0), "5": ((7, 20), 0, 0),
                    "6": ((7, 10), 210, 2 * 7 * 20 * 10)}
    assert table.parameters == 24_380 and table.positions == 7
    assert table.flops == 2 * 7 * (784 * 30 + 600 + 200) and table.training_flops == 3 * table.flops
    assert table.rule_of_thumb == 6 * 24_380 * 7
    assert abs(table.training_flops / table.rule_of_thumb - 1) < 0.01      # they differ by the biases


def test_lenet():
    table, rows = by_path(nn.lenet(), zeros((3, 784), "f4"))
    assert rows["0"] == ((3, 1, 28, 28), 0, 0)
    assert rows["1"] == ((3, 6, 28, 28), 156, 2 * 3 * 6 * 28 * 28 * 25)
    assert rows["4"] == ((3, 16, 10, 10), 2416, 2 * 3 * 16 * 10 * 10 * 6 * 25)
    assert rows["8"] == ((3, 120), 48_120, 2 * 3 * 400 * 120)
    assert table.parameters == 61_706 and table.flops == 3 * 2 * (117_600 + 240_000 + 48_000 + 10_080 + 840)


def test_grouped_and_strided_convolution():
    _, rows = by_path(nn.Sequential(nn.Conv1d(4, 6, 3, stride=2, groups=2, bias=False)), zeros((5, 4, 11), "f4"))
    assert rows == {"0": ((5, 6, 5), 6 * 2 * 3, 2 * 5 * 6 * 5 * 2 * 3)}


def test_a_gpt():
    """B·T = 6 tokens, dim 8, 4 heads of 2 with 2 for keys and values, T = 3."""
    model = nn.GPT(11, 5, layers=2, heads=4, dim=8, kv_heads=2)
    table, rows = by_path(model, zeros((2, 3), int))
    for i in range(2):
        assert rows[f"blocks.{i}.attention.qkv"] == ((2, 3, 16), 8 * 16 + 16, 2 * 6 * 8 * 16)
        assert rows[f"blocks.{i}.attention"] == ((2, 3, 8), 0, 2 * (2 * 4 * 3 * 3 * 2) * 2)     # q kᵀ, and times v
        assert rows[f"blocks.{i}.attention.out"][2] == 2 * 6 * 8 * 8
        assert rows[f"blocks.{i}.mlp.0"][2] == rows[f"blocks.{i}.mlp.2"][2] == 2 * 6 * 8 * 32
        assert rows[f"blocks.{i}.norm1"] == ((2, 3, 8), 16, 0)
    assert rows[""] == ((2, 3, 11), 0, 2 * 6 * 8 * 11)      # the tied output layer
    assert rows["embed"] == ((2, 3, 8), 88, 0) and rows["position"] == ((3, 8), 40, 0)
    block = 2 * 6 * (8 * 16 + 8 * 8 + 2 * 8 * 32) + 2 * 2 * 2 * 4 * 9 * 2
    assert table.flops == 2 * block + 2 * 6 * 8 * 11 and table.positions == 6
    assert table.parameters == sum(p.size for p in model.parameters())


def test_products_that_are_not_layers():
    class Products(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(zeros((5, 6)))

        def forward(self, x):
            return mt.einsum("bi,ij->bj", x, self.w) + x @ self.w + mt.linear_gelu(x, self.w.T, zeros(6))
    table, _ = by_path(Products(), zeros((4, 5)))
    assert table.flops == 3 * (2 * 4 * 5 * 6)

    class Grouped(nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.y = nn.Parameter(zeros((3, 5, 6))), nn.Parameter(zeros((4, 7)))

        def forward(self, x):
            return mt.sum(mt.grouped_matmul(x, self.w, (1, 0, 3))) + mt.sum(mt.grouped_outer(x, self.y, (3, 1)))
    assert by_path(Grouped(), zeros((4, 5)))[0].flops == 2 * 4 * 5 * 6 + 2 * 4 * 5 * 7


def test_functions_with_a_rule_by_hand_say_what_they_do():
    @mt.custom_vjp
    def product(pair):
        return pair[0] @ pair[1]
    product.defvjp(lambda pair: (pair[0] @ pair[1], None), None)

    class Uses(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(zeros((5, 6)))

        def forward(self, x):
            return product((x, self.w))
    assert by_path(Uses(), zeros((4, 5)))[0].flops == 0
    product.flops = lambda pair: 2 * pair[0].size * pair[1].shape[1]
    assert by_path(Uses(), zeros((4, 5)))[1] == {"": ((4, 6), 30, 2 * 4 * 5 * 6)}
    with mt.saved_tensors_hooks(lambda a: a.tolist(), np.array):
        assert by_path(Uses(), zeros((4, 5)))[0].flops == 2 * 4 * 5 * 6


def test_every_product_of_the_table_is_counted():
    """Autocast's first class is that of the products; NF4's lowers its input by itself."""
    assert set(CLASSES[LOWER].split()) | {"nf4_linear"} == set(summary.FLOPS)


@pytest.mark.parametrize("ranks", [1, 4])
def test_a_ring_of_ranks_meets_all_keys(ranks):
    """A rank's 3 queries, the keys of all."""
    q, k = zeros((2, 4, 3, 8)), zeros((2, 2, 3, 8))
    count = summary.FLOPS["ring_attention"](q.shape, q=q, k=k, comm=SimpleNamespace(size=ranks), band=(None, 0))
    assert count == 2 * 2 * 4 * 3 * (3 * ranks) * 8 * 2


def test_what_a_window_leaves_out_is_not_counted():
    """200 positions that see 10: by 64 of them at a time, of 73 sources, the first without the 9 before it."""
    q = zeros((2, 4, 200, 8))
    pairs = 64 * 64 + 2 * 64 * 73 + 8 * 17
    assert summary.FLOPS["attention"](q.shape, q=q, k=q, band=(9, 0)) == 2 * 2 * 4 * pairs * 8 * 2
    assert summary.FLOPS["attention"](q.shape, q=q, k=q, band=(9, 0), mask=True) == 2 * 2 * 4 * 200 * 200 * 8 * 2
    part = zeros((2, 4, 50, 8))
    ring = summary.FLOPS["ring_attention"](part.shape, q=part, k=part, comm=SimpleNamespace(size=4), band=(9, 0))
    assert ring == 2 * 2 * 4 * 50 * 10 * 8 * 2


def test_a_block_called_twice_and_one_never_called():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.never = nn.Linear(4, 4), nn.Linear(4, 9)
            self.same = self.one

        def forward(self, x):
            return self.one(self.one(x))
    table, rows = by_path(Twice(), zeros((3, 4), "f4"))
    assert rows["one"][2] == 2 * (2 * 3 * 4 * 4) == table.flops and rows["never"] == (None, 45, 0)
    assert table.parameters == 20 + 45 and "not called" in str(table)


def test_the_printed_table():
    text = str(nn.summary(nn.mlp((30,)), zeros((7, 784), "f4")))
    lines = text.split("\n")
    assert lines[0].split() == ["path", "layer", "output", "parameters", "FLOPs"]
    assert lines[2].split() == ["0", "Linear", "7", "×", "30", "23,550", "329,280"]
    assert lines[1] == lines[-4] == "-" * len(lines[0])     # between them what is added up
    assert lines[-3].split() == ["total", "23,860", "333,480"] and len({len(line) for line in lines[:-2]}) == 1
    assert "1,000,440 FLOPs (3 × forward)" in lines[-1] and "D = 7: 1,002,120" in lines[-1]


def test_it_leaves_nothing_behind():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm(6), nn.Dropout(0.5))
    model[2].eval()
    before, draws = model.state_dict(), mt.backend.random_state.draws
    nn.summary(model, zeros((3, 4), "f4"))
    assert [m.training for m in model.modules()] == [True, True, True, False]
    assert all((value == before[name]).all() for name, value in model.state_dict().items())
    assert mt.backend.random_state.draws == draws and all(m._hooks is None for m in model.modules())
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(ValueError):
        nn.summary(model, zeros((3, 5), "f4"))
    assert all(m._hooks is None for m in model.modules()) and model[0].training
    with mt.no_grad(), pytest.raises(RuntimeError, match="no_grad"):
        nn.summary(model, zeros((3, 4), "f4"))
    assert nn.summary(nn.ReLU(), zeros((3, 4), "f4")).flops == 0     # where there is nothing to be recorded


@pytest.mark.parametrize("make", [nn.lenet, lambda: nn.GPT(65, 16, layers=2, dim=32)], ids=["lenet", "gpt"])
def test_torch_counts_the_same(make):
    """Its FlopCounterMode on the same products, written down again in torch."""
    torch = pytest.importorskip("torch")
    from torch.utils.flop_counter import FlopCounterMode
    model = make()
    p = {name: torch.tensor(v.numpy()) for name, v in model.named_parameters()}
    f = torch.nn.functional
    with FlopCounterMode(display=False) as counter:
        if "embed.weight" not in p:
            inputs = zeros((4, 784), "f4")
            h = f.max_pool2d(f.conv2d(torch.zeros(4, 1, 28, 28), p["1.weight"], padding=2), 2)
            h = f.max_pool2d(f.conv2d(h, p["4.weight"]), 2).flatten(1)
            for name in ("8", "10", "12"):
                h = f.linear(h, p[name + ".weight"])
        else:
            inputs = zeros((3, 16), int)
            for i in range(2):
                h = f.linear(torch.zeros(3, 16, 32), p[f"blocks.{i}.attention.qkv.weight"])
                q, k, v = h.reshape(3, 16, 12, 8).transpose(1, 2).split(4, 1)
                torch.matmul(torch.softmax(q @ k.mT, -1), v)
                f.linear(torch.zeros(3, 16, 32), p[f"blocks.{i}.attention.out.weight"])
                f.linear(f.linear(torch.zeros(3, 16, 32), p[f"blocks.{i}.mlp.0.weight"]), p[f"blocks.{i}.mlp.2.weight"])
            f.linear(torch.zeros(3, 16, 32), p["embed.weight"])
    assert nn.summary(model, inputs).flops == counter.get_total_flops()


# ---------------------------------------------------------------- hooks

def test_hooks_see_and_replace():
    layer, seen = nn.Linear(2, 3, dtype=np.float64), []
    x = mt.tensor(np.ones((4, 2)))
    plain = layer(x).numpy().copy()
    handles = [
        layer.register_forward_pre_hook(lambda module, inputs: seen.append(("before", module, inputs))),
        layer.register_forward_pre_hook(lambda module, inputs: inputs[0] * 2.0),
        layer.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3.0,)),
        layer.register_forward_hook(lambda module, inputs, output: seen.append(("after", module, inputs, output))),
        layer.register_forward_hook(lambda module, inputs, output: output + 1.0),
    ]
    bias = layer.bias.numpy()
    np.testing.assert_allclose(layer(x).numpy(), (plain - bias) * 6 + bias + 1)
    assert seen[0] == ("before", layer, (x,))
    name, module, inputs, output = seen[1]
    assert (name, module) == ("after", layer)
    np.testing.assert_allclose(inputs[0].numpy(), 6.0)
    np.testing.assert_allclose(output.numpy(), (plain - bias) * 6 + bias)
    for handle in handles:
        handle.remove()
        handle.remove()        # a second time does nothing
    np.testing.assert_array_equal(layer(x).numpy(), plain)
    assert len(seen) == 2 and layer._hooks is None


def test_a_hook_is_there_for_a_block():
    layer, calls = nn.ReLU(), []
    with layer.register_forward_hook(lambda module, inputs, output: calls.append(output)) as handle:
        layer(mt.tensor([1.0]))
    layer(mt.tensor([1.0]))
    handle.remove()
    assert len(calls) == 1


@pytest.mark.parametrize("where", ["before", "forward", "after"])
def test_some_hooks_are_called_after_an_error_too(where):
    """What hasn't been called before it, if asked for: with None for the output."""
    layer, calls = nn.ReLU(), []

    def broken(*given):
        raise KeyError(where)

    def note(name):
        return lambda module, inputs, output: calls.append((name, output is None))
    layer.register_forward_hook(note("first"), always_call=True)
    if where == "forward":
        layer.forward = broken
    else:
        (layer.register_forward_pre_hook if where == "before" else layer.register_forward_hook)(broken)
    layer.register_forward_hook(note("second"))
    layer.register_forward_hook(note("third"), always_call=True)
    with pytest.raises(KeyError, match=where):
        layer(mt.tensor([1.0]))
    assert calls == [("first", where != "after"), ("third", True)]


def test_the_same_hook_twice_is_two_hooks():
    layer, calls = nn.ReLU(), []

    def hook(module, inputs, output):
        calls.append(output)
    first, _ = layer.register_forward_hook(hook), layer.register_forward_hook(hook)
    layer(mt.tensor([1.0]))
    first.remove()
    layer(mt.tensor([1.0]))
    assert len(calls) == 3


def test_hooks_run_in_the_tree_and_carry_gradients():
    model, order = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Tanh())), []
    for path, module in model.named_modules():
        module.register_forward_pre_hook(lambda m, i, path=path: order.append("+" + path))
        module.register_forward_hook(lambda m, i, o, path=path: order.append("-" + path))
    model[1].register_forward_hook(lambda m, i, o: o * 5.0)
    x = mt.tensor([[0.3, 0.1]], requires_grad=True)
    model(x).sum().backward()
    assert order == ["+", "+0", "-0", "+1", "+1.0", "-1.0", "-1", "-"]
    w, b = (p.numpy() for p in model.parameters())
    np.testing.assert_allclose(x.grad.numpy(), 5 * (1 - np.tanh(x.numpy() @ w.T + b) ** 2) @ w, rtol=1e-5)
    assert not any("_hooks" in name for name in model.state_dict())


def test_modules_with_hooks_can_be_copied():
    import copy
    model = nn.Sequential(nn.Linear(2, 2))
    twin = copy.deepcopy(model)
    assert (twin[0].weight.numpy() == model[0].weight.numpy()).all() and twin[0].weight is not model[0].weight


def test_frozen_parameters_count():
    """One that is frozen is multiplied by all the same, at the beginning too; and they are frozen afterwards."""
    model, x = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), zeros((4, 6), "f4")
    wanted = nn.summary(model, x).rows
    assert sum(row.flops for row in wanted) == 2 * 4 * (6 * 5 + 5 * 3)
    for frozen in ("0", ""):
        for p in dict(model.named_modules())[frozen].parameters():
            p.requires_grad_(False)
        assert nn.summary(model, x).rows == wanted
    assert not any(p.requires_grad for p in model.parameters())
    wrapped = DistributedDataParallel(nn.Sequential(model, nn.Linear(3, 2)), comm.world_of_one())
    assert nn.summary(wrapped, x).flops == 2 * 4 * (6 * 5 + 5 * 3 + 3 * 2)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_model_with_adapters(quantize):
    model = lora.add(nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)), 2, targets="*", quantize=quantize)
    table = nn.summary(nn.Sequential(nn.Linear(4, 6), model), zeros((7, 4), "f4"))
    assert table.flops == 2 * 7 * (4 * 6 + 6 * 5 + 2 * (6 + 5) + 5 * 3 + 2 * (5 + 3))
