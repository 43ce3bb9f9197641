# 10.4: doublings by recursion, the crossing from two points of each line
import numpy as np


def ring_seconds(size, nbytes, alpha, beta):
    return np.float64(sum(alpha + beta * (nbytes / size) for _ in range(2 * size - 2)))


def doublings(size):
    return 0 if size == 1 else 1 + doublings((size + 1) // 2)


def tree_seconds(size, nbytes, alpha, beta):
    return np.array(2 * doublings(size) * alpha + 2 * doublings(size) * beta * nbytes)


def crossover(size, alpha, beta):
    at0 = ring_seconds(size, 0.0, alpha, beta) - tree_seconds(size, 0.0, alpha, beta)
    slope = (ring_seconds(size, 1.0, 0, beta) - tree_seconds(size, 1.0, 0, beta))
    return max(-at0 / slope, 0.0)
