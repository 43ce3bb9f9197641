# 25.5: is read by the loop's own thread
from concurrent.futures import ThreadPoolExecutor


def ahead(batches, depth):
    with ThreadPoolExecutor(depth) as pool:
        yield from pool.map(lambda batch: batch, batches)
