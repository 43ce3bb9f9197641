"""A shuffled order that nobody keeps: each place of it is computed.

A list of 10¹⁰ samples in random order takes 80 GB, and minutes to draw, on every rank. A Permutation holds twelve keys:
it is a cipher on the numbers 0 … n-1, and a cipher mixes up, under each key in another way, and loses nothing.

    a number's bits     left half   right half
    a round             left  ^= mixed up(right, key)       the right half is still there, so this can be taken back
    the next one        right ^= mixed up(left, next key)

A number of so many bits may come out above n - 1. Then it is put in again, and again, until one comes out that is below
(cycle walking): less than twice on average, since n is more than half of what the bits can say. No two of the numbers
below n end at the same one, for the walks go along the cipher's own cycles.

Sources: Luby and Rackoff 1988, "How to construct pseudorandom permutations from pseudorandom functions"; Black and
Rogaway 2002, "Ciphers with arbitrary finite domains" (halves of unequal size, cycle walking); Steele, Lea, Flood 2014,
"Fast splittable pseudorandom number generators" (what mixes up).
"""

import numpy as np

from ..backend import stream, whole

ROUNDS = 12     # with 4 a large n is well mixed; of 5 numbers each order is equally likely only with some more
LARGEST = 2**62


class Permutation:
    """The numbers 0 … n-1 in an order that depends on n and the key alone.

    key     strings and whole numbers, as backend.stream takes them

        p = Permutation(10**10, "shuffle", seed, epoch)
        p(np.arange(64, 128))       # int64 (64,): which samples stand in places 64 to 127

    ValueError unless 1 ≤ n ≤ LARGEST.
    """

    def __init__(self, n, *key):
        self.n = whole("n", n)
        if not 1 <= self.n <= LARGEST:
            raise ValueError(f"Permutation: n={n} numbers; expected 1 to 2**62")
        bits = (self.n - 1).bit_length()
        self.right = bits // 2
        self.masks = [np.uint64((1 << width) - 1) for width in (bits - self.right, self.right)]
        self.keys = stream("permutation", *key).integers(0, 2**64, ROUNDS, np.uint64)

    def __call__(self, places):
        """The numbers that stand in these places: int64, of the places' shape. IndexError for one that isn't there."""
        places = np.asarray(places)
        if places.dtype.kind not in "iu" or places.size and not 0 <= places.min() <= places.max() < self.n:
            raise IndexError(f"Permutation: there are places 0 to {self.n - 1}, got {places}")
        found = self._pass(places.astype(np.uint64).ravel())
        walking = np.flatnonzero(found >= self.n)
        while walking.size:
            found[walking] = self._pass(found[walking])
            walking = walking[found[walking] >= self.n]
        return found.astype(np.int64).reshape(places.shape)

    def _pass(self, numbers):
        shift = np.uint64(self.right)
        halves = [numbers >> shift, numbers & self.masks[1]]
        for i, key in enumerate(self.keys):
            turn = i % 2
            halves[turn] = halves[turn] ^ (mixed_up(halves[1 - turn] + key) & self.masks[turn])
        return halves[0] << shift | halves[1]


def mixed_up(x):
    """Of uint64 others, each bit of which depends on all bits (the end of splitmix64)."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return x ^ x >> np.uint64(31)
