"""Machine code on disk, and what is refused before it gets there. Compiling itself: test_compiled.py."""

import base64
import json
import os
import subprocess
import sys
import zlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from minitorch_dist.kernels import build
from minitorch_dist.kernels.add import ADD
from minitorch_dist.kernels.kernel import Kernel

ROOT = Path(__file__).parents[2]
TYPES = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
BINARY = build.Binary("_add", ("*fp32", "i32"), 2, 1024, 4, b"\x00code\xff" * 100)


def compiled(ptx, **metadata):
    """What Triton might have answered."""
    facts = {"name": "f", "shared": 0, "num_warps": 4, "num_ctas": 1, "global_scratch_size": 0} | metadata
    return SimpleNamespace(metadata=SimpleNamespace(**facts), asm={"ptx": ptx, "cubin": b"x"})


def entry(*types):
    lines = ",\n".join(f"\t.param .{t} f_param_{i}" for i, t in enumerate(types))
    return f".visible .func (.param .b32 r) f_helper(\n\t.param .b32 a\n)\n.visible .entry f(\n{lines}\n)\n.reqntid 128"


def test_scratch_pointers_are_counted_from_the_ptx():
    for scratch in (0, 1, 2):
        ptx = entry("u64 .ptr .global .align 1", "u64", "u64", "u32", *["u64"] * scratch)
        binary = build.checked(ADD, TYPES, compiled(ptx))
        assert binary == build.Binary("f", tuple(TYPES.values()), scratch, 0, 4, b"x")
    left_out = build.checked(ADD, TYPES | {"y": None}, compiled(entry("u64", "u64", "u32", "u64")))
    assert left_out.types == ("*fp32", "*fp32", "i32") and left_out.scratch == 1


@pytest.mark.parametrize("answer, words", [
    (compiled(entry("u64", "u64", "u32", "u64")), "its PTX takes"),                        # another order
    (compiled(entry("u64", "u64", "u64")), "its PTX takes"),                               # one too few
    (compiled(entry("u64", "u64", "u64", "u64", "u64", "u64")), "its PTX takes"),          # a wider number
    (compiled(entry("u64", "u64", "u64", "u32", "u32")), "its PTX takes"),                 # no pointer behind
    (compiled(entry("u64", "u64", "u64", "u32", "u64"), global_scratch_size=64), "global_scratch_size"),
    (compiled(entry("u64", "u64", "u64", "u32", "u64"), profile_scratch_size=1), "profile_scratch_size"),
    (compiled(entry("u64", "u64", "u64", "u32", "u64"), launch_cooperative_grid=True), "cooperative"),
    (compiled(entry("u64", "u64", "u64", "u32", "u64"), num_ctas=2), "clusters of 2")])
def test_what_a_launch_does_not_provide_is_refused(answer, words):
    with pytest.raises(RuntimeError, match=words):
        build.checked(ADD, TYPES, answer)


def test_what_was_written_is_read(tmp_path):
    path = tmp_path / "deep" / "inside" / "f.json"
    assert build.read(path) is None
    build.write(path, BINARY)
    assert build.read(path) == BINARY
    assert [p.name for p in path.parent.iterdir()] == ["f.json"]


def test_machine_code_takes_little_room(tmp_path):
    build.write(tmp_path / "f.json", replace(BINARY, cubin=bytes(range(256)) * 400))
    assert (tmp_path / "f.json").stat().st_size < 2000
    assert build.read(tmp_path / "f.json").cubin == bytes(range(256)) * 400


def test_a_damaged_file_counts_as_none(tmp_path):
    path = tmp_path / "f.json"
    build.write(path, BINARY)
    whole, other = path.read_text(), base64.b64encode(zlib.compress(b"other")).decode()
    code = json.loads(whole)["cubin"]
    for text in (whole[:len(whole) // 2], "", "{}", "[]", whole.replace(code, other), whole.replace(code, code[:-8]),
                 whole.replace(code, "AAAA" + code), whole.replace('"warps"', '"worps"')):
        assert text != whole
        path.write_text(text)
        assert build.read(path) is None


def test_many_writers_at_once_leave_a_whole_file(tmp_path):
    path = tmp_path / "f.json"
    with ThreadPoolExecutor(8) as pool:
        readings = list(pool.map(lambda _: (build.write(path, BINARY), build.read(path))[1], range(64)))
    assert readings == [BINARY] * 64
    assert len(list(tmp_path.iterdir())) == 1


def test_a_folder_that_cannot_be_written_is_said_once(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(build, "key", lambda *a: "k")
    monkeypatch.setattr(build, "compile_triton", lambda *a: None)
    monkeypatch.setattr(build, "checked", lambda *a: BINARY)
    with pytest.warns(UserWarning, match="XDG_CACHE_HOME names another place"):
        assert build.build(ADD, TYPES, [], {}, 90) == BINARY


PROGRAM = """
import sys
from minitorch_dist.kernels import build
from minitorch_dist.kernels.add import ADD
types = {"x": "*fp32", "y": "*fp32", "out": "*fp32", "n": "i32"}
key = build.key(ADD, types, ["n"], {}, 90)
others = [build.key(ADD, types | {"x": "*fp16"}, ["n"], {}, 90), build.key(ADD, types, [], {}, 90),
          build.key(ADD, types, ["n"], {"BLOCK": 64}, 90), build.key(ADD, types, ["n"], {"num_warps": 8}, 90),
          build.key(ADD, types, ["n"], {"num_stages": 1}, 90), build.key(ADD, types, ["n"], {}, 80)]
assert len({key, *others}) == 7
binary = build.build(ADD, types, ["n"], {}, 90)
def never(*args):
    raise AssertionError("compiled again")
build.compile_triton = never
assert build.build(ADD, types, ["n"], {}, 90) == binary and binary.cubin[:4] == b"\\x7fELF"
print(key)
"""


def test_names_depend_on_all_that_matters_and_a_second_process_compiles_nothing(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(tmp_path)}
    keys = []
    for _ in range(2):
        done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=environment, capture_output=True,
                              text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        keys.append(done.stdout.strip())
    assert keys[0] == keys[1]
    assert [p.stem for p in (tmp_path / "minitorch_dist" / "kernels").iterdir()] == [keys[0]]


ELSEWHERE = """
import re
from minitorch_dist.kernels import build
from twice import TWICE
ptx = build.compile_triton(TWICE, {"x": "*fp32"}, [], {}, 90).asm["ptx"]
print(*re.findall(r'\\.file\\s+1\\s+"(.*)"', ptx))
"""
TWICE = """
import triton
from minitorch_dist.kernels.kernel import Kernel

@triton.jit
def twice(x):
    triton.language.store(x, 2 * triton.language.load(x))

TWICE = Kernel("twice", twice, {"x": "*"}, {})
"""


@pytest.mark.thorough
def test_the_same_kernel_in_another_place_names_the_lines_of_its_own_file(tmp_path):
    environment = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path / "triton")}
    for folder in (tmp_path / "one", tmp_path / "other"):
        folder.mkdir()
        (folder / "twice.py").write_text(TWICE)
        done = subprocess.run([sys.executable, "-c", ELSEWHERE], cwd=ROOT, capture_output=True, text=True, timeout=120,
                              env=environment | {"PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])})
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == str(folder / "twice.py")


def test_a_record_that_does_not_describe_its_function_is_refused():
    for signature, constexprs, divisible in (({"x": "*", "y": "*", "n": "i32"}, {"BLOCK": 1}, ()),
                                             ({"y": "*", "x": "*", "out": "*", "n": "i32"}, {"BLOCK": 1}, ()),
                                             ({"x": "*", "y": "*", "out": "*", "n": "i32"}, {}, ()),
                                             ({"x": "*", "y": "i32", "out": "*", "n": "i32"}, {"BLOCK": 1}, ()),
                                             ({"x": "*", "y": "*", "out": "*", "n": "i32"}, {"BLOCK": 1}, ("m",))):
        with pytest.raises(TypeError, match="kernel wrong"):
            Kernel("wrong", ADD.fn, signature, constexprs, divisible)
