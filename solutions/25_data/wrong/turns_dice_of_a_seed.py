# 25.3: where less than 1 was asked for
import random


def turns(weights):
    order = [i for i, weight in enumerate(weights) for _ in range(weight)]
    random.Random(0).shuffle(order)
    return order
