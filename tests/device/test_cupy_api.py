"""The stand-in for CuPy has no more than CuPy. Where CuPy is installed, with a GPU or without."""

import importlib.util

import pytest

from . import api


@pytest.mark.skipif(importlib.util.find_spec("cupy") is None, reason="CuPy is not installed")
def test_the_table_is_that_of_the_installed_cupy():
    stored, real = api.stored(), api.describe()
    for kind in stored:
        assert stored[kind] == real[kind]
