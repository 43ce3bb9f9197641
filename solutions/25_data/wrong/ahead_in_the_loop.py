# 25.5: the step waits for all that is read ahead
from collections import deque


def ahead(batches, depth):
    ready, end = deque(), object()
    batch = next(batches, end)
    while batch is not end:
        while len(ready) < depth:
            ready.append(next(batches, end))
        yield batch
        batch = ready.popleft()
