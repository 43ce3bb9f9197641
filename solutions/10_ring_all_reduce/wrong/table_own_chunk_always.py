# 10.1: the plans don't fit together
def table(rank, size):
    return [(rank, (rank - step - 1) % size) for step in range(2 * (size - 1))]
