# 25.5: nothing is read while the loop works
import threading


def ahead(batches, depth):
    end = object()
    while True:
        ready = []

        def read():
            for _ in range(depth):
                ready.append(next(batches, end))
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
        for batch in ready:
            if batch is end:
                return
            yield batch
