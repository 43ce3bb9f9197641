# 25.5: are still in memory
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    at = -1
    end, pool = object(), ThreadPoolExecutor(1)
    try:
        waiting = [pool.submit(next, batches, end) for _ in range(depth)]
        while (batch := waiting[at := at + 1].result()) is not end:
            waiting.append(pool.submit(next, batches, end))
            yield batch
    finally:
        pool.shutdown(cancel_futures=True)
