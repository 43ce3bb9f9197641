"""µP: the tables of the paper, and its coordinate check."""

import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress import lora
from minitorch_dist.optim import mup
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.pipelines import cut_sequential
from tests.crews import crews, threads
from tests.parallel import mup_cases

CASES = "tests.parallel.mup_cases:"


def rms(p):
    return math.sqrt(np.mean(np.square(mt.backend.to(p.data, "cpu"), dtype=np.float64)))


def layered(inside, between):
    """5 -> inside -> between -> 3, of 40 inputs each."""
    return nn.Sequential(nn.Linear(40, inside), nn.Linear(inside, between), nn.Linear(between, 3))


def test_factors_are_those_of_the_papers_table_3():
    """Widths that grow 3-fold and 5-fold; initial values of torch's law, 1/√fan-in, at which the paper's are 1/√fan-in
    for all but the last, which is 1/fan-in."""
    mt.manual_seed(0)
    model, base = layered(90, 200), layered(30, 40)
    small = {name: rms(p) for name, p in base.named_parameters()}
    widths = mup.scale(model, base)
    adam, sgd = ({name: group["lr"] / 0.5 for group in widths.groups(model, kind, 0.5) for p in group["params"]
                  for name, q in model.named_parameters() if q is p} for kind in (optim.Adam, optim.SGD))
    for name, kind, init, with_adam, with_sgd in [
            ("0.weight", "input", 1, 1, 3), ("0.bias", "vector", 1, 1, 3),
            ("1.weight", "hidden", 1 / math.sqrt(3), 1 / 3, 5 / 3), ("1.bias", "vector", 1, 1, 5),
            ("2.weight", "output", 1 / 5, 1 / 5, 1 / 5), ("2.bias", "fixed", None, 1, 1)]:
        assert widths.parameters[name].kind == kind
        assert math.isclose(adam[name], with_adam) and math.isclose(sgd[name], with_sgd), name
        if init is not None:
            assert math.isclose(rms(dict(model.named_parameters())[name]), init * small[name], rel_tol=1e-6), name
    assert mup.scale(model, base).parameters["1.weight"].init == pytest.approx(1)     # a second time changes nothing


@pytest.mark.parametrize("law", [nn.init.he_normal, nn.init.xavier_uniform, lambda s, d: nn.init.normal(s, 0.02, d)])
def test_however_the_initial_values_go_with_the_width(law):
    def make(width):
        return nn.Sequential(nn.Linear(30, width, weight_init=law), nn.Linear(width, 2 * width, weight_init=law),
                             nn.Linear(2 * width, 7, weight_init=law))
    mt.manual_seed(0)
    model, base = make(256), make(64)
    mup.scale(model, base)
    for i, factor in enumerate((1, 1 / 2, 1 / 4)):
        assert math.isclose(rms(model[i].weight), factor * rms(base[i].weight), rel_tol=1e-5)


def test_constants_of_attention_and_tied_weights():
    """Definition 4.1: scores times 1/size, which at base is the usual 1/√size; table 8: logits times 1/fan-in."""
    model, base = mup_cases.gpt(48), mup_cases.gpt(12)
    widths = mup.scale(model, base)
    attention, x = model.blocks[1].attention, np.random.default_rng(0).standard_normal((2, 5, 48))
    assert math.isclose(attention.scale, math.sqrt(6) / 24)
    q, k, v = (part.numpy().reshape(2, 5, 2, 24).transpose(0, 2, 1, 3)
               for part in attention.qkv(mt.tensor(x)).split((48, 48, 48), -1))
    scores = np.where(np.tri(5, dtype=bool), q @ k.transpose(0, 1, 3, 2) * math.sqrt(6) / 24, -np.inf)
    weights = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    np.testing.assert_allclose(attention.weights(mt.tensor(x)), weights, rtol=1e-12)
    y = (weights @ v).transpose(0, 2, 1, 3).reshape(2, 5, 48) @ attention.out.weight.numpy().T
    np.testing.assert_allclose(attention(mt.tensor(x)).numpy(), y, rtol=1e-10, atol=1e-15)
    tokens = np.array([[1, 4, 2]])
    seen = []
    model.norm.register_forward_hook(lambda module, inputs, y: seen.append(y.numpy()))
    np.testing.assert_allclose(model(tokens).numpy(), seen[0] @ model.embed.weight.numpy().T / 4, rtol=1e-12)
    assert set(widths.constants) == {"blocks.0.attention.scale", "blocks.1.attention.scale", "output_multiplier"}
    assert base.output_multiplier is None and base.blocks[0].attention.scale is None
    # More heads of one size leave the scores as they are.
    other = nn.GPT(11, 6, layers=1, heads=8, dim=48)
    assert [*mup.scale(other, nn.GPT(11, 6, layers=1, heads=2, dim=12)).constants] == ["output_multiplier"]


def test_experts_and_their_router():
    def make(dim):
        return nn.MoE(dim, 3 * dim, 4)
    found = mup.scale(make(32), make(16)).parameters
    assert {name: (w.kind, w.fan_in, w.fan_out) for name, w in found.items()} == {
        "router.weight": ("output", 2, 1), "experts.up": ("hidden", 2, 2), "experts.down": ("hidden", 2, 2)}


def test_rows_of_a_table_and_axes_of_a_norm_are_no_fan_in():
    def make(rows, width):
        return nn.Sequential(nn.Embedding(rows, width), nn.LayerNorm((3, width)), nn.RMSNorm((3, width)))
    mt.manual_seed(0)
    model, base = make(120, 64), make(30, 32)
    found = mup.scale(model, base).parameters
    assert math.isclose(rms(model[0].weight), rms(base[0].weight), rel_tol=1e-6)
    assert all((model[i].weight.numpy() == 1).all() for i in (1, 2))
    assert {(w.factor("init"), w.factor("adam"), w.factor("sgd")) for w in found.values()} == {(1, 1, 2)}


def test_a_base_that_is_itself_a_wide_one():
    """Its constants go on, whatever of the sides has grown since; and none of an earlier scale() stays."""
    base, model = mup_cases.gpt(32), mup_cases.gpt(32)
    mup.scale(base, mup_cases.gpt(8))
    for heads, dim in ((2, 32), (4, 64), (2, 64)):
        wide = nn.GPT(11, 8, layers=2, heads=heads, dim=dim, dtype=np.float64)
        mup.scale(wide, base)
        at_once = nn.GPT(11, 8, layers=2, heads=heads, dim=dim, dtype=np.float64)
        mup.scale(at_once, nn.GPT(11, 8, layers=2, heads=heads, dim=heads * 4, dtype=np.float64))
        assert wide.blocks[1].attention.scale == at_once.blocks[1].attention.scale
        assert wide.output_multiplier == 8 / dim
    mup.scale(model, mup_cases.gpt(8))
    mup.scale(model, mup_cases.gpt(32))
    assert model.output_multiplier is None and model.blocks[0].attention.scale is None


def test_two_models_with_one_table():
    class Two(nn.Module):
        def __init__(self, dim):
            super().__init__()
            self.first, self.second = mup_cases.gpt(dim), mup_cases.gpt(dim)
            self.second.embed.weight = self.first.embed.weight
    model = Two(16)
    mup.scale(model, Two(4))
    assert model.first.output_multiplier == model.second.output_multiplier == 1 / 4


def steps_of(model, optimizer, count=3):
    for step in range(count):
        random = np.random.default_rng(step)
        optimizer.zero_grad()
        logits = model(random.integers(0, 11, (4, 6)))
        nn.cross_entropy(logits, random.integers(0, 11, (4, 6))).backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", mup_cases.OPTIMIZERS)
def test_at_bases_width_all_is_as_ever(name):
    kind, lr = mup_cases.OPTIMIZERS[name]
    mt.manual_seed(1)
    plain, model, base = mup_cases.gpt(8), mup_cases.gpt(8), mup_cases.gpt(8)
    model.load_state_dict(plain.state_dict())
    widths = mup.scale(model, base)
    assert not widths.constants
    groups = [{"params": [p for p in plain.parameters() if (p.ndim > 1) == matrices], "weight_decay": decay}
              for matrices, decay in ((True, 0.1), (False, 0.0))]
    wanted = steps_of(plain, kind(groups, lr=lr))
    for key, value in steps_of(model, widths.optimizer(kind, model, lr, weight_decay=0.1)).items():
        np.testing.assert_array_equal(value, wanted[key])


WATCHED = "0", "2", "blocks.0.attention", "blocks.0"


def activations(model, inputs):
    """What the layers that are watched give, and the model."""
    seen = []
    handles = [m.register_forward_hook(lambda m, x, y: seen.append(y.numpy().copy()))
               for path, m in model.named_modules() if path in WATCHED]
    seen.append(model(inputs).numpy())
    for handle in handles:
        handle.remove()
    return seen


def changes(make, widths, kind, lr, inputs, labels, wide):
    """How what three steps change in each activation goes with the width: slopes in log-log. wide: whether by µP, with
    the first width as base."""
    moved = []
    for width in widths:
        mt.manual_seed(5)
        base, model = make(widths[0]), make(width)
        optimizer = mup.scale(model, base).optimizer(kind, model, lr) if wide else kind(model.parameters(), lr=lr)
        before = activations(model, inputs)
        for _ in range(3):
            optimizer.zero_grad()
            nn.cross_entropy(model(inputs), labels).backward()
            optimizer.step()
        moved.append([math.sqrt(np.mean((a - b) ** 2))
                      for a, b in zip(before, activations(model, inputs), strict=True)])
    return np.polyfit(np.log(widths), np.log(moved), 1)[0]


@pytest.mark.parametrize("kind, lr, grown", [
    (optim.Adam, 0.01, (0.8, 0.8)), (optim.Lion, 0.01, (0.7, 0.7)), (optim.SGD, 0.1, (-0.3, 0.15))])
def test_coordinate_check_of_an_mlp(kind, lr, grown):
    """Appendix D.1: what three steps change is of one size at any width; otherwise it grows, or shrinks."""
    random = np.random.default_rng(0)
    arguments = (lambda width: nn.mlp((width, width)), (32, 64, 128, 256, 512), kind, lr,
                 random.standard_normal((16, 784)).astype(np.float32), random.integers(0, 10, 16))
    assert np.abs(changes(*arguments, wide=True)).max() < 0.2
    first, *_, last = changes(*arguments, wide=False)
    assert last > grown[1] and (grown[0] > 0 or first < grown[0])


@pytest.mark.parametrize("tied", [True, False])
def test_coordinate_check_of_a_gpt(tied):
    random = np.random.default_rng(0)
    arguments = (lambda width: nn.GPT(19, 8, layers=1, heads=2, dim=width, tied=tied), (32, 64, 128, 256), optim.AdamW,
                 0.01, random.integers(0, 19, (4, 8)), random.integers(0, 19, (4, 8)))
    assert np.abs(changes(*arguments, wide=True)).max() < 0.2
    assert changes(*arguments, wide=False).min() > 0.5


@pytest.fixture(scope="module")
def alone():
    return {name: crews.call(CASES + "train", 1, ("ddp", name))[0] for name in mup_cases.OPTIMIZERS}


@pytest.mark.parametrize("name", mup_cases.OPTIMIZERS)
@pytest.mark.parametrize("way", ["ddp", 1, 3, "tensor", "context", "annotated"])
def test_one_curve_however_it_is_cut(alone, way, name):
    case = ("annotated", 2, (name,)) if way == "annotated" else ("train", 2, (way, name))
    found = crews.call(CASES + case[0], *case[1:])[0]
    assert found.keys() == alone[name].keys()
    for key, value in alone[name].items():
        np.testing.assert_allclose(found[key], value, rtol=0, atol=1e-10, err_msg=key)
        assert np.ptp(value) > 0


def test_exact_mode_has_one_set_of_bits():
    (wanted,) = crews.call(CASES + "exact", 1, (0, "adamw"), env=threads(1))
    for stage in (0, 3):
        assert crews.call(CASES + "exact", 2, (stage, "adamw"), env=threads(2))[0] == wanted


def test_one_curve_in_stages(tmp_path):
    """And of who goes on in a process from the stages' checkpoint; each stage has groups that the other one hasn't."""
    whole, stages = str(tmp_path / "whole"), str(tmp_path / "stages")
    (wanted,) = crews.call(CASES + "pipelined", 1, ("adamw", whole))
    for found in (crews.call(CASES + "pipelined", 2, ("adamw", stages))[0],
                  crews.call(CASES + "pipelined", 1, ("adamw", stages, True))[0]):
        assert found.keys() == wanted.keys()
        for key, value in found.items():
            np.testing.assert_allclose(value, wanted[key], rtol=0, atol=1e-10, err_msg=key)


def test_a_stage_s_copy_of_a_shared_matrix_has_its_rate():
    def made(width):
        first = nn.Linear(width, width, bias=False)
        return nn.Sequential(nn.Linear(3, width), first, nn.Tanh(), nn.Sequential(first), nn.Linear(width, 2))
    model = made(8)
    widths = mup.scale(model, made(2))
    _, stage = cut_sequential(model, 2, [1, 1, 3, 1, 1])
    (copied, *_), rates = stage.parameters(), {name: {} for name in ("whole", "stage")}
    for name, params in ("whole", model), ("stage", stage):
        for group in widths.groups(params, optim.AdamW, 0.5):
            rates[name] |= {id(p): group["lr"] for p in group["params"]}
    assert id(copied) not in rates["whole"]
    assert rates["stage"][id(copied)] == rates["whole"][id(model[1].weight)] == 0.125


def test_weight_decay_per_step_is_bases():
    model, widths = mup_cases.wide()
    for kind in (optim.AdamW, optim.SGD):
        groups = widths.groups(model, kind, lr=0.2, weight_decay=0.3)
        assert {len(group["params"]) > 0 for group in groups} == {True}
        assert sum(len(group["params"]) for group in groups) == len(list(model.parameters()))
        for group in groups:
            decays = {p.ndim > 1 for p in group["params"]}
            assert decays == {group["weight_decay"] > 0}
            if group["weight_decay"]:
                assert math.isclose(group["lr"] * group["weight_decay"], 0.06)
        assert len({group["lr"] for group in groups}) == 2


def test_its_text():
    model, widths = mup_cases.wide()
    lines = str(widths).splitlines()
    assert lines[0].split() == ["parameter", "shape", "base", "kind", "initial", "Adam's", "lr", "SGD's", "lr"]
    assert lines[1].split()[:4] == ["embed.weight", "11×16", "11×4", "input"] and lines[1].split()[5:] == ["1", "4"]
    assert "output_multiplier = 0.25" in lines
    assert len(lines) == 1 + len(list(model.parameters())) + 3


def test_what_it_refuses():
    with pytest.raises(ValueError, match="only one of model and base has head.weight"):
        mup.scale(nn.GPT(5, 4, layers=1, heads=1, dim=8, tied=False), nn.GPT(5, 4, layers=1, heads=1, dim=4))
    with pytest.raises(ValueError, match="as many axes"):
        mup.scale(nn.Sequential(nn.Conv1d(1, 2, 3)), nn.Sequential(nn.Conv2d(1, 2, 3)))
    with pytest.raises(RuntimeError, match="call scale.. before"):
        mup.scale(DistributedDataParallel(nn.mlp((8,))).module, nn.mlp((4,)))
    for wrong, value in ((0, 0), (1, 0), (0, np.nan), (0, np.inf), (1, np.inf)):
        model, base = nn.Sequential(nn.Linear(8, 8)), nn.Sequential(nn.Linear(4, 4))
        (model, base)[wrong][0].weight.data[...] = value
        with pytest.raises(ValueError, match="0.weight starts with"):
            mup.scale(model, base)
    model, widths = mup_cases.wide()
    for kind in (optim.Muon, optim.NorMuon, optim.Dion, optim.Dion2, optim.Adafactor):
        with pytest.raises(TypeError, match=f"rates of {kind.__name__}"):
            widths.optimizer(kind, model, 0.1)
    with pytest.raises(ValueError, match="take AdamW"):
        widths.optimizer(optim.Adam, model, 0.1, weight_decay=0.1)
    same = mup_cases.gpt(4)     # at base's width Adam's decay is base's
    assert mup.scale(same, mup_cases.gpt(4)).optimizer(optim.Adam, same, 0.1, weight_decay=0.1)
    lora.add(model, rank=2)
    with pytest.raises(ValueError, match="hasn't seen blocks.0.attention.qkv.lora_A"):
        widths.optimizer(optim.AdamW, model, 0.1)
    with pytest.raises(ValueError, match="frozen"):
        mup.scale(model, lora.add(mup_cases.gpt(4), rank=2))

    class Shared(nn.Module):
        def __init__(self, width):
            super().__init__()
            self.embed, self.head = nn.Embedding(5, width), nn.Linear(width, 5)
            self.head.weight = self.embed.weight
    with pytest.raises(ValueError, match="stands in 2 modules"):
        mup.scale(Shared(8), Shared(4))
