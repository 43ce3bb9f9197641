# 10.1: that is the first half only
def table(rank, size):
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]
