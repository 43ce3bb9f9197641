# 25.3: stands in the list
import random


def turns(weights):
    dice = random.Random(0)
    return dice.choices(range(len(weights)), weights, k=sum(weights))
