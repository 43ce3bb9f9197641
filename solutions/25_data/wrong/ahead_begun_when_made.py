# 25.5: batch 0 is read before anybody has asked for it
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    end, pool = object(), ThreadPoolExecutor(1)
    waiting = deque(pool.submit(next, batches, end) for _ in range(depth))

    def given():
        try:
            while (batch := waiting.popleft().result()) is not end:
                waiting.append(pool.submit(next, batches, end))
                yield batch
        finally:
            pool.shutdown(cancel_futures=True)
    return given()
