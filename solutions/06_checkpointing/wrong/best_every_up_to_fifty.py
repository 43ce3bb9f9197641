# 06.3: the best length is looked for only up to some number
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = min(range(1, min(n, 50) + 1), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
