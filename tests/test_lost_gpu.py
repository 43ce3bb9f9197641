"""What a worker of pytest-xdist does when CUDA has failed in it."""

import os
import sys
from types import SimpleNamespace

import pytest

from .lost_gpu import Worker


class CUDARuntimeError(RuntimeError):
    def __init__(self, status):
        self.status = status


@pytest.mark.parametrize("status, failed, ends", [
    (700, True, True), (719, True, True), (700, False, False), (None, True, False), (100, True, False)],
    ids=["an illegal address", "a failed launch", "nothing has failed yet", "the GPU is well", "there is no GPU"])
def test_a_worker_without_its_gpu_ends(monkeypatch, status, failed, ends):
    def synchronize():
        if status:
            raise CUDARuntimeError(status)
    runtime = SimpleNamespace(deviceSynchronize=synchronize, CUDARuntimeError=CUDARuntimeError)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    ended, worker = [], Worker()
    monkeypatch.setattr(os, "_exit", ended.append)
    for outcome in (False, failed, False):       # setup, call, teardown
        worker.pytest_runtest_logreport(SimpleNamespace(failed=outcome))
    worker.pytest_runtest_logfinish()
    worker.pytest_runtest_logfinish()       # of the next test, which has not failed
    assert ended == [3] * ends


def test_a_failure_without_cupy_is_just_that(monkeypatch):
    monkeypatch.delitem(sys.modules, "cupy", raising=False)
    monkeypatch.setattr(os, "_exit", lambda status: pytest.fail("it ended"))
    worker = Worker()
    worker.pytest_runtest_logreport(SimpleNamespace(failed=True))
    worker.pytest_runtest_logfinish()
