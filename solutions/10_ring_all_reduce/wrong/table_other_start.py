# 10.1: a good plan, but it begins with another chunk
def table(rank, size):
    return [((rank - step - 1) % size, (rank - step - 2) % size) for step in range(2 * (size - 1))]
