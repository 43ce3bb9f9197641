# 25.5: must not go through a future or a generator
from collections import deque
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    with ThreadPoolExecutor(1) as pool:
        waiting = deque(pool.submit(next, batches) for _ in range(depth))
        while True:
            batch = waiting.popleft().result()
            waiting.append(pool.submit(next, batches))
            yield batch
