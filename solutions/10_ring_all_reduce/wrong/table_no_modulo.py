# 10.1: what is to the left of 0?
def table(rank, size):
    return [(rank - step, rank - step - 1) for step in range(2 * (size - 1))]
