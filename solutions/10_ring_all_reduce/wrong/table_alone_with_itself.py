# 10.1: in case 6 of 6: size=1
def table(rank, size):
    if size == 1:
        return [(0, 0)]
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(2 * (size - 1))]
