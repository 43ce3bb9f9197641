"""Parameters streamed from disk: the bits of the whole model, one unit and those read ahead in memory."""

import os
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from safetensors.numpy import load_file

import minitorch_dist as mt
from minitorch_dist import checkpoints, comm, ledger, nn, optim
from minitorch_dist.nn.absent import Absent, AbsentParameterError
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.offload import offload_activations, stream_from_disk, streaming
from tests.crews import crews
from tests.device.fake_cupy import installed, transfers
from tests.parallel.test_offload import file_size_limit, held_files

CASES = "tests.parallel.offload_cases:"
WIDTH, LAYERS = 37, 5


def net(dtype="f4", layers=LAYERS):
    mt.manual_seed(1)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers)))


def gpt(dtype="f4"):
    mt.manual_seed(2)
    return nn.GPT(17, 12, layers=3, heads=4, dim=20, dtype=np.dtype(dtype))


class Odd(nn.Module):
    """A weight that two units share, a unit in a unit, one called twice, a frozen one, a number, running statistics;
    the order depends on a switch."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(3)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.blocks[2][0].weight = self.blocks[0][0].weight
        self.outer = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))
        self.scale = nn.Parameter(np.full((), 1.5, "f4"))
        self.norm = nn.BatchNorm(WIDTH)
        self.norm.running_mean[...] = np.arange(WIDTH) / 10
        self.blocks[1][0].bias.requires_grad_(False)
        self.backwards = False

    def units(self):
        return [*self.blocks, self.outer, self.outer[1]]

    def forward(self, x):
        for block in list(self.blocks)[::-1 if self.backwards else 1]:
            x = block(x)
        return self.norm(self.blocks[1](self.outer(x)) * self.scale)


MODELS = {"net": (net, None), "gpt": (gpt, None), "odd": (Odd, Odd.units)}


def inputs(model, dtype="f4"):
    rng = np.random.default_rng(4)
    return rng.integers(0, 17, (3, 9)) if isinstance(model, nn.GPT) else \
        mt.tensor(rng.standard_normal((6, WIDTH)).astype(dtype))


def outputs(model, dtype="f4"):
    model.eval()
    with mt.no_grad():
        y = model(inputs(model, dtype))
    return (y[0] if isinstance(y, tuple) else y).numpy().tobytes()


def all_absent(model, resident=()):
    """Whether no parameter has values, but those whose names begin so."""
    return all(isinstance(p.data, Absent) != name.startswith(resident) for name, p in model.named_parameters())


class Recursive(nn.Module):
    """A unit that runs inside of itself."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(5)
        self.inside = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, depth=3):
        return self.inside(self(x, depth - 1) if depth else x)


# ---------------------------------------------------------------- the same bits

@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_outputs_have_the_same_bits(tmp_path, name, prefetch):
    make, units = MODELS[name]
    wanted, model = outputs(make()), make()
    assert stream_from_disk(model, tmp_path, prefetch, units and units(model)) is model
    assert outputs(model) == outputs(model) == wanted
    assert not any(p.requires_grad for p in model.parameters())
    assert all_absent(model, ("scale", "norm.", "embed.", "position.") + ("blocks.0.0.weight",) * (name == "odd"))


def test_one_block_alone_is_a_unit(tmp_path):
    """And not the embedding, with which a GPT makes its logits, and not by calling it."""
    for tied in (True, False):
        mt.manual_seed(2)
        model = nn.GPT(17, 12, layers=1, heads=4, dim=20, tied=tied, moe={"experts": 2, "k": 1})
        whole = outputs(model)
        stream_from_disk(model, tmp_path)
        assert all_absent(model, ("embed", "position", "norm", "head")) and outputs(model) == whole


def test_units_may_be_compiled(tmp_path):
    """Captured once, though their values come to another place each time."""
    made = [mt.compile(layer, "numpy") for layer in net("f8")]
    model = stream_from_disk(nn.Sequential(*made), tmp_path)
    x, wanted = inputs(model, "f8"), outputs(net("f8"), "f8")
    for _ in range(3):
        assert outputs(model, "f8") == wanted
    assert [(layer.compiled.captures, layer.breaks) for layer in made] == [(1, {})] * LAYERS and len(x)


def test_in_float64_and_a_generated_text(tmp_path):
    assert outputs(stream_from_disk(net("f8"), tmp_path / "net"), "f8") == outputs(net("f8"), "f8")
    start = np.array([[1, 2, 3], [4, 5, 6]])
    wanted = gpt().generate(start, 14, 0)
    assert np.array_equal(stream_from_disk(gpt(), tmp_path / "gpt").generate(start, 14, 0), wanted)


def test_a_unit_inside_of_itself(tmp_path):
    model = nn.Sequential(Recursive(), Recursive())
    stream_from_disk(model, tmp_path)
    assert outputs(model) == outputs(nn.Sequential(Recursive(), Recursive())) and all_absent(model)
    model = Recursive()
    stream_from_disk(model, tmp_path, units=[model])
    assert outputs(model) == outputs(Recursive()) and all_absent(model)


def test_the_order_may_change(tmp_path):
    """What was read ahead in vain is dropped: one unit and the next are in memory at a time all the same."""
    model = stream_from_disk(net(), tmp_path, 1)
    size = streaming.round_up((WIDTH + 1) * WIDTH * 4, 64)
    x, plain = inputs(model), net()
    for order in ([0, 1, 2, 3, 4], [4, 3, 2, 1, 0], [4, 3, 2, 1, 0], [2, 2, 0, 4]):
        wanted = x
        with mt.no_grad(), ledger.record(memory=True) as book:
            h = x
            for i in order:
                h, wanted = model[i](h), plain[i](wanted)
        assert h.numpy().tobytes() == wanted.numpy().tobytes()
        assert book.peak["parameter"] == 2 * size
    model = Odd()
    stream_from_disk(model, tmp_path, 2, model.units())
    for backwards in (False, True, True, False):
        whole = Odd()
        model.backwards = whole.backwards = backwards
        assert outputs(model) == outputs(whole)


# ---------------------------------------------------------------- memory

@pytest.mark.parametrize("prefetch", [0, 1, 2, 9])
def test_a_unit_and_those_ahead_are_in_memory(tmp_path, prefetch):
    model = stream_from_disk(net(), tmp_path, prefetch)
    size = streaming.round_up((WIDTH + 1) * WIDTH * 4, 64)
    for _ in range(2):
        with ledger.record(memory=True) as book:
            outputs(model)
        assert book.peak["parameter"] == min(LAYERS, 1 + prefetch) * size and book.live["parameter"] == 0
        alive, reads = set(), []
        for kind, name in book.events:
            (alive.add if kind == "read" else alive.remove)(name)
            reads += [name] if kind == "read" else []
            assert len(alive) <= 1 + prefetch
        assert reads == [str(i) for i in range(LAYERS)] and not alive


def test_a_unit_stays_while_one_inside_of_it_runs(tmp_path):
    model = Odd()
    stream_from_disk(model, tmp_path, 0, model.units())
    with ledger.record() as book:
        outputs(model)
    at = book.events.index(("read", "outer"))
    assert book.events[at:at + 4] == [("read", "outer"), ("read", "outer.1"), ("free", "outer.1"), ("free", "outer")]


def test_files_are_open_as_long_as_the_model_lives(tmp_path):
    model = stream_from_disk(net(), tmp_path)
    outputs(model)
    assert len(held_files(tmp_path)) == LAYERS
    del model
    assert held_files(tmp_path) == []


def test_memory_as_python_counts_it(tmp_path):
    """Of arrays of every kind: 12 layers of 200²."""
    def layers():
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(12)))
    one, x = 4 * 200 * 201, mt.tensor(np.ones((2, 200), "f4"))
    for prefetch in (0, 1):
        model = stream_from_disk(layers(), tmp_path, prefetch)
        with mt.no_grad():
            model(x)
            tracemalloc.start()
            model(x)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
        assert (1 + prefetch) * one <= peak < (1.3 + prefetch) * one


# ---------------------------------------------------------------- from a checkpoint

def test_a_model_that_never_was_in_memory(tmp_path):
    """Built without values, filled from a checkpoint that three ranks of ZeRO have written; again from the files."""
    crews.call(CASES + "save_sharded_gpt", 3, (str(tmp_path / "saved"),))
    whole = gpt()
    checkpoints.load(tmp_path / "saved", whole)
    random_before = mt.backend.random_snapshot()
    with nn.without_values():
        model = nn.GPT(17, 12, layers=3, heads=4, dim=20)
    stream_from_disk(model, tmp_path / "units", values=checkpoints.StoredValues(tmp_path / "saved"))
    assert outputs(model) == outputs(whole) and mt.backend.random_snapshot() == random_before
    with nn.without_values():
        again = nn.GPT(17, 12, layers=3, heads=4, dim=20)
    assert outputs(stream_from_disk(again, tmp_path / "units")) == outputs(whole)
    odd = Odd()
    stream_from_disk(odd, tmp_path / "odd", units=odd.units())
    with nn.without_values():
        other = Odd()
    other.norm.running_mean[...] = 0.0
    assert outputs(stream_from_disk(other, tmp_path / "odd", units=other.units())) == outputs(Odd())
    found = {}
    for path in sorted((tmp_path / "units").iterdir()):
        found |= load_file(path)
    assert {k: v.tobytes() for k, v in found.items()} == {k: v.tobytes() for k, v in whole.state_dict().items()}


def test_filling_from_a_checkpoint_holds_a_unit_at_a_time(tmp_path):
    def layers():
        return nn.Sequential(*(nn.Linear(200, 200) for _ in range(20)))
    checkpoints.save(tmp_path / "saved", layers())
    tracemalloc.start()
    with nn.without_values():
        model = layers()
    stream_from_disk(model, tmp_path / "units", values=checkpoints.StoredValues(tmp_path / "saved"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 * 4 * 200 * 201


def test_building_without_values_takes_no_memory():
    tracemalloc.start()
    with nn.without_values():
        model = nn.Sequential(nn.Linear(40, 30), nn.Linear(4000, 4000))
        gpt = nn.GPT(50257, 1024, layers=2, heads=2, dim=1024, moe={"experts": 8})
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000 and sum(p.size for p in model.parameters()) == 41 * 30 + 4000 * 4001
    assert gpt.embed.weight.shape == (50257, 1024) and gpt.embed.weight.requires_grad
    for use in (lambda: model[0](np.zeros((1, 40), "f4")), model.state_dict, lambda: model[0].weight + 1.0,
                lambda: optim.SGD(model[0].parameters())):
        with pytest.raises(AbsentParameterError, match=r"shape \(30, 40\) was made without_values"):
            use()
    assert isinstance(nn.Linear(2, 3).weight.data, np.ndarray)


# ---------------------------------------------------------------- ranks

def test_each_rank_reads_its_share(tmp_path):
    n = 3
    wanted = {name: outputs(make()) for name, (make, _) in MODELS.items()}
    for found in crews.call(CASES + "streamed", n, (str(tmp_path),)):
        assert found.pop("text") == gpt().generate(np.array([[1, 2, 3]]), 14, 0).tolist()
        assert "values has no 'blocks.0" in found.pop("refused")
        read = found.pop("read")
        share = streaming.round_up(-(-4 * WIDTH * (WIDTH + 1) // n), 64)
        assert max(read) <= share and len(read) == LAYERS
        gathered = found.pop("sent")
        assert gathered == LAYERS * (n - 1) * share
        assert found == {(name, prefetch): bits for name, bits in wanted.items() for prefetch in (0, 2)}


# ---------------------------------------------------------------- a GPU

@pytest.mark.parametrize("name", ["net", "gpt"])
def test_to_a_gpu(tmp_path, name):
    make = MODELS[name][0]
    with installed() as cupy:
        model = stream_from_disk(make().to("cuda"), tmp_path, 1).eval()
        x = cupy.asarray(inputs(model) if name == "gpt" else inputs(model).numpy())
        transfers.clear()
        with mt.no_grad():
            y = model(mt.tensor(x) if name == "net" else x)
        assert transfers == {"up": LAYERS if name == "net" else 3}
        if name == "gpt":
            text = model.generate(x, 5, 0).get()
        assert y.device == "cuda:0" and y.data.get().tobytes() == outputs(make())
    assert name == "net" or np.array_equal(text, make().generate(inputs(make()), 5, 0))


# ---------------------------------------------------------------- what goes wrong

def test_what_is_refused(tmp_path):
    model = stream_from_disk(net(), tmp_path)
    with pytest.raises(RuntimeError, match="0 lies on disk, and can't be trained from there.*no_grad"):
        model(inputs(model))
    for use in (model.state_dict, lambda: model[1].weight + 1.0, lambda: model[1].weight.numpy()):
        with pytest.raises(AbsentParameterError, match=r"\.weight lies in .*\d.safetensors, and its values"):
            use()
    with pytest.raises(ValueError, match="belongs to an optimizer, Dist"):
        stream_from_disk(model, tmp_path)
    for owned in (net(), DistributedDataParallel(net(), comm.world_of_one())):
        optim.SGD(owned.parameters(), 0.1)
        with pytest.raises(ValueError, match=r"0.weight.*belongs to an optimizer"):
            stream_from_disk(owned, tmp_path)
    with pytest.raises(ValueError, match="prefetch=-1"):
        stream_from_disk(net(), tmp_path, -1)
    for parts in (lambda: stream_from_disk(net(), tmp_path, prefetch=1.5),
                  lambda: offload_activations(net(), tmp_path, prefetch=1.5).__enter__()):
        with pytest.raises(TypeError, match="prefetch=1.5: must be a whole number"):
            parts()
    with pytest.raises(ValueError, match="no children with parameters"):
        stream_from_disk(nn.Linear(2, 2), tmp_path)
    with pytest.raises(ValueError, match="stream_from_disk: units must be modules of the model; Tanh is none"):
        stream_from_disk(net(), tmp_path, units=[nn.Tanh()])
    (tmp_path / "file").touch()
    for folder, values, error, words in (
            (tmp_path / "file" / "x", None, OSError, "can't be written here"),
            (tmp_path / "v", {"0.weight": np.ones((2, 2))}, ValueError, r"0.weight has shape \(37, 37\) and dtype f"),
            (tmp_path / "v", net(layers=LAYERS - 1).state_dict(), ValueError, "values has no '4.weight'")):
        plain = net()
        with pytest.raises(error, match=words):
            stream_from_disk(plain, folder, values=values)
        assert outputs(plain) == outputs(net()) and plain[0].weight.requires_grad


def test_a_full_disk_leaves_model_and_folder(tmp_path):
    model = net()
    with file_size_limit(3000), pytest.raises(OSError, match="bytes can't be written here.*are free"):
        stream_from_disk(model, tmp_path)
    assert outputs(model) == outputs(net()) and os.listdir(tmp_path) == []


def test_files_that_do_not_fit(tmp_path):
    stream_from_disk(net(), tmp_path)
    with nn.without_values():
        longer, wider = net(layers=LAYERS + 1), nn.Sequential(nn.Linear(WIDTH, 3), nn.Linear(3, 2))
        fitting = net()
    with pytest.raises(FileNotFoundError, match="5.safetensors"):
        stream_from_disk(longer, tmp_path)
    with pytest.raises(ValueError, match=r"0.safetensors is of another model: its 0.bias.*\[37\], 148.*\[3\], 12"):
        stream_from_disk(wider, tmp_path)
    path = tmp_path / "2.safetensors"
    stream_from_disk(fitting, tmp_path, 0)
    whole = path.read_bytes()
    os.truncate(path, len(whole) - 10)
    with pytest.raises(OSError, match="2.safetensors ends 10 bytes too early"):
        outputs(fitting)
    with nn.without_values():
        another = net()
    with pytest.raises(ValueError, match="bytes only: it was cut off"):
        stream_from_disk(another, tmp_path)
    path.write_bytes(whole)
    assert outputs(fitting) == outputs(net())       # and goes on when the file is there again


def test_a_forward_that_raises_leaves_nothing_open(tmp_path):
    model = gpt()
    stream_from_disk(model, tmp_path)
    wanted = outputs(model)
    handle = model.blocks[1].mlp.register_forward_pre_hook(lambda m, inputs: 1 / 0)
    for use in (lambda: outputs(model), lambda: model.blocks[1](mt.tensor(np.ones((1, 3, 20), "f4")))):
        with pytest.raises(ZeroDivisionError), mt.no_grad():
            use()
        assert all_absent(model, ("norm.", "embed.", "position."))
    handle.remove()
    with ThreadPoolExecutor(1) as other:        # nor to the thread that raised
        assert other.submit(outputs, model).result() == wanted
    assert all_absent(model, ("norm.", "embed.", "position."))


def test_one_thread_at_a_time(tmp_path):
    """Another is refused while one runs, harms nothing, and has its turn later."""
    model, refused = stream_from_disk(net(), tmp_path), []

    def meanwhile(m, inputs):
        handle.remove()
        with ThreadPoolExecutor(1) as other:
            refused.extend(other.submit(run, x).exception() for run in (outputs, model[2], model[3]) for x in [model])
    handle = model[2].register_forward_pre_hook(meanwhile)
    assert outputs(model) == outputs(net())
    assert [type(error) for error in refused] == [RuntimeError] * 3 and "another thread" in str(refused[0])
    with ThreadPoolExecutor(1) as other:
        assert other.submit(outputs, model).result() == outputs(net()) and all_absent(model)
