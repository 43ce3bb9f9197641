# 06.3: one segment for all
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = min(range(1, max(n, 2)), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
