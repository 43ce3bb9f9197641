# 25.5: are still in memory
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    given = []
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            given.append(batch)
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
