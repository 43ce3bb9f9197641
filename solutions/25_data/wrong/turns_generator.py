# 25.3: the list isn't one of whole numbers
def turns(weights):
    return (i for i, weight in enumerate(weights) for _ in range(weight))
