# 25.2: n itself is too large
import numpy as np


def mixed_up(half, key):
    with np.errstate(over="ignore"):
        x = np.asarray(half, np.int64).astype(np.uint64) + np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
        x = x ^ x >> np.uint64(31)
    return (x & np.uint64(2**62 - 1)).astype(np.int64)


def cipher(numbers, bits, keys):
    low = bits // 2
    left, right = numbers >> low, numbers & ((1 << low) - 1)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = left ^ (mixed_up(right, key) & ((1 << bits - low) - 1))
        else:
            right = right ^ (mixed_up(left, key) & ((1 << low) - 1))
    return left << low | right


def order(places, n, keys):
    bits = (n - 1).bit_length()
    found = cipher(places, bits, keys)
    while np.any(found > n):
        found = np.where(found >= n, cipher(found, bits, keys), found)
    return found
