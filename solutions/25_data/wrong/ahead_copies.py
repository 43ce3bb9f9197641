# 25.5: is handed on: batches are large
import copy
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield copy.copy(batch)
    finally:
        pool.shutdown(cancel_futures=True)
