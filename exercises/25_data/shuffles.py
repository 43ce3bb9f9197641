"""25.2 on numbers of any size, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when

ROUNDS = 12
MANY = 10**12
LONG = 2**13 + 1        # of its walks nearly each second goes on; some are more than 10 steps long
PICTURE = {"n": 700, "rounds": (1, 2, 3, 12)}


# ---------------------------------------------------------------- cases

def keys(rng, rounds=ROUNDS):
    return rng.integers(0, 2**64, rounds, np.uint64)


def cases(rng):
    found = []
    for bits, rounds in ((6, 12), (7, 12), (9, 3), (1, 5), (0, 4), (5, 1), (5, 2), (4, 0), (40, 7), (53, 12), (61, 5),
                         (62, 4)):
        numbers = rng.permutation(1 << bits) if bits < 8 else rng.integers(0, 1 << bits, (3, 4))
        found.append({"what": "cipher", "numbers": numbers, "bits": bits, "keys": keys(rng, rounds)})
    found.append({"what": "cipher", "numbers": np.array([[0, 63], [17, 4]]), "bits": 6, "keys": keys(rng)})
    for n in (33, 100, 64, 1, 2, 3, 5, 300, 18):
        found.append({"what": "order", "places": rng.permutation(n), "n": n, "keys": keys(rng)})
    for n, rounds in ((MANY, ROUNDS), (2**49 + 1, 5), (2**61 + 3, 4), (2**62, 3), (2**40, 6)):
        found.append({"what": "order", "places": rng.integers(0, n, 60), "n": n, "keys": keys(rng, rounds)})
    # (of twelve places some come out above 66 with nearly any keys)
    found += [{"what": "order", "places": places, "n": n, "keys": keys(rng)}
              for places, n in ((np.arange(40, 52).reshape(3, 4), 67), (np.array([99]), 100),
                                (np.zeros(0, np.int64), 100), (np.array(7), 100))]
    found.append(meets_n(rng, 100))
    found.append({**found[-1], "places": np.append(found[-1]["places"], np.arange(20))})
    of_12, places = keys(rng), np.arange(LONG)
    found.append({"what": "order", "places": longest(places, LONG, of_12), "n": LONG, "keys": of_12})
    return [*found, *({"what": "order", "places": np.arange(PICTURE["n"]), "n": PICTURE["n"], "keys": of_12[:rounds]}
                      for rounds in PICTURE["rounds"])]


def meets_n(rng, n):
    """One place alone, for which the cipher gives n itself."""
    while True:
        of_12 = keys(rng)
        (place,) = np.flatnonzero(cipher(np.arange(1 << number_bits(n)), number_bits(n), of_12) == n)
        if place < n:
            return {"what": "order", "places": np.array([place]), "n": n, "keys": of_12}


def longest(places, n, keys, count=25):
    """The places with the longest walks."""
    found, steps = cipher(places, number_bits(n), keys), np.zeros(len(places), int)
    while (out := found >= n).any():
        steps[out] += 1
        found[out] = cipher(found[out], number_bits(n), keys)
    return np.argsort(-steps, kind="stable")[:count]


# ---------------------------------------------------------------- rightly, and with mistakes

def mixed_up(half, key):
    """As the exercise has it, without the 64th bit's loss being told."""
    x = np.asarray(half, np.int64).astype(np.uint64).ravel() + np.uint64(key)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x = (x ^ x >> np.uint64(shift)) * np.uint64(factor)
    return ((x ^ x >> np.uint64(31)) & np.uint64(2**62 - 1)).astype(np.int64).reshape(np.shape(half))


def halves_of(bits):
    return bits - bits // 2, bits // 2


def cipher(numbers, bits, keys, widths=halves_of, turn=lambda i: i % 2, masks=None, change=np.bitwise_xor, asked=None,
           key=lambda keys, i: keys[i], rounds=lambda keys: len(keys), after=None):
    """The halves in a list, and which of them is to be changed a number; the keywords are the mistakes."""
    width = widths(bits)
    masks = (masks or (lambda width: [(1 << w) - 1 for w in width]))(width)
    halves = [numbers >> width[1], numbers & ((1 << width[1]) - 1)]
    for i in range(rounds(keys)):
        own = turn(i)
        other = halves[1 - own if asked is None else asked(own)]
        halves[own] = change(halves[own], mixed_up(other, key(keys, i)) & masks[own])
    if after:
        return after(*halves, width)
    return halves[0] << width[1] | halves[1]


def in_parallel(numbers, bits, keys):
    """Both halves by the other's old value."""
    (high, low), left, right = halves_of(bits), numbers >> bits // 2, numbers & ((1 << bits // 2) - 1)
    for key in keys:
        left, right = left ^ mixed_up(right, key) & ((1 << high) - 1), right ^ mixed_up(left, key) & ((1 << low) - 1)
    return left << low | right


def both_each_round(numbers, bits, keys):
    """Left, then right by the new left, with one key."""
    (high, low), left, right = halves_of(bits), numbers >> bits // 2, numbers & ((1 << bits // 2) - 1)
    for key in keys:
        left = left ^ mixed_up(right, key) & ((1 << high) - 1)
        right = right ^ mixed_up(left, key) & ((1 << low) - 1)
    return left << low | right


def exchanged(numbers, bits, keys):
    """The textbook's round, which changes one half and then exchanges the two, with halves that stay unequal."""
    (high, low), left, right = halves_of(bits), numbers >> bits // 2, numbers & ((1 << bits // 2) - 1)
    for key in keys:
        left, right = right, left ^ mixed_up(right, key) & ((1 << high) - 1)
    return left << low | right


def exchanged_low(numbers, bits, keys):
    """The same, each half mixed up with the bits that the left one has then."""
    (high, low), left, right = halves_of(bits), numbers >> bits // 2, numbers & ((1 << bits // 2) - 1)
    for i, key in enumerate(keys):
        left, right = right, left ^ mixed_up(right, key) & ((1 << (low if i % 2 else high)) - 1)
    return left << low | right


def allowed(case):
    """Passes that all places together take until drive.py breaks off."""
    return 400 + 2 * case["places"].size if "places" in case else 0


class Endless(Exception):
    """A walk that goes round and round."""


def number_bits(n):
    return (n - 1).bit_length()


def walked(places, n, keys, one):
    found = one(places)
    while (found >= n).any():
        found = np.where(found >= n, one(found), found)
    return found


def log2(n):
    return int(np.ceil(np.log2(n))) if n > 1 else 0


def run(case, cipher=cipher, bits=number_bits, walk=walked, passes=80, **how):
    """The outputs of one case; the result is None where a walk never ends, which drive.py breaks off."""
    if case["what"] == "cipher":
        numbers = cipher(case["numbers"], case["bits"], case["keys"], **how)
    else:
        n, width = case["n"], bits(case["n"])
        left = iter(range(passes))

        def one(found):
            if next(left, None) is None:
                raise Endless
            return cipher(found, width, case["keys"], **how)
        try:
            numbers = walk(case["places"], n, case["keys"], one)
        except Endless:
            numbers = None
    return {"result": numbers, "changed": False}


def p(text, **how):
    return gives(text, lambda case: run(case, **how))


def nothing(places, n, keys, one):
    return one(places)


def modulo(places, n, keys, one):
    return one(places) % n


def once(places, n, keys, one):
    found = one(places)
    return np.where(found >= n, one(found), found)


def once_modulo(places, n, keys, one):
    return once(places, n, keys, one) % n


def at_most(count):
    def walk(places, n, keys, one):
        found = one(places)
        for _ in range(count):
            found = np.where(found >= n, one(found), found)
        return found
    return walk


def by_the_first(places, n, keys, one):
    found = one(places)
    while found.size and found.flat[0] >= n:
        found = np.where(found >= n, one(found), found)
    return found


def the_place_again(places, n, keys, one):
    found = one(places)
    if (found >= n).any():
        raise Endless
    return found


def all_again(places, n, keys, one):
    found = one(places)
    while (found >= n).any():
        found = one(found)
    return found


def above(places, n, keys, one):
    found = one(places)
    while (found > n).any():
        found = np.where(found > n, one(found), found)
    return found


def last_number(places, n, keys, one):
    return np.minimum(one(places), n - 1)


def place_itself(places, n, keys, one):
    found = one(places)
    return np.where(found >= n, places, found)


def next_place(places, n, keys, one):
    """What came out too large is put in as its place, one further on."""
    found, at = one(places), places
    while (found >= n).any():
        at = at + 1
        found = np.where(found >= n, one(at), found)
    return found


def left_out(places, n, keys, one):
    found = one(places)
    return found[found < n]


def times(case):
    """How many of the n places share a number with another, or None."""
    return case["what"] == "order" and case["places"].size == case["n"]


def twice(text):
    """The sentence, and which numbers come more than once in the first case that has all places."""
    def said(case, got):
        found, counts = np.unique(np.asarray(got["result"]), return_counts=True)
        if not times(case) or counts.max(initial=0) < 2:
            return text
        return text + f". Number {found[counts.argmax()]} stands in {counts.max()} places"
    return said


SIGNATURES = [     # those of walks first: a cipher's mistakes show in walks, too
    when("the places or numbers aren't what they were before the call: work on a copy",
         lambda case, got: got.get("changed", False)),
    p("order: an even number of bits: as few as n - 1 takes, else more than half of the walks go on",
      bits=lambda n: number_bits(n) + number_bits(n) % 2),
    p("order: n itself is too large: numbers are 0 to n - 1", walk=above),
    p("order: only where the first of the places has too large a number are any put in again: each of them, until it "
      "is below n", walk=by_the_first),
    gives(twice("order: modulo n, or - n: two numbers become the same, and others never come. What is too large is "
                "put in again"),
          lambda case: run(case, walk=modulo)),
    gives(twice("order: what is too large has become n - 1. It is put in again"), lambda case: run(
        case, walk=last_number)),
    gives(twice("order: what is too large stays in its own place, where it meets another that came there. It is put in "
                "again"), lambda case: run(case, walk=place_itself)),
    gives(twice("order: what is too large is replaced by the next place's number, which that one has, too. It is "
                "itself put in again"), lambda case: run(case, walk=next_place)),
    p("order: what is too large is left as it is: put it in again, until it is below n", walk=nothing),
    gives(twice("order: scaled down to n: two numbers become the same. What is too large is put in again"), lambda case:
          run(case, walk=lambda places, n, keys, one: one(places) * n >> number_bits(n))),
    gives("order: the place is put in again, and gives the same as before, for ever: put in what came out", lambda case:
          run(case, walk=the_place_again)),
    *(p(f"order: what is too large is put in again {k} times at most: until it is below n, which now and then takes "
        f"more",
        walk=at_most(k)) for k in (2, 3, 4, 5, 6, 8, 10)),
    p("order: what is too large is put in again only once: until it is below n", walk=once),
    gives(twice("order: what is too large is put in again once, and then taken modulo n: until it is below n"),
          lambda case: run(case, walk=once_modulo)),
    gives("order: those that are below n are put in again with the others: then what stands in a place depends on what "
          "else is asked for", lambda case: run(case, walk=all_again, passes=allowed(case))),
    p("order: what is too large is left out: each place has a number", walk=left_out),
    p("order: n - 1 is the largest number: if n is a power of two it takes a bit less than n", bits=int.bit_length),
    p("order: a bit too many: n - 1 is the largest number", bits=lambda n: n.bit_length() + 1),
    p("order: log2 in floating point, which can't tell n from its neighbours above 2⁴⁸: (n - 1).bit_length() can",
      bits=log2),
    p("order: the places themselves: nothing is mixed up", walk=lambda places, n, keys, one: places),
    when(lambda case, got: f"order: the result has shape {np.shape(got['result'])}; it must be the places', "
         f"{case['places'].shape}", lambda case, got: case["what"] == "order" and np.size(got["result"])
         == case["places"].size and np.shape(got["result"]) != case["places"].shape),
    when("order: what came out too large is put in again for ever. Does the cipher make two numbers the same? Is "
         "what came "
         "out put in, and not the place?", lambda case, got: case["what"] == "order" and got.get("endless", False)),
    when(twice("order: some numbers come twice, so that others never "
               "come"), lambda case, got: times(case) and np.unique(
        got["result"]).size < case["n"]),
    p("cipher: the lowest bits of what is mixed up are needed, as many as the half has; without & the halves grow",
      masks=lambda width: [(1 << 62) - 1] * 2),
    p("cipher: each half takes its own number of bits; these are the other's, and with an odd number of bits they "
      "differ",
      masks=lambda width: [(1 << w) - 1 for w in width[::-1]]),
    p("cipher: left has more bits than right, if they are odd, and takes as many; both have been given right's",
      masks=lambda width: [(1 << width[1]) - 1] * 2),
    p("cipher: right has fewer bits than left, if they are odd; with left's it runs into it",
      masks=lambda width: [(1 << width[0]) - 1] * 2),
    p("cipher: left's bits - bits // 2 are the more: here right has them, and left bits // 2",
      widths=lambda bits: halves_of(bits)[::-1]),
    p("cipher: halves of equal size, of an odd number of bits one more in all: it is another cipher, of numbers up to "
      "twice as large", widths=lambda bits: (-(-bits // 2),) * 2),
    gives(twice("cipher: both halves are changed at once, by the other's old value: that can't be taken back, so two "
                "numbers become the same. One half in each round"), lambda case: run(case, cipher=in_parallel)),
    p("cipher: both halves are changed in each round: one, left in rounds 0, 2, 4 …, right in the others",
      cipher=both_each_round),
    p("cipher: right is changed first: in round 0 it is left", turn=lambda i: 1 - i % 2),
    p("cipher: left is changed in each round, right never: it stays as it is", turn=lambda i: 0),
    p("cipher: right is changed in each round, left never: it stays as it is", turn=lambda i: 1),
    p("cipher: left is changed in the first half of the rounds, right in the second: they take turns",
      cipher=lambda numbers, bits, keys: cipher(numbers, bits, keys, turn=lambda i: int(i >= len(keys) // 2))),
    p("cipher: a half is mixed up with itself: two numbers become the same. The other half changes it, which is still "
      "there", asked=lambda own: own),
    p("cipher: the left half mixes up in each round, itself in every other one: always the half that isn't changed",
      asked=lambda own: 0),
    p("cipher: the right half mixes up in each round, itself in every other one: always the half that isn't changed",
      asked=lambda own: 1),
    gives(twice("cipher: a half is replaced by what is mixed up, so that two numbers become the same; it is left ^ …, "
                "which can be taken back"), lambda case: run(case, change=lambda own, mixed: mixed)),
    p("cipher: | isn't ^: it can't be taken back, so two numbers become the same", change=np.bitwise_or),
    p("cipher: & isn't ^: it can't be taken back, so two numbers become the same", change=np.bitwise_and),
    p("cipher: + isn't ^: the half needs one bit more, and runs into the other", change=np.add),
    p("cipher: + isn't ^. It could be taken back as well, and is another order, that the other ranks don't have",
      cipher=lambda numbers, bits, keys: added(numbers, bits, keys)),
    p("cipher: each round has the first key: round i has keys[i]", key=lambda keys, i: keys[0]),
    p("cipher: two rounds have one key: round i has keys[i]", key=lambda keys, i: keys[i // 2]),
    p("cipher: the keys come from the last to the first: that would take it back", key=lambda keys, i: keys[-1 - i]),
    p("cipher: the last round is missing: there are as many as keys", rounds=lambda keys: max(0, len(keys) - 1)),
    p("cipher: the first round is missing: there are as many as keys", cipher=lambda numbers, bits, keys: cipher(
        numbers, bits, keys, rounds=lambda keys: max(0, len(keys) - 1), key=lambda keys, i: keys[i + 1],
        turn=lambda i: (i + 1) % 2)),
    p("cipher: the first key is left out: there are as many rounds as keys", rounds=lambda keys: max(0, len(keys) - 1),
      key=lambda keys, i: keys[i + 1]),
    p("cipher: there are four rounds: as many as keys", rounds=lambda keys: min(4, len(keys))),
    p("cipher: numbers of more than 31 bits are cut off: they are int64", cipher=lambda numbers, bits, keys: cipher(
        numbers.astype(np.int32), bits, keys)),
    p("order: numbers of more than 31 bits are cut off: they are int64", walk=lambda places, n, keys, one: walked(
        places, n, keys, one).astype(np.int32)),
    p("cipher: there are as many rounds as pairs of keys: one for each key", rounds=lambda keys: len(keys) // 2),
    p("cipher: the two halves have changed places when they are put together", after=lambda left, right, width:
      right << width[0] | left),
    p("cipher: right isn't put back behind left: left << right's bits | right", after=lambda left, right, width:
      left | right),
    p("cipher: left is moved up by its own bits, not by right's", after=lambda left, right, width:
      left << width[0] | right),
    p("cipher: the halves are exchanged after each round, and have unequal sizes: left stays left", cipher=exchanged),
    p("cipher: the halves are exchanged after each round: of an odd number of rounds they stand in the wrong order, "
      "and of unequal sizes run into each other", cipher=exchanged_low),
]


def added(numbers, bits, keys):
    (high, low), halves = halves_of(bits), [numbers >> bits // 2, numbers & ((1 << bits // 2) - 1)]
    for i, key in enumerate(keys):
        mask = (1 << (low if i % 2 else high)) - 1
        halves[i % 2] = halves[i % 2] + (mixed_up(halves[1 - i % 2], key) & mask) & mask
    return halves[0] << low | halves[1]


DEMANDS = [
    demand(lambda case, got: f"right, but {np.asarray(got['result']).dtype}: numbers of samples are int64",
           lambda case, got: np.asarray(got["result"]).dtype == np.int64),
]
