"""What tests share: bytecode, ranks, a second pytest beside the first (aside.py), a quick run (quick.py), workers that
have lost their GPU (lost_gpu.py)."""

import os
import signal
import sys

# Hundreds of processes import the library: none of them should have to compile it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A second BLAS thread makes one process on a busy machine slower, at four times the CPU seconds. Where bits mustn't
# depend on it there are two: crews.threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A script's `make test &` has Ctrl-C ignored, and all that it starts: then Python makes no KeyboardInterrupt of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest  # noqa: E402

from . import aside, lost_gpu, quick  # noqa: E402
from .crews import crews  # noqa: E402


def pytest_addoption(parser):
    quick.add_option(parser)


def pytest_configure(config):
    config.pluginmanager.register(aside.plugin(config), "aside")
    if config.getoption("quick"):
        config.pluginmanager.register(quick.Quick(), "quick")
    if hasattr(config, "workerinput"):
        config.pluginmanager.register(lost_gpu.Worker(), "lost_gpu")


@pytest.fixture(scope="session", autouse=True)
def end_of_crews():
    """Ranks that tests share live until the last test."""
    with crews:
        yield
