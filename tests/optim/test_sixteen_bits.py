"""Parameters of 16 bits: every optimizer updates float32 masters, and takes a loss scale."""

import copy
import pickle

import ml_dtypes
import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, ledger, nn, optim
from minitorch_dist.flat import FlatBuffer
from minitorch_dist.optim.optimizer import TILE
from tests.device.fake_cupy import installed, transfers

LR = 2.0 ** -10
SHAPES = [(7, 11), (131, 257), (5, 3)]
assert 131 * 257 > TILE
DTYPES = {"float16": np.float16, "bfloat16": ml_dtypes.bfloat16}


def halves(params):
    params = list(params)
    return params[::2], params[1::2]


OPTIMIZERS = {
    "sgd": lambda params: optim.SGD(params, lr=LR, momentum=0.9, weight_decay=0.1, nesterov=True),
    "plain sgd": lambda params: optim.SGD(params, lr=LR),
    "adagrad": lambda params: optim.Adagrad(params, lr=LR, weight_decay=0.1),
    "adam": lambda params: optim.Adam(params, lr=LR, weight_decay=0.1, amsgrad=True, maximize=True),
    "adamw": lambda params: optim.AdamW(params, lr=LR),
    "lion": lambda params: optim.Lion(params, lr=LR, weight_decay=0.1),
    "schedule-free": lambda params: optim.AdamWScheduleFree(params, lr=LR),
    "adamw, 8 bits": lambda params: optim.AdamW(params, lr=LR, state_bits=8),
    "lamb": lambda params: optim.LAMB(params, lr=LR),
    "lars": lambda params: optim.LARS(params, lr=1.0),
    "muon": lambda params: optim.Muon(params, lr=LR),
    "normuon": lambda params: optim.NorMuon(params, lr=LR),
    "dion": lambda params: optim.Dion(params, lr=LR),
    "dion2": lambda params: optim.Dion2(params, lr=LR, fraction=0.6),
    "adafactor": lambda params: optim.Adafactor(params, lr=LR, weight_decay=0.1),
    "combined": lambda params: optim.Combined(optim.Muon(halves(params)[0], lr=LR),
                                              optim.AdamW(halves(params)[1], lr=LR)),
}
each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS)
each_dtype = pytest.mark.parametrize("dtype", DTYPES)


def start(shapes=SHAPES):
    random = np.random.default_rng(0)
    return [random.standard_normal(shape).astype("f4") for shape in shapes]


def gradients(step, dtype, shapes=SHAPES):
    random = np.random.default_rng([step, 3])
    return [random.standard_normal(shape, np.float32).astype(dtype) for shape in shapes]


def leaves(values, dtype):
    return [mt.tensor(v.astype(dtype), requires_grad=True) for v in values]


def give(params, grads, scale=1.0):
    for p, g in zip(params, grads, strict=True):
        p.grad = mt.tensor((g.astype("f4") * scale).astype(p.dtype))


@each_optimizer
@each_dtype
def test_steps_are_those_of_float32_rounded_once(name, dtype):
    """From the same numbers, by the same gradients: 10 steps, of which 16 bits would round many away, add up."""
    dtype = DTYPES[dtype]
    low = leaves(start(), dtype)
    wide = [mt.tensor(p.numpy().astype("f4"), requires_grad=True) for p in low]
    before = [p.numpy().copy() for p in low]
    optimizers = [OPTIMIZERS[name](params) for params in (low, wide)]
    for step in range(10):
        for params, optimizer in zip((low, wide), optimizers, strict=True):
            give(params, [g.astype("f4") for g in gradients(step % 4, dtype)])
            optimizer.step()
    for p, w, b in zip(low, wide, before, strict=True):
        assert p.dtype == dtype and (p.numpy() == w.numpy().astype(dtype)).all()
        assert np.mean(p.numpy() != b) > 0.05
    for a, b in zip(*(o.state_dict()["state"] for o in optimizers), strict=True):
        assert all((a[name] == b[name]).all() and a[name].dtype == np.float32 for name in b)
        assert set(a) == {"master", *b}


@each_optimizer
@each_dtype
def test_a_loss_scale_changes_no_bit_and_a_step_left_out_nothing(name, dtype):
    dtype, found = DTYPES[dtype], []
    for scale in (None, 2.0 ** 7):
        params = leaves(start(), dtype)
        optimizer, scaler = OPTIMIZERS[name](params), optim.GradScaler(scale or 1.0, enabled=scale is not None)
        for step in range(4):
            give(params, gradients(step, dtype), scaler.get_scale())
            if step == 2:
                if scale is None:
                    continue
                params[1].grad.data[3, 5] = np.inf
            before = [p.numpy().tobytes() for p in params]
            scaler.step(optimizer)
            if scale is not None:
                assert scaler.found_inf(optimizer) == (step == 2)
                scaler.update(scale)
            assert (before == [p.numpy().tobytes() for p in params]) == (step == 2)
        state = optimizer.state_dict()
        found.append((state["steps"], [p.numpy().tobytes() for p in params],
                      [a.tobytes() for arrays in state["state"] for a in arrays.values()]))
    assert found[0] == found[1] and found[0][0] == [3] * 3


@each_optimizer
def test_gradients_that_16_bits_would_flush_are_divided_in_float32(name):
    """Some 2⁻²⁸, which float16 has nothing for: the masters go where float32 goes."""
    low = leaves(start(), np.float16)
    wide = [mt.tensor(p.numpy().astype("f4"), requires_grad=True) for p in low]
    optimizers = [OPTIMIZERS[name](params) for params in (low, wide)]
    for step in range(3):
        give(low, gradients(step, np.float16))
        give(wide, gradients(step, np.float16), 2.0 ** -28)
        optimizers[0].step(grad_scale=2.0 ** 28)
        optimizers[1].step()
    masters = [arrays["master"] for arrays in optimizers[0].state_dict()["state"]]
    in_order = [w for pair in halves(wide) for w in pair] if name == "combined" else wide
    for master, w, p, g in zip(masters, in_order, low, gradients(2, np.float16), strict=True):
        np.testing.assert_array_equal(master, w.numpy())
        np.testing.assert_array_equal(p.grad.numpy(), g)        # as they came


@each_optimizer
def test_what_somebody_sets_counts_and_state_goes_along(name):
    params = leaves(start(), np.float16)
    optimizer = OPTIMIZERS[name](params)
    give(params, gradients(0, np.float16))
    optimizer.step()
    with mt.no_grad():
        params[1][...] = 2.0
    FlatBuffer(params[::-1])
    twins = leaves([p.numpy() for p in params], np.float16)
    other = OPTIMIZERS[name](twins)
    other.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    for ps, o in ((params, optimizer), (twins, other)):
        give(ps, gradients(1, np.float16))
        o.step()
    assert np.abs(params[1].numpy() - 2.0).max() < 0.02
    assert all(p.numpy().tobytes() == t.numpy().tobytes() for p, t in zip(params, twins, strict=True))


def test_a_gpu_is_asked_once_for_factor_and_decision():
    with installed():
        params = [mt.tensor(v.astype("f2"), requires_grad=True, device="cuda") for v in start([(4, 3)])]
        optimizer = optim.Combined(optim.SGD(params, lr=1.0))
        for found in (0.0, 1.0):
            before = params[0].cpu().numpy()
            params[0].grad = mt.tensor(np.full((4, 3), 8, "f2"), device="cuda")
            transfers.clear()
            optimizer.step(mt.tensor([4.0], device="cuda"), mt.tensor([found], device="cuda"))
            assert transfers["down"] == 1 and not transfers["implicit"]
            moved = before.astype("f4") - params[0].cpu().numpy().astype("f4")
            np.testing.assert_allclose(moved, 0.0 if found else 2.0, atol=2e-3)


def test_state_settles_in_all_parts_or_in_none():
    params = leaves(start(), np.float16)
    optimizer = OPTIMIZERS["combined"](params)
    give(params, gradients(0, np.float16))
    optimizer.step()
    before = [a.tobytes() for arrays in optimizer.state_dict()["state"] for a in arrays.values()]

    class Full:
        """Room for one part."""
        room = 1

        def move(self, state):
            if not self.room:
                raise OSError("no room")
            self.room -= 1
            return {name: a.copy() for name, a in state.items()}
    with pytest.raises(OSError, match="no room"):
        optimizer.settle_in(Full())
    assert [o.home for o in optimizer.optimizers] == [None, None]
    give(params, gradients(1, np.float16))
    assert before == [a.tobytes() for arrays in optimizer.state_dict()["state"] for a in arrays.values()]
    optimizer.step()


def test_masters_are_counted():
    """2 + 2 bytes of a parameter and its gradient, 4 of each state and of the master."""
    w = mt.tensor(np.ones((64, 128), np.float16), requires_grad=True)
    sgd = optim.SGD([w], momentum=0.9)
    with ledger.record(memory=True) as book:
        (w * w).sum().backward()
        sgd.step()
    n = w.size
    assert [book.live[kind] // n for kind in ("parameter", "gradient", "optimizer")] == [2, 2, 8]


# ---------------------------------------------------------------- state of another optimizer

def model_of():
    mt.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 4))


KINDS = {       # the same kinds of state arrays, in as many groups
    "adam, adamw": lambda a, b, c, d: optim.Combined(optim.Adam([a, c]), optim.AdamW([b, d])),
    "adamw, adam": lambda a, b, c, d: optim.Combined(optim.AdamW([a, c]), optim.Adam([b, d])),
    "others": lambda a, b, c, d: optim.Combined(optim.Adam([a, b]), optim.AdamW([c, d])),
    "unevenly": lambda a, b, c, d: optim.Combined(optim.Adam([a]), optim.AdamW([b, c, d])),
    "adam alone": lambda a, b, c, d: optim.Adam([{"params": [a, c]}, {"params": [b, d]}]),
}


@pytest.mark.parametrize(("other", "in_memory", "on_disk"), [
    ("adamw, adam", r"is of Combined\(Adam, AdamW\), this optimizer is Combined\(AdamW, Adam\)",
     r"is of a Combined\(Adam, AdamW\), this run has a Combined\(AdamW, Adam\)"),
    ("others", "shape", "0.bias of the optimizer's group 0 is in another one there"),
    ("unevenly", r"groups of \[2, 2\] parameters, this Combined\(Adam, AdamW\) of \[1, 3\]", "2.weight .*group 1"),
    ("adam alone", r"is of Combined\(Adam, AdamW\), this optimizer is Adam$", "is of a Combined.* this run has a Adam"),
])
def test_another_combination_is_refused(tmp_path, other, in_memory, on_disk):
    model = model_of()
    optimizer = KINDS["adam, adamw"](*model.parameters())
    checkpoints.save(tmp_path / "it", model, optimizer)
    wrong = KINDS[other](*model_of().parameters())
    before = wrong.state_dict()
    with pytest.raises(ValueError, match=in_memory):
        wrong.load_state_dict(optimizer.state_dict())
    twin = model_of()
    with pytest.raises(checkpoints.CheckpointError, match=on_disk):
        checkpoints.load(tmp_path / "it", twin, KINDS[other](*twin.parameters()))
    assert wrong.state_dict()["groups"] == before["groups"]
    checkpoints.load(tmp_path / "it", twin, KINDS["adam, adamw"](*twin.parameters()))


# ---------------------------------------------------------------- parts of parameters

@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, lambda p: pickle.loads(pickle.dumps(p))])
@pytest.mark.parametrize("frozen", [False, True])
def test_a_copy_of_a_part_is_a_part(how, frozen):
    p = mt.tensor(np.ones((2, 6)), requires_grad=True)
    p.leaf.part_of = (4, 6)
    twin = how(p.requires_grad_(not frozen))
    assert twin.requires_grad != frozen and twin is not p
    with pytest.raises(ValueError, match=r"\(2, 6\) is a part of one of shape \(4, 6\)"):
        optim.Muon([twin.requires_grad_()])
    whole = how(mt.tensor(np.ones((2, 6)), requires_grad=True))
    optim.Muon([whole])


def test_a_share_of_several_ranks_is_not_pickled():
    p = mt.tensor(np.ones((2, 6)), requires_grad=True)
    p.leaf.over, p.leaf.part_of = object(), (4, 6)
    for how in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"\(2, 6\) is a share of one of shape \(4, 6\)"):
            how(p)
    assert copy.copy(p.detach()).requires_grad is False and copy.deepcopy(p).leaf.over is p.leaf.over
