"""Batches made while the one before is worked on."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor

from ..backend import whole

END = object()


def ahead(batches, count=1):
    """The same batches in the same order, `count` of which a thread makes before they are asked for: reading them from
    disk, or augmenting them, takes no time of training then.

        for batch in ahead(loader.epoch(epoch)): …

    An error is raised where the batch would have been. The thread begins with the first batch, and ends with the last,
    or where the loop is left. What batches are made of must not depend on what the loop does: a Loader's doesn't.
    ValueError unless count is at least 1.
    """
    if whole("count", count) < 1:
        raise ValueError(f"ahead: count={count} batches; expected 1 or more")
    return _ahead(iter(batches), count)


def _ahead(batches, count):
    reader = ThreadPoolExecutor(1, "reads ahead")
    try:
        waiting = deque(reader.submit(next, batches, END) for _ in range(count))
        while (batch := waiting.popleft().result()) is not END:
            waiting.append(reader.submit(next, batches, END))
            yield batch
    finally:
        reader.shutdown(cancel_futures=True)
