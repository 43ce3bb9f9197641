# 25.5: close returns, and read 2 still goes on
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
