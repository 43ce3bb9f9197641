# 25.3: in the middles of equal stretches
def turns(weights):
    times = [((j + 0.5) / weight, i) for i, weight in enumerate(weights) for j in range(weight)]
    return [i for _, i in sorted(times)]
