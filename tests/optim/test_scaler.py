"""GradScaler against the rules of torch's in plain Python, and against runs without it."""

import json
import math
import re
import runpy
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.compress.low_precision import RECIPES
from tests.device.fake_cupy import installed, transfers

rng = np.random.default_rng(4)
OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.01),
    "adamw": lambda params: optim.AdamW(params, lr=0.01, amsgrad=True),
    "lamb": lambda params: optim.LAMB(params, lr=0.01),
    "adafactor": lambda params: optim.Adafactor(params, lr=0.01),
    "adam, 8 bits": lambda params: optim.Adam(params, lr=0.01, state_bits=8),
}
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def leaf(*values, dtype=np.float32, device="cpu"):
    return mt.tensor(np.array(values, dtype), requires_grad=True, device=device)


def set_grad(p, *values):
    p.grad = mt.tensor(np.array(values, p.dtype), device=p.device)


# ---------------------------------------------------------------- the factor

def of_torch(infs, scale, growth, backoff, interval):
    """The factors after each step, by the rules in the documentation of torch.amp.GradScaler."""
    clean, found = 0, []
    for inf in infs:
        clean = 0 if inf else clean + 1
        if inf:
            scale *= backoff
        elif clean == interval:
            clean = 0
            scale = scale * growth if scale * growth < 2.0 ** 128 else scale       # float32 ends there
        found.append(scale)
    return found


@pytest.mark.parametrize("settings", [(65536.0, 2.0, 0.5, 3), (8.0, 4.0, 0.25, 1), (2.0 ** 127, 2.0, 0.5, 1)], ids=str)
def test_the_factor_grows_and_shrinks_as_torchs(settings):
    p, infs = leaf(1.0), rng.random(40) < 0.2
    scaler, optimizer = optim.GradScaler(*settings), optim.SGD([p], lr=0.0)
    found = []
    for inf in infs:
        set_grad(p, rng.choice([np.inf, -np.inf, np.nan]) if inf else 1.0)
        scaler.step(optimizer)
        assert scaler.found_inf(optimizer) == inf
        scaler.update()
        found.append(scaler.get_scale())
    assert infs.any() and found == of_torch(infs, *settings)


def test_the_defaults_are_torchs():
    scaler = optim.GradScaler()
    assert scaler.state_dict() == {"scale": 65536.0, "growth_factor": 2.0, "backoff_factor": 0.5,
                                   "growth_interval": 2000, "_growth_tracker": 0}
    for wrong in ({"init_scale": 0.0}, {"init_scale": math.inf}, {"growth_factor": 1.0}, {"backoff_factor": 1.0},
                  {"growth_interval": 0}):
        (name, value), = wrong.items()
        with pytest.raises(ValueError, match=f"{name} is {value}"):
            optim.GradScaler(**wrong)


def test_losses_come_in_all_kinds():
    scaler = optim.GradScaler(4.0)
    low, exact = mt.tensor(np.float16([60_000])), mt.tensor([0.1, 0.2], dtype=np.float64)
    scaled = scaler.scale([low, (exact, mt.tensor(3.0))])
    assert [type(part) for part in (scaled, scaled[1])] == [list, tuple]
    assert scaled[0].dtype == np.float32 and scaled[0].item() == 240_000
    np.testing.assert_array_equal(scaled[1][0].numpy(), 4 * exact.numpy())
    assert scaled[1][0].dtype == np.float64 and scaled[1][1].item() == 12
    scaler.update(0.5)
    assert scaler.get_scale() == 0.5 and scaler.scale(mt.tensor(3.0)).item() == 1.5


# ---------------------------------------------------------------- runs

def run(optimizer, scaler, steps=6, clip=None, dtype=np.float32, spoil=()):
    """(parameters, numbers of updates) of a small model, trained; at the steps `spoil` a gradient is inf."""
    mt.manual_seed(1)
    model = nn.Sequential(nn.Linear(7, 9, dtype=dtype), nn.Tanh(), nn.Linear(9, 4, dtype=dtype))
    opt = OPTIMIZERS[optimizer](model.parameters())
    data = np.random.default_rng(3)
    for step in range(steps):
        x, labels = data.standard_normal((5, 7)).astype(dtype), data.integers(0, 4, 5)
        opt.zero_grad()
        scaler.scale(nn.cross_entropy(model(x), labels)).backward()
        if step in spoil:
            model[0].bias.grad.data[3] = np.nan
        if clip:
            scaler.unscale_(opt)
            if not scaler.found_inf(opt):
                assert optim.clip_grad_norm_(model.parameters(), clip) > clip
        before = [p.numpy().copy() for p in model.parameters()]
        scaler.step(opt)
        scaler.update()
        same = [np.array_equal(a, p.numpy()) for a, p in zip(before, model.parameters(), strict=True)]
        assert all(same) if step in spoil else not any(same)
    return [p.numpy().copy() for p in model.parameters()], opt.state_dict()


@each_optimizer
@pytest.mark.parametrize("clip", [None, 0.2])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_a_factor_that_is_a_power_of_2_changes_no_bit(optimizer, clip, dtype):
    with_it = run(optimizer, optim.GradScaler(growth_interval=2), clip=clip, dtype=dtype)
    without = run(optimizer, optim.GradScaler(enabled=False), clip=clip, dtype=dtype)
    for a, b in zip(with_it[0], without[0], strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(with_it[1]["state"], without[1]["state"], strict=True):
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])


@each_optimizer
@pytest.mark.parametrize("clip", [None, 0.2])
def test_a_step_that_is_left_out_leaves_nothing_behind(optimizer, clip):
    """Neither parameters nor moments change, and it isn't counted, by which Adam would correct its bias."""
    spoilt = run(optimizer, optim.GradScaler(), steps=3, spoil=(1,), clip=clip)
    assert spoilt[1]["steps"] == [2] * 4
    for arrays in spoilt[1]["state"]:
        assert all(np.isfinite(a).all() for a in arrays.values())


def test_optimizers_are_judged_one_by_one_and_the_factor_by_all():
    p, q = leaf(1.0, 2.0), leaf(3.0)
    first, second, scaler = optim.SGD([p], lr=1.0), optim.SGD([q], lr=1.0), optim.GradScaler(4.0)
    set_grad(p, 4.0, 8.0)
    set_grad(q, np.inf)
    scaler.step(first)
    scaler.step(second)
    scaler.update()
    assert p.tolist() == [0.0, 0.0] and q.tolist() == [3.0] and scaler.get_scale() == 2.0


def test_in_one_flat_buffer_each_optimizer_has_its_own():
    """DistributedDataParallel's buckets know nothing of optimizers."""
    p, q = leaf(1.0), leaf(3.0)
    mt.optim.optimizer.flat_buffers([p, q])
    first, second, scaler = optim.SGD([p], lr=1.0), optim.SGD([q], lr=1.0), optim.GradScaler(4.0)
    set_grad(p, 4.0)
    set_grad(q, np.inf)
    scaler.unscale_(first)
    assert p.grad.tolist() == [1.0] and not scaler.found_inf(first)
    scaler.unscale_(second)
    assert p.grad.tolist() == [1.0] and scaler.found_inf(second) and not scaler.found_inf(first)


def test_an_optimizer_that_takes_no_factor_gets_divided_gradients():
    class Own:
        """Somebody's, as a torch user writes one."""

        def __init__(self, p):
            self.param_groups = [{"params": [p]}]

        def step(self):
            p, = self.param_groups[0]["params"]
            p.data -= p.grad.data

    p = leaf(3.0)
    own, scaler = Own(p), optim.GradScaler(4.0)
    for gradient, wanted, scale in ((4.0, 2.0, 4.0), (np.inf, 2.0, 2.0), (2.0, 1.0, 2.0)):
        set_grad(p, gradient)
        scaler.step(own)
        scaler.update()
        assert p.tolist() == [wanted] and scaler.get_scale() == scale


def test_a_parameter_without_a_gradient_rests():
    p, q = leaf(1.0), leaf(3.0)
    adam, scaler = optim.Adam([p, q]), optim.GradScaler()
    set_grad(p, 1.0)
    scaler.step(adam)
    scaler.update()
    assert adam.state_dict()["steps"] == [1, 0] and q.tolist() == [3.0]


def test_gradients_of_16_bits_are_divided_inside_of_adam():
    """2⁻²⁰ times the factor fits into float16; divided there it would be flushed to zero (or to a subnormal)."""
    p = leaf(1.0, 1.0, dtype=np.float16)
    adam, scaler = optim.Adam([p], lr=2.0 ** -4, betas=(0.0, 0.0), eps=2.0 ** -30), optim.GradScaler(2.0 ** 12)
    set_grad(p, 2.0 ** -18, -2.0 ** -14)
    with pytest.raises(ValueError, match="gradients of float16 can't be divided in place"):
        scaler.unscale_(adam)
    scaler.step(adam)       # g / (|g| + eps) with g = 2⁻³⁰ and -2⁻²⁶
    np.testing.assert_allclose(p.numpy(), [1 - 2.0 ** -5, 1 + 2.0 ** -4 * 16 / 17], rtol=2.0 ** -11)


def test_a_refusal_divides_nothing():
    a, b = leaf(1.0), leaf(1.0, dtype=np.float16)
    adam, scaler = optim.Adam([a, b]), optim.GradScaler(1024.0)
    set_grad(a, 1024.0)
    set_grad(b, 1024.0)
    with pytest.raises(ValueError, match="gradients of float16"):
        scaler.unscale_(adam)
    scaler.step(adam)
    np.testing.assert_allclose([state["exp_avg"].item() for state in adam.state_dict()["state"]], 0.1, rtol=1e-6)


def test_the_factor_never_leaves_what_float32_can_divide_by():
    p, scaler = leaf(1.0, 2.0), optim.GradScaler(2.0 ** -120)
    optimizer = optim.SGD([p], lr=1.0)

    def step(value):
        set_grad(p, value, value)
        scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        return scaler.found_inf(optimizer) or p.tolist() != [1.0, 2.0]
    for _ in range(20):
        step(np.nan)
    assert scaler.get_scale() == 2.0 ** -126 and p.tolist() == [1.0, 2.0]
    assert step(2.0 ** -126) and p.tolist() == [0.0, 1.0]


def test_a_factor_that_is_no_power_of_2_divides_in_the_gradients_precision():
    p, scaler = leaf(1.0, dtype=np.float64), optim.GradScaler(1000.0)
    optimizer = optim.SGD([p], lr=1.0)
    scaler.scale(mt.sum(p * p)).backward()
    scaler.unscale_(optimizer)
    assert p.grad.item() == pytest.approx(2.0, rel=1e-15)


@pytest.mark.parametrize("settings", [{"init_scale": 0.0}, {"init_scale": 1e39}, {"init_scale": 1e-50},
                                      {"growth_interval": 2.5}])
def test_settings_that_mean_nothing(settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        optim.GradScaler(**settings)


def test_a_factor_set_by_hand_is_looked_at_and_a_damaged_state_changes_nothing():
    scaler = optim.GradScaler()
    for wrong in (0.0, -1.0, np.nan, np.inf):
        with pytest.raises(ValueError, match="new_scale"):
            scaler.update(wrong)
    with pytest.raises(ValueError, match="no growth_factor, backoff_factor, growth_interval, _growth_tracker: "):
        scaler.load_state_dict({"scale": 4.0})
    assert scaler.get_scale() == 2.0 ** 16
    for end in (2.0 ** -126, 2.0 ** 127):
        assert scaler.update(end) is None and scaler.get_scale() == optim.GradScaler(end).get_scale() == end


def test_calls_in_the_wrong_order():
    p = leaf(1.0)
    optimizer, scaler = optim.SGD([p], lr=1.0), optim.GradScaler()
    with pytest.raises(RuntimeError, match="nobody has looked"):
        scaler.update()
    set_grad(p, 1.0)
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="already been called"):
        scaler.unscale_(optimizer)
    scaler.step(optimizer)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(RuntimeError, match=rf"{call.__name__}\(\) after step\(\)"):
            call(optimizer)
    scaler.update()
    scaler.unscale_(optimizer)
    with pytest.raises(RuntimeError, match="enabled"):
        scaler.load_state_dict(optim.GradScaler(enabled=False).state_dict())


def test_disabled_it_does_nothing():
    p, scaler = leaf(1.0), optim.GradScaler(enabled=False)
    optimizer, loss = optim.SGD([p], lr=1.0), mt.tensor(2.0)
    set_grad(p, 0.5)
    assert scaler.scale(loss) is loss and scaler.get_scale() == 1.0 and scaler.state_dict() == {}
    scaler.unscale_(optimizer)
    scaler.step(optimizer)
    scaler.update()
    assert p.tolist() == [0.5] and not scaler.found_inf(optimizer)


def test_a_saved_state_goes_on():
    def factors(scaler, infs):
        p = leaf(1.0)
        optimizer, found = optim.SGD([p], lr=0.0), []
        for inf in infs:
            set_grad(p, np.inf if inf else 1.0)
            scaler.step(optimizer)
            scaler.update()
            found.append(scaler.get_scale())
        return found
    infs = rng.random(30) < 0.15
    whole = factors(optim.GradScaler(1024.0, growth_interval=4), infs)
    first, second = optim.GradScaler(1024.0, growth_interval=4), optim.GradScaler()
    begun = factors(first, infs[:13])
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert begun + factors(second, infs[13:]) == whole and len(set(whole)) > 2


def test_a_late_backward_is_refused():
    """What update has changed since is what backward would multiply by."""
    p, scaler = leaf(1.0), optim.GradScaler()
    loss = scaler.scale(p * p)
    scaler.update(2.0)
    with pytest.raises(RuntimeError, match=r"GradScaler.update has overwritten"):
        loss.backward(mt.ones(1))


# ---------------------------------------------------------------- on a GPU: nobody waits

@pytest.mark.parametrize("optimizer", ["adam", "adamw"])
def test_a_gpu_is_not_waited_for(optimizer):
    with installed():
        p, found = leaf(1.0, 2.0, device="cuda"), []
        opt, scaler = optim.Adam([p], lr=0.5, betas=(0.0, 0.0), eps=1.0), optim.GradScaler(4.0, growth_interval=1)
        x = mt.tensor([3.0, -1.0], device="cuda")
        for inf in (1.0, np.inf, 1.0):
            opt.zero_grad()
            y = mt.tensor([inf, 1.0], device="cuda")
            transfers.clear()
            scaler.scale((p * x * y).sum()).backward()
            scaler.step(opt)
            scaler.update()
            assert not transfers["implicit"] and transfers["up"] <= 2 * (not found)     # at first factor and count
            found.append((p.tolist(), scaler.get_scale()))
        # Without memory a step is lr · g/(|g| + eps), g = 3 and -1.
        once, twice = [1 - 0.375, 2 + 0.25], [1 - 0.75, 2 + 0.5]
        assert found == [(once, 8.0), (once, 4.0), (twice, 8.0)] and opt.state_dict()["steps"] == [2]


def test_the_kernel_is_handed_factor_and_decision_where_they_are():
    class Told(optim.Adam):
        def apply(self, *scaling):
            told.append(scaling)
    with installed():
        p, told = leaf(1.0, 2.0, device="cuda"), []
        opt, scaler = Told([p]), optim.GradScaler(4.0)
        set_grad(p, 4.0, np.nan)
        transfers.clear()
        scaler.step(opt)
        scaler.update()
        assert not transfers["down"] + transfers["implicit"]
        assert [x.tolist() for x in told[0]] == [2.0, [1.0]]        # (halved since)
        set_grad(p, 4.0, 8.0)
        scaler.unscale_(opt)
        scaler.step(opt)
        assert told[1][0] is None and told[1][1].tolist() == [0.0] and p.grad.tolist() == [2.0, 4.0]


def test_sgd_on_a_gpu_asks_for_the_decision_alone():
    with installed():
        p = leaf(1.0, 2.0, device="cuda")
        opt, scaler = optim.SGD([p], lr=1.0), optim.GradScaler(4.0)
        set_grad(p, 4.0, np.nan)
        transfers.clear()
        scaler.step(opt)
        scaler.update()
        assert transfers["down"] == 1 and p.tolist() == [1.0, 2.0] and scaler.get_scale() == 2.0


# ---------------------------------------------------------------- 2 + 2 + 12 bytes

def test_bytes_per_parameter_in_mixed_precision():
    """ZeRO's count: parameter and gradient of 2 bytes, a float32 master and two moments; in float32 4 + 4 + 8."""
    n = 64 * 64
    held = {}
    for dtype in (np.float16, np.float32):
        p = mt.tensor(np.ones((64, 64), dtype), requires_grad=True)
        adam, scaler = optim.Adam([p], lr=1e-3), optim.GradScaler(2.0 ** 8)
        with ledger.record(memory=True) as book:
            scaler.scale(mt.sum(mt.mul(p, p).astype(np.float32))).backward()
            scaler.step(adam)
            scaler.update()
        held[dtype] = [book.live[kind] // n for kind in ("parameter", "gradient", "optimizer")]
        assert np.all(p.numpy() < 1)
    assert held == {np.float16: [2, 2, 12], np.float32: [4, 4, 8]}


def test_the_example(tmp_path, capsys):
    """Shares that fall as the factor grows, half the bytes of activations, a picture. (After so little training no
    gradient is small enough to be lost: so one is looked at that is made smaller.)"""
    program = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "mixed_precision.py"))
    assert program["main"](["--epochs", "2", "--hidden", "64,32", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    lost, spoilt = ([float(x) for x in column] for column in zip(
        *re.findall(r"^float16, 2\^\d+ +([\d.]+) % +[\d.]+ % +([\d.]+) % +\S+ %$", said, re.M), strict=True))
    assert lost == sorted(lost, reverse=True) and len(lost) == 5
    assert spoilt[:2] == [0, 0] and spoilt[4] > 99
    zero, ranged, inf, error = map(float, *re.findall(
        r"^bfloat16, 2\^0 +([\d.]+) % +([\d.]+) % +([\d.]+) % +([\d.]+) %$", said, re.M))
    scaled_error, = map(float, re.findall(r"^float16, 2\^16 .* ([\d.]+) %$", said, re.M))
    assert ranged == inf == 0 and zero < 1 and 4 * scaled_error < error < 4      # 3 bits fewer, layer by layer
    wide, low, scaled, brain, *few = (int(x.replace(",", ""))
                                      for x in re.findall(r"([\d,]+) bytes +[\d,]+ bytes$", said, re.M))
    assert 0.5 * wide <= low == brain <= scaled < 0.52 * wide and few == [wide] * (len(RECIPES) + 2)
    errors = {name: (float(alone), float(mean)) for name, alone, mean in re.findall(
        r"^([a-z].*?) +[\d.]+ % +([\d.]+) % +([\d.]+) %$", said, re.M) if name.split(",")[0] in RECIPES}
    assert len(errors) == len(few) and errors["mxfp8"][0] < errors["mxfp4"][0] / 3
    for name, (alone, mean) in errors.items():      # by chance the mean of 16 has a quarter of the error of one
        by_chance = name in ("nvfp4", "nvfp4, tokens not mixed")
        assert abs(mean / alone - 0.25) < 0.04 if by_chance else mean == alone
    assert (tmp_path / "gradients.png").stat().st_size > 10_000
    for seed in range(4):
        mt.manual_seed(1)
        batch = nn.mlp((16,)), np.random.default_rng(seed).standard_normal((8, 784)).astype(np.float32), np.arange(8)
        small, exact = (program["first_gradient"](*batch, *how) for how in ((-20,), (0, None)))
        share = np.mean(small[exact != 0] == 0)
        expected = np.mean(abs(exact[exact != 0]) < 2.0 ** (20 - 25))      # but for what is rounded on the way
        assert 0.1 < expected and abs(share / expected - 1) < 0.2


def test_a_rank_may_have_nothing_to_update_in_several_models():
    """None for each of their optimizers, in any order that the others may have; and what it knows of the last."""
    scaler = optim.GradScaler(2.0)
    for calls in ("unscale_ step unscale_ step", "unscale_ unscale_ step step", "step step", "step unscale_ step"):
        for name in calls.split():
            getattr(scaler, name)(None)
        assert not scaler.found_inf(None) and len(scaler._stages) == 2
        assert all(stage.stepped and stage.found is not None for stage in scaler._stages.values())
        scaler.update()


@pytest.mark.filterwarnings("ignore:invalid value")      # inf - inf, of steps that are left out
def test_the_recipe_goes_on_after_steps_that_overflow():
    """As its docstring has it, with clipping, from a factor that is much too large."""
    mt.manual_seed(0)
    model, x = nn.Linear(4, 3), rng.standard_normal((6, 4)).astype(np.float32)
    optimizer, scaler = optim.SGD(model.parameters(), 0.1), optim.GradScaler(2.0 ** 40)
    losses, moved, norms = [], [], []
    for _ in range(60):
        before = model.weight.numpy().copy()
        optimizer.zero_grad()
        with mt.autocast("float16"):
            loss = nn.cross_entropy(model(mt.tensor(x)), np.arange(6) % 3)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norms.append(optim.clip_grad_norm_(model.parameters(), 0.3, error_if_nonfinite=False))
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        moved.append((model.weight.numpy() != before).any())
    left_out = moved.index(True)
    assert 5 < left_out < 40 and all(moved[left_out:]) and scaler.get_scale() == 2.0 ** (40 - left_out)
    assert not np.isfinite(norms[:left_out]).any() and np.isfinite(norms[left_out:]).all()
    assert losses[-1] < losses[0]
