# 25.5: depth 3: while step 0 works, 1 batch asked for, 2 reads have begun, and 4 should
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(1))
        while (batch := waiting.popleft().result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
