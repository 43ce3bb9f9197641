# 10.1: / gives fractions, // and % whole numbers
def table(rank, size):
    return [((rank - s) % size + 0.5, (rank - s - 1) % size + 0.25) for s in range(2 * (size - 1))]
