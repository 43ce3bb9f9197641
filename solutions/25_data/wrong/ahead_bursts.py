# 25.5: nothing is read while the loop works
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = deque(pool.submit(next, batches, end) for _ in range(depth))
        while (batch := waiting.popleft().result()) is not end:
            yield batch
            if not waiting:
                waiting.extend(pool.submit(next, batches, end) for _ in range(depth))
    finally:
        pool.shutdown(cancel_futures=True)
