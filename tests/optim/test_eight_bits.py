"""Optimizers that keep their state in 8 bits: the steps of one that rounds it number by number, saved as float32's."""

import copy
import runpy
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, ledger, nn, optim
from minitorch_dist.data import digits
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.optim import optimizer as optimizers
from minitorch_dist.optim.packed import Packed, arrays_of, dynamic_levels
from minitorch_dist.parallel.offload import offload, offload_optimizer
from tests.device.fake_cupy import installed

SHAPES, TILE = [(7, 11), (13,), (31, 47), (), (0, 3), (5, 16)], 512
assert 31 * 47 > 2 * TILE and 31 * 47 % 16
KINDS = {   # name -> (constructor, which of its arrays have a sign)
    "adam": (lambda params, bits=8: optim.Adam(params, 0.01, weight_decay=0.1, maximize=True, state_bits=bits),
             {"exp_avg": True, "exp_avg_sq": False}),
    "adamw": (lambda params, bits=8: optim.AdamW(params, 0.01, amsgrad=True, state_bits=bits),
              {"exp_avg": True, "exp_avg_sq": False, "max_exp_avg_sq": False}),
    "sgd": (lambda params, bits=8: optim.SGD(params, 0.01, momentum=0.9, nesterov=True, state_bits=bits),
            {"momentum": True}),
    "adagrad": (lambda params, bits=8: optim.Adagrad(params, 0.01, initial_accumulator_value=0.2, state_bits=bits),
                {"sum": False}),
    "lion": (lambda params, bits=8: optim.Lion(params, 0.01, weight_decay=0.1, state_bits=bits), {"exp_avg": True}),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Several per parameter, and on a GPU too."""
    monkeypatch.setattr(optimizers, "TILE", TILE)
    monkeypatch.setattr(optimizers, "DEVICE_TILE", TILE)


def leaves(dtype="f4", shapes=SHAPES, device="cpu"):
    random = np.random.default_rng(1)
    return [mt.tensor(random.standard_normal(shape).astype(dtype), requires_grad=True, device=device)
            for shape in shapes]


def give(params, step):
    """Gradients of sizes far apart; the second parameter rests now and then."""
    for k, p in enumerate(params):
        random = np.random.default_rng([step, k])
        grad = random.standard_normal(p.shape) * 10.0 ** random.uniform(-3, 0, p.shape)
        p.grad = None if k == 1 and step % 2 else mt.tensor(np.asarray(grad, p.dtype), device=p.device)


def train(params, optimizer, steps):
    for step in steps:
        give(params, step)
        optimizer.step()
    return [p.numpy().tobytes() for p in params]


def rounded(values, signed):
    """Block by block of 16, each number to the level next to its first 12 significant bits."""
    levels = dynamic_levels(signed)
    found, flat = values.copy().reshape(-1), values.reshape(-1)
    for at in range(0, flat.size, 16):
        block = flat[at:at + 16]
        scale = np.abs(block).max()
        if scale:
            fraction, exponent = np.frexp((block / scale).astype("f4").astype("f8"))
            middles = np.sign(fraction) * (np.floor(np.abs(fraction) * 4096) + 0.5) / 4096 * 2.0 ** exponent
            off = np.abs(np.where(block == 0, 0, middles)[:, None] - levels.astype("f8"))
            if not signed:
                off[block > 0, 0] = np.inf
            found[at:at + 16] = levels[off.argmin(1)].astype(block.dtype) * scale
    return found.reshape(values.shape)


# ---------------------------------------------------------------- steps

@each_kind
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_steps_are_those_of_an_optimizer_whose_state_is_rounded_after_each(kind, dtype):
    make, signs = KINDS[kind]
    params, plain = leaves(dtype), leaves(dtype)
    ours, theirs = make(params), make(plain, 32)
    for step in range(6):
        found, wanted = train(params, ours, [step]), train(plain, theirs, [step])
        assert found == wanted
        saved = theirs.state_dict()
        for k, (arrays, rounding) in enumerate(zip(ours.state_dict()["state"], saved["state"], strict=True)):
            assert set(arrays) == set(rounding) == {*signs, *(["master"] if dtype == "f2" else [])}
            if k == 1 and step % 2:
                continue
            for name, signed in signs.items():
                rounding[name] = rounded(rounding[name], signed)
                assert arrays[name].dtype == rounding[name].dtype
                np.testing.assert_array_equal(arrays[name], rounding[name], err_msg=f"{k}, {name}")
        theirs.load_state_dict(saved)


def test_a_parameter_without_a_gradient_and_a_step_left_out_change_no_code():
    params = leaves(shapes=[(40,), (23,)])
    optimizer = optim.Adam(params, state_bits=8)
    train(params, optimizer, [0])
    before = [a.tobytes() for array in optimizer.state[0].values() for a in array.arrays]
    give(params, 0)
    optimizer.step(found_inf=1.0)
    assert before == [a.tobytes() for array in optimizer.state[0].values() for a in array.arrays]
    codes = optimizer.state[0]["exp_avg"].codes.copy()
    train(params, optimizer, [1])       # the second rests
    same = optimizer.state[0]["exp_avg"].codes == codes
    assert same[48:].all() and not same[:48].all()


@pytest.mark.filterwarnings("ignore:invalid value")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_without_a_number_makes_none(bad):
    """Its block's elements with it, and no others'; nothing becomes finite again."""
    params = leaves(shapes=[(64,)])
    optimizer = optim.Adam(params, state_bits=8)
    give(params, 0)
    params[0].grad.data[20] = bad
    optimizer.step()
    train(params, optimizer, [2, 3])
    lost = np.isnan(params[0].numpy())
    assert lost[16:32].all() and lost.sum() == 16


@each_kind
def test_the_bits_on_a_gpu(kind):
    """Where Adam's kernel isn't taken, and no more than some elements are unpacked at a time."""
    wanted = train(params := leaves(), KINDS[kind][0](params), range(3))
    with installed():
        params = leaves(device="cuda")
        optimizer = KINDS[kind][0](params)
        for step in range(3):
            give(params, step)
            optimizer.step()
        assert [p.cpu().numpy().tobytes() for p in params] == wanted
        assert all(not isinstance(a, np.ndarray) for state in optimizer.state for each in state.values()
                   for a in arrays_of(each))


# ---------------------------------------------------------------- groups, and what is held

def test_each_group_keeps_its_state_as_it_says():
    """In one flat buffer; each parameter's steps are those that it would take alone."""
    def run(bits):
        params = leaves()
        optimizer = optim.AdamW([{"params": params[::2], "state_bits": bits[0]},
                                 {"params": params[1::2], "state_bits": bits[1], "lr": 0.1}])
        return train(params, optimizer, range(4)), optimizer
    of = {bits: run(bits) for bits in ((8, 8), (32, 32), (8, 32), (32, 8))}
    for bits, (found, _) in of.items():
        assert found[::2] == of[bits[0], bits[0]][0][::2] and found[1::2] == of[bits[1], bits[1]][0][1::2]
    assert of[8, 8][0][0] != of[32, 32][0][0]
    mixed = of[8, 32][1]
    assert [isinstance(state["exp_avg"], Packed) for state in mixed.state] == [True, False]
    assert mixed.flats[0] is mixed.flats[1]
    assert [group["lr"] for group in mixed.state_dict()["groups"]] == [1e-3, 0.1]


@pytest.mark.parametrize("dtype, master", [("f4", 0), ("f2", 4), ("f8", 0)])
def test_the_ledger_counts_what_is_held(dtype, master):
    """8 bits of a code, and 1/16 of a scale, for each of Adam's two, instead of 2 · 32."""
    params = leaves(dtype, [(64, 48), (160,)])
    optimizer, n, scale = optim.Adam(params, state_bits=8), 64 * 48 + 160, 8 if dtype == "f8" else 4
    whole = -(-n // 4096) * 4096        # the flat buffer with what fills its last block
    give(params, 0)
    with ledger.record(memory=True) as book:
        optimizer.step()
    assert book.peak["optimizer"] == whole * (2 * (1 + scale / 16) + master)
    assert sum(a.nbytes for state in optimizer.state for a in state.values()) == book.peak["optimizer"]


@pytest.mark.parametrize("make, says", [
    (lambda p: optim.Adam([p], state_bits=16), "state_bits is 16; it must be 32 or 8 for Adam"),
    (lambda p: optim.SGD([{"params": [p], "state_bits": 4}]), "state_bits is 4; it must be 32 or 8 for SGD"),
    (lambda p: optim.Muon([{"params": [p], "state_bits": 8}]), "state_bits is 8; it must be 32 for Muon"),
    (lambda p: optim.NorMuon([{"params": [p], "state_bits": 8}]), "state_bits is 8; it must be 32 for NorMuon"),
    (lambda p: optim.Dion([{"params": [p], "state_bits": 8}]), "state_bits is 8; it must be 32 for Dion"),
    (lambda p: optim.Dion2([{"params": [p], "state_bits": 8}]), "state_bits is 8; it must be 32 for Dion2"),
])
def test_what_is_refused(make, says):
    with pytest.raises(ValueError, match=says):
        make(leaves(shapes=[(3, 4)])[0])


# ---------------------------------------------------------------- saved, moved, copied

@pytest.mark.parametrize("setting, says", [({"lr": -1.0}, "lr is -1.0"), ({"momentun": 0.9}, "momentun, which a SGD")])
def test_saved_settings_that_dont_fit_change_nothing(setting, says):
    optimizer = optim.SGD(leaves(shapes=[(3, 4)]), 0.1)
    saved = optimizer.state_dict()
    saved["groups"][0] |= setting | {"weight_decay": 0.5}
    with pytest.raises(ValueError, match=says):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["lr"] == 0.1 and not optimizer.param_groups[0]["weight_decay"]


def packed(optimizer):
    return any(isinstance(array, Packed) for state in optimizer.state for array in state.values())


def test_how_state_is_kept_stays_as_the_group_says():
    """Whatever those that hand it on have written beside it, as DiLoCo does."""
    optimizer = optim.SGD(leaves(shapes=[(3, 4)]), 0.1)
    saved = optimizer.state_dict()
    saved["groups"][0]["state_bits"] = 8
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["state_bits"] == 32 and not packed(optimizer)


def test_state_goes_from_float32_to_8_bits_and_back(tmp_path):
    """In memory and on disk. From 8 bits to 8 bits nothing is lost; nor on the way through an optimizer of 32."""
    def model():
        mt.manual_seed(3)
        return nn.Sequential(nn.Linear(9, 21), nn.Tanh(), nn.Linear(21, 4))

    def steps(net, optimizer, numbers):
        for step in numbers:
            optimizer.zero_grad()
            x = np.random.default_rng(step).standard_normal((6, 9)).astype("f4")
            nn.cross_entropy(net(mt.tensor(x)), np.arange(6) % 4).backward()
            optimizer.step()
        return [p.numpy().tobytes() for p in net.parameters()]
    for bits in (8, 32):
        first = model()
        optimizer = optim.AdamW(first.parameters(), 0.01, state_bits=bits)
        steps(first, optimizer, range(4))
        checkpoints.save(tmp_path / f"{bits}", first, optimizer)
        values, saved = {name: a.copy() for name, a in first.state_dict().items()}, optimizer.state_dict()
        twin = copy.deepcopy((first, optimizer))
        wanted = steps(first, optimizer, range(4, 7))
        assert steps(*twin, range(4, 7)) == wanted
        for into in (8, 32):
            for how in ("memory", "disk"):
                other = model()
                restored = optim.AdamW(other.parameters(), 0.7, state_bits=into)
                if how == "disk":
                    checkpoints.load(tmp_path / f"{bits}", other, restored)
                else:
                    other.load_state_dict(values)
                    restored.load_state_dict(saved)
                assert packed(restored) == (into == 8) and restored.lr == 0.01
                assert restored.param_groups[0]["state_bits"] == into and "state_bits" not in saved["groups"][0]
                if (bits, into) == (8, 32):     # as far as it goes without being packed: nothing is lost
                    again = optim.AdamW(other.parameters(), state_bits=8)
                    again.load_state_dict(restored.state_dict())
                    restored = again
                found = steps(other, restored, range(4, 7))
                assert (found == wanted) == (bits == 8 or into == 32), (bits, into, how)


@each_kind
def test_state_follows_parameters_that_move(kind):
    finals = []
    for moves in (False, True):
        params = leaves()
        optimizer = KINDS[kind][0](params)
        train(params, optimizer, range(2))
        if moves:
            FlatBuffer(params[::-1])
        finals.append(train(params, optimizer, range(2, 4)))
    assert finals[0] == finals[1]


@pytest.mark.parametrize("where", ["files", "host"])
@pytest.mark.parametrize("at", [0, 2])
def test_offloaded_it_has_the_same_bits(tmp_path, monkeypatch, where, at):
    def run(params, to=None):
        optimizer = optim.AdamW([{"params": params[:2]}, {"params": params[2:], "state_bits": 32}], state_bits=8)
        for step in range(4):
            if to and step == at:
                offload_optimizer(optimizer, to)
            give(params, step)
            optimizer.step()
        return [p.cpu().numpy().tobytes() for p in params], optimizer
    wanted, _ = run(leaves(shapes=SHAPES[::-1]))
    if where == "files":
        found, optimizer = run(leaves(shapes=SHAPES[::-1]), tmp_path)
        arrays = [a for state in optimizer.state for each in state.values() for a in arrays_of(each)]
        assert not any(offload.owner_of(a).flags.owndata for a in arrays)
    else:
        monkeypatch.setattr(offload, "PIECE", 16 * 1000)
        with installed():
            found, optimizer = run(leaves(shapes=SHAPES[::-1], device="cuda"), "cpu")
        arrays = [a for state in optimizer.state for each in state.values() for a in arrays_of(each)]
        assert all(isinstance(a, np.ndarray) for a in arrays)
    assert found == wanted and packed(optimizer)


def test_beside_muon():
    params = leaves(shapes=[(12, 20), (33,)])
    both = optim.Combined(optim.Muon(params[:1]), optim.AdamW(params[1:], state_bits=8))
    apart = leaves(shapes=[(12, 20), (33,)])
    each = [optim.Muon(apart[:1]), optim.AdamW(apart[1:], state_bits=8)]
    found = train(params, both, range(3))
    for step in range(3):
        give(apart, step)
        for one in each:
            one.step()
    assert found == [p.numpy().tobytes() for p in apart]
    assert isinstance(both.state[1]["exp_avg"], Packed)


def test_the_example_leaves_embeddings_their_32_bits():
    example = runpy.run_path(str(Path(__file__).parents[2] / "examples" / "gpt.py"))
    model = nn.GPT(11, 8, layers=1, heads=2, dim=16)
    optimizer = example["OPTIMIZERS"]["adamw8"](model, SimpleNamespace(lr=0.1, weight_decay=0.2))
    packed = {id(slot.segment.tensor): isinstance(state["exp_avg"], Packed)
              for state, slots in zip(optimizer.state, optimizer.slots, strict=True) for slot in slots}
    assert {name for name, p in model.named_parameters() if not packed[id(p)]} == {"embed.weight", "position.weight"}
    assert len(packed) == len(list(model.parameters()))
    decayed = {id(p) for group in optimizer.param_groups for p in group["params"] if group["weight_decay"]}
    assert decayed == {id(p) for p in model.parameters() if p.ndim > 1}


# ---------------------------------------------------------------- it trains

def test_digits_are_learnt_as_with_float32():
    """The loss of 8 bits stays by that of float32, and ends where it does; a step from one state is 1 % off."""
    x, labels, *_ = digits.arrays()
    losses, trained = [], []
    for bits in (32, 8):
        mt.manual_seed(1)
        model, random = nn.mlp((32,)), np.random.default_rng(0)
        optimizer = optim.Adam(model.parameters(), 2e-3, state_bits=bits)
        losses.append([])
        for _ in range(80):
            rows = random.integers(0, len(x), 64)
            optimizer.zero_grad()
            loss = nn.cross_entropy(model(mt.tensor(x[rows])), labels[rows])
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
        trained.append(optimizer)
    exact, ours = np.array(losses)
    assert exact[0] == ours[0] > 2.2 and exact[-20:].mean() < 0.3
    assert np.abs(ours - exact).max() < 0.03
    before = trained[0].state_dict()["state"]
    trained[1].load_state_dict(trained[0].state_dict())
    after = trained[1].state_dict()["state"]
    steps = [np.concatenate([(s["exp_avg"] / (np.sqrt(s["exp_avg_sq"]) + 1e-8)).ravel() for s in states])
             for states in (before, after)]
    assert np.linalg.norm(steps[1] - steps[0]) < 0.015 * np.linalg.norm(steps[0])
