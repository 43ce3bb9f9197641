"""An illegal address or a failed assertion in a kernel ends all of CUDA's work in that process: whatever test comes
next fails as well. A worker of pytest-xdist that has so lost its GPU ends itself, and xdist starts another."""

import os
import sys

import pytest

THERE_IS_NONE = (34, 35, 100)       # of cudaError: a stub, a driver that is too old, no device


def is_lost():
    """Whether this process has lost its GPU."""
    cupy = sys.modules.get("cupy")
    if cupy is None:
        return False
    try:
        cupy.cuda.runtime.deviceSynchronize()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return error.status not in THERE_IS_NONE
    return False


class Worker:
    """The plugin of a worker. The test that has failed is reported once more, as one that the worker has crashed in."""

    failed = False

    def pytest_runtest_logreport(self, report):
        self.failed |= report.failed

    @pytest.hookimpl(trylast=True)      # when xdist has passed the reports on
    def pytest_runtest_logfinish(self):
        if self.failed and is_lost():
            os._exit(3)
        self.failed = False
