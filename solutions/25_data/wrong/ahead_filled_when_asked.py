# 25.5: nothing is read while the loop works
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            yield batch
            waiting.append(pool.submit(next, batches, end))
    finally:
        pool.shutdown(cancel_futures=True)
