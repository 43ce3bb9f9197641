# 10.4: alpha is missing: each of the ring's messages pays it
import math


def ring_seconds(size, nbytes, alpha, beta):
    return 2 * (size - 1) * beta * nbytes / size


def tree_seconds(size, nbytes, alpha, beta):
    return 2 * math.ceil(math.log2(size)) * (alpha + beta * nbytes)


def crossover(size, alpha, beta):
    steps = math.ceil(math.log2(size))
    return alpha * (size - 1 - steps) / (beta * (steps - (size - 1) / size))
