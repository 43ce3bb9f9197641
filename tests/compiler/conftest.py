"""Kernels of these tests are kept in a folder that ends with them; ranks inherit it. Triton interprets."""

import os
import warnings

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")      # before anybody imports Triton


@pytest.fixture(scope="package", autouse=True)
def kernels_of_their_own(tmp_path_factory):
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before


@pytest.fixture(autouse=True)
def nothing_runs_uncompiled_unsaid():
    """A function that runs uncompiled fails the test that doesn't expect it."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs uncompiled")
        yield
