# 25.2: only those that walk are put in again; two rounds at a time
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
    masks = (1 << bits - low) - 1, (1 << low) - 1
    halves = [left, right]
    for i, key in enumerate(keys):
        halves[i % 2] = halves[i % 2] ^ (mixed_up(halves[(i + 1) % 2], key) & masks[i % 2])
    left, right = halves
    return left << low | right


def order(places, n, keys):
    bits = (n - 1).bit_length()
    found = np.array(cipher(places, bits, keys))
    flat = found.reshape(-1)
    walking = np.flatnonzero(flat >= n)
    while walking.size:
        flat[walking] = cipher(flat[walking], bits, keys)
        walking = walking[flat[walking] >= n]
    return found
