"""The system's C compiler: which one, what it refuses, what is kept on disk and what becomes of it there."""

import contextlib
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.compiler import cc
from minitorch_dist.testing import ranks

CACHED = (cc.compiler, cc.vector_functions, cc._processor)
X = np.linspace(-2.0, 2.0, 12).reshape(3, 4)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """Nothing is known of a compiler, and nothing is kept on disk; returns the folder for it."""
    def clear():
        for function in CACHED:
            getattr(function, "cache_clear", lambda: None)()
    clear()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CC", raising=False)
    yield tmp_path / "cache" / "minitorch_dist" / "c"
    monkeypatch.undo()
    clear()


def program(number):
    """A function with a kernel that no other number's has."""
    return lambda x: mt.exp(x) * float(number) + 1.0


def holds(function, emit=None):
    compiled = mt.compile(function, emit=emit)
    np.testing.assert_allclose(compiled(mt.tensor(X)).numpy(), function(mt.tensor(X)).numpy(), rtol=1e-14)
    assert not compiled.breaks
    return compiled


def script(path, text):
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


def test_no_compiler(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=r"no cc, gcc or clang on PATH.*\$CC"):
        mt.compile(program(1), emit="c")
    assert "tiles" in holds(program(1)).show("kernels")


def test_the_compiler_of_CC_comes_first(fresh, monkeypatch, tmp_path):
    found = subprocess.run(["sh", "-c", "command -v cc"], capture_output=True, text=True).stdout.strip()
    mine = script(tmp_path / "mycc", f'echo "$@" >> {tmp_path}/asked; exec {found} "$@"')
    monkeypatch.setenv("CC", mine)
    holds(program(2), "c")
    asked = (tmp_path / "asked").read_text()
    assert "-march=native" in asked and "-ffast-math" not in asked and "-ffp-contract=off" in asked


def test_flags_with_CC(fresh, monkeypatch):
    """CC="gcc -m64", as make has it, is no program's name: the next one is taken, or its words are."""
    monkeypatch.setenv("CC", "gcc -m64")
    holds(program(3), "c")


@pytest.mark.parametrize("text", ["", " ", "gcc -DX='1"])
def test_CC_without_a_program(fresh, monkeypatch, text):
    """Nothing, or a quotation that doesn't end: the next one of the list is taken."""
    monkeypatch.setenv("CC", text)
    holds(program(3), "c")


def test_a_compiler_that_fails(fresh, monkeypatch, tmp_path):
    """With emit="c" its words come out; without, the kernels run in tiles, and the answer is right."""
    monkeypatch.setenv("CC", script(
        tmp_path / "badcc", 'case "$*" in *version*) echo bad 1.0;; *) echo "it is Monday" >&2; exit 1;; esac'))
    with pytest.raises(RuntimeError, match="it is Monday"):
        mt.compile(program(4), emit="c")(mt.tensor(X))
    compiled = mt.compile(program(4))
    x = mt.tensor(X, requires_grad=True)
    for warned in (pytest.warns(UserWarning, match="it is Monday"), contextlib.nullcontext()):      # told once
        x.grad = None
        with warned:
            y = compiled(x)
            y.sum().backward()
        np.testing.assert_allclose(y.numpy(), np.exp(X) * 4 + 1, rtol=1e-14)
        np.testing.assert_allclose(x.grad.numpy(), np.exp(X) * 4, rtol=1e-14)


def test_a_compiler_that_says_nothing_of_itself(fresh, monkeypatch, tmp_path):
    monkeypatch.setenv("CC", script(tmp_path / "brokencc", "exit 3"))
    holds(program(5), "c")      # the next one of the list
    assert cc.compiler()[0] != str(tmp_path / "brokencc")


def kept(folder):
    return sorted(p for p in folder.iterdir() if p.suffix == ".so")


def test_kernels_are_kept_for_the_next_program(fresh, monkeypatch, tmp_path):
    holds(program(6), "c")
    files = kept(fresh)
    assert files and not [p for p in fresh.iterdir() if p.suffix != ".so"]      # nothing half done stays
    times = [p.stat().st_mtime_ns for p in files]
    ran = []
    run = subprocess.run
    monkeypatch.setattr(subprocess, "run", lambda command, **options: ran.append(command) or run(command, **options))
    holds(program(6), "c")
    assert not ran and [p.stat().st_mtime_ns for p in kept(fresh)] == times
    holds(program(7), "c")
    assert len(ran) == 1 and len(kept(fresh)) == len(files) + 1


CHILD = textwrap.dedent("""
    import sys
    import numpy as np
    import minitorch_dist as mt
    x = np.linspace(-2.0, 2.0, 12).reshape(3, 4)
    f = lambda x: mt.exp(x) * {number} + 1.0
    compiled = mt.compile(f, emit={emit!r})
    assert np.allclose(compiled(mt.tensor(x)).numpy(), np.exp(x) * {number} + 1.0), compiled.breaks
    print(compiled.show("kernels")[:4])
""")


def child(number, emit, **env):
    """A process of its own, which may die."""
    path = os.pathsep.join(p for p in sys.path if p)
    return subprocess.Popen([sys.executable, "-c", CHILD.format(number=float(number), emit=emit)], text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | {"PYTHONPATH": path} | env,
                            cwd=Path(mt.__file__).parents[1])


def end(process, limit=60):
    out, error = process.communicate(timeout=limit)
    return process.returncode, out, error


@pytest.mark.parametrize("damage", ["empty", "text", "cut off", "another's"])
def test_a_damaged_library_is_made_anew(fresh, damage):
    """A file that is no library, or the beginning of one (a full disk): never a wrong answer, never a dead process."""
    number = 8
    assert end(child(number, "c"))[0] == 0
    for file in kept(fresh):
        whole = file.read_bytes()
        file.unlink()
        file.write_bytes({"empty": b"", "text": b"not a library", "cut off": whole[:len(whole) // 2],
                          "another's": whole.replace(b"kernel", b"karnel")}[damage])
    code, out, error = end(child(number, "c"))
    assert code == 0, error[-800:]
    assert out.strip() == "void"
    assert all(len(file.read_bytes()) > 1000 and b"karnel" not in file.read_bytes() for file in kept(fresh))


@pytest.mark.parametrize("emit", [None, "c"])
def test_a_cache_that_cannot_be_written(fresh, emit, tmp_path):
    """A file stands where the folder should be: kernels are compiled for this process alone, and it is told."""
    (tmp_path / "file").write_text("")
    code, out, error = end(child(9, emit, XDG_CACHE_HOME=str(tmp_path / "file")))
    assert code == 0 and out.strip() == "void", error[-800:]
    assert str(tmp_path / "file") in error and "XDG_CACHE_HOME" in error


def test_processes_that_compile_the_same_at_once(fresh):
    processes = [child(10, "c") for _ in range(3)]
    for process in processes:
        code, _, error = end(process)
        assert code == 0, error[-800:]
    assert not [p for p in fresh.iterdir() if p.suffix != ".so"]


def test_ranks_of_one_node(fresh):
    """Two ranks, each compiling its own and the same."""
    values = ranks.call("tests.compiler.rank_cases:compile_at_once", 2)
    assert values[0] == values[1]
