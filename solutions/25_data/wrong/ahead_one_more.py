# 25.5: at most 2 may. One more than depth
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth + 1))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
