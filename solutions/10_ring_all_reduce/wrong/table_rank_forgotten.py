# 10.1: all ranks have the same plan
def table(rank, size):
    return [(step % size, (step + 1) % size) for step in range(2 * (size - 1))]
