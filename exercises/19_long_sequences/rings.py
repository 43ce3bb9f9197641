"""19.3 in closed form, and what the ranks get with a mistake in the ring."""

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same
from exercises.frame.messages import RECEIVES, SENDS

from . import softmaxes

ALL = 10 ** 6       # keys in a block
NAMES = ("outs", "dqs", "dks", "dvs")
# Whose first position is below the last one on each rank, but on some rank above the last one of another rank that sees
# some of the others; also without those of the fourth rank, and of the third.
MIXED = [[3, 8, 6], [0, 5, 1], [4, 9, 10], [2, 11, 7]]


def draw(rng, ranks, time, heads, size, width, passes, in_order=True, slope=0.0, last_first=True):
    """A case: each rank's parts of so many sequences, and the gradients by their outputs.

    in_order  rank 0 has the first positions; else they are MIXED, 3 on each
    slope     by how much scores grow from one rank's keys to the next one's
    last_first   the order of the backwards
    """
    places = np.arange(4 * time) if in_order else np.array(MIXED)      # of 4 ranks, whatever their number
    at = places[places < ranks * time].reshape(ranks, time)
    drawn = [[{name: rng.standard_normal((heads, time, n)) for name, n in
               (("q", size), ("k", size), ("v", width), ("dout", width))} for _ in range(passes)] for _ in range(4)]
    for rank, of_rank in enumerate(drawn):
        for one in of_rank:
            one["q"][..., 0] = np.abs(one["q"][..., 0]) + 1
            one["k"][..., 0] += slope * rank
    backwards = [*range(passes)][::-1 if last_first else 1]
    return [{"at": list(at), "passes": drawn[rank], "backwards": backwards} for rank in range(ranks)]


def truth(case):
    """Of one process that has the whole sequence."""
    found = [{name: [] for name in NAMES} for _ in case]
    at, time = np.concatenate(case[0]["at"]), len(case[0]["at"][0])
    for number in range(len(case[0]["passes"])):
        q, k, v, dout = (np.concatenate([rank["passes"][number][name] for rank in case], 1)
                         for name in ("q", "k", "v", "dout"))
        whole = softmaxes.exact(q, k, v, at, at)[0], *softmaxes.exact_gradients(q, k, v, at, at, dout)
        for rank, of in enumerate(found):
            for name, value in zip(NAMES, whole, strict=True):
                of[name].append(value[:, rank * time:(rank + 1) * time])
    return found


# ---------------------------------------------------------------- mistakes

def ring(rank, n):
    """[(whose keys, whose values, whose positions)], in order."""
    return [((rank - step) % n,) * 3 for step in range(n)]


def visits(keys=-1, values=-1, places=-1, steps=range):
    """As ring; the numbers say from which side each comes: -1 as it does, 1 from the other one, 0 the own ones stay."""
    def of(rank, n):
        return [tuple((rank + side * step) % n for side in (keys, values, places)) for step in
                (steps(n) if callable(steps) else steps)]
    return of


def short(n):
    return range(max(n - 1, 1))


def long(n):
    return range(n + 1) if n > 1 else range(1)


def others(n):
    return range(1, n) if n > 1 else range(1)


def by_number(rank, n):
    """Without the blocks of ranks behind this one."""
    return [visit for visit in ring(rank, n) if visit[0] <= rank]


def by_ends(at):
    """Without the blocks whose first position comes behind the last of this rank's."""
    return lambda rank, n: [visit for visit in ring(rank, n) if at[visit[0]][0] <= at[rank][-1]]


def merged(pieces):
    found = pieces[0]
    for piece in pieces[1:]:
        found = softmaxes.merge(found, piece)
    return found


def last(pieces):
    return pieces[-1]


def averaged(pieces):
    return sum(out for out, _ in pieces) / len(pieces), merged(pieces)[1]


def added(pieces):
    return sum(out for out, _ in pieces), merged(pieces)[1]


def home(parts, rank, n):
    """parts[w]: [(whose keys, (dk, dv))] that rank w has worked out, in order. All of those of this rank's keys."""
    return [part for of_rank in parts for source, part in of_rank if source == rank]


def at_neighbour(side):
    return lambda parts, rank, n: home(parts, (rank + side) % n, n)


def own(parts, rank, n):
    return [part for source, part in parts[rank] if source == rank]


def not_own(parts, rank, n):
    return [part for other, of_rank in enumerate(parts) for source, part in of_rank if source == rank != other]


def own_twice(parts, rank, n):
    return home(parts, rank, n) + own(parts, rank, n) * (n > 1)


def last_one(parts, rank, n):
    """Of all that belongs to the rank's keys, what was added last."""
    return [part for source, part in parts[(rank - 1) % n] if source == rank]


def what_came_last(parts, rank, n):
    """What this rank has worked out in its last step, whoever's keys it was."""
    return [parts[rank][-1][1]]


def all_of_mine(parts, rank, n):
    """All that this rank has worked out, whoever's keys it was."""
    return [part for _, part in parts[rank]]


def world(case, forward=ring, combine=merged, back=None, at=None, kept=None, goes_through=lambda number, n: number,
          dq=sum, collect=home, mean=False, travel=(True, True), found_last=False):
    """What is asked for; the keywords are the mistakes.

    forward, back  the visits of both passes; back=None: as forward
    at             (case's positions, rank) -> those that are taken for them
    combine        [(out, lse)] -> that of a rank; kept: the same, of what backward is given, if that is another
    goes_through   (number of a backward, how many) -> the forward whose `kept` it goes through
    found_last     it takes out and lse from the last forward, and the rest from that one
    dq             [shares] -> dq; collect: (parts, rank, N) -> those that make up dk and dv; mean: whether they are
                   divided by N; travel: whether dk, and dv, are collected, or are the rank's own
    """
    n, found = len(case), [{name: [] for name in NAMES} for _ in case]
    at = [at(case[0]["at"], rank) if at else case[0]["at"][rank] for rank in range(n)]
    given = []
    with np.errstate(all="ignore"):
        for number in range(len(case[0]["passes"])):
            parts = [rank["passes"][number] for rank in case]
            pieces = [[softmaxes.attend(parts[r]["q"], parts[k]["k"], parts[v]["v"], at[r], at[p])
                       for k, v, p in forward(r, n)] for r in range(n)]
            states = [combine(of_rank) for of_rank in pieces]
            for r, (out, _) in enumerate(states):
                found[r]["outs"].append(out)
            given.append((parts, [kept(of_rank) for of_rank in pieces] if kept else states))
        for number in range(len(given)):
            parts, states = given[goes_through(number, len(given))]
            states = given[-1][1] if found_last else states
            made = []
            for r in range(n):
                dout = case[r]["passes"][number]["dout"]
                made.append([(k, softmaxes.backward(parts[r]["q"], parts[k]["k"], parts[v]["v"], at[r], at[p],
                                                    *states[r], dout, ALL)) for k, v, p in (back or forward)(r, n)])
            grads = [[(k, part[1:]) for k, part in of_rank] for of_rank in made]
            for r in range(n):
                found[r]["dqs"].append(dq([part[0] for _, part in made[r]]))
                for which, name in enumerate(("dks", "dvs")):
                    chosen = (collect if travel[which] else own)(grads, r, n)
                    zeros = np.zeros(parts[r]["kv"[which]].shape)
                    found[r][name].append(sum((part[which] for part in chosen), zeros) / (n if mean else 1))
    return found


def contiguous(at, rank):
    """Positions of ranks that lie in order, whatever was said."""
    return np.arange(len(at[0])) + rank * len(at[0])


def from_0(at, rank):
    return np.arange(len(at[0]))


def reversed_all(at, rank):
    """Those of the second ring that drive.py makes."""
    return at[::-1][rank][::-1]


BOTH = [    # (what is said, keywords of world); forward's mistakes, of which backward may be free
    ("the ring goes the other way than you think: what arrives in step s is rank r - s's, and its positions are taken "
     "for rank r + s's, or the reverse", {"forward": visits(places=1)}),
    ("the keys that arrive are taken for this rank's own: their positions are those of the rank that they come from",
     {"forward": visits(places=0)}),
    ("one step too few: after N-1 messages there are N blocks to look at, the own one and N-1 others",
     {"forward": visits(steps=short)}),
    ("one step too many: after N steps the own block is here again, and is counted twice",
     {"forward": visits(steps=long)}),
    ("the rank's own keys are missing: attention comes before the first message has arrived, too",
     {"forward": visits(steps=others)}),
    ("the rank's own block is counted in each step: what has arrived is to take its place",
     {"forward": visits(0, 0, 0)}),
    ("the keys stay where they were, and only positions change: what has arrived is to take their place",
     {"forward": visits(0, 0, -1)}),
    ("only keys go round: the values beside them are this rank's own", {"forward": visits(values=0)}),
    ("only values go round: the keys beside them are this rank's own", {"forward": visits(keys=0)}),
    ("the keys of the ranks behind this one are left out: who sees what is a matter of positions, and `at` says them",
     {"forward": by_number}),
]

FORWARD = [
    ("the result is that of the last block alone: attention is to be told what was seen before", {"combine": last}),
    ("the mean over the blocks, as if all weighed the same: give attention what was seen before",
     {"combine": averaged}),
    ("the blocks' results are added up: each is a mean of its own. Give attention what was seen before",
     {"combine": added}),
    ("positions are taken to be in order, rank after rank: they are what `at` says", {"at": contiguous}),
    ("each rank's positions are taken to begin at 0: they are what `at` says", {"at": from_0}),
    ("each rank's positions are sorted, but not its queries, keys and values, to which they belong one by one",
     {"at": lambda at, rank: np.sort(at[rank])}),
    ("a ring is changed when a second one is made: what __init__ keeps belongs to the object (self), not to the class "
     "or the module", {"at": reversed_all}),
]

BACKWARD = [
    ("dk and dv are complete, but on the wrong rank: they are the next one's. Another message brings them home",
     {"collect": at_neighbour(1)}),
    ("dk and dv are complete, but on the wrong rank: they are those of the one before. A message too many?",
     {"collect": at_neighbour(-1)}),
    ("dk and dv are those of the keys that came last: they stay on the rank that has worked them out, and belong to "
     "another", {"collect": what_came_last}),
    ("dk and dv of all blocks are added into one array that stays: gradients by different keys. They travel with their "
     "keys", {"collect": all_of_mine}),
    ("dk has this rank's own part only, where dv is complete: both travel", {"travel": (False, True)}),
    ("dv has this rank's own part only, where dk is complete: both travel", {"travel": (True, False)}),
    ("dk and dv have this rank's own part only: all ranks' queries have looked at these keys", {"collect": own}),
    ("in dk and dv this rank's own part is missing", {"collect": not_own}),
    ("in dk and dv this rank's own part is there twice", {"collect": own_twice}),
    ("what arrives of dk and dv is overwritten by this rank's part: it is added to it", {"collect": last_one}),
    ("dk and dv are the mean over the ranks: each adds its part, and nobody divides", {"mean": True}),
    ("dq is the last step's share: every block adds to it", {"dq": lambda shares: shares[-1]}),
    ("dq is the first step's share, of this rank's own keys: every block adds to it", {"dq": lambda shares: shares[0]}),
    ("dq is the mean over the steps: every block adds its share", {"dq": lambda shares: sum(shares) / len(shares)}),
    ("backward goes through what the last forward has kept: two were under way, and each has its own `kept`",
     {"goes_through": lambda number, n: n - 1}),
    ("backward takes the out and lse that the last forward has left on self: two were under way, and what each has "
     "found belongs into its own `kept`", {"found_last": True}),
    ("backward goes through what another forward has kept: what belongs to this one is in its own `kept`, and forwards "
     "and backwards may come in any order", {"goes_through": lambda number, n: n - 1 - number}),
    ("backward is given out and lse as they were after the first step: those of all keys are the last ones",
     {"kept": lambda pieces: pieces[0]}),
    ("backward is given the last step's out and lse alone: those of all keys together were asked for",
     {"kept": lambda pieces: pieces[-1]}),
]


def told(sentence, how):
    return gives(sentence, lambda case: world(case, **how))


def notes(got):
    """What was done to arrays that were being sent."""
    return [note for rank in got for note in rank["touched"]]


def last_alone(case, got):
    """Of several forwards under way all outs are right, and the gradients of the last one."""
    last = len(case[0]["passes"]) - 1
    return last > 0 and all(
        same(x, y, 1e-9) for rank, right in zip(got, truth(case), strict=True)
        for x, y in [*zip(rank["outs"], right["outs"], strict=True),
                     *((rank[name][last], right[name][last]) for name in NAMES if name != "outs")])


SIGNATURES = [
    when(lambda case, got: min(notes(got)), lambda case, got: notes(got)),
    # Those that leave outs right come first: they explain nothing else by chance.
    *[told(text, how) for text, how in BACKWARD],
    *[told(text, how) for text, how in BOTH],
    *[told(text, how | {"back": ring}) for text, how in BOTH],
    *[told(text, how) for text, how in FORWARD],
    *[told(f"in backward: {text}", {"back": how["forward"]}) for text, how in BOTH],
    *[gives(where + "a block is left out because its first position comes behind this rank's last one: positions are "
            "in any order, so it takes the smallest and the greatest", lambda case, ways=ways:
            world(case, **{way: by_ends(case[0]["at"]) if way in ways else ring for way in ("forward", "back")}))
      for where, ways in (("", ("forward", "back")), ("", ("forward",)), ("in backward: ", ("back",)))],
    when("of several forwards under way the last one's gradients are right, the others' aren't: something that "
         "backward takes is the last one's. All of it belongs into `kept`, and nothing into self", last_alone),
]


# ---------------------------------------------------------------- what is asked for beside right numbers

def sends(rank, forward):
    """The messages that a rank sends in one of the two passes."""
    return [call for call in rank.calls if call["op"] in SENDS and (call["begin"] < rank["turn"]) == forward]


def peers(rank, ops):
    return {call["peer"] for call in rank.calls if call["op"] in ops}


def sizes(case):
    """Bytes of a rank's keys and values, of all passes."""
    return sum(one[name].nbytes for one in case[0]["passes"] for name in ("k", "v"))


def most(got, forward):
    return max(sum(call["bytes"] for call in sends(rank, forward)) for rank in got)


def travels(call, rank):
    """Whether a message was under way while the rank worked."""
    return call["end"] is not None and any(call["begin"] <= begin and end <= call["end"]
                                           for begin, end, _ in rank["work"])


def overlapped(case, rank):
    """Whether all messages of forward were under way while the rank worked, but for those of steps that it has left
    out, in which it would have seen nothing."""
    steps, messages = len(case[0]["passes"]) * len(case), sends(rank, True)
    idle = [call for call in messages if not travels(call, rank)]
    per_step = len(messages) / max(1, steps - len(case[0]["passes"]))
    return len(idle) <= per_step * max(0, steps - len(rank["work"]))


DEMANDS = [
    demand(lambda case, got: f"right, but {got[0]['changed'][0]} isn't what it was before the call: work on a copy",
           lambda case, got: not any(rank["changed"] for rank in got)),
    demand(lambda case, got: f"right, by luck: {min(notes(got))}", lambda case, got: not notes(got)),
    demand("right, but a posted message is never waited for: MPI may still read from the array when you change it",
           lambda case, got: all(call["end"] is not None for rank in got for call in rank.calls)),
    demand("right, but some rank sends to several others: in a ring one sends to one neighbour, and receives from the "
           "other, whatever the number of ranks",
           lambda case, got: all(len(peers(rank, ops)) <= 1 for rank in got for ops in (SENDS, RECEIVES))),
    demand(lambda case, got: f"right, but in forward some rank sends {most(got, True):,} bytes: its keys and values "
                             f"N-1 times are {(len(case) - 1) * sizes(case):,}. Queries stay where they are, and after "
                             "N-1 messages everybody has met everything",
           lambda case, got: most(got, True) <= (len(case) - 1) * sizes(case)),
    demand("right, but nothing travels while a rank computes: post the messages of a step before attention, and wait "
           "for them after it",
           lambda case, got: all(overlapped(case, rank) for rank in got)),
    demand(lambda case, got: f"right, but in backward some rank sends {most(got, False):,} bytes: keys, values and "
                             f"their gradients N times are {2 * len(case) * sizes(case):,}",
           lambda case, got: most(got, False) <= 2 * len(case) * sizes(case)),
    demand("right, but keys and values don't go round again in backward: then every rank has kept those of all others, "
           "the whole sequence, and that is what it has no room for",
           lambda case, got: most(got, False) >= 2 * (len(case) - 1) * sizes(case)),
]
