# 06.3: looked for only up to some number
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    root = round(n ** 0.5)
    every = min(range(max(root - 1, 1), min(root + 1, n) + 1), key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
