# 25.3: Tijdeman's bound, 1 - 1 / (2n - 2)
from fractions import Fraction


def turns(weights):
    total = sum(weights)
    slack = Fraction(total, max(1, 2 * sum(weight > 0 for weight in weights) - 2))
    behind, order = [0] * len(weights), []
    for _ in range(total):
        behind = [late + weight for late, weight in zip(behind, weights, strict=True)]
        i = min((Fraction(total - slack - late) / weight, i)
                for i, (late, weight) in enumerate(zip(behind, weights, strict=True)) if weight and late >= slack)[1]
        behind[i] -= total
        order.append(i)
    return order
