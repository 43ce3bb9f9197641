# 10.4: beta is seconds per byte, and you divide by it
import math


def ring_seconds(size, nbytes, alpha, beta):
    return 2 * (size - 1) * (alpha + nbytes / size / beta)


def tree_seconds(size, nbytes, alpha, beta):
    return 2 * math.ceil(math.log2(size)) * (alpha + nbytes / beta)


def crossover(size, alpha, beta):
    steps = math.ceil(math.log2(size))
    return alpha * (size - 1 - steps) / (beta * (steps - (size - 1) / size))
