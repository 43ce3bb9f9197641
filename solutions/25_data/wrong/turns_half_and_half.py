# 25.3: where less than 1 was asked for
def turns(weights):
    halves = [], []
    for i, weight in enumerate(weights):
        halves[0].extend([i] * (weight // 2))
        halves[1].extend([i] * (weight - weight // 2))
    return halves[0] + halves[1]
