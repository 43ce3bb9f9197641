# 10.1: what arrives comes from the wrong side
def table(rank, size):
    return [((rank + step) % size, (rank + step + 1) % size) for step in range(2 * (size - 1))]
