# 10.4: a power of two needs no rounding
def ring_seconds(size, nbytes, alpha, beta):
    return 2 * (size - 1) * alpha + 2 * (size - 1) / size * nbytes * beta


def steps(size):
    return size.bit_length()


def tree_seconds(size, nbytes, alpha, beta):
    return 2 * steps(size) * (alpha + beta * nbytes)


def crossover(size, alpha, beta):
    return max(0.0, (size - 1 - steps(size)) * alpha / beta / (steps(size) - 1 + 1 / size))
