"""25.2 A shuffled order that nobody keeps.

A list of 10¹⁰ numbers in random order takes 80 GB, on every rank. Which number stands in a place can be computed from
the place alone, by a cipher: it mixes up numbers of so many bits, and no two become the same. In each round one half is
changed by the other, which is still there, so that the round could be taken back (a Feistel network):

    bits of a number       1 0 1 1 | 0 1 1          left: bits - bits // 2 of them      right: bits // 2, the lowest
    rounds 0, 2, 4 …       left  ^= mixed_up(right, key of the round), its lowest bits: as many as left has
    rounds 1, 3, 5 …       right ^= mixed_up(left, key of the round), its lowest bits: as many as right has

n numbers, 0 to n - 1, are a power of two only by chance. The cipher is one of as few bits as n - 1 takes; what comes
out above n - 1 is put in again, and again, until it is below n (cycle walking).
"""

import numpy as np


def mixed_up(half, key):
    """Of integers others, int64 from 0 to 2⁶² - 1, of the same shape: each bit depends on all bits of half and key."""
    with np.errstate(over="ignore"):
        x = np.asarray(half, np.int64).astype(np.uint64) + np.uint64(key)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
        x = x ^ x >> np.uint64(31)
    return (x & np.uint64(2**62 - 1)).astype(np.int64)


def cipher(numbers, bits, keys):
    """Of numbers from 0 to 2**bits - 1 others, no two the same; int64, of the numbers' shape, as they are.

    keys: one for each round, uint64, any number of them. bits: 0 to 62. With 1 bit the right half has none, it is 0.
    """
    # begin with the two halves, by >> and &; behind the rounds they are put together again
    low = bits // 2
    left, right = numbers >> low, numbers & ((1 << low) - 1)
    for i, key in enumerate(keys):
        if i % 2 == 0:
            left = left ^ (mixed_up(right, key) & ((1 << bits - low) - 1))
        else:
            right = right ^ (mixed_up(left, key) & ((1 << low) - 1))
    return left << low | right


def order(places, n, keys):
    """Which of the numbers 0 to n - 1 stand in these places, int64 0 to n - 1, of any shape: int64, of the same shape.

    All n places together have each number once. What stands in a place doesn't depend on which others are asked for,
    and costs the same for any n up to 2⁶².
    """
    # begin with how many bits n - 1 has (Python's integers know). One pass, then again those that came out too large
    bits = (n - 1).bit_length()
    found = cipher(places, bits, keys)
    while np.any(found >= n):
        found = np.where(found >= n, cipher(found, bits, keys), found)
    return found
