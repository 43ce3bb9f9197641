# 06.3: the arrays alive are listed and counted
def peak(n, every):
    alive, most = [], 0
    starts = list(range(0, n, every))
    while starts:
        begin = starts[-1]
        alive = starts + list(range(begin + 1, min(begin + every, n)))
        most = max(most, len(alive))
        starts.pop()
    return most


def best_every(n):
    every = best = None
    for length in range(n, 0, -1):
        if best is None or peak(n, length) < best:
            every, best = length, peak(n, length)
    return [every, best]
