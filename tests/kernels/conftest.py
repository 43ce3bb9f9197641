"""Kernels run in Triton's interpreter here, unless somebody has said otherwise before Triton is imported: compiling is
tested in a process of its own, and `make test-gpu` sets TRITON_INTERPRET=0."""

import importlib.util
import os

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")


class WithoutTriton(pytest.Module):
    """A file of tests on a machine that can't have Triton: skipped before it is imported."""

    def collect(self):
        pytest.skip("Triton is not installed (the extra `triton` has it on Linux x86-64)", allow_module_level=True)


def pytest_pycollect_makemodule(module_path, parent):
    if importlib.util.find_spec("triton") is None:
        return WithoutTriton.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Machine code that tests make doesn't stay in the user's cache, but for a GPU's, where compiling takes the most of
    the time: the next run of `make test-gpu`, and its other processes, find it there."""
    if os.environ["TRITON_INTERPRET"] == "1":
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
