# 06.3: the best length is looked for only up to some number
import math


def peak(n, every):
    return n // every + every - 1


def best_every(n):
    root = math.isqrt(n)
    lengths = range(max(1, root - 6), min(n, root + 6) + 1)
    every = min(lengths, key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
