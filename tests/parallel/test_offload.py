"""Saved activations on disk or on the host: the bits of a step without, and the bytes that theory says."""

import gc
import os
import resource
import signal
import subprocess
import sys
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.autodiff.primitive import state
from minitorch_dist.autodiff.writes import log, tick, wrote
from minitorch_dist.parallel.offload import offload, offload_activations, spill
from tests.crews import crews
from tests.device.fake_cupy import installed, transfers

CASES = "tests.parallel.offload_cases:"


@contextmanager
def file_size_limit(nbytes):
    """The kernel refuses to let files grow beyond it, as it does on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.fixture
def written(monkeypatch):
    """[the owner's bounds, its first and last byte written] of what goes away."""
    found, put = [], offload.Activations.put

    def noted(self, owner, first, last):
        found.append((offload.byte_range(owner), first, last))
        return put(self, owner, first, last)
    monkeypatch.setattr(offload.Activations, "put", noted)
    return found


def gpt(dtype="f4"):
    mt.manual_seed(1)
    return nn.GPT(17, 9, layers=3, heads=3, dim=12, kv_heads=1, dropout=0.2, positions="rotary", dtype=np.dtype(dtype))


def net(dtype="f4"):
    """Convolution, pooling, BatchNorm; a frozen layer and a mask."""
    mt.manual_seed(2)
    model = nn.Sequential(nn.Reshape(1, 8, 8), nn.Conv2d(1, 3, 3, dtype=dtype), nn.BatchNorm(3, dtype=dtype),
                          nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(27, 7, dtype=dtype), nn.Tanh(),
                          Masked(7, 5, dtype))
    model[6].weight.requires_grad_(False)
    return model


class Masked(nn.Module):
    def __init__(self, inside, outside, dtype):
        super().__init__()
        self.weight = nn.Parameter(np.random.default_rng(3).standard_normal((inside, outside)).astype(dtype))
        self.register_buffer("mask", (np.random.default_rng(4).random((inside, outside)) < 0.6).astype(dtype))

    def forward(self, x):
        return x @ (self.weight * self.mask)


def loss_of(model, dtype="f4", place=lambda a: a):
    rng = np.random.default_rng(5)
    if isinstance(model, nn.GPT):
        x = rng.integers(0, 17, (5, 9))
        return nn.cross_entropy(model(place(x)).reshape((-1, 17)), place(x.reshape(-1)), reduction="sum")
    x = rng.standard_normal((6, 64)).astype(dtype)
    return mt.sum(mt.sin(model(mt.tensor(place(x)))) * place(rng.standard_normal((6, 5)).astype(dtype)))


def gradients(make, context, dtype="f4", steps=3):
    """Gradients and parameters of some steps of SGD, which moves the parameters into a flat buffer."""
    model, found = make(dtype), []
    optimizer = optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9)
    for _ in range(steps):
        with context(model):
            loss = loss_of(model, dtype)
        loss.backward()
        found += [p.grad.data.copy() for p in model.parameters() if p.requires_grad] + [np.asarray(loss.data)]
        optimizer.step()
        optimizer.zero_grad()
    return found


def same(found, wanted):
    assert len(found) == len(wanted) > 3
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()


# ---------------------------------------------------------------- the same bits

@pytest.mark.parametrize("make", [gpt, net])
@pytest.mark.parametrize("dtype", ["f4", "f8"])
@pytest.mark.parametrize("prefetch", [0, 3])
def test_gradients_have_the_same_bits(tmp_path, written, make, dtype, prefetch):
    wanted = gradients(make, lambda m: nullcontext(), dtype)
    same(gradients(make, lambda m: offload_activations(m, tmp_path, 1, prefetch), dtype), wanted)
    assert len(written) > 20


def views():
    """Arrays as ops may keep them."""
    rng = np.random.default_rng(6)
    a = rng.standard_normal((7, 6, 5))
    qkv = rng.standard_normal((2, 3, 9, 4)).astype("f4")
    return {"itself": a, "transposed": a.transpose(2, 0, 1), "slice": a[2:4], "steps": a[::2, 1::3, ::-1],
            "backwards": a[::-1], "column": a[:, 1], "spread": np.broadcast_to(a[0], (4, 6, 5)),
            "fortran": np.asfortranarray(a[0]), "q": qkv[:, :, :3].transpose(0, 2, 1, 3), "v": qkv[:, :, 6:],
            "windows": np.lib.stride_tricks.sliding_window_view(a, 3, 0), "bytes": a.view("u1")[:, :, 3:11],
            "bool": a > 0, "empty": a[:0], "one": a[3:4, 2:3, 1:2],
            "frombuffer": np.frombuffer(bytearray(a.tobytes()))[::-1]}


@pytest.mark.parametrize("name", list(views()))
def test_an_array_comes_back_with_its_strides(tmp_path, name):
    array = views()[name]
    copy = array.copy()
    store = offload.Activations(nn.Sequential(), spill.Spill(tmp_path), 1, 1)
    kept = store.pack(array)
    assert isinstance(kept, offload.View) == (name != "empty")
    if name != "empty":
        offload.memory_of(offload.owner_of(array))[...] = 7     # what is written to it now is not seen
    again = store.unpack(kept)
    assert again.dtype == copy.dtype and again.strides == array.strides and np.array_equal(again, copy)


@pytest.mark.parametrize("inside", [True, False])
def test_twice_and_to_second_order(tmp_path, inside):
    """Backward twice through what is kept; a gradient's gradient, recorded inside of the block and outside."""
    def passes(context):
        w = mt.tensor(np.random.default_rng(7).standard_normal((5, 4)), requires_grad=True)
        x = np.random.default_rng(8).standard_normal((6, 5))
        block = context()
        with block if inside else nullcontext():
            with nullcontext() if inside else block:
                y = mt.sum(mt.exp(mt.tanh(mt.tensor(x) @ w) * 0.5))
            y.backward(retain_graph=True)
            y.backward(create_graph=True)
            first, w.grad = w.grad, None
            mt.sum(first * first).backward()
        return [first.data, w.grad.data, x, np.asarray(y.data)]
    same(passes(lambda: offload_activations(nn.Sequential(), tmp_path, 1)), passes(nullcontext))


def test_beside_checkpoints_transforms_and_compiled_functions(tmp_path):
    def step(context):
        model, x = gpt("f8"), np.random.default_rng(9).integers(0, 17, (2, 9))
        for block in model.blocks:
            block.dropout.p = 0.0
        with context(model):
            h = model.embed(x)
            for run in (mt.checkpoint(model.blocks[0]), model.blocks[1], model.blocks[2]):
                h = run(h)
            out = mt.sum(mt.sin(h)) + mt.sum(mt.grad(lambda u: mt.sum(mt.tanh(u) ** 3))(h))
            out.backward()
        return [p.grad.data for p in model.parameters() if p.grad is not None]
    same(step(lambda m: offload_activations(m, tmp_path, 1)), step(lambda m: nullcontext()))


def test_beside_fully_shard(tmp_path):
    for equal, bytes_written in crews.call(CASES + "sharded_activations", 2, (str(tmp_path),)):
        assert equal and bytes_written > 0


# ---------------------------------------------------------------- what it costs

@pytest.mark.parametrize("prefetch", [0, 1, 2])
@pytest.mark.parametrize("n", [1, 5])
def test_memory_is_that_of_the_chain(tmp_path, n, prefetch):
    """n values of tanh: n are held without; with, the one that backward is at and `prefetch` more."""
    def chain(context):
        x = mt.tensor(np.random.default_rng(0).standard_normal(1000), requires_grad=True)
        with ledger.record(memory=True) as book:
            with context:
                h = x
                for _ in range(n):
                    h = mt.tanh(h)
            kept, last = book.live["activation"], mt.sum(h)
            del h
            last.backward()
        assert book.live["activation"] == 0
        return kept, book.peak["activation"]
    assert chain(nullcontext()) == (8000 * n, 8000 * n)
    assert chain(offload_activations(nn.Sequential(), tmp_path, prefetch=prefetch, min_bytes=8000)) == \
        (0, 8000 * min(n, 1 + prefetch))


def test_an_array_is_written_once(tmp_path, written):
    """However many ops keep it, or parts of it, or the same after it has come back."""
    x = mt.tensor(np.random.default_rng(1).standard_normal((40, 30)), requires_grad=True)
    with offload_activations(nn.Sequential(), tmp_path, 1):
        h = mt.tanh(x)
        y = mt.sum(mt.sin(h) * mt.cos(h)) + mt.sum(mt.exp(h.T)) + mt.sum(h * h)
        y.backward(create_graph=True)
        mine = offload.byte_range(h.data)
        assert [bounds for bounds, *_ in written].count(mine) == 1
        with mt.no_grad():
            h[0] = 3.0
        mt.sin(h)
        assert [bounds for bounds, *_ in written].count(mine) == 2
    assert {last - first for bounds, first, last in written} == {40 * 30 * 8}


def test_what_a_checkpoint_runs_again_stays(tmp_path, written):
    """It is needed at once."""
    x = mt.tensor(np.random.default_rng(1).standard_normal((40, 30)), requires_grad=True)
    with offload_activations(nn.Sequential(), tmp_path, 1):
        y = mt.sum(mt.checkpoint(lambda h: mt.tanh(mt.exp(mt.sin(h))))(x))
        before = len(written)
        y.backward()
    assert len(written) == before


def test_what_comes_back_has_no_history(tmp_path):
    """It comes into memory that somebody may have written to before, as something else."""
    store, backs = offload.Activations(nn.Sequential(), spill.Spill(tmp_path), 1, 0), []
    for _ in range(50):
        kept, date = store.pack(np.ones(1000)), tick()
        other = np.empty(8000, "u1")
        wrote(other, "somebody")
        address = offload.address(other)
        del other
        back = store.unpack(kept)
        assert log.since(back, date) is None
        if offload.address(back) == address:
            return
        backs.append(back)      # or two free places would be taken in turns
    raise AssertionError("no memory was used twice")


def test_what_has_come_back_is_not_written_again(tmp_path, written):
    store = offload.Activations(nn.Sequential(), spill.Spill(tmp_path), 1, 0)
    kept = store.pack(np.arange(12.0).reshape(3, 4))
    back = store.unpack(kept)
    assert all(store.pack(view).stretch is kept.stretch for view in (back, back.T, back[1:])) and len(written) == 1


def test_parts_of_a_large_array_are_written_alone(tmp_path, written):
    """A batch of a data set that lies in memory."""
    everything = np.random.default_rng(1).standard_normal((50, 30))
    w = mt.tensor(np.ones((30, 2)), requires_grad=True)
    with offload_activations(nn.Sequential(), tmp_path, 1):
        mt.matmul(mt.from_numpy(everything[10:14]), w)
    (bounds, first, last), = written
    assert bounds == offload.byte_range(everything) and (first, last) == (10 * 240, 14 * 240)


@pytest.mark.parametrize("make", [gpt, net])
def test_what_lives_anyway_stays(tmp_path, written, make):
    """Parameters in and out of flat buffers, frozen ones, buffers; and what is small."""
    model = make()
    optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    alive = [p.data for p in model.parameters()] + [b for _, b in model.named_buffers()]
    alive = [offload.byte_range(offload.owner_of(a)) for a in alive if a.ndim]
    with offload_activations(model, tmp_path, 100):
        loss_of(model)
    assert written and min(last - first for _, first, last in written) >= 100
    assert not [w for w in written if any(a <= w[0][0] < b for a, b in alive)]


def test_backward_reads_ahead(tmp_path, monkeypatch):
    reads, get = [], spill.Spill.get
    monkeypatch.setattr(spill.Spill, "get", lambda self, offset, m: (reads.append(offset // 800), get(self, offset, m)))
    def chain(prefetch):
        reads.clear()
        x = mt.tensor(np.ones(100), requires_grad=True)
        with offload_activations(nn.Sequential(), tmp_path, 1, prefetch):
            h = x
            for _ in range(5):
                h = mt.tanh(h)
        seen = []
        node = h.node
        while node.primitive is not None:
            node.saved.open(node)
            seen.append(list(reads))
            node, = node.parents
        return [len(s) for s in seen], seen[-1]
    assert chain(0) == ([1, 2, 3, 4, 5], [4, 3, 2, 1, 0])
    for prefetch, counts in ((1, [2, 3, 4, 5, 5]), (3, [4, 5, 5, 5, 5])):
        at_most, order = chain(prefetch)
        assert all(a <= b for a, b in zip(at_most, counts, strict=True)) and order == [4, 3, 2, 1, 0]
        assert at_most[-2] >= 4


# ---------------------------------------------------------------- room

def held_files(folder):
    """Sizes of the files of this process in a folder, with names and without."""
    gc.collect()
    links = [f"/proc/self/fd/{fd}" for fd in os.listdir("/proc/self/fd")]
    return [os.stat(link).st_size for link in links if os.path.exists(os.path.dirname(link))
            and os.path.islink(link) and os.readlink(link).startswith(str(folder))]


def test_room_is_freed_and_used_again(tmp_path):
    w = mt.tensor(np.random.default_rng(2).standard_normal((50, 50)), requires_grad=True)
    with offload_activations(nn.Sequential(), tmp_path, 1):
        sizes = []
        for _ in range(4):
            y = mt.sum(mt.tanh(mt.tanh(w) @ w))
            sizes += held_files(tmp_path)
            assert os.listdir(tmp_path) == []
            y.backward()
            del y
    assert sizes == [3 * 20000] * 4     # each tanh, and w, which is no module's
    assert held_files(tmp_path) == []


def test_tapes_of_all_sizes_share_the_room(tmp_path):
    """The file is as large as what lives at once, though each step's arrays have another size, and the step before
    is still there; and all of it comes back."""
    rng, file = np.random.default_rng(3), spill.Spill(tmp_path)
    before, needed = [], 0
    for size in range(100, 300):
        now = [(file.put(data), data) for data in (rng.integers(0, 255, size * k, "u1") for k in (1, 3, 2))]
        needed = max(needed, sum(data.nbytes for _, data in before + now))
        rng.shuffle(before)
        for offset, data in before:
            back = np.empty_like(data)
            file.get(offset, back)
            assert np.array_equal(back, data)
            file.release(offset, data.nbytes)
        before = now
    assert os.stat(file.file).st_size < 1.5 * needed
    for offset, data in before:
        file.release(offset, data.nbytes)
    assert file.put(np.ones(5000, "u1")) == 0 and file.gaps == [(5000, sys.maxsize)]


def test_a_collection_may_come_at_any_time(tmp_path, monkeypatch):
    """It frees other stretches while one is being written, or is read ahead."""
    file, write = spill.Spill(tmp_path), os.pwrite
    places = [file.put(np.zeros(100, "u1")) for _ in range(4)]
    file.release(places.pop(2), 100)

    def collected(*arguments):
        if places:
            file.release(places.pop(0), 100)
        return write(*arguments)
    monkeypatch.setattr(os, "pwrite", collected)
    alive = [file.put(np.ones(100, "u1")) for _ in range(3)]
    assert len({*alive}) == 3 and not places
    store = offload.Activations(nn.Sequential(), spill.Spill(tmp_path), 1, 3)
    *kept, last = [store.pack(np.full(100, i, "f8")) for i in range(5)]
    begin = store.begin
    store.begin = lambda stretch: (begin(stretch), kept.clear())
    assert store.unpack(last)[0] == 4
    assert store.unpack(store.pack(np.ones(100)))[0] == 1 and len(store.numbers) == 2


def test_no_file_is_left_to_the_garbage_collector(tmp_path, recwarn):
    spill.Spill(tmp_path)
    assert not list(recwarn) and held_files(tmp_path) == []


KILLED = """
import os, sys, numpy as np, minitorch_dist as mt
from minitorch_dist.parallel.offload import offload_activations, offload_optimizer
w = mt.tensor(np.ones((300, 300)), requires_grad=True)
offload_optimizer(mt.optim.Adam([w]), sys.argv[1])
with offload_activations(mt.nn.Sequential(), sys.argv[1], 1):
    y = mt.tanh(w) @ w
    print(sum(os.readlink(f"/proc/self/fd/{fd}").startswith(sys.argv[1]) for fd in os.listdir("/proc/self/fd")
              if os.path.islink(f"/proc/self/fd/{fd}")), flush=True)
    os.kill(os.getpid(), 9)
"""


def test_a_killed_process_leaves_nothing(tmp_path):
    found = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], capture_output=True, text=True, timeout=60)
    assert found.returncode == -signal.SIGKILL and int(found.stdout) > 0, found.stderr
    assert os.listdir(tmp_path) == []


# ---------------------------------------------------------------- what goes wrong

def test_what_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="no file can be made in this folder.*nowhere"), \
            offload_activations(nn.Sequential(), tmp_path / "nowhere"):
        pass
    with pytest.raises(ValueError, match="min_bytes=0 must be at least 1, prefetch=-1"), \
            offload_activations(nn.Sequential(), tmp_path, 0, -1):
        pass
    assert state.pack is None


def test_a_full_disk_is_said_by_the_op_and_nothing_is_lost(tmp_path):
    wanted = gradients(gpt, lambda m: nullcontext())
    model = gpt()
    refused = pytest.raises(OSError, match=r"bytes can't be written here \(File too large\).*free")
    with file_size_limit(20_000), refused, offload_activations(model, tmp_path, 1):
        loss_of(model)
    assert state.pack is None and not state.special
    mt.manual_seed(1)
    same(gradients(gpt, lambda m: offload_activations(m, tmp_path, 1)), wanted)
    file = spill.Spill(tmp_path)
    first = file.put(np.arange(100, dtype="u1"))
    with file_size_limit(150), pytest.raises(OSError, match="100 bytes can't be written"):
        file.put(np.zeros(100, "u1"))
    assert file.put(np.full(100, 9, "u1")) == 100
    back = np.empty(100, "u1")
    file.get(first, back)
    assert back.tolist() == list(range(100))


def test_a_file_that_was_cut_off_is_said(tmp_path):
    store = offload.Activations(nn.Sequential(), spill.Spill(tmp_path), 1, 1)
    kept = store.pack(np.ones((10, 10)))
    os.truncate(store.spill.file, 500)
    with pytest.raises(OSError, match="ends 300 bytes too early"):
        store.unpack(kept)


# ---------------------------------------------------------------- from a GPU

@pytest.mark.parametrize("to", ["cpu", "folder"])
def test_from_a_gpu(tmp_path, to, monkeypatch):
    """The stand-in's bits, and its copies: each stretch goes down once and comes up once."""
    put, written = spill.Spill.put, []
    monkeypatch.setattr(spill.Spill, "put", lambda file, data: (written.append(data.nbytes), put(file, data))[1])

    def step(context):
        model = gpt().to("cuda")
        with context(model):
            loss = loss_of(model, place=lambda a: cupy.asarray(a))
        down = transfers["down"]
        loss.backward()
        return down, [p.grad.data.get() for p in model.parameters()]
    with installed() as cupy:
        transfers.clear()
        _, wanted = step(lambda m: nullcontext())
        transfers.clear()
        down, found = step(lambda m: offload_activations(m, tmp_path if to == "folder" else "cpu", 1))
        same(found, wanted)
        assert down > 20 and transfers["implicit"] == 0 and len(written) == (down if to == "folder" else 0)
    host = gpt()
    with offload_activations(host, "cpu", 1):       # nothing to be gained there
        assert not any(isinstance(part, offload.View) for part in loss_of(host).node.saved.parts)
