# 06.3: the longest was asked for
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = min(range(1, n + 1), key=lambda length: (peak(n, length), length))
    return every, peak(n, every)
