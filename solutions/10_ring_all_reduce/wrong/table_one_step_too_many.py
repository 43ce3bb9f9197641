# 10.1: one step too many in each half
def table(rank, size):
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(2 * size)]
