# 06.3: only lengths that divide n are looked at
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = min([e for e in range(1, n + 1) if n % e == 0], key=lambda length: (peak(n, length), -length))
    return every, peak(n, every)
