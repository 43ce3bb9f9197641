# 10.1: what arrives in a step isn't what goes on in the next
def table(rank, size):
    first = [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]
    return first + [((rank + 2 - step) % size, (rank + 1 - step) % size) for step in range(size - 1)]
