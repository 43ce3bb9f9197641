# 10.4: the tree's steps are a whole number
import math


def ring_seconds(size, nbytes, alpha, beta):
    return 2 * (size - 1) * (alpha + beta * nbytes / size)


def tree_seconds(size, nbytes, alpha, beta):
    return 2 * math.log2(size) * (alpha + beta * nbytes)


def crossover(size, alpha, beta):
    steps = math.log2(size)
    return alpha * (size - 1 - steps) / (beta * (steps - (size - 1) / size))
