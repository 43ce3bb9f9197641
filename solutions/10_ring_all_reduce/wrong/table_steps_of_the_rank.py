# 10.1: of rank 0 has a length of 0, and on 4 ranks it takes 2(N-1) = 6 steps
def table(rank, size):
    return [((rank - step) % size, (rank - step - 1) % size) for step in range(2 * rank)]
