# 06.3: is its checkpoint, and is counted twice
def peak(n, every):
    return n // every + every


def best_every(n):
    every = min(range(1, n + 1), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
