# 25.5: nothing is read while the loop works, nor is there a thread
def ahead(batches, depth):
    yield from batches
