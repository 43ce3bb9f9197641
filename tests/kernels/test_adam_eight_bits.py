"""The fused update of state of 8 bits: byte for byte what optim.packed makes of float32's arithmetic, and no byte more;
through the optimizer what rests and what is skipped, groups, saved state, and inf. (test_stand_in.py: the CPU's steps.)
"""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import kernels, ledger, optim
from minitorch_dist.kernels import adam
from minitorch_dist.optim.adam import every_level
from minitorch_dist.optim.packed import BLOCK, Packed, arrays_of

from .eight_bit_cases import assert_alike, leaves
from .harness import random
from .samples.adam import aligned
from .test_adam import DeviceLike, on_device

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")
MARGIN, POISON = 64, 171        # bytes


def guarded(values):
    """A copy of an array, at a multiple of 16 bytes in memory full of poison; and that memory."""
    memory = aligned(values.nbytes + 2 * MARGIN, np.uint8)
    memory[:] = POISON
    inner = memory[MARGIN:MARGIN + values.nbytes].view(values.dtype)
    inner[:] = values
    return inner, memory


def packed(values, signed):
    kept = Packed.full(values.size, 0, np.float32, "cpu", signed)
    kept.pack(values)
    return kept


def expected(p, g, state, step, lr, betas, eps, decay, decoupled, amsgrad, maximize, grad_scale):
    """One update as kernels/adam.py says it, in float32, number by number; p in float64. State is packed."""
    g = g * np.float32(1 / np.float32(grad_scale)) * (-1 if maximize else 1)
    if not decoupled:
        g = g + np.float32(decay) * p
    m, v = (state[name].unpack() for name in ("m", "v"))
    m = m + np.float32(1 - betas[0]) * (g - m)
    v = v + np.float32(1 - betas[1]) * (g * g - v)
    new = {"m": m, "v": v} | ({"largest": np.maximum(v, state["largest"].unpack())} if amsgrad else {})
    root = np.sqrt(new["largest" if amsgrad else "v"].astype("f8") / (1 - betas[1] ** step))
    p = p.astype("f8") * (1 - lr * decay * decoupled) - lr / (1 - betas[0] ** step) * m / (root + eps)
    return p, {name: packed(values, name == "m") for name, values in new.items()}


@pytest.mark.parametrize("size", [16, 48, 2048 + 16, 4096 + 2032])
@pytest.mark.parametrize("options", [{}, {"decoupled": True}, {"amsgrad": True, "maximize": True}], ids=str)
def test_every_byte(size, options):
    """From state of blocks far apart in size, of zeros, and of one number that is not; memory around it stays."""
    flags = {"decoupled": False, "amsgrad": False, "maximize": False} | options
    start = random(size, seed=3) * 10.0 ** np.random.default_rng(4).uniform(-12, 0, size).astype("f4")
    if size > BLOCK:
        start.reshape(-1, BLOCK)[-1] = 0
        start[size // 2 // BLOCK * BLOCK + 5] = 1e18
    state = {"m": packed(start, True), "v": packed(start * start, False)}
    state |= {"largest": packed(start * start * 2, False)} if flags["amsgrad"] else {}
    p, g = random(size, seed=1), random(size, seed=2)
    g[-BLOCK:-9] = 0
    parts = {"p": p, "g": g}
    for name, kept in state.items():
        parts |= zip((name, f"{name}_scales"), kept.arrays, strict=True)
    inner = {name: guarded(values) for name, values in parts.items()}
    update = adam.Update([{name: array for name, (array, _) in inner.items()}], [6], levels=every_level("cpu"), **flags)
    settings = 1e-2, (0.9, 0.99), 1e-8, 0.1
    update([settings], np.array([4.0], "f4"), np.zeros(1, "f4"))
    wanted, new = expected(p, g, state, 7, *settings, grad_scale=4.0, **flags)
    np.testing.assert_allclose(inner["p"][0], wanted, rtol=3e-6, atol=1e-7)
    np.testing.assert_array_equal(inner["g"][0], g)
    for name, kept in new.items():
        for array, want in zip((inner[name][0], inner[f"{name}_scales"][0]), kept.arrays, strict=True):
            np.testing.assert_array_equal(array, want, err_msg=name)
        assert (kept.codes != state[name].codes).mean() > 0.3
    for _, memory in inner.values():
        assert (memory[:MARGIN] == POISON).all() and (memory[-MARGIN:] == POISON).all()
    assert update.counts() == [7]


# ---------------------------------------------------------------- through the optimizer

def bytes_of(optimizer):
    return [a.tobytes() for state in optimizer.state for each in state.values() for a in arrays_of(each)]


def give(params, seed):
    for k, p in enumerate(params):
        p.grad = mt.tensor(random(*p.shape, seed=seed + k, dtype=p.dtype))


def test_a_step_that_is_skipped_changes_no_byte_and_one_that_rests_none_of_its_own():
    params = on_device(leaves())
    optimizer = optim.AdamW(params, amsgrad=True, state_bits=8)
    give(params, 0)
    optimizer.step()
    before, values = bytes_of(optimizer), [p.numpy().copy() for p in params]
    optimizer.step(found_inf=1.0)
    assert bytes_of(optimizer) == before and optimizer.state_dict()["steps"] == [1] * len(params)
    for p, value in zip(params, values, strict=True):
        np.testing.assert_array_equal(p.numpy(), value)
    first = optimizer.slots[0][1]
    whole = slice(first.segment.start, first.segment.end)
    rests = [a.copy() for each in optimizer.state[0].values() for a in each[whole].arrays]
    params[1].grad = None
    optimizer.step()
    after = [a for each in optimizer.state[0].values() for a in each[whole].arrays]
    assert all(map(np.array_equal, after, rests)) and bytes_of(optimizer) != before
    np.testing.assert_array_equal(params[1].numpy(), values[1])


def test_groups_of_8_and_of_32_bits_are_a_launch_each():
    ends = []
    for place in (lambda params: params, on_device):
        params = place(leaves())
        optimizer = optim.AdamW([{"params": params[:2], "state_bits": 32}, {"params": params[2:]}], state_bits=8)
        for step in range(3):
            give(params, 10 * step)
            with ledger.record() as book:
                optimizer.step()
        ends.append((params, optimizer))
    assert dict(book.launches) == {"adam": 2}
    assert_alike(*ends)


def test_bits_go_through_saved_state():
    """From the kernel to a state_dict of float32 and back: the same bytes; and on from there the same steps."""
    ends = []
    for pause in (False, True):
        params = on_device(leaves())
        optimizer = optim.Adam(params, state_bits=8)
        for step in range(4):
            if pause and step == 2:
                saved, before = optimizer.state_dict(), bytes_of(optimizer)
                optimizer = optim.Adam(params, lr=0.7, state_bits=8)
                optimizer.load_state_dict(saved)
                assert bytes_of(optimizer) == before
            give(params, 10 * step)
            optimizer.step()
        ends.append(([p.numpy().tobytes() for p in params], bytes_of(optimizer), optimizer.state_dict()["steps"]))
    assert ends[0] == ends[1]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_gradient_without_a_number_makes_none(bad):
    """All of its block is lost, here as on the CPU, and no other."""
    ends = []
    for place in (lambda params: params, on_device):
        params = place([mt.tensor(random(64), requires_grad=True)])
        optimizer = optim.Adam(params, amsgrad=True, state_bits=8)
        give(params, 0)
        params[0].grad.data[20] = bad
        optimizer.step()
        give(params, 1)
        optimizer.step()
        ends.append([params[0].numpy(), *optimizer.state_dict()["state"][0].values()])
    for here, there in zip(*ends, strict=True):
        assert np.isnan(there)[16:32].all() and np.isnan(there).sum() == 16
        np.testing.assert_allclose(there, here, rtol=1e-5)


@pytest.mark.parametrize("bits", [8, 32])
def test_padding_stays_zero_without_eps(bits):
    """0/0 there would be decayed into the moments, and a block has one scale."""
    params = on_device([mt.tensor(random(20), requires_grad=True)])
    optimizer = optim.Adam(params, eps=0.0, weight_decay=0.1, state_bits=bits)
    for step in range(3):
        give(params, step)
        optimizer.step()
    assert np.isfinite(params[0].numpy()).all() and not optimizer.flats[0].params[20:].any()


def test_float64_stays_with_the_tiles(monkeypatch):
    monkeypatch.setattr(kernels, "load", lambda name: pytest.fail(f"{name} was asked for"))
    params = on_device(leaves(dtype="f8"))
    assert isinstance(params[0].leaf.flat.params, DeviceLike)
    give(params, 0)
    optim.Adam(params, state_bits=8).step()


def test_what_does_not_fit_is_named():
    state = {name: Packed.full(32, 0, np.float32, "cpu", name == "m") for name in ("m", "v")}
    good = {"p": aligned(32, "f4"), "g": aligned(32, "f4")}
    for name, kept in state.items():
        good |= zip((name, f"{name}_scales"), kept.arrays, strict=True)
    levels = every_level("cpu")
    adam.Update([good], [0], levels=levels)
    with pytest.raises(ValueError, match=r"m_scales has shape \(1,\).*scales a 16th"):
        adam.Update([good | {"m_scales": good["m_scales"][:1]}], [0], levels=levels)
    with pytest.raises(ValueError, match="m, m_scales, p, v, v_scales; it needs g, m, p, v$"):
        adam.Update([good], [0])
    with pytest.raises(TypeError, match="m of dtype .*all are float32"):
        adam.Update([{name: a for name, a in good.items() if not name.endswith("scales")}], [0])
    with pytest.raises(TypeError, match="v of dtype .*all are uint8"):
        adam.Update([good | {"v": aligned(32, "f4")}], [0], levels=levels)
    with pytest.raises(ValueError, match="parameter 0 has the arrays g, m, p, v, v_scales; it needs g, m, m_scales, p"):
        adam.Update([{name: a for name, a in good.items() if name != "m_scales"}], [0], levels=levels)
