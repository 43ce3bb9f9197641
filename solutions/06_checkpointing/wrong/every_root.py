# 06.3: the root of n
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = int(n ** 0.5)
    return every, peak(n, every)
