"""Every kernel's compiled code on the emulated GPU, against its definition: no access outside of an array or at a wrong
multiple, no race in shared memory, and the bytes that the kernels' docstrings promise."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minitorch_dist import kernels

from ..quick import asked
from . import PATIENCE, harness

ROOT = Path(__file__).parents[2]
# tf32 and 16-bit products are of warps on 8.0 and of four warps on 9.0; 7.5 has none of ours.
SAMPLES = [(90, sample.id) for sample in harness.samples()]
OLDER = [(80, sample.id) for sample in harness.samples() if sample.size <= 100] + [
    (75, sample.id) for sample in harness.samples() if sample.size == 31]


def emulated(*task):
    """The lines that emulate_all.py prints."""
    done = subprocess.run([sys.executable, "-m", f"{__package__}.emulate_all", *map(str, task)], cwd=ROOT,
                          timeout=PATIENCE, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.fixture(scope="module")
def of_samples(request, tmp_path_factory):
    """{(compute capability, id): error} of those samples that are to be tested."""
    names_of = {}
    for sample, in sorted(asked(request, "sample")):
        names_of.setdefault(sample[0], []).append(sample[1])
    errors = {}
    for capability, names in names_of.items():
        path = tmp_path_factory.mktemp("asked") / "ids.json"
        path.write_text(json.dumps(names))
        errors |= {(capability, line["id"]): line["error"] for line in emulated("samples", capability, path)}
    return errors


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda s: f"sm{s[0]} {s[1]}")
def test_as_defined(of_samples, sample):
    assert of_samples[sample] is None


@pytest.mark.thorough
@pytest.mark.parametrize("sample", OLDER, ids=lambda s: f"sm{s[0]} {s[1]}")
def test_as_defined_on_older_gpus(of_samples, sample):
    assert of_samples[sample] is None


@pytest.mark.thorough
@pytest.mark.parametrize("capability", [90, 80])
def test_started_as_launch_py_starts_it(capability):
    """On a stand-in for CuPy: what the driver gets is what the PTX takes, each number in its width."""
    found = emulated("launches", capability)
    assert {name for line in found for name in line["id"].split("-") if name in kernels.table()} == set(kernels.table())
    assert [line for line in found if line["error"]] == []


@pytest.mark.thorough
def test_gpts_train_by_compiled_kernels():
    """Forward, dropout, loss, backward, clipping and one launch of Adam, on the stand-in with an emulated driver: the
    losses of the host's training."""
    for one in emulated("steps", 90):
        assert len(set(one["wanted"])) == 3 and one["losses"] == pytest.approx(one["wanted"], rel=2e-5), one["family"]
        launched = one["launches"]
        assert launched["adam"] == 3 and launched["cross_entropy"] == launched["cross_entropy_backward"] == 3
        assert launched["flash_attention"] == launched["flash_attention_sources"] == 6
        assert launched["segment_sums"] >= 3 and launched["norm"] == launched["norm_backward"] >= 15


@pytest.mark.thorough
def test_kernels_that_the_compiler_writes():
    found = emulated("generated", 90)
    assert len(found) >= 7 and [line for line in found if line["error"]] == []


def test_what_is_taken_out_is_missed():
    """Each barrier of rms norm, and the guards of vector addition at an array's end."""
    found = emulated("broken", 90)
    barriers = [line["error"] for line in found if line["what"] == "barrier"]
    assert len(barriers) >= 2 and all("with no barrier between: a race" in (error or "") for error in barriers)
    loads, stores = (line["error"] for line in found if line["what"] != "barrier")
    assert "reads 4 bytes" in loads and "4,000 bytes into y, which has 4,000" in loads
    assert "writes 4 bytes" in stores and "into out" in stores


@pytest.fixture(scope="module")
def costs():
    """{kernel: its launch} of the calls that `kernels NAME --count` makes."""
    return {one["kernel"]: one for line in emulated("counts", 90) for one in line["launches"]}


def bytes_of(one, *arrays):
    return sum(sum(size for name, size in one[way].items() if not arrays or name in arrays)
               for way in ("read", "written"))


def test_every_kernel_has_a_call(costs):
    assert set(costs) == set(kernels.table())


def test_bytes_are_those_promised(costs):
    """Sectors that are asked for, once or again, are those of the arrays, read once and written once."""
    for name, each, *more in (("add", 12 * 10_000), ("dropout", 8 * 10_000), ("philox_uniform", 4 * 10_000),
                              ("bias_gelu", 8 * 64 * 512, 2048), ("swiglu", 12 * 64 * 512),
                              ("swiglu_backward", 20 * 64 * 512),
                              ("norm", 8 * 64 * 768, 2 * 3072, 2 * 256)):
        one = costs[name]
        assert bytes_of(one) == each + sum(more), name
        # No sector of the large arrays is asked for twice; a vector of weights is, by every program.
        assert bytes_of(one) <= 32 * (one["global load"]["units"] + one["global store"]["units"])
        if not more:
            assert bytes_of(one) == 32 * (one["global load"]["units"] + one["global store"]["units"]), name


def test_adam_reads_16_and_writes_12_bytes_per_parameter(costs):
    one, n = costs["adam"], 8192 + 512 + 1024
    states = [name for name in one["read"] if name.startswith("lent")]
    assert sum(one["read"][name] for name in states) == 16 * n
    assert sum(size for name, size in one["written"].items() if name.startswith("lent")) == 12 * n
    tables = sum(size for name, size in one["read"].items() if name not in states)
    assert tables < 0.01 * 28 * n
    assert one["global load"]["bytes"] < 1.03 * 16 * n and one["global store"]["bytes"] < 1.001 * 12 * n


def test_cross_entropy_reads_the_logits_once_each_way(costs):
    forward, backward = costs["cross_entropy"], costs["cross_entropy_backward"]
    logits = 4 * 16 * 1000
    assert forward["read"]["logits"] == logits and logits <= forward["global load"]["bytes"] <= 1.02 * logits
    assert backward["read"]["logits"] == backward["written"]["out"] == logits
    assert backward["global load"]["bytes"] <= 1.02 * logits and backward["global store"]["bytes"] == logits


def test_attention_keeps_no_matrix_of_weights(costs):
    """2 heads of 128 positions of 64 float16: blocks of 64 queries see 1 or 2 blocks of sources, 3 of the 4; forward
    multiplies each twice, backward's two kernels three and four times. Written: o and its logarithms, no weights."""
    heads, times, size, block = 2, 128, 64, 64
    seen = 2 * heads * 3 * block * block * size         # operations of one product over the blocks that are seen
    forward, queries, sources = (costs[f"flash_attention{name}"] for name in ("", "_queries", "_sources"))
    assert [one["flops"]["tensor"] / seen for one in (forward, queries, sources)] == [2, 3, 4]
    one_array, logs = heads * times * size * 2, heads * times * 4
    assert forward["written"] == {"out": one_array, "logs": logs}
    assert queries["written"] == {"gq": one_array, "deltas": logs}
    assert sources["written"] == {"gk": one_array, "gv": one_array}
    # Queries once; keys and values for each block of queries that sees them: 3 of 4, where once would be 2.
    assert forward["global load"]["bytes"] == one_array + 2 * one_array * 3 // 2


def test_matmul_multiplies_what_is_there(costs):
    assert costs["matmul"]["flops"]["tensor"] == 2 * 128 * 128 * 96 and costs["matmul"]["written"] == {"out": 32768}


def test_short_segments_are_added_up_without_a_tree(costs):
    """200 rows into 50: no segment has more than STRETCH rows, and no program of 4 warps sums over warps, where lanes
    would meet in one bank of shared memory: it only copies ahead, each number in and out once."""
    one = costs["segment_sums"]
    assert one["read"]["g"] == 200 * 64 * 4
    for way in ("shared load", "shared store"):
        assert one[way]["units"] == one[way]["least"]


@pytest.mark.parametrize("name", ["matmul", "flash_attention", "flash_attention_queries"])
def test_tiles_in_shared_memory_lie_without_bank_conflicts(costs, name):
    for way in ("shared load", "shared store"):
        assert costs[name][way]["requests"] > 0 and costs[name][way]["units"] == costs[name][way]["least"]


def counted_of(folder):
    """{what is called: [cell]} of what a chapter's count.py shows of our solutions."""
    shown = subprocess.run([sys.executable, f"exercises/{folder}/count.py", "--ours"], cwd=ROOT, capture_output=True,
                           text=True, timeout=120)
    assert shown.returncode == 0 and shown.stderr == ""
    return {line.split("  ")[0]: line.split("  ", 1)[1].split() for line in shown.stdout.splitlines()[3:]}


def test_what_learners_see_of_their_own_kernels():
    """The solutions of chapter 13: coalesced 12, 8 and 28 bytes per element; of x[::2] half of what is moved is unused,
    and each of a thread's four loads has sectors of its own: 8 times x's bytes."""
    rows = counted_of("13_triton")
    assert rows["add"][:6] == ["1", "12.00", "12.00", "100", "%", "12.00"]
    assert rows["softmax"][:6] == ["1", "8.00", "8.00", "100", "%", "8.00"]
    assert rows["add, x is a[::2]"][:6] == ["1", "12.00", f"{8 * 4 + 8:.2f}", "30", "%", "16.00"]
    assert rows["adam"][0] == "1" and 28 <= float(rows["adam"][1]) < 28.1


def test_what_learners_see_of_tiles():
    """The solutions of chapter 26: of 64³ multiply-adds a strip of x and one of y for each tile, and out; of 128
    positions of 32 features what programs of 32 rows load along the way, 32 + 64 + 96 + 128 rows of two arrays."""
    rows, along = counted_of("26_attention_kernels"), 2 * 320 * 32
    for tile in (16, 32, 64):
        assert rows[f"matmul, tiles of {tile} × {tile}"][:3] == ["1", *[f"{8 / tile + 4 / 64:.2f}"] * 2]
    once = 4 * 128 * 32
    assert rows["attention"][:2] == ["1", f"{4 * (once / 2 + along + 128) / 128 ** 2:.2f}"]
    assert rows["attention_backward"][:2] == ["2", f"{4 * (2 * (once + along) + 2 * 128 + 2 * 320) / 128 ** 2:.2f}"]


def test_a_kernel_of_which_something_is_not_known_is_one_sentence():
    shown = subprocess.run([sys.executable, "-m", "minitorch_dist", "kernels", "matmul", "--count", "--cc", "100"],
                           cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert shown.returncode == 1 and shown.stdout == ""
    assert shown.stderr.startswith("kernels: matmul on sm_100: the emulator doesn't know the PTX instruction")
    assert shown.stderr.count("\n") == 1


@pytest.mark.parametrize("capability", ["90", "80"])
def test_counts_as_people_see_them(capability):
    shown = subprocess.run([sys.executable, "-m", "minitorch_dist", "kernels", "add", "--count", "--cc", capability],
                           cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": "0"}, capture_output=True, text=True)
    assert shown.returncode == 0 and shown.stderr == ""
    lines = shown.stdout.splitlines()
    assert lines[0] == f"add on sm_{capability}, emulated: two arrays of 10,000"
    assert ("  global load   80,000 bytes in 2,500 sectors of 32, 100 % of them used. Once at least: 40,000 of x, "
            "40,000 of y") in lines
    line, = (line for line in lines if "tl.load" in line)
    assert line.split()[:4] == ["add.py:24", "1,320", "80,000", "2,500"]
