# 10.1: send and receive are mixed up
def table(rank, size):
    return [((rank - step - 1) % size, (rank - step) % size) for step in range(2 * (size - 1))]
