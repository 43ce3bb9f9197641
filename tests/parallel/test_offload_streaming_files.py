"""Streamed models, their files and checkpoints: which parameters go there, and what may become of the files."""

import json
import os

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, nn
from minitorch_dist.nn.absent import Absent, AbsentParameterError
from minitorch_dist.parallel.offload import spill, stream_from_disk
from tests.device.fake_cupy import installed
from tests.parallel.test_offload_streaming import WIDTH, all_absent, gpt, inputs, net, outputs


class Children(nn.Module):
    """Without a Sequential; a child has the name of what is left over."""

    def __init__(self):
        super().__init__()
        mt.manual_seed(6)
        self.first, self.rest = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.nothing = nn.Tanh()
        self.scale = nn.Parameter(np.full(1, 1.5, "f4"))

    def forward(self, x):
        return self.rest(self.nothing(self.first(x))) * self.scale


def unmade(make):
    with nn.without_values():
        return make()


def tripled(model):
    return {name: 3 * array for name, array in model.state_dict().items()}


# ---------------------------------------------------------------- which parameters

def test_children_are_the_units_where_there_is_no_sequential(tmp_path):
    model = stream_from_disk(Children(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"{n}.safetensors" for n in ("first", "rest", "the rest")]
    assert all_absent(model, "scale") and outputs(model) == outputs(Children())


@pytest.mark.parametrize("frozen", [2, 3])
def test_frozen_blocks_are_streamed_too(tmp_path, frozen):
    model = gpt()
    for block in list(model.blocks)[:frozen]:
        for p in block.parameters():
            p.requires_grad_(False)
    stream_from_disk(model, tmp_path)
    assert all_absent(model, ("embed.", "position.", "norm.")) and outputs(model) == outputs(gpt())


# ---------------------------------------------------------------- what becomes of the files

def test_another_model_in_the_folder_is_no_matter(tmp_path, monkeypatch):
    """Nor one that is refused, nor another working directory."""
    monkeypatch.chdir(tmp_path)
    model = stream_from_disk(net(), "units")
    before = {p.name: p.read_bytes() for p in (tmp_path / "units").iterdir()}
    values = tripled(net())
    for odd in ({"4.weight": [1.0]}, {"4.weight": values["4.weight"].astype("f8")}):
        with pytest.raises(ValueError, match=r"4.weight has shape \(37, 37\) and dtype float32, the value has"):
            stream_from_disk(net(), "units", values={**values, **odd})
        assert {p.name: p.read_bytes() for p in (tmp_path / "units").iterdir()} == before
    other = stream_from_disk(net(), "units", values=values)
    monkeypatch.chdir("/")
    assert outputs(model) == outputs(net()) != outputs(other)


def test_files_of_another_dtype_or_damaged_are_refused(tmp_path):
    def with_buffer(dtype):
        model = net()
        model.register_buffer("number", np.arange(3).astype(dtype))
        return model
    stream_from_disk(with_buffer("i4"), tmp_path)
    with pytest.raises(ValueError, match=r"its number has .*'I32', \[3\], 12.*'F32', \[3\], 12"):
        stream_from_disk(unmade(lambda: with_buffer("f4")), tmp_path)
    stream_from_disk(with_buffer("?"), tmp_path)
    stream_from_disk(unmade(lambda: with_buffer("?")), tmp_path)
    whole = (tmp_path / "0.safetensors").read_bytes()
    size = 8 + int.from_bytes(whole[:8], "little")
    header = json.loads(whole[8:size])
    for entry in header.values():
        entry["data_offsets"] = [at - 9 for at in entry["data_offsets"]]
    headers = [text.ljust(size - 8) for text in (
        b"null", b"[]", b"{", b"\xff", whole[8:size].replace(b"dtype", b"dtypo"),
        json.dumps(header, separators=(",", ":")).encode())]
    for damaged in (b"\xff" * 8 + whole[8:], *(whole[:8] + header + whole[size:] for header in headers)):
        (tmp_path / "0.safetensors").write_bytes(damaged)
        with pytest.raises(ValueError, match="0.safetensors .*no file of safetensors"):
            stream_from_disk(unmade(lambda: with_buffer("?")), tmp_path)


def test_a_damaged_checkpoint_is_refused_and_each_array_read_once(tmp_path, monkeypatch):
    checkpoints.save(tmp_path / "saved", net())
    read, names = checkpoints.loading.Reader.read, []
    monkeypatch.setattr(checkpoints.loading.Reader, "read", lambda self, name, box: (
        names.append(name), read(self, name, box))[1])
    model = stream_from_disk(unmade(net), tmp_path / "units", values=checkpoints.StoredValues(tmp_path / "saved"))
    assert outputs(model) == outputs(net()) and names == [f"model.{name}" for name, _ in net().named_parameters()]
    path = tmp_path / "saved" / "rank-0.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-5] ^= 1
    path.write_bytes(whole)
    with pytest.raises(checkpoints.CheckpointError, match="changed since it was written: its CRC-32"):
        stream_from_disk(unmade(net), tmp_path / "new", values=checkpoints.StoredValues(tmp_path / "saved"))
    assert os.listdir(tmp_path / "units") and not list(tmp_path.glob("new/*"))
    believed = checkpoints.StoredValues(tmp_path / "saved", verify=False)
    assert outputs(stream_from_disk(unmade(net), tmp_path / "new", values=believed)) != outputs(net())


# ---------------------------------------------------------------- parameters that aren't there

def test_what_a_streamed_model_refuses_leaves_it_as_it_was(tmp_path):
    model = stream_from_disk(gpt(), tmp_path)
    for use in (lambda: model.load_state_dict(tripled(gpt())), lambda: model.to(np.float64)):
        with pytest.raises(AbsentParameterError, match="blocks.0.norm1.weight lies in"):
            use()
        assert outputs(model) == outputs(gpt())
    assert model.to("cpu") is model
    with installed():
        for place, other in (("cpu", "cuda"), ("cuda", "cpu")):
            model = stream_from_disk(gpt().to(place), tmp_path)
            with pytest.raises(AbsentParameterError, match="blocks.0.norm1.weight lies in"):
                model.to(other)
            assert model.embed.weight.device[:4] == place[:4]


def test_without_values_a_model_can_be_meant_for_another_device_and_dtype(tmp_path):
    model = unmade(gpt).to(np.float64)
    assert {p.dtype for p in model.parameters()} == {np.dtype("f8")} and all_absent(model)
    assert outputs(stream_from_disk(model, tmp_path / "f8", values=gpt("f8").state_dict()), "f8") == \
        outputs(gpt("f8"), "f8")
    with installed() as cupy:
        model = unmade(gpt).to("cuda")
        assert {p.device for p in model.parameters()} == {"cuda:0"} and all_absent(model)
        stream_from_disk(model, tmp_path, values=gpt().state_dict()).eval()
        with mt.no_grad():
            found = model(cupy.asarray(inputs(model))).data.get()
        assert model.embed.weight.device == model.blocks[0].norm1.weight.device == "cuda:0"
    assert found.tobytes() == outputs(gpt())


def test_without_values_parameters_may_be_given_as_lists_and_numbers():
    for values in (1.5, [1.0, 2.0], np.ones((2, 3), "f8"), mt.tensor(np.ones(3, "f4"))):
        whole, parameter = nn.Parameter(values), unmade(lambda values=values: nn.Parameter(values))
        assert isinstance(parameter.data, Absent) and parameter.requires_grad
        assert (parameter.shape, parameter.dtype) == (whole.shape, whole.dtype)


def test_a_read_that_brings_less_than_was_asked_for_goes_on(tmp_path, monkeypatch):
    """As the kernel's do from 2 GiB on."""
    data, read = np.arange(200, dtype=np.uint8), os.preadv
    monkeypatch.setattr(spill.os, "preadv", lambda file, views, offset: read(file, [views[0][:70]], offset))
    (tmp_path / "numbers").write_bytes(data.tobytes())
    found = np.zeros(190, np.uint8)
    with open(tmp_path / "numbers", "rb", buffering=0) as file:
        spill.read_into(file.fileno(), 10, found, "numbers")
        np.testing.assert_array_equal(found, data[10:])
        with pytest.raises(OSError, match="numbers ends 5 bytes too early"):
            spill.read_into(file.fileno(), 15, found, "numbers")
