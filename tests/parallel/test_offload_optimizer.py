"""The optimizer's state in files, or on the host beside a GPU: the bits of the update without."""

import copy
import mmap
import resource

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, ledger, nn, optim
from minitorch_dist.optim.optimizer import TILE
from minitorch_dist.optim.packed import arrays_of
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.offload import offload, offload_optimizer, spill
from tests.crews import crews
from tests.device.fake_cupy import installed, transfers

CASES = "tests.parallel.offload_cases:"
OPTIMIZERS = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: optim.Adam(groups, lr=0.01, amsgrad=True, maximize=True),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.01),
    "adamwschedulefree": lambda groups: optim.AdamWScheduleFree(groups, lr=0.01),
}


class Tensors(nn.Module):
    """Parameters of unequal sizes, over a tile and below; one is never used, one is of another dtype."""

    def __init__(self, dtype):
        super().__init__()
        rng = np.random.default_rng(1)
        self.a = nn.Parameter(rng.standard_normal((3, TILE // 2 + 5)).astype(dtype))
        self.b = nn.Parameter(rng.standard_normal(70).astype(dtype))
        self.idle = nn.Parameter(rng.standard_normal(33).astype(dtype))
        self.c = nn.Parameter(rng.standard_normal((1, 1)).astype("f8"))

    def backward(self, step):
        rng = np.random.default_rng(step)
        for p in (self.a, self.b, self.c):
            gradient = rng.standard_normal(p.shape).astype(p.dtype)
            p.grad = mt.tensor(gradient, device=p.device)


def groups(model):
    return [{"params": [model.a, model.idle], "weight_decay": 0.1}, {"params": [model.b, model.c], "lr": 0.003}]


def train(name, dtype, away=None, at=0, steps=4, device=None):
    """(parameters, state dict) after some steps; `away` is applied to the optimizer before step `at`."""
    model = Tensors(dtype)
    if device:
        model.to(device)
    optimizer = OPTIMIZERS[name](groups(model))
    for step in range(steps):
        if away and step == at:
            away(optimizer)
        model.backward(step)
        if step == 2:
            optim.clip_grad_norm_([model.a, model.b, model.c], 10.0)
        optimizer.step()
        if step == 1:
            with mt.no_grad():
                model.b[3] = 0.125      # a parameter that somebody has set counts as set
    return model.state_dict(), optimizer.state_dict(), optimizer


def same(found, wanted):
    assert {k: a.tobytes() for k, a in found[0].items()} == {k: a.tobytes() for k, a in wanted[0].items()}
    assert found[1]["steps"] == wanted[1]["steps"] and found[1]["groups"] == wanted[1]["groups"]
    for a, b in zip(found[1]["state"], wanted[1]["state"], strict=True):
        assert {k: v.tobytes() for k, v in a.items()} == {k: v.tobytes() for k, v in b.items()}


@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype, at", [("f4", 0), ("f8", 2), ("f2", 1)])
def test_state_in_files_has_the_same_bits(tmp_path, name, dtype, at):
    wanted = train(name, dtype)
    found = train(name, dtype, lambda optimizer: offload_optimizer(optimizer, tmp_path), at)
    same(found, wanted)
    arrays = [a for state in found[2].state for a in state.values()]
    assert arrays and all(isinstance(offload.owner_of(a).base.obj if isinstance(offload.owner_of(a).base, memoryview)
                                     else offload.owner_of(a).base, mmap.mmap) for a in arrays)
    assert found[1]["steps"] == [4, 0, 4, 4] and not list(tmp_path.iterdir())


def test_no_state_is_counted_in_memory(tmp_path):
    model = Tensors("f4")
    size = sum(-(-p.size // 16) * 16 * p.dtype.itemsize for p in model.parameters())
    for away in (False, True):
        optimizer = optim.Adam(model.parameters())
        if away:
            assert offload_optimizer(optimizer, tmp_path) is optimizer
        model.backward(0)
        with ledger.record(memory=True) as book:
            optimizer.step()
        assert book.peak["optimizer"] == 0 if away else book.peak["optimizer"] >= 2 * size
        assert book.launches["adam"] == 2


def test_state_follows_parameters_to_other_buckets(tmp_path):
    """DistributedDataParallel cuts its buckets anew after the first backward."""
    def run(away):
        mt.manual_seed(4)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 90), nn.Tanh(), nn.Linear(90, 70)),
                                        comm.world_of_one(), bucket_cap_mb=0.01)
        optimizer = optim.AdamW(model.parameters(), 0.01)
        if away:
            offload_optimizer(optimizer, tmp_path)
        seen = []
        for step in range(3):
            x = np.random.default_rng(step).standard_normal((4, 5)).astype("f4")
            mt.sum(mt.sin(model(mt.tensor(x)))).backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(len(optimizer.flats))
        return model.state_dict(), optimizer.state_dict(), seen
    wanted, found = run(False), run(True)
    same(found, wanted)
    assert found[2] == wanted[2]


@pytest.mark.parametrize("n", [1, 3])
def test_with_pieces_of_fully_shard_and_checkpoints(tmp_path, n):
    """Each rank's state in files of its own; saved, and resumed without offload, and the other way round."""
    for found in crews.call(CASES + "sharded_state", n, (str(tmp_path),)):
        assert len(set(found["curves"])) == 1
        assert found["counted"][0] > 0 == found["counted"][1]


def test_what_was_loaded_before_the_first_step_is_taken_along(tmp_path):
    """Such as masters with more digits than the parameters."""
    optimizer = optim.Adam([nn.Parameter(np.ones(2, "f2"))])
    saved = optimizer.state_dict()
    saved["state"][0]["master"][:] = [1.0003, 2.0007]
    optimizer.load_state_dict(saved)
    found = offload_optimizer(optimizer, tmp_path).state_dict()
    assert found["state"][0]["master"].tolist() == np.array([1.0003, 2.0007], "f4").tolist()


# ---------------------------------------------------------------- beside a GPU

@pytest.mark.parametrize("name", list(OPTIMIZERS))
@pytest.mark.parametrize("dtype, at, to", [("f4", 0, "cpu"), ("f2", 0, "cpu"), ("f8", 2, "cpu"), ("f4", 1, "folder")])
def test_beside_a_gpu_the_host_updates(tmp_path, monkeypatch, name, dtype, at, to):
    """By pieces, through two buffers: the host's own bits; gradients and parameters come down, parameters go up."""
    wanted = train(name, dtype)
    monkeypatch.setattr(offload, "PIECE", 16 * 1500)
    to = tmp_path if to == "folder" else to
    with installed():
        found = train(name, dtype, lambda optimizer: offload_optimizer(optimizer, to), at, device="cuda")
        same(found[:2], wanted)
        assert all(isinstance(a, np.ndarray) for state in found[2].state for a in state.values())
        model, optimizer = Tensors("f4").to("cuda"), None
        optimizer = offload_optimizer(OPTIMIZERS[name](groups(model)), to)
        model.backward(0)
        transfers.clear()
        with ledger.record(memory=True) as book:
            optimizer.step()
        # pieces: of a 3 (3 · 16,389 elements), of b one, of c one
        assert transfers == {"down": 2 * 5, "up": 5}
        assert book.peak["optimizer"] == 0 and book.peak["buffer"] == 2 * 2 * 16 * 1500 * (4 + 8)
        assert book.launches[name] == 3


def test_state_that_begins_above_0_does_so_in_a_file(tmp_path):
    ends = []
    for to in (None, tmp_path):
        model = Tensors("f4")
        optimizer = optim.Adagrad(groups(model), lr=0.1, initial_accumulator_value=0.5)
        optimizer = optimizer if to is None else offload_optimizer(optimizer, to)
        model.backward(0)
        optimizer.step()
        ends.append((model.state_dict(), optimizer.state_dict()))
    same(*ends)


def lies_in_a_file(array):
    """Whether an array's memory is a mapped file's."""
    while isinstance(array, np.ndarray):
        array = array.base
    return isinstance(array, memoryview) and isinstance(array.obj, mmap.mmap)


@pytest.mark.parametrize("bits", [32, 8])
def test_a_deep_copys_state_is_in_files_of_its_own(tmp_path, bits):
    model = Tensors("f4")
    optimizer = offload_optimizer(optim.AdamW(groups(model), lr=0.01, state_bits=bits), tmp_path)
    model.backward(0)
    optimizer.step()
    with ledger.record(memory=True) as book:
        model2, twin = copy.deepcopy((model, optimizer))
        arrays = [a for each in (optimizer, twin) for state in each.state for s in state.values() for a in arrays_of(s)]
        assert all(map(lies_in_a_file, arrays)) and len({a.ctypes.data for a in arrays}) == len(arrays)
        alone = model.state_dict(), optimizer.state_dict()
        for step in (1, 2):
            model2.backward(step)
            twin.step()
        assert book.peak["optimizer"] == 0
    same((model.state_dict(), optimizer.state_dict()), alone)       # the first one's are as they were
    for step in (1, 2):
        model.backward(step)
        optimizer.step()
    same((model2.state_dict(), twin.state_dict()), (model.state_dict(), optimizer.state_dict()))


def test_beside_a_gpu_a_deep_copys_state_is_on_the_host():
    with installed():
        model = Tensors("f4").to("cuda")
        optimizer = offload_optimizer(optim.AdamW(groups(model), lr=0.01))
        model.backward(0)
        optimizer.step()
        model2, twin = copy.deepcopy((model, optimizer))
        arrays = [a for each in (optimizer, twin) for state in each.state for a in state.values()]
        assert all(type(a) is np.ndarray for a in arrays) and len({a.ctypes.data for a in arrays}) == len(arrays)
        for m, o in ((model, optimizer), (model2, twin)):
            m.backward(1)
            o.step()
        same((model2.state_dict(), twin.state_dict()), (model.state_dict(), optimizer.state_dict()))


def test_what_has_no_elements_needs_no_file(tmp_path):
    found = spill.mapped(tmp_path / "nowhere", np.zeros((0, 3), "f4"))
    assert found.shape == (0, 3) and found.dtype == np.float32


# ---------------------------------------------------------------- what goes wrong

def test_what_is_refused(tmp_path):
    optimizer = optim.Adam([nn.Parameter(np.ones(5000, "f4"))])
    with pytest.raises(ValueError, match="give a folder"):
        offload_optimizer(optimizer)
    with installed(), pytest.raises(ValueError, match="give a folder"):     # one of two is enough
        offload_optimizer(optim.Adam([nn.Parameter(np.ones(3)), *nn.Linear(2, 3).to("cuda").parameters()]))
    with pytest.raises(FileNotFoundError, match="no file can be made in this folder.*nowhere"):
        offload_optimizer(optimizer, tmp_path / "nowhere")
    for nowhere in (None, 3):
        with pytest.raises(TypeError, match=f"to={nowhere}: 'cpu', or the path of a folder"):
            offload_optimizer(optimizer, nowhere)
        with pytest.raises(TypeError, match=f"offload_activations: to={nowhere}"), \
                offload.offload_activations(nn.Linear(2, 3), nowhere):
            pass
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(OSError, match=r"32,768 bytes can't be set apart here \(File too large\)"):
            offload_optimizer(optimizer, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert optimizer.home is None       # and goes on as it was
    optimizer.param_groups[0]["params"][0].grad = np.ones(5000, "f4")
    optimizer.step()
    assert optimizer.state_dict()["steps"] == [1]
