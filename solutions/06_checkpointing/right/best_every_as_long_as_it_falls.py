# 06.3: peak never rises before its lowest, and never falls behind it
def peak(n, every):
    return n // every + every - 1


def best_every(n):
    every = 1
    while every < n and peak(n, every + 1) <= peak(n, every):
        every += 1
    return every, peak(n, every)
