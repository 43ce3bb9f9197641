"""What the answers of chapter 7 are tried with, and the mistakes that are known."""

import numpy as np

from exercises.frame import Check, demand, gives, when
from exercises.frame.messages import bytes_sent, messages, steps
from exercises.frame.pictures import message_arrows

LONG = 40_000      # elements: no MPI library copies 320,000 bytes aside
SOME = 3_001


def doublings(case):
    """⌈log₂N⌉"""
    return (len(case) - 1).bit_length()


def all_waited_for(case, got):
    return all(call["end"] is not None for rank in got for call in rank.calls)


NEVER_WAITED = ("a posted message is never waited for: MPI may still be reading from the array when you change it, or "
                "hasn't written into it yet; call wait() on what isend or irecv returned")
waited = demand(NEVER_WAITED, all_waited_for)
not_waited = when(NEVER_WAITED, lambda case, got: not all_waited_for(case, got))


# ---------------------------------------------------------------- 07.1

def by_permutation(rng, targets, size, one_array=False, dtype=np.float64):
    """A case in which rank r sends to targets[r]; size: a shape, or a list of each rank's."""
    source, sizes = np.argsort(targets), size if isinstance(size, list) else [size] * len(targets)
    return [{"outgoing": rng.standard_normal(sizes[rank]).astype(dtype), "dst": int(targets[rank]),
             "src": int(source[rank]), "shape": sizes[source[rank]], "one_array": one_array}
            for rank in range(len(targets))]


def overlaps(case, got):
    return any(name == "overlap" for rank in got for name, _ in rank.events)


def overwritten_before_sending(case, got):
    """With one array for both: some ranks are right, and the others were sent what had just been received."""
    right = [np.array_equal(g["incoming"], case[rank["src"]]["outgoing"]) for g, rank in zip(got, case, strict=True)]
    return case[0]["one_array"] and any(right) and all(
        any(np.array_equal(g["incoming"], rank["outgoing"]) for rank in case) for g in got)


class Exchange(Check):
    exercise = "07.1"
    signatures = [
        not_waited,
        when("with outgoing and incoming one array, the message that arrives is written over the one that is still "
             "being sent: isend returns before the array has been read. Send a copy", overlaps),
        when("with outgoing and incoming one array, a rank that receives first has overwritten what it was still to "
             "send, and sends back what it got. Send a copy made before", overwritten_before_sending),
        gives("dst and src are mixed up: what arrived is what rank dst sent, not rank src",
              lambda case: [{"incoming": case[rank["dst"]]["outgoing"]} for rank in case]),
        gives("each rank has received its own array",
              lambda case: [{"incoming": rank["outgoing"]} for rank in case]),
        gives("incoming is still what it was: write into the array (incoming[...] = …, or receive into it); "
              "incoming = … only gives the name to another one",
              lambda case: [{"incoming": rank["outgoing"] if rank["one_array"] else
                             case[rank["src"]]["outgoing"] * np.nan} for rank in case]),
    ]
    demands = [
        waited,
        demand("right here, by luck: the message that arrives is written over the one that is still being sent",
               lambda case, got: not overlaps(case, got)),
        demand("more than one message per rank", lambda case, got: all(len(rank.calls) <= 2 for rank in got)),
        demand("right, but the ranks wait for each other in a chain: some receive before they send. If all post their "
               "message first, all travel in the same step", lambda case, got: len(case) == 2 or steps(got) <= 1),
    ]

    def cases(self, rng, ranks):
        ring = np.roll(np.arange(ranks), -1)
        found = [by_permutation(rng, ring, LONG), by_permutation(rng, np.roll(ring, 2), (3, SOME), dtype=np.float32),
                 by_permutation(rng, ring, LONG, one_array=True)]
        if ranks == 2:      # where it makes no difference if dst and src are mixed up: that has a better sentence
            found.append(by_permutation(rng, ring, [0, 5]))
        if ranks == 4:
            found += [by_permutation(rng, np.array([2, 3, 0, 1]), LONG), by_permutation(rng, np.array([2, 1, 3, 0]), 7)]
        return found

    def truth(self, case):
        return [{"incoming": case[rank["src"]]["outgoing"]} for rank in case]


# ---------------------------------------------------------------- 07.2

def unreached(case, got):
    """Some ranks beside src have its array, the others still their own."""
    src = case[0]["src"]
    others = [rank for rank in range(len(case)) if rank != src]
    has = [rank for rank in others if np.array_equal(got[rank]["x"], case[src]["x"])]
    return 0 < len(has) < len(others) and all(np.array_equal(got[rank]["x"], case[rank]["x"])
                                              for rank in others if rank not in has)


class Broadcast(Check):
    exercise = "07.2"
    same_bits = ("x",)
    signatures = [
        not_waited,
        gives("every rank has rank 0's array; rank src's was asked for, and src isn't always 0",
              lambda case: [{"x": case[0]["x"]}] * len(case)),
        when("the data doesn't reach all ranks: some still have what they had before", unreached),
        gives("no rank but src has received anything: x is what it was before",
              lambda case: [{"x": rank["x"]} for rank in case]),
        when("src itself has lost its data: the array that was to be sent was overwritten before",
             lambda case, got: not np.array_equal(got[case[0]["src"]]["x"], case[case[0]["src"]]["x"])),
    ]
    demands = [
        waited,
        demand(lambda case: f"right, but with too many messages: {len(case) - 1} are enough, one for each rank that "
                            "doesn't have the data yet",
               lambda case, got: len(messages(got)) <= len(case) - 1),
        demand(lambda case: f"right, but every message is sent by src itself: that takes {len(case) - 1} steps, where "
                            f"{doublings(case)} are enough if those who have the data pass it on",
               lambda case, got: doublings(case) == len(case) - 1
               or {message.src for message in messages(got)} != {case[0]["src"]}),
        demand(lambda case: f"right, but the data is handed from rank to rank in a chain: that takes {len(case) - 1} "
                            f"steps, where {doublings(case)} are enough if all who have it send at the same time",
               lambda case, got: doublings(case) == len(case) - 1 or steps(got) < len(case) - 1
               or max(sum(m.src == rank for m in messages(got)) for rank in range(len(case))) > 1),
        demand(lambda case: f"right, but the messages take more than ⌈log₂N⌉ = {doublings(case)} steps: a rank that "
                            "has many to pass it on must get it first",
               lambda case, got: steps(got) <= doublings(case)),
    ]

    def cases(self, rng, ranks):
        found = [[{"x": rng.standard_normal(shape).astype(dtype), "src": src} for _ in range(ranks)]
                 for shape, src, dtype in (((3, 5), 0, np.float64), (SOME, ranks - 1, np.float64),
                                           ((2, 3), ranks // 2, np.float32), ((0, 4), 0, np.float64))]
        # Of as many bytes as floats, which hold only the first 53 bits of them.
        return [*found, [{"x": rng.integers(1 << 62, size=6), "src": 0} for _ in range(ranks)]]

    def truth(self, case):
        return [{"x": case[case[0]["src"]]["x"]}] * len(case)

    def picture(self, runs, path):
        return message_arrows(runs[4][0][1], path)


# ---------------------------------------------------------------- 07.3

def total(case):
    return np.sum([rank["x"] for rank in case], axis=0)


def same_everywhere(value):
    return lambda case: [{"x": value(case)}] * len(case)


def one_of_them(case, got):
    """All ranks have the same array, and it is one of those that were to be added."""
    return any(all(np.array_equal(g["x"], r["x"]) for g in got) for r in case)


def rank_0_only(case, got):
    return len(case) > 1 and np.allclose(got[0]["x"], total(case)) and not any(
        np.allclose(g["x"], total(case)) for g in got[1:])


def own_arrays_sent(case):
    """Nobody hands on what he has received: rank 0 gets the arrays of 1, 2, 4 … only."""
    return case[0]["x"] + sum(case[1 << k]["x"] for k in range(doublings(case)))


def pascal(case):
    """Each hands on all that he has collected, all the way round: rank r's own part comes again and again."""
    have = [rank["x"] for rank in case]
    for _ in range(len(case) - 1):
        have = [have[rank] + have[rank - 1] for rank in range(len(case))]
    return [{"x": x} for x in have]


def doubled_without_end(case):
    """Exchange with rank XOR 1, XOR 2 … where those who have no partner go on alone."""
    have = [rank["x"] for rank in case]
    for k in range(doublings(case)):
        have = [have[r] + have[r ^ 1 << k] if r ^ 1 << k < len(case) else have[r] for r in range(len(case))]
    return [{"x": x} for x in have]


def odd_one_folded(case):
    """The same, if of an odd number of ranks the last one has given its array to rank 0, and gets that one's sum."""
    if len(case) < 3 or len(case) % 2 == 0:
        return None
    found = doubled_without_end([{"x": case[0]["x"] + case[-1]["x"]}, *case[1:-1]])
    return [*found, found[0]]


def up_the_tree(add):
    """What rank 0 has at the end, if who receives makes add(own, received) of it."""
    def found(case):
        have, distance = [rank["x"] for rank in case], 1
        while distance < len(case):
            for rank in range(0, len(case) - distance, 2 * distance):
                have[rank] = add(have[rank], have[rank + distance])
            distance *= 2
        return have[0]
    return same_everywhere(found)


class AllReduce(Check):
    exercise = "07.3"
    same_bits = ("x",)
    signatures = [
        not_waited,
        when("only rank 0 has the sum: it must come back to the others", rank_0_only),
        when("the result is the array of one rank: what was received has overwritten what was there (add it), or was "
             "added in an array of its own that isn't x, or the broadcast comes from a rank that hasn't the sum",
             one_of_them),
        gives("the message is received into x itself, and overwrites what it is to be added to: it needs an array of "
              "its own, np.empty_like(x)", up_the_tree(lambda own, received: 2 * received)),
        gives("the broadcast comes after each step: it overwrites sums that haven't been added yet. Once, when rank 0 "
              "has all",
              same_everywhere(lambda case: 2 ** max(doublings(case) - 1, 0) * sum(r["x"] for r in case[:2]))),
        gives("the result is the mean: {ranks}.000 times too small. A sum was asked for",
              same_everywhere(lambda case: total(case) / len(case))),
        gives("the largest of all ranks' numbers: their sum was asked for",
              same_everywhere(lambda case: np.max([rank["x"] for rank in case], 0))),
        gives("x isn't changed: x = x + … makes another array and leaves the caller's as it was (x += … does not)",
              lambda case: [{"x": rank["x"]} for rank in case]),
        gives("partial sums are lost: somebody hands on the array with which he began, instead of what he has "
              "collected",
              same_everywhere(own_arrays_sent)),
        gives("arrays are counted more than once: if sums go round the ring, and not single arrays, what a rank "
              "receives has parts in it that it has already added", pascal),
        *(gives("on {ranks} ranks some have no partner in rank XOR distance, and the ranks end with different sums: "
                "{ranks} is no power of two", way) for way in (doubled_without_end, odd_one_folded)),
        gives("on {ranks} ranks the last ones are left out: {ranks} is no power of two, and log₂N is rounded up",
              same_everywhere(lambda case: np.sum([rank["x"] for rank in case[:1 << len(case).bit_length() - 1]], 0))),
        gives("the sum of ranks 0 and 1 alone: that is step 1, and partial sums go on to be added, until the distance "
              "is N or more", same_everywhere(lambda case: sum(r["x"] for r in case[:2]))),
    ]
    demands = [
        waited,
        demand(lambda case: f"right, but the messages take more than 2⌈log₂N⌉ = {2 * doublings(case)} steps: let "
                            "several ranks add at the same time",
               lambda case, got: steps(got) <= 2 * doublings(case)),
    ]

    def cases(self, rng, ranks):
        whole = [{"x": rng.integers(-9, 9, (2, 3, 4)).astype(np.float32)} for _ in range(ranks)]    # sums are exact
        return [[{"x": rng.standard_normal(SOME)} for _ in range(ranks)], whole]

    def truth(self, case):
        return [{"x": total(case)}] * len(case)

    def picture(self, runs, path):
        got = runs[max(runs)][0][1]
        half = steps(got) // 2
        return message_arrows(got, path, lambda message: int(message.step > half),
                              {0: "towards the sum", 1: "back to all"})


# ---------------------------------------------------------------- 07.4

def parts(case):
    return [rank["x"] for rank in case]


def everybody(case, of_rank):
    return [{"result": of_rank(rank)} for rank in range(len(case))]


def left_neighbour_again(case):
    x = parts(case)
    return everybody(case, lambda me: [x[me] if i == me else x[me - 1] for i in range(len(case))])


def in_order_of_arrival(case):
    x = parts(case)
    return everybody(case, lambda me: [x[me - i] for i in range(len(case))])


def misplaced(case):
    """What arrives in step s is put where the part of the rank s to the right belongs."""
    x = parts(case)
    return everybody(case, lambda me: [x[(2 * me - i) % len(case)] for i in range(len(case))])


def one_place_on(case):
    """What arrives in step s is put where the part of the rank s to the left belongs, which has come before."""
    x, size = parts(case), len(case)
    return None if size == 1 else everybody(case, lambda me: [None if i == (me + 1) % size else x[i - 1]
                                                              for i in range(size)])


def one_buffer(case):
    """All entries are views of one array, in which every arrival overwrites the one before."""
    x, size = parts(case), len(case)
    buffer = np.full(max(map(len, x), default=0), np.nan)

    def of(me):
        for step in range(size - 1):
            arrived = x[me - step - 1]
            buffer[:len(arrived)] = arrived
        return [x[me] if i == me else buffer[:len(x[i])].copy() for i in range(size)]
    return everybody(case, of)


def of_the_next_call(own):
    """What drive.py asks for next has overwritten the others' parts, or all of them."""
    def found(case):
        x = parts(case)
        return everybody(case, lambda me: [x[i] if i == me and not own else x[i] + 1 for i in range(len(case))])
    return found


def own_missing(case, got):
    """Some rank has everything but its own part."""
    def has(rank, i):
        result = got[rank]["result"]
        return isinstance(result, list) and len(result) == len(case) and isinstance(result[i], np.ndarray) \
            and np.array_equal(result[i], case[i]["x"])
    return all(has(rank, i) != (i == rank) for rank in range(len(case)) for i in range(len(case)))


def each_part_once(case, got):
    """By their sizes, which are all different where parts are long."""
    found = [(m.src, m.bytes) for m in messages(got) if m.bytes > 1000]
    return len(found) == len(set(found))


def no_way_back(case, got):
    """Whether no rank sends as many parts as there are ranks, where parts are long. Of two, one may send both."""
    senders = [m.src for m in messages(got) if m.bytes > 1000]
    return len(case) == 2 or all(senders.count(rank) < len(case) for rank in range(len(case)))


class AllGather(Check):
    exercise = "07.4"
    tolerance = 0.0
    signatures = [
        not_waited,
        when("the others' parts are right, but each rank's own is missing from its list", own_missing),
        gives("every rank has its left neighbour's part again and again: after the first step hand on what has "
              "arrived, not your own part", left_neighbour_again),
        gives("the parts stand in the order in which they arrived, another one on each rank: in step s comes the part "
              "of the rank s + 1 to the left", in_order_of_arrival),
        gives("the parts are in the wrong places: in step s comes the part of the rank s + 1 to the left (%, because "
              "after rank 0 comes the last)", misplaced),
        gives("every part is one place too far to the right, and lies on the one that was there: in step 0 comes the "
              "part of the left neighbour, rank - 1, not the own one", one_place_on),
        gives("all entries are views of one array, and every message has overwritten the one before: a new array "
              "for each", one_buffer),
        *(gives("the list of one call holds what the next one has received: arrays that are kept from call to call are "
                "overwritten. New ones for each", of_the_next_call(own)) for own in (False, True)),
    ]
    demands = [
        waited,
        demand("the parts have another dtype than they had",
               lambda case, got: all(np.asarray(part).dtype == case[0]["x"].dtype for rank in got
                                     for part in rank["result"])),
        demand("right, but one rank sends everything to everybody and the others wait for it: in a ring no rank sends "
               "a part more than once",
               lambda case, got: max(bytes_sent(got)) <= sum(rank["x"].nbytes for rank in case) + 16 * 4 * len(case)),
        demand(lambda case: f"right, but each part goes all the way round, back to its owner: after {len(case) - 1} "
                            "steps everybody has everything", no_way_back),
        demand("right, but more bytes travel than the parts have: are they filled up to one length? Each is to be sent "
               "as long as it is", lambda case, got: len(case) == 2 or sum(bytes_sent(got)) <= (len(case) - 1) * (
                   sum(rank["x"].nbytes for rank in case) + 32 * len(case))),
        demand("right, but some rank sends its own part to several others, or one that it has received: in a ring each "
               "part is handed to one neighbour, who hands it on", each_part_once),
        demand(lambda case: f"right, but the messages take more than {2 * (len(case) - 1)} steps (N-1 for the parts, "
                            "as many for their lengths): the ranks wait for each other in a chain",
               lambda case, got: len(case) == 2 or steps(got) <= 2 * (len(case) - 1)),
    ]

    def cases(self, rng, ranks):
        lengths = [[5, 2, 7, 3], [SOME, SOME - 4, SOME + 9, SOME + 2], [0, 6, 1, 0]]
        found = [[{"x": rng.standard_normal(n).astype(dtype)} for n in row[:ranks]]
                 for row, dtype in zip(lengths, (np.float64, np.float64, np.float32), strict=True)]
        if ranks == 3:      # in a byte, or two, there is no room for the length; others' mistakes are known by now
            found.append([{"x": rng.integers(256, size=n).astype(np.uint8)} for n in (70_000, 300, 2)])
        return found

    def truth(self, case):
        return [{"result": parts(case)}] * len(case)

    def picture(self, runs, path):
        case, got = runs[max(runs)][0]
        whose = {rank["x"].nbytes: i for i, rank in enumerate(case)}       # all of different lengths, and none of one
        return message_arrows(got, path, lambda message: whose.get(message.bytes),
                              {i: f"part of rank {i}" for i in range(len(case))} | {None: "a length"})
