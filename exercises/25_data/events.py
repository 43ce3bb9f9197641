"""25.5: in which order what must happen, and what known mistakes look like."""

from typing import NamedTuple

import numpy as np

from exercises.frame import demand

SHOWN = 9       # events up to the one that is told
KEPT = 1        # batches more than depth that may still be there: the one that was given last, say
LEAVE = "close", "break"


# ---------------------------------------------------------------- cases

def case(what, depth, batches, fails=None, **more):
    """fails: {read: what it raises}"""
    fails = fails or {}
    return {"what": what, "depth": depth, "batches": batches, "fails": list(fails), "raised": list(fails.values()),
            **more}


def cases(rng):
    def some(count):
        return [np.append(rng.integers(0, 99, 2), number) for number in range(count)]
    one = rng.integers(1, 99, 3)
    odd = [one, None, 0, [], "", one, False, one.astype(float), np.zeros(0)]
    most = int(rng.integers(6, 9))
    return [case("steps", 1, some(most), first=True), case("steps", 3, some(most + 1)), case("steps", 2, odd),
            case("steps", 5, some(2)), case("steps", 2, []),
            case("waits", 1, some(4), long=1), case("waits", 3, some(5)), case("waits", 2, some(4), {2: "KeyError"}),
            case("fails", 4, some(6), {2: "OSError"}), case("fails", 1, some(3), {0: "SystemExit"}),
            *(case("left", 2, some(most), how=how, asks=asks, held=held) for held, asks in (
                (False, 3), (True, 2), (False, 0)) for how in ("close", "break")),
            case("left", 1, some(most), how="break", asks=1, held=False),
            case("left", 3, some(5), {2: "OSError"}, how="close", asks=1, held=False), case("two", 2, some(3)),
            {"what": "clocks", "depth": 2, "reads": rng.permutation([0.004] * 9 + [0.02] * 3), "steps": [0.009] * 12}]


# ---------------------------------------------------------------- what happened

class Now(NamedTuple):
    """An event, and how things stand with it: batches asked for, reads begun, reads that go on, and whether the loop is
    over: the end or an error has come out, or close been called."""

    at: int
    who: str
    number: int
    what: str
    asked: int
    begun: int
    going: int
    over: bool


def states(events):
    asked, begun, going, over = 0, 0, 0, False
    for at, (who, number, what) in enumerate(events):
        begins = what.startswith("begins")
        asked += who == "ask" and begins
        begun += who == "read" and begins
        going += who == "read" and (1 if begins else -1)
        yield Now(at, who, number, what, asked, begun, going, over)
        over |= who in LEAVE or who == "ask" and what.startswith(("ends", "raises"))


def kind(case):
    return "fails" if case["what"] == "waits" and case["fails"] else case["what"]


def outcomes(events, who="ask"):
    """[what came of each ask]"""
    return [what for name, _, what in events if name == who and what != "begins"]


def wanted(case):
    """The outcomes of a right answer, but for those that are left."""
    last = min([len(case["batches"]), *case["fails"]])
    return [f"gives batch {number}" for number in range(last)] + [
        f"raises the error of read {last}"] * len(case["fails"]) + ["ends"] * 3


def in_words(who, number, what):
    if who == "ask" and what == "begins":
        return f"batch {number} asked for"
    name = {"ask": "next", "read": f"read {number}", "step": f"step {number}",
            "threads": f"{number} thread{'s' * (number != 1)}"}.get(who, who)
    return f"{name} {what.partition(',')[0]}"


def so_far(events, at):
    """A line: what happened up to there."""
    shown = events[max(0, at + 1 - SHOWN):at + 1]
    return "\n  " + "… " * (at + 1 > SHOWN) + "; ".join(in_words(*event) for event in shown)


# ---------------------------------------------------------------- demands

def no(sentence, predicate, *kinds):
    """A demand: in cases of these kinds, or all, nothing is so. sentence: text, or f(case, now, events)"""
    def found(case, got):
        if kinds and kind(case) not in kinds:
            return None
        return next((now for now in states(got["events"]) if predicate(case, now)), None)

    def said(case, got):
        now = found(case, got)
        text = sentence if isinstance(sentence, str) else sentence(case, now, got["events"])
        return text + so_far(got["events"], now.at)
    return demand(said, lambda case, got: not found(case, got))


def gone_wrong(case, now):
    """An ask that comes to what it shouldn't."""
    right = [*wanted(case), *["ends"] * now.asked]
    return now.who == "ask" and now.what not in ("begins", "never returns", right[now.number])


def of_batches(case, now, events):
    """What is wrong with the batches that come."""
    what, k, batches = now.what, now.number, case["batches"]
    if what == "ends":
        odd = batches[k]
        if case["what"] == "waits":
            return f"batch {k} of {len(batches)} is still being read, and next says that this is the end: a queue " \
                   "that is empty for now isn't the end; wait for what comes"
        if not isinstance(odd, np.ndarray) or not odd.size:
            return f"batch {k} is {odd!r}, and is taken for the end: a batch may be anything. What says that it is " \
                   "the end must be nothing else, an object() of your own, asked for by `is`"
        return f"batches {k} to {len(batches) - 1} of {len(batches)} are lost: the thread had ended, and what it had " \
               "read still waited"
    if what.startswith("gives a copy"):
        return f"{what.removeprefix('gives ')} is handed on: batches are large; hand on what was read"
    if what.startswith("gives batch"):
        other = int(what.split()[-1])
        return f"batch {other} comes where batch {k} should" + (
            f": batch {k} is lost, or comes too late" if other > k else ": it has been given before")
    if what.startswith("gives"):
        return f"next {what}, which is no batch, " + (
            "where the end was to come" if k >= len(batches) else
            f"where batch {k} was to come" + ": has another iterator left it there? Each has its own" * (k == 0))
    if "TypeError" in what and "not itera" in what and k == 0:
        return f"what is returned is no iterator: {what.partition(': ')[2]}"
    if "StopIteration" in what:
        return f"next {what}: at the end next(batches) raises StopIteration, and that must not go through a future " \
               "or a generator. next(batches, end) gives an object of your own instead"
    if k > len(batches):
        return f"the end has come, and asked once more next {what}: the end comes again"
    return f"{'a read takes a while' if case['what'] == 'waits' else 'no read fails'}, and next {what}"


def of_hanging(case, now, events):
    n = len(case["batches"])
    if now.number < n:
        return f"next never returns, where batch {now.number} was to come: it waits, and no read goes on"
    return ("the end has come, and asked once more next never returns: the end comes again" if now.number > n else
            "next never returns, where the end was to come: does the thread know that there is nothing more to read?")


def reads_on(case, now, events):
    after = {"left": f"{case.get('how')} was called", "fails": "the error came out"}.get(kind(case), "the end came out")
    return f"read {now.number} begins after {after}: nobody wants it any more"


def of_errors(case, now, events):
    last = case["fails"][0]
    error = f"read {last} raises {case['raised'][0]}, "
    if now.number < last:
        return error + f"and that comes out in place of batch {now.number}: those that were read before it come first"
    if now.number > last:
        return error + f"which came out; asked once more, next {now.what}, and should say that this is the end"
    if now.what == "ends":
        return error + "and nobody hears of it: next says that this is the end. The run would go on with less data"
    if now.what.startswith("raises"):
        return error + f"and another error comes out: next {now.what}. Hand on the one that was raised"
    return error + f"and next {now.what}. The error is to come out in place of that batch"


def more_than_depth(case, now, events):
    depth, total = case["depth"], max(each.begun for each in states(events))
    more = max(each.begun - each.asked for each in states(events))
    why = (" One more than depth: does the thread read, and then wait for room? It waits for room, then reads"
           if more == depth + 1 else "" if total < len(case["batches"]) else
           " Nothing holds the thread up" + ": Queue(0) has room for any number" * (depth == 1))
    return (f"depth {depth}: when {now.asked} batch{'es' * (now.asked != 1)} had been asked for, {now.begun} reads had "
            f"begun, and at most {now.asked + depth} may." + why)


def less_than_depth(case, now, events):
    depth, right = case["depth"], min(now.asked + case["depth"], len(case["batches"]) + 1)
    said = (f"depth {depth}: while step {now.number} works, {now.asked} batch{'es' * (now.asked != 1)} asked for, "
            f"{now.begun} reads have begun, and {right} should in the end")
    if now.begun > now.asked:
        return f"{said}: the thread stops too early, or waits until more are missing"
    by_the_loop = any("own thread" in each.what for each in states(events))
    return f"{said}: nothing is read while the loop works" + ", nor is there a thread that could" * by_the_loop


def threads_left(case, now, events):
    many = f"{now.number} thread{'s are' if now.number > 1 else ' is'} left "
    if kind(case) != "left":
        return many + f"when {'the error' if case['fails'] else 'the end'} has come out: it waits for what never comes"
    if not case["asks"]:
        return many + f"by {case['how']} before any batch was asked for"
    if case["how"] == "close":
        return many + "by close: it waits for room in a queue, or for work, or reads on. It must hear that the loop " \
                      "is left, wherever it waits"
    return many + "when the loop is left by break: nobody calls close, and the iterator is dropped. A generator's " \
                  "`finally` is run then; an object's __del__, unless the thread itself holds on to the object"


def closing(case, now, events):
    if "AttributeError" in now.what and "'close'" in now.what:
        return "there is no close: a generator has one"
    if "error of read" in now.what:
        return f"close {now.what}, which nobody has asked for: errors come out in place of their batch"
    return f"close {now.what}" + (", called once more" if now.number else
                                  ", before any batch was asked for" if not case["asks"] else "")


def of_two(case, got):
    """What is wrong where two are begun, or None."""
    count, events = len(case["batches"]), got["events"]
    theirs = [outcomes(events), outcomes(events, "other ask")]
    if any(what == "never returns" for _, _, what in events):
        return "they wait for each other"
    if theirs != [[*(f"gives batch {n}" for n in range(count)), *["ends"] * (k == 0), *["ends"] * (k == 1)]
                  for k in range(2)]:
        return "one gives the other's batches"
    return "threads are left" if any("threads" in who for who, _, _ in events) else None


STUCK = "never returns"

DEMANDS = [
    no(lambda case, now, events: f"ahead(batches, {case['depth']}) {now.what}",
       lambda case, now: now.who == "make" and now.what.startswith("raises")),
    no("batch 0 is read before anybody has asked for it: who makes an iterator may never begin to loop, and nothing "
       "ends the thread then. A function with yield in it begins with the first next; one that returns something made "
       "by another function begins at once", lambda case, now: now.begun > now.asked == 0),
    no(lambda case, now, events: f"batch {now.number} is read by the loop's own thread, when {now.asked} "
       f"batch{'es' * (now.asked != 1)} had been asked for: the step waits for all that is read ahead",
       lambda case, now: now.who == "read" and "own thread" in now.what and now.begun > now.asked),
    no("two threads read at once: an iterator can't do that, and which batch comes first is left to chance",
       lambda case, now: now.going > 1),
    no(lambda case, now, events: f"batch {now.number} has been read, and next waits for read {now.begun - 1} as well: "
       "that is what the thread is there for. A batch is given as soon as it is there",
       lambda case, now: now.who == "ask" and now.what == STUCK and now.going, "steps", "waits"),
    no(of_hanging, lambda case, now: now.who == "ask" and now.what == STUCK, "steps", "waits"),
    no(of_batches, gone_wrong, "steps", "waits"),
    no(reads_on, lambda case, now: now.over and now.who == "read" and now.what.startswith("begins"), "left"),
    no(more_than_depth, lambda case, now: now.begun > now.asked + case["depth"]),
    no(less_than_depth, lambda case, now: now.who == "step" and now.what.startswith("has too little"), "steps"),
    no(lambda case, now, events: f"of the {now.number} batches before this one {now.what.split()[1]} are still in "
       "memory though the loop has let go of them: keep none that was given",
       lambda case, now: now.who == "step" and "alive" in now.what
       and int(now.what.split()[1]) > case["depth"] + KEPT, "steps"),
    no(lambda case, now, events: f"read {case['fails'][0]} raises {case['raised'][0]}, and nobody hears of it: next "
       "waits for ever. What is raised in a thread ends that thread, and no other: hand it over as a batch is, and "
       "raise it in the loop" + ". SystemExit is no Exception, but a BaseException" * ("SystemExit" in case["raised"]),
       lambda case, now: now.who == "ask" and now.what == STUCK and now.number <= case["fails"][0], "fails"),
    no(of_errors, gone_wrong, "fails"),
    no("the error has come out, and asked once more next never returns: behind it is the end", lambda case, now:
       now.who == "ask" and now.what == STUCK, "fails"),
    no(closing, lambda case, now: now.who in LEAVE and now.what.startswith("raises"), "left"),
    no("close never returns: it waits for the thread, and the thread for room, which nobody makes any more",
       lambda case, now: now.who in LEAVE and now.what == STUCK, "left"),
    no(lambda case, now, events: f"{now.who} returns, and read {now.begun - 1} still goes on: whoever closes the files "
       "next takes them away from it. Wait until the thread has ended",
       lambda case, now: now.who in LEAVE and now.what == "returns" and now.going, "left"),
    no(reads_on, lambda case, now: now.over and now.who == "read" and now.what.startswith("begins")),
    no(threads_left, lambda case, now: now.who == "threads"),
    no(lambda case, now, events: f"after close next {now.what}: it is to say that this is the end",
       lambda case, now: now.over and now.who == "ask" and now.what not in ("begins", "ends"), "left"),
    demand(lambda case, got: f"two of them at once, and {of_two(case, got)}: what one has, its thread too, belongs to "
           "it alone", lambda case, got: case["what"] != "two" or not got["events"] or not of_two(case, got)),
    demand(lambda case, got: f"right, but over a generator next raises {got['raised']}",
           lambda case, got: "raised" not in got),
]
