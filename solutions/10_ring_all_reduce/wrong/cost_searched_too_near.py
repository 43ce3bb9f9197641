# 10.4: the costs are right, but not where they cross
def ring_seconds(size, nbytes, alpha, beta):
    return 2 * (size - 1) * (alpha + beta * nbytes / size)


def steps(size):
    return (size - 1).bit_length()


def tree_seconds(size, nbytes, alpha, beta):
    return 2 * steps(size) * (alpha + beta * nbytes)


def crossover(size, alpha, beta):
    low, high = 0.0, 1e6
    for _ in range(200):
        mid = (low + high) / 2
        if ring_seconds(size, mid, alpha, beta) < tree_seconds(size, mid, alpha, beta):
            high = mid
        else:
            low = mid
    return low
