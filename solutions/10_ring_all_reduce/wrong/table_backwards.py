# 10.1: but the last one comes first
def table(rank, size):
    return [((rank - step) % size, (rank - step - 1) % size) for step in reversed(range(2 * (size - 1)))]
