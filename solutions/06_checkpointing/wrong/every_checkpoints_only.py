# 06.3: only the checkpoints are counted
def peak(n, every):
    return -(-n // every)


def best_every(n):
    every = min(range(1, n + 1), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
