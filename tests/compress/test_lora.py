"""Adapters in one process: against closed forms, finite differences, and the plain model's bits."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn, optim
from minitorch_dist.autodiff.check import check_grads
from minitorch_dist.autodiff.primitive import lower
from minitorch_dist.compress import lora, prune
from minitorch_dist.compress.lora import LoRALinear
from minitorch_dist.compress.low_precision import convert_to_low_precision_training

from .lora_cases import moved

IN, OUT, RANK, ALPHA = 9, 13, 3, 5
TOKENS = np.random.default_rng(0).integers(0, 11, (3, 6))


def linear(bias=True):
    mt.manual_seed(2)
    return nn.Linear(IN, OUT, bias, dtype=np.float64)


def adapted(**options):
    return moved(lora.add(linear(), RANK, ALPHA, targets="*", **options))


def gpt(dtype=np.float32, **options):
    mt.manual_seed(3)
    return nn.GPT(11, 6, layers=2, heads=2, dim=16, dtype=dtype, **options)


def loss_of(model):
    return nn.cross_entropy(mt.reshape(model(TOKENS[:, :-1]), (-1, 11)), TOKENS[:, 1:].reshape(-1))


def gradients(model):
    loss_of(model).backward()
    return {name: p.grad.numpy() for name, p in model.named_parameters() if p.grad is not None}


def numbers(*shape):
    return np.random.default_rng(shape).standard_normal(shape)


# ---------------------------------------------------------------- one layer

@pytest.mark.parametrize(("rslora", "scale"), [(False, ALPHA / RANK), (True, ALPHA / np.sqrt(RANK))])
@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_layer_is_its_closed_form(quantize, rslora, scale):
    layer = adapted(quantize=quantize, rslora=rslora)
    x, ct = mt.tensor(numbers(2, 4, IN), requires_grad=True), numbers(2, 4, OUT)
    y = layer(x)
    y.backward(mt.tensor(ct))
    w = layer.weight.dequantize(np.float64) if quantize else linear().weight.numpy()
    a, b, rows, g = layer.lora_A.numpy(), layer.lora_B.numpy(), x.numpy().reshape(-1, IN), ct.reshape(-1, OUT)
    np.testing.assert_allclose(y.numpy(), x.numpy() @ (w + scale * b @ a).T + layer.bias.numpy(), rtol=1e-12)
    np.testing.assert_allclose(x.grad.numpy(), ct @ (w + scale * b @ a), rtol=1e-12)
    np.testing.assert_allclose(layer.lora_A.grad.numpy(), scale * b.T @ g.T @ rows, rtol=1e-12, atol=1e-13)
    np.testing.assert_allclose(layer.lora_B.grad.numpy(), scale * g.T @ rows @ a.T, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_gradients_are_finite_differences(quantize):
    layer = adapted(quantize=quantize)

    def put(**values):
        for name, value in values.items():
            object.__setattr__(layer, name, value)

    def f(x, a, b):
        put(lora_A=a, lora_B=b)
        return mt.tanh(layer(x))
    put(bias=lower(layer.bias), **({} if quantize else {"weight": lower(layer.weight)}))      # arrays, of no level
    check_grads(f, (numbers(4, IN) / 4, numbers(RANK, IN) / 4, numbers(OUT, RANK) / 4), order=2)


def test_initial_values():
    """U(±1/√in) and zeros; by the seed and the path, and nothing else."""
    mt.manual_seed(7)
    wide = lora.add(nn.Sequential(nn.Linear(400, 30), nn.Linear(30, 400)), 50, targets="*")
    a = wide[0].lora_A.numpy()
    assert abs(a).max() <= 1 / 20 < 1.01 * abs(a).max() and abs(a.std() * 20 * np.sqrt(3) - 1) < 0.02
    assert not wide[0].lora_B.numpy().any() and wide[0].lora_B.shape == (30, 50)
    mt.manual_seed(7)
    other = nn.Sequential(nn.Linear(400, 30), nn.Linear(30, 400))
    backend.next_stream()
    lora.add(other, 50, targets="0")
    np.testing.assert_array_equal(other[0].lora_A.numpy(), a)
    assert not np.array_equal(wide[1].lora_A.numpy()[:, :30], a[:, :30])
    mt.manual_seed(8)
    assert not np.array_equal(lora.add(nn.Sequential(nn.Linear(400, 30)), 50, targets="0")[0].lora_A.numpy(), a)


def test_dropout_is_the_adapters_alone():
    layer, x = adapted(dropout=0.5), mt.tensor(numbers(400, IN))
    added = layer(x).numpy() - linear()(x).numpy()
    whole = layer.eval()(x).numpy() - linear()(x).numpy()
    np.testing.assert_allclose(whole, ALPHA / RANK * x.numpy() @ (layer.lora_B.numpy() @ layer.lora_A.numpy()).T,
                               rtol=1e-10, atol=1e-12)
    # In the least squares' sense it is the whole on average, and it is not the whole.
    assert abs((added * whole).sum() / (whole * whole).sum() - 1) < 0.15 and abs(added - whole).max() > 0.1


def test_backward_makes_no_product_for_what_is_frozen(monkeypatch):
    """Nor keeps a gradient; for a first layer's input there is none, either."""
    product, made = np.matmul, []

    def seen(a, b, **options):
        made.append(tuple(sorted((a.shape[-2], b.shape[-1]))) + a.shape[-1:])      # or its transpose
        return product(a, b, **options)
    of_weight, of_input = (IN, OUT, 4), (4, IN, OUT)
    of_adapter = [(RANK, OUT, 4), (RANK, 4, OUT), (RANK, IN, 4)]
    for layer, inside, wanted in ((linear(), False, [of_weight]), (adapted(), False, of_adapter),
                                  (adapted(), True, [*of_adapter, of_input, (4, IN, RANK)]),
                                  (adapted(quantize="nf4"), True, [*of_adapter, of_input, (4, IN, RANK)])):
        y = layer(mt.tensor(numbers(4, IN), requires_grad=inside))
        with monkeypatch.context() as patch:
            patch.setattr(np, "matmul", seen)
            y.backward(mt.tensor(numbers(4, OUT)))
        assert sorted(made) == sorted(wanted)
        made.clear()
        assert [p.grad is None for p in layer.parameters()].count(False) == 2


# ---------------------------------------------------------------- models

def test_the_first_forward_has_the_base_models_bits_and_names():
    base, m = gpt(), lora.add(gpt())
    assert np.array_equal(base(TOKENS).numpy(), m(TOKENS).numpy())
    adapters = lora.state_dict(m)
    assert sorted(adapters) == sorted(f"blocks.{i}.{layer}.lora_{which}" for i in (0, 1) for which in "AB" for layer in
                                      ("attention.qkv", "attention.out", "mlp.0", "mlp.2"))
    assert set(m.state_dict()) == set(base.state_dict()) | set(adapters)
    assert [name for name, p in m.named_parameters() if p.requires_grad] == list(adapters)
    assert sum(p.size for p in lora.parameters(m)) == 2 * 8 * (16 + 48 + 16 + 16 + 2 * (16 + 64))
    m.load_state_dict(base.state_dict() | adapters)


def test_adapters_go_from_model_to_model():
    m = moved(lora.add(gpt(), dropout=0.1))
    other = lora.add(gpt(), dropout=0.1)
    lora.load_state_dict(other, lora.state_dict(m))
    assert np.array_equal(other.eval()(TOKENS).numpy(), m.eval()(TOKENS).numpy())
    with pytest.raises(KeyError, match="no values for"):
        lora.load_state_dict(other, {})
    with pytest.raises(ValueError, match="has shape"):
        lora.load_state_dict(lora.add(gpt(), rank=2), lora.state_dict(m))
    with pytest.raises(ValueError, match="no adapters"):
        lora.state_dict(gpt())
    least = lora.state_dict(lora.add(gpt(), rank=1))
    assert all(1 in matrix.shape for matrix in least.values())


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_merged_is_a_plain_model_and_back(quantize):
    m, plain = moved(lora.add(gpt(np.float64), dropout=0.3, quantize=quantize)).eval(), gpt(np.float64)
    before, wanted = m.state_dict(), m(TOKENS).numpy()
    modules = [type(each) for each in plain.modules()]
    assert lora.merge(m) is m and [type(each) for each in m.modules()] == modules
    np.testing.assert_allclose(m(TOKENS).numpy(), wanted, rtol=1e-11, atol=1e-13)
    plain.load_state_dict(m.state_dict())
    assert np.array_equal(plain(TOKENS).numpy(), m(TOKENS).numpy())
    with pytest.raises(ValueError, match="merged"):
        lora.add(m)
    with pytest.raises(ValueError, match="no adapters"):
        lora.merge(m)
    m.train()
    lora.unmerge(m)
    after = m.state_dict()
    assert list(after) == list(before) and all(np.array_equal(after[name], before[name]) for name in before)
    assert m.blocks[0].mlp[0].lora_dropout.training and np.array_equal(m.eval()(TOKENS).numpy(), wanted)
    with pytest.raises(ValueError, match="not merged"):
        lora.unmerge(m)


@pytest.mark.parametrize("dtype", [mt.bfloat16, np.float16], ids=["bfloat16", "float16"])
def test_merged_in_16_bits_is_rounded_once(dtype):
    m = moved(lora.add(linear().to(dtype), RANK, ALPHA, targets="*"))
    w, a, b = (np.float64(lower(p).astype(np.float32)) for p in (m.weight, m.lora_A, m.lora_B))
    bits = lower(m.weight).copy()
    merged = lora.merge(m)
    assert merged.weight.dtype == merged.bias.dtype == dtype
    np.testing.assert_array_equal(lower(merged.weight), np.float32(w + ALPHA / RANK * b @ a).astype(dtype))
    back = lora.unmerge(merged)
    assert back.weight.dtype == back.lora_A.dtype == dtype
    np.testing.assert_array_equal(lower(back.weight), bits)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_what_is_cast_while_it_is_merged_comes_back_cast(quantize):
    m = moved(lora.add(gpt(), quantize=quantize))
    wanted = {p.dtype for p in m.to("float64").parameters()}
    m = lora.unmerge(lora.merge(moved(lora.add(gpt(), quantize=quantize))).to("float64"))
    assert {p.dtype for p in m.parameters()} == wanted and m(TOKENS).dtype == np.float64


@pytest.mark.parametrize("double", [True, False])
def test_scales_keep_their_dtype_when_a_model_is_cast(double):
    m = lora.add(gpt(), quantize="nf4", double=double)
    layer = m.blocks[0].mlp[0]
    before = layer.weight.dequantize()
    m.to("float16")
    assert layer.lora_A.dtype == m(TOKENS).dtype == np.float16 and np.array_equal(layer.weight.dequantize(), before)
    lora.add(gpt().to("float16"), quantize="nf4", double=double).load_state_dict(m.state_dict())


def test_targets():
    def of(targets):
        m = lora.add(gpt(tied=False), targets=targets)
        return [path for path, layer in m.named_modules() if isinstance(layer, LoRALinear)]
    assert of("head") == ["head"] and of(["head", "*.mlp.?"]) == [
        "blocks.0.mlp.0", "blocks.0.mlp.2", "blocks.1.mlp.0", "blocks.1.mlp.2", "head"]
    assert of(lambda layer, path: layer.weight.shape[0] == 48) == ["blocks.0.attention.qkv", "blocks.1.attention.qkv"]
    assert of(lora.TARGETS) == of(None)
    alone = lora.add(linear(), targets="*")
    assert lora.add(linear(), 2.0, targets="*").lora_A.shape[0] == 2
    assert isinstance(alone, LoRALinear) and [name for name, _ in alone.named_parameters()] == [
        "weight", "bias", "lora_A", "lora_B"]


@pytest.mark.parametrize(("options", "words"), [
    ({"targets": "*.mlp.1"}, r"'\*.mlp.1' meets no Linear; there are blocks.0.attention.qkv"),
    ({"targets": ["*.mlp.0", "head"]}, "'head' meets no Linear"), ({"targets": lambda m, path: False}, "a target"),
    ({"rank": 0}, "rank is 0"), ({"rank": 1.5}, "rank is 1.5"), ({"dropout": 1}, "dropout is 1"),
    ({"dropout": -0.1}, "dropout is -0.1"),
    ({"alpha": np.inf}, "alpha is inf"), ({"quantize": "int4"}, "'int4'; there is 'nf4'")],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value))
def test_what_does_not_fit_changes_nothing(options, words):
    m = gpt()
    with pytest.raises(ValueError, match=words):
        lora.add(m, **options)
    assert all(p.requires_grad for p in m.parameters()) and not any(isinstance(x, LoRALinear) for x in m.modules())
    m.blocks[1].mlp[0].weight.data[3, 4] = np.nan
    with pytest.raises(ValueError, match="inf or NaN"):
        lora.add(m, quantize="nf4")
    assert all(p.requires_grad for p in m.parameters()) and not any(isinstance(x, LoRALinear) for x in m.modules())
    with pytest.raises(ValueError, match="a transformer block's; there are 0"):
        lora.add(nn.Sequential(nn.Linear(3, 4)))


def test_a_model_gets_adapters_once():
    with pytest.raises(ValueError, match="blocks.0.attention.qkv has an adapter already"):
        lora.add(lora.add(gpt()), targets="blocks.1.mlp.0")


def test_adapters_and_products_of_few_bits_refuse_each_other():
    with pytest.raises(ValueError, match=r"blocks.0.attention.qkv.lora_A is an adapter \(lora.add\)"):
        convert_to_low_precision_training(lora.add(gpt()), "mxfp8")
    with pytest.raises(ValueError, match="blocks.0.attention.qkv makes its products of few bits"):
        lora.add(convert_to_low_precision_training(gpt(), "mxfp8"))


# ---------------------------------------------------------------- with what one does besides

@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_recomputed_and_compiled(quantize):
    """The first block's input needs no gradient, its adapters do."""
    def made():
        m = lora.add(gpt(), dropout=0.2, quantize=quantize)
        with mt.no_grad():
            for number, p in enumerate(lora.parameters(m)):
                p[...] = np.random.default_rng(number).standard_normal(p.shape) / 10
        return m
    wanted = gradients(made().eval())
    assert len(wanted) == 16 and all(abs(g).max() > 1e-5 for g in wanted.values())
    compiled = mt.compile(made().eval(), "numpy")
    for name, g in gradients(compiled).items():
        np.testing.assert_allclose(g, wanted[name], rtol=1e-4, atol=1e-6)
    with mt.autocast("bfloat16"):
        for name, g in gradients(made().eval()).items():
            assert abs(g - wanted[name]).max() <= 0.05 * abs(wanted[name]).max() and g.dtype == np.float32
    mt.manual_seed(9)
    wanted = gradients(made())
    mt.manual_seed(9)
    m = made()
    for block in m.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    found = gradients(m)
    assert found.keys() == wanted.keys() and all(np.array_equal(found[name], wanted[name]) for name in wanted)


def test_training_moves_the_adapters_alone():
    m = gpt()
    loss_of(m).backward()
    lora.add(m)
    assert all(p.grad is None for p in m.parameters())
    before, optimizer, losses = m.state_dict(), optim.AdamW(lora.parameters(m), 0.02), []
    for _ in range(15):
        optimizer.zero_grad()
        losses.append((loss := loss_of(m)).item())
        loss.backward()
        optim.clip_grad_norm_(m.parameters(), 1.0)
        optimizer.step()
    assert losses[-1] < 0.95 * losses[0]
    changed = {name for name, values in m.state_dict().items() if not np.array_equal(values, before[name])}
    assert changed == set(lora.state_dict(m))


def test_codes_are_not_pruned():
    m = lora.add(gpt(), quantize="nf4")
    name = "blocks.0.mlp.0.weight.codes"
    with pytest.raises(ValueError, match=r"codes \(uint8\): a code of 0 is no weight of 0"):
        prune.Pruning(m, prune.magnitude(m, 0.5, names=[name]))
