# 25.3: two calls give two orders
import random


def turns(weights):
    order = [i for i, weight in enumerate(weights) for _ in range(weight)]
    random.shuffle(order)
    return order
