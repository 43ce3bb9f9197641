# 25.2: whole numbers of Python's, one place after the other
import numpy as np

FACTORS = (30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)


def mixed_up(half, key):
    x = (half + key) % 2**64
    for shift, factor in FACTORS:
        x = (x ^ x >> shift) * factor % 2**64
    return (x ^ x >> 31) % 2**62


def one(number, bits, keys):
    low = 1 << bits // 2
    high = 1 << bits - bits // 2
    left, right = divmod(number, low)
    for i, key in enumerate(keys):
        if i & 1:
            right ^= mixed_up(left, key) % low
        else:
            left ^= mixed_up(right, key) % high
    return left * low + right


def cipher(numbers, bits, keys):
    keys = keys.tolist()
    return np.array([one(number, bits, keys) for number in numbers.ravel().tolist()], np.int64).reshape(numbers.shape)


def order(places, n, keys):
    bits, keys, found = (n - 1).bit_length(), keys.tolist(), []
    for place in places.ravel().tolist():
        place = one(place, bits, keys)
        while place >= n:
            place = one(place, bits, keys)
        found.append(place)
    return np.array(found, np.int64).reshape(places.shape)
