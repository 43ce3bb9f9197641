# 10.1: the second half begins with chunk r on rank r again
def table(rank, size):
    half = [((rank - step) % size, (rank - step - 1) % size) for step in range(size - 1)]
    return half + half
