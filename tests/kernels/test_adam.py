"""The fused update against torch, over a thousand steps, and through the optimizer: one launch, the same numbers."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import kernels, ledger, optim
from minitorch_dist.kernels import adam

from .harness import random
from .samples.adam import flat, padded

pytestmark = pytest.mark.skipif(not kernels.interpreting(), reason="Triton compiles in this process")


class DeviceLike(np.ndarray):
    """Host memory that the engine takes for a GPU's: kernels are asked for, and the interpreter runs them."""


def on_device(params):
    """An array of each parameter's flat buffer becomes DeviceLike; as kernels.usable asks for."""
    for buffer in mt.flat.flat_buffers(params):
        buffer.params, buffer.grads = buffer.params.view(DeviceLike), buffer.grads.view(DeviceLike)
    return params


def leaves(sizes, dtype=np.float32):
    return [mt.tensor(random(n, dtype=dtype, seed=k), requires_grad=True) for k, n in enumerate(sizes)]


def give_gradients(params, step, dtype=np.float32, resting=()):
    for k, p in enumerate(params):
        p.grad = None if k in resting else mt.tensor(random(p.size, dtype=dtype, seed=100 + step))


@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.1}, {"amsgrad": True}, {"maximize": True, "eps": 1e-3}],
                         ids=str)
@pytest.mark.parametrize("decoupled", [False, True])
def test_ten_steps_are_torchs(decoupled, settings):
    torch = pytest.importorskip("torch")
    sizes = 5, 1030, 16
    theirs = [torch.nn.Parameter(torch.tensor(random(n, seed=k))) for k, n in enumerate(sizes)]
    reference = (torch.optim.AdamW if decoupled else torch.optim.Adam)(theirs, lr=1e-2, fused=True, **settings)
    params = leaves(sizes)
    on_device(params)
    ours = (optim.AdamW if decoupled else optim.Adam)(params, lr=1e-2, **settings)
    for step in range(10):
        give_gradients(params, step)
        for p, t in zip(params, theirs, strict=True):
            t.grad = torch.tensor(p.grad.numpy().copy())
        ours.step()
        reference.step()
    for p, t in zip(params, theirs, strict=True):
        np.testing.assert_allclose(p.numpy(), t.detach().numpy(), rtol=3e-6, atol=1e-7)


def test_loss_scaling_is_torchs():
    """grad_scale divides, found_inf skips the update and the count."""
    torch = pytest.importorskip("torch")
    theirs = torch.nn.Parameter(torch.tensor(random(50)))
    reference = torch.optim.Adam([theirs], lr=1e-2, fused=True)
    p, = on_device(leaves([50]))
    ours = optim.Adam([p], lr=1e-2)
    for step, inf in enumerate((0.0, 1.0, 0.0)):
        give_gradients([p], step)
        theirs.grad = torch.tensor(p.grad.numpy().copy())
        reference.grad_scale, reference.found_inf = torch.tensor(64.0), torch.tensor(inf)
        reference.step()
        ours.step(grad_scale=64.0, found_inf=inf)
    np.testing.assert_allclose(p.numpy(), theirs.detach().numpy(), rtol=3e-6, atol=1e-7)
    assert ours.state_dict()["steps"] == [2] == [int(reference.state[theirs]["step"])]


@pytest.mark.parametrize("t", [1, 2, 10, 69, 70, 693, 694, 10_000, 2_000_000])
def test_bias_corrections_at_any_step(t):
    """One update from chosen moments: what remains is lr · m/(1 - β₁ᵗ) / (√(v/(1 - β₂ᵗ)) + eps)."""
    x, g = (flat(random(16, seed=k), 16) for k in (1, 2))
    m, v = flat(random(16, seed=3), 16), flat(random(16, seed=4) ** 2, 16)
    parts = [a.astype(np.float64) for a in (x, g, m, v)]
    update = adam.Update([{"p": x, "g": g, "m": m, "v": v}], [t - 1])
    before = x.copy()
    update([(0.5, (0.9, 0.999), 1e-8, 0.0)])
    wanted = adam.definition(*parts, None, t, 0.5, (0.9, 0.999), 1e-8, 0.0)[0]
    np.testing.assert_allclose(x - before, wanted - parts[0], rtol=2e-6)
    assert update.counts() == [t]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")      # ln 0, and the padding's 0/0 where eps is 0
@pytest.mark.parametrize("beta", [0.0, 0.5])
def test_small_betas(beta):
    x, g, m, v = (flat(random(16, seed=k), 16) for k in (1, 2, 3, 4))
    m[:] = v[:] = 0
    wanted = adam.definition(x.astype(np.float64), g, m, v, None, 1, 0.1, (beta, beta), 0.0, 0.0)[0]
    adam.Update([{"p": x, "g": g, "m": m, "v": v}], [0])([(0.1, (beta, beta), 0.0, 0.0)])
    np.testing.assert_allclose(x, wanted, rtol=1e-6)


# ---------------------------------------------------------------- through the optimizer

def plan(name, dtype):
    """Two optimizers of the same model with two groups, of which the second is "on a GPU"; two flat buffers each."""
    made = []
    for place in (lambda params: params, on_device):
        params = leaves((70, 3, 1100, 16, 33), dtype)
        mt.flat.FlatBuffer(params[:2])
        place(params)
        groups = [{"params": params[::2]},
                  {"params": params[1::2], "weight_decay": 0.2, "lr": 3e-3, "betas": (0.8, 0.9)}]
        made.append((params, getattr(optim, name)(groups, lr=1e-2, amsgrad=name == "Adam")))
    return made


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_one_launch_for_the_whole_model_and_the_numbers_of_the_cpu(name, dtype):
    """Rested, skipped, scaled steps, a schedule, a saved and restored state: the same as the tiles on the CPU."""
    (cpu, tiled), (gpu, fused) = plan(name, dtype)
    for step in range(6):
        for params, optimizer in ((cpu, tiled), (gpu, fused)):
            give_gradients(params, step, dtype, resting=[(), (1,), (0, 4)][step % 3])
            optimizer.param_groups[0]["lr"] = 1e-2 / (1 + step // 2)
            with ledger.record() as book:
                optimizer.step(grad_scale=mt.tensor(4.0) if step == 2 else None, found_inf=float(step == 4))
            if optimizer is fused:
                assert dict(book.launches) == {"adam": 1}
        if step == 3:
            saved, other = fused.state_dict(), plan(name, dtype)[1]
            give_gradients(other[0], step, dtype)
            other[1].step()         # what it has counted so far is to be forgotten
            for p, q in zip(gpu, other[0], strict=True):
                q.data[...] = p.data
            gpu, fused = other
            fused.load_state_dict(saved)
    assert fused.state_dict()["steps"] == tiled.state_dict()["steps"] and max(tiled.state_dict()["steps"]) == 5
    for p, q in zip(cpu, gpu, strict=True):
        np.testing.assert_allclose(q.numpy(), p.numpy(), rtol=1e-5 if dtype == np.float32 else 2e-3, atol=1e-7)
    for a, b in zip(tiled.state_dict()["state"], fused.state_dict()["state"], strict=True):
        assert set(a) == set(b)
        for key in a:
            np.testing.assert_allclose(b[key], a[key], rtol=1e-5, atol=1e-7)


def test_disabled_and_enabled_in_turns():
    (cpu, tiled), (gpu, fused) = plan("AdamW", np.float32)
    for step in range(4):
        for params, optimizer in ((cpu, tiled), (gpu, fused)):
            give_gradients(params, step)
            if step % 2:
                with kernels.disable():
                    optimizer.step()
            else:
                optimizer.step()
    for p, q in zip(cpu, gpu, strict=True):
        np.testing.assert_allclose(q.numpy(), p.numpy(), rtol=1e-5, atol=1e-7)
    assert fused.state_dict()["steps"] == [4] * 5


def test_parameters_that_move_to_other_storage_are_updated_there():
    """As two versions of a pipeline's weights do (parallel/pipelines/two_buffered.py)."""
    (cpu, tiled), (gpu, fused) = plan("AdamW", np.float32)
    free = [flat.params.copy() for flat in fused.flats]
    for step in range(5):
        give_gradients(cpu, step)
        give_gradients(gpu, step)
        tiled.step()
        before = [flat.params for flat in fused.flats]
        for buffer, array in zip(fused.flats, free, strict=True):
            array[...] = buffer.params
            buffer.live_in(array)
        kept = [array.copy() for array in before]
        fused.step()
        for array, copy in zip(before, kept, strict=True):
            np.testing.assert_array_equal(array, copy)
        free = before
    for p, q in zip(cpu, gpu, strict=True):
        np.testing.assert_allclose(q.numpy(), p.numpy(), rtol=1e-5, atol=1e-7)
    assert fused.state_dict()["steps"] == [5] * 5


def test_weights_set_by_hand_are_not_overwritten_by_their_master():
    for place in (lambda params: params, on_device):
        p, = place(leaves([20], np.float16))
        optimizer = optim.Adam([p], lr=1e-3)
        give_gradients([p], 0, np.float16)
        optimizer.step()
        p.data[...] = 3.0
        optimizer.step()
        np.testing.assert_allclose(p.numpy(), 3.0, atol=5e-3)


def test_what_does_not_fit_is_named():
    good = {name: flat(random(16), 16) for name in ("p", "g", "m", "v")}
    for change in ({"g": flat(random(32), 32)}, {"m": good["m"][:8]}):
        with pytest.raises(ValueError, match="length"):
            adam.Update([good | change], [0])
    with pytest.raises(ValueError, match="16 bytes"):
        adam.Update([{name: flat(random(17), 32)[1:17] for name in good}], [0])
    with pytest.raises(TypeError, match="dtype"):
        adam.Update([good, good | {"p": good["p"].astype(np.float16)}], [0, 0])


def test_padding_stays_zero_and_gradients_stay():
    (_, _), (gpu, fused) = plan("AdamW", np.float32)
    give_gradients(gpu, 0)
    before = [p.grad.numpy().copy() for p in gpu]
    fused.step(grad_scale=2.0)
    for p, g in zip(gpu, before, strict=True):
        np.testing.assert_array_equal(p.grad.numpy(), g)
    for buffer in fused.flats:
        inside = np.zeros(buffer.size, bool)
        for s in buffer.segments:
            inside[s.start:s.stop] = True
            assert padded(s.stop - s.start) == s.end - s.start
        assert not buffer.params[~inside].any()


@pytest.mark.parametrize("resting", [(), (1,)])
def test_a_step_between_forward_and_backward_raises(resting):
    """As on the CPU; of a parameter that has rested, nothing was overwritten."""
    params = on_device(leaves((20, 20)))
    optimizer = optim.Adam(params)
    squares = [(p * p).sum() for p in params]
    give_gradients(params, 0, resting=resting)
    optimizer.step()
    for k, y in enumerate(squares):
        if k in resting:
            y.backward()
        else:
            with pytest.raises(RuntimeError, match="Adam.step has overwritten"):
                y.backward()


def test_a_direction_that_changes_between_steps():
    """The kernel is made for one direction; counts of updates go over to the next."""
    ends = []
    for place in (lambda params: params, on_device):
        params = place(leaves((70, 33)))
        optimizer = optim.Adam([{"params": params[:1]}, {"params": params[1:]}], lr=1e-2)
        for step, up in enumerate((False, True, True, False)):
            optimizer.param_groups[1]["maximize"] = up
            give_gradients(params, step)
            optimizer.step()
        ends.append([np.asarray(p.data) for p in params])
        assert optimizer.state_dict()["steps"] == [4, 4]
    for theirs, ours in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)
