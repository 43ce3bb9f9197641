# 00.1: the largest of all steps was asked for
import math


def compare(one, two, tolerance):
    for step, (a, b) in enumerate(zip(one, two, strict=True), 1):
        distance = 0.0 if a != a and b != b else math.inf if a != a or b != b else abs(b - a)
        if distance > tolerance:
            return distance, step
    return 0.0, None
