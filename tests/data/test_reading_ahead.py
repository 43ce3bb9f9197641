"""Batches made ahead: the same ones, so many and no more, errors where they belong, no thread left."""

import threading

import numpy as np
import pytest

from minitorch_dist.data import Loader, ahead, reading_ahead


def readers():
    return [thread for thread in threading.enumerate() if thread.name.startswith("reads ahead")]


@pytest.mark.parametrize("count", [1, 2, 50])
def test_the_same_batches_in_the_same_order(count):
    loader = Loader(np.arange(34), np.arange(34), 5)
    expected = [batch.inputs.tolist() for batch in loader.epoch(2)]
    assert [batch.inputs.tolist() for batch in ahead(loader.epoch(2), count)] == expected
    assert list(ahead([], count)) == [] and not readers()


@pytest.mark.parametrize("count", [1, 3])
def test_so_many_are_made_ahead_and_by_a_thread(count):
    made, enough = [], threading.Semaphore(0)

    def batches():
        for i in range(10):
            made.append((i, threading.current_thread()))
            enough.release()
            yield i
    batches = ahead(batches(), count)
    assert not made and next(batches) == 0
    for _ in range(count + 1):
        assert enough.acquire(timeout=30)
    assert not enough.acquire(timeout=0.05)
    assert [i for i, _ in made] == list(range(count + 1))
    assert threading.current_thread() not in [thread for _, thread in made]
    batches.close()
    assert not readers() and len(made) == count + 1


def test_an_error_comes_in_its_place():
    def batches():
        yield 1
        yield 2
        raise OSError("the disk is gone")
    found = ahead(batches(), 2)
    assert [next(found), next(found)] == [1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(found)
    assert not readers() and list(found) == []


def test_a_loop_that_is_left_leaves_no_thread():
    for i in ahead(iter(int, 1)):       # zeros without end
        assert i == 0
        break
    assert not readers()


def test_a_loop_that_is_left_has_no_more_made(monkeypatch):
    """But the one that the thread is at."""
    made, left = [], threading.Event()

    class Executor(reading_ahead.ThreadPoolExecutor):
        def shutdown(self, **options):
            super().shutdown(**options | {"wait": False})
            left.set()
            super().shutdown(**options)

    def batches():
        for i in range(9):
            made.append(i)
            assert i == 0 or left.wait(30)
            yield i
    monkeypatch.setattr(reading_ahead, "ThreadPoolExecutor", Executor)
    found = ahead(batches(), 5)
    assert next(found) == 0
    found.close()
    assert len(made) <= 2 and not readers()


def test_it_wants_one_or_more():
    with pytest.raises(ValueError, match="count=0"):
        ahead([1], 0)
    with pytest.raises(TypeError, match="count=1.5: must be a whole number"):
        ahead([1], 1.5)
