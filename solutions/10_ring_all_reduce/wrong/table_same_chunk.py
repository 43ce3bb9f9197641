# 10.1: a rank sends and receives the same chunk in one step
def table(rank, size):
    return [((rank - step) % size, (rank - step) % size) for step in range(2 * (size - 1))]
