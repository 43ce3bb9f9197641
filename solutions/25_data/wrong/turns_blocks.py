# 25.3: one source after the other: at first nothing but the first
def turns(weights):
    return [i for i, weight in enumerate(weights) for _ in range(weight)]
