# 10.1: complete chunks don't reach all ranks
def table(rank, size):
    first = [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]
    return first + [((rank + 1 + step) % size, (rank + step) % size) for step in range(size - 1)]
