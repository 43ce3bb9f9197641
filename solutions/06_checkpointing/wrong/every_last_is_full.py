# 06.3: as if it were as long as the others
def peak(n, every):
    return -(-n // every) + every - 1


def best_every(n):
    every = min(range(1, n + 1), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
