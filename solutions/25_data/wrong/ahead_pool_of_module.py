# 25.5: 1 thread is left when the end has come out
from collections import deque
from concurrent.futures import ThreadPoolExecutor, wait

pool = ThreadPoolExecutor(1)


def ahead(batches, depth):
    end = object()
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield batch
    finally:
        for future in waiting:
            future.cancel()
        wait(waiting)
