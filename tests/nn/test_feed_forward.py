"""The feed-forward part of a block: two layers in one op, to the bit, unless somebody looks in between."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, ledger, nn
from minitorch_dist.nn.transformer import FeedForward

random = np.random.default_rng
FUSED, APART = ["linear_gelu", "linear"], ["linear", "gelu", "linear"]


def steps(mlp, x, ct):
    """The names of the ops on the tape, the output and all gradients."""
    leaf = mt.tensor(x, requires_grad=True)
    y = mlp(leaf)
    names, node = [], y.node
    while node.primitive is not None:
        names.append(node.primitive.name)
        node = node.parents[0]
    y.backward(mt.tensor(ct))
    grads = [leaf.grad, *(p.grad for p in mlp.parameters())]
    mlp.zero_grad()
    return names[::-1], [y.numpy().copy(), *(g.numpy().copy() for g in grads)]


def same_bits(got, wanted):
    for g, w in zip(got, wanted, strict=True):
        assert g.dtype == w.dtype
        np.testing.assert_array_equal(g, w)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "bfloat16"])
@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("shape", [(24,), (31, 24), (3, 7, 24)])
def test_one_op_makes_the_bits_of_two(shape, approximate, dtype):
    dtype = backend.as_dtype(dtype)
    layers = nn.Linear(24, 37, dtype=dtype), nn.GELU(approximate), nn.Linear(37, 24, dtype=dtype)
    mlp, apart = FeedForward(*layers), nn.Sequential(*layers)
    assert [name for name, _ in mlp.named_parameters()] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    x, ct = random(1).standard_normal((2, *shape)).astype(dtype)
    (names, got), (names_apart, wanted) = steps(mlp, x, ct), steps(apart, x, ct)
    assert names == FUSED and names_apart == APART
    same_bits(got, wanted)


def test_a_block_trains_as_one_of_separate_layers_does():
    ends = []
    for apart in (False, True):
        mt.manual_seed(7)
        model = nn.GPT(11, 9, layers=2, heads=2, dim=12, dropout=0.1)
        if apart:
            for block in model.blocks:
                block.mlp = nn.Sequential(*block.mlp)
        optimizer = mt.optim.AdamW(model.parameters(), lr=0.01)
        for step in range(4):
            tokens, labels = random(step).integers(0, 11, (2, 3, 8))
            optimizer.zero_grad()
            with backend.random_scope(0, step, 3, (0, 3)):
                nn.cross_entropy(model(tokens), labels).backward()
            optimizer.step()
        ends.append(model.state_dict())
    assert list(ends[0]) == list(ends[1])
    same_bits(ends[0].values(), ends[1].values())


class Doubled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


def put(name, layer):
    return lambda mlp: setattr(mlp, name, layer)


@pytest.mark.parametrize("change, names", [
    (lambda mlp: None, FUSED),
    (put("0", Doubled(6, 24)), ["linear", "mul", "gelu", "linear"]),
    (put("0", nn.Linear(6, 24, bias=False)), ["matmul", "gelu", "linear"]),
    (put("1", nn.ReLU()), ["linear", "relu", "linear"]),
    (put("1", nn.GELU("none")), FUSED),
    (put("3", nn.Tanh()), [*FUSED, "tanh"]),
    (lambda mlp: setattr(mlp[0], "forward", lambda x: mt.linear(x, mlp[0].weight, mlp[0].bias) * 2),
     ["linear", "mul", "gelu", "linear"]),
    (lambda mlp: setattr(mlp[1], "forward", mt.tanh), ["linear", "tanh", "linear"]),
    (lambda mlp: delattr(mlp, "1"), ["linear", "linear"]),
], ids=["as it was", "a Linear's child", "no bias", "ReLU", "GELU by erf", "a layer more", "another Linear.forward",
        "another GELU.forward", "no GELU"])
def test_what_takes_a_layers_place_is_called(change, names):
    mlp = nn.TransformerBlock(6, 2).mlp
    change(mlp)
    x, ct = random(1).standard_normal((2, 5, 6)).astype("f4")
    got, apart = steps(mlp, x, ct), steps(nn.Sequential(*mlp), x, ct)
    assert got[0] == names
    same_bits(got[1], apart[1])


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("before", [True, False])
def test_hooks_on_the_layers_run_and_may_change_what_passes(layer, before):
    mlp = nn.TransformerBlock(6, 2).mlp
    x, ct = random(1).standard_normal((2, 5, 6)).astype("f4")
    seen, plain = [], steps(mlp, x, ct)
    register = getattr(mlp[layer], "register_forward_pre_hook" if before else "register_forward_hook")
    handle = register(lambda module, *values: seen.append(values))
    looked_at = steps(mlp, x, ct)
    handle.remove()
    assert looked_at[0] == APART and steps(mlp, x, ct)[0] == FUSED
    same_bits(looked_at[1], plain[1])
    (inputs, *_), = seen
    assert inputs[0].shape == ((5, 6) if layer == 0 else (5, 24))
    handle = register(lambda module, *values: values[-1][0] * 2 if before else values[-1] * 2)
    assert not np.array_equal(steps(mlp, x, ct)[1][0], plain[1][0])
    handle.remove()


@pytest.mark.parametrize("wanted", [(True, True), (True, False), (False, True)])
def test_of_silu_times_up_these_two_are_kept_and_nothing_else(wanted):
    gate, up, ct = random(3).standard_normal((3, 40, 25)).astype("f4")
    leaves = [mt.tensor(x, requires_grad=it) for x, it in zip((gate, up), wanted, strict=True)]
    with ledger.record(memory=True) as book:
        y = mt.swiglu(leaves[0] * 1.0, leaves[1] * 1.0)
        assert book.live["activation"] == gate.nbytes + up.nbytes
        y.backward(mt.tensor(ct))
    assert [leaf.grad is not None for leaf in leaves] == list(wanted)


def test_a_gated_feed_forward_keeps_its_inputs_and_what_the_gate_is_of():
    """x, both halves, and what the last matrix takes: 6 + 2 · 10 + 10 numbers of a row."""
    layers = nn.TransformerBlock(6, 2, mlp="swiglu", hidden=10, bias=False).mlp
    with ledger.record(memory=True) as book:
        y = layers(mt.tensor(random(1).standard_normal((7, 6)).astype("f4"), requires_grad=True) * 1.0)
        assert book.live["activation"] == 4 * 7 * (6 + 20 + 10)
    del y
