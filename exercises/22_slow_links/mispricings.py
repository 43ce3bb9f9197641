"""The known mistakes of 22.4."""

import math

import numpy as np

from exercises.frame import demand, gives, when
from exercises.frame.comparing import same

from .prices import (
    RIGHT,
    compute,
    data_parallel,
    diloco,
    encoded,
    one_bit,
    power_sgd,
    ring,
    run,
    smallest,
    timeline,
    truth,
    wait,
    whole,
)


def f(what, text, formula):
    """Of one function."""
    return gives(f"{what}: {text}", lambda case: run(case, what, formula) if case["what"] == what else None)


def r(text, reduce):
    """Of all_reduce, and then of all that is built of it."""
    return gives("all_reduce: " + text, lambda case: run(case, reduce=reduce))


def g(text, gather):
    return gives("all_gather: " + text, lambda case: run(case, gather=gather))


def messages(steps, part, latency=lambda n, steps: steps):
    """Seconds of so many steps, with this part of the bytes in each."""
    def cost(nbytes, link):
        n = link["ranks"]
        return latency(n, steps(n)) * link["latency"] + steps(n) * nbytes * part(n) / link["bandwidth"]
    return cost


def ages(case, got):
    """More than anybody waits."""
    return got["result"] > 1e5 * truth(case)["result"]


def after_backward(case, cost):
    job, n = case["job"], case["more"]["buckets"]
    return compute(job) + n * cost(4 * job["numbers"] / n, case["link"])


def in_one(case, cost):
    return compute(case["job"]) + wait(case, cost)


def all_hidden(case, cost):
    job, n = case["job"], case["more"]["buckets"]
    return max(compute(job), n * cost(4 * job["numbers"] / n, case["link"]))


def behind_backward(case, cost):
    """As if backward and sending could begin together."""
    job, n = case["job"], case["more"]["buckets"]
    return job["forward"] + max(job["backward"], n * cost(4 * job["numbers"] / n, case["link"]))


def all_at_once(case, cost):
    """Buckets that don't wait for each other."""
    job, n = case["job"], case["more"]["buckets"]
    return compute(job) + cost(4 * job["numbers"] / n, case["link"])


def undivided(case, cost):
    job, n = case["job"], case["more"]["buckets"]
    return timeline(job, case["link"], n, lambda nbytes, link: cost(nbytes * n, link))


def without_forward(case, cost):
    return data_parallel(case, cost) - case["job"]["forward"]


def during_forward(case, cost):
    job = case["job"]
    return timeline(job, case["link"], case["more"]["buckets"], cost, lambda job, i, n: compute(job) * (i + 1) / n)


def sized(what, bytes_each):
    right, cost = RIGHT[what]
    return lambda case, _: right(case, lambda nbytes, link: cost(nbytes * bytes_each / 4, link))


def signs(bits, scale=8, cost=whole):
    return lambda case, _: encoded(case) + cost(case["job"]["numbers"] * bits / 8 + scale, case["link"])


def two_messages(case, cost):
    return encoded(case) + cost(case["job"]["numbers"] / 8, case["link"]) + cost(8, case["link"])


def no_compute(right):
    return lambda case, cost: right(case, cost) - compute(case["job"])


def not_encoded(right):
    return lambda case, cost: right(case, cost) - case["more"]["encode"]


def one_message(case, cost):
    return encoded(case) + cost(4 * (case["more"]["p"] + case["more"]["q"]), case["link"])


def by_product(case, cost):
    return encoded(case) + cost(4 * case["more"]["p"] * case["more"]["q"], case["link"])


def gathered(case, cost):
    return encoded(case) + sum(whole(4 * case["more"][name], case["link"]) for name in "pq")


def greater(case, cost):
    """The two all-reduces at the same time."""
    return encoded(case) + max(cost(4 * case["more"][name], case["link"]) for name in "pq")


def only_one(name):
    return lambda case, cost: encoded(case) + cost(4 * case["more"][name], case["link"])


def hides(hidden, least=0.0):
    """DiLoCo where `hidden(case)` seconds of a meeting aren't waited for."""
    def formula(case, cost):
        return compute(case["job"]) + max(least, wait(case, cost) - hidden(case)) / case["more"]["every"]
    return formula


def overlap(case):
    return case["more"].get("overlap", 0)


def per_step(case, cost):
    """One step's computing in the place of the overlap's."""
    return compute(case["job"]) + max(0.0, wait(case, cost) / case["more"]["every"] - overlap(case) * compute(
        case["job"]))


def every_time(case, cost):
    return compute(case["job"]) + max(0.0, wait(case, cost) - overlap(case) * compute(case["job"]))


def whole_round(case, cost):
    return case["more"]["every"] * diloco(case, cost)


def all_divided(case, cost):
    hidden = overlap(case) * compute(case["job"])
    return (compute(case["job"]) + max(0.0, wait(case, cost) - hidden)) / case["more"]["every"]


def fewer_bytes(case, cost):
    """An all-reduce of 1/H of the parameters in every step."""
    more = case["more"]
    return compute(case["job"]) + max(0.0, cost(4 * case["job"]["numbers"] / more["every"], case["link"]) - overlap(
        case) * compute(case["job"]) / more["every"])


def twice(case, cost):
    return compute(case["job"]) + max(0.0, 2 * wait(case, cost) - overlap(case) * compute(case["job"])) / case["more"][
        "every"]


def every_as(count):
    """smallest_every by another rounding of the ratio."""
    def formula(case, cost):
        return count(wait(case, cost) / (case["more"]["share"] * compute(case["job"])))
    return formula


def of_step(case, cost):
    """Waiting is at most `share` of a step with it: W / H ≤ share · (computing + W / H)."""
    share = case["more"]["share"]
    return max(1, math.ceil(wait(case, cost) * (1 - share) / (share * compute(case["job"]))))


def of_total(case, cost):
    """The share of the whole step's time that is waiting."""
    share = case["more"]["share"] / (1 + case["more"]["share"])
    return max(1, math.ceil(wait(case, cost) / (share * compute(case["job"]))))


def strictly(case, cost):
    ratio = wait(case, cost) / (case["more"]["share"] * compute(case["job"]))
    return max(1, math.floor(ratio) + 1)


def no_share(case, cost):
    return max(1, math.ceil(wait(case, cost) / compute(case["job"])))


def times_share(case, cost):
    return max(1, math.ceil(case["more"]["share"] * wait(case, cost) / compute(case["job"])))


def of_backward(case, cost):
    return max(1, math.ceil(wait(case, cost) / (case["more"]["share"] * case["job"]["backward"])))


def added(case, cost):
    """The share is taken of a step that has 1 + share times the computing."""
    return max(1, math.ceil(wait(case, cost) / ((1 + case["more"]["share"]) * compute(case["job"]))))


def too_early(case, got):
    """A smaller H than one in thousands."""
    return case["what"] == "smallest_every" and got["result"] < truth(case)["result"] > 1000


def near(case, got):
    return same(got["result"], truth(case)["result"], 1e-3)


SIGNATURES = [
    when("bytes times bandwidth: the bandwidth is bytes per second, so divide by it", ages),
    f("data_parallel", "nothing is overlapped: the first bucket is sent while backward computes the next",
      after_backward),
    f("data_parallel", "nothing is overlapped, and all is sent in one: the first bucket is sent while backward "
      "computes the next", in_one),
    f("data_parallel", "forward can't hide anything: no gradient is there before backward", all_hidden),
    f("data_parallel", "sending can't begin with backward: the first bucket is complete after 1 / buckets of it",
      behind_backward),
    f("data_parallel", "the buckets wait for each other: one is sent when the one before it has arrived", all_at_once),
    f("data_parallel", "each bucket has 1 / buckets of the bytes", undivided),
    f("data_parallel", "forward is left out", without_forward),
    f("data_parallel", "buckets are filled in backward alone, not in forward", during_forward),
    f("data_parallel", "a number has 4 bytes", sized("data_parallel", 8)),
    f("data_parallel", "a number has 4 bytes: numbers aren't bytes", sized("data_parallel", 1)),
    f("data_parallel", "a number has 4 bytes", sized("data_parallel", 2)),
    f("one_bit", "a byte has eight signs", signs(8)),
    f("one_bit", "a sign is a bit, an eighth of a byte", signs(32)),
    f("one_bit", "1/32 of 4 bytes is a bit; numbers / 32 are too few bytes", signs(0.25)),
    f("one_bit", "the scale's 8 bytes are left out", signs(1, 0)),
    f("one_bit", "the scale has 8 bytes, not 4", signs(1, 4)),
    f("one_bit", "a rank hands over its own scale, 8 bytes, not those of all ranks",
      lambda case, _: signs(1, 8 * case["link"]["ranks"])(case, _)),
    f("one_bit", "one message, with the scale in it", two_messages),
    f("one_bit", "a sum of signs is no sign: they can't be all-reduced, everybody sends to everybody (all_gather)",
      signs(1, 8, ring)),
    f("one_bit", "the computing is left out: asked for are seconds per step", no_compute(one_bit)),
    f("one_bit", "packing and unpacking take time, too: `encode` seconds", not_encoded(one_bit)),
    f("power_sgd", "the products take time, too: `encode` seconds", not_encoded(power_sgd)),
    f("power_sgd", "`encode` is seconds of a step, once", lambda case, cost: power_sgd(case, cost)
      + case["more"]["encode"]),
    f("power_sgd", "P must be summed, and made orthonormal, before anybody can compute Q: two messages, not one",
      one_message),
    f("power_sgd", "p and q are numbers that are sent, P's and Q's; nothing is multiplied", by_product),
    f("power_sgd", "P and Q are summed: all-reduces, not all-gathers", gathered),
    f("power_sgd", "Q can't be sent together with P: one after the other", greater),
    f("power_sgd", "Q is sent, too", only_one("p")),
    f("power_sgd", "P is sent, too", only_one("q")),
    f("power_sgd", "a number has 4 bytes: numbers aren't bytes", sized("power_sgd", 1)),
    f("power_sgd", "a number has 4 bytes", sized("power_sgd", 8)),
    f("power_sgd", "the computing is left out: asked for are seconds per step", no_compute(power_sgd)),
    f("diloco", "without overlap: while it is on its way the workers go on for `overlap` steps",
      hides(lambda case: 0.0)),
    f("diloco", "`overlap` steps, not one, are made while it is on its way", hides(lambda case: (overlap(case) > 0)
      * compute(case["job"]))),
    f("diloco", "nobody waits less than 0 seconds: who has it before the overlap's end goes on computing",
      hides(lambda case: overlap(case) * compute(case["job"]), -math.inf)),
    f("diloco", "forward hides as well as backward: `overlap` whole steps", hides(lambda case: overlap(case)
      * case["job"]["backward"])),
    f("diloco", "overlap is a number of steps, not of seconds", hides(overlap)),
    f("diloco", "the waiting is divided by H first, and then the whole overlap taken off: both come once per round",
      per_step),
    f("diloco", "the workers meet in every step here: divide by H what comes once per round", every_time),
    f("diloco", "these are the seconds of a round; asked for are those of a step", whole_round),
    f("diloco", "the computing is divided by H as well: it is done in every step", all_divided),
    f("diloco", "there are 1/H as many messages, each of all parameters: not as many, each of 1/H", fewer_bytes),
    f("diloco", "one all-reduce of the parameters, not two", twice),
    f("diloco", "a number has 4 bytes: numbers aren't bytes", sized("diloco", 1)),
    f("diloco", "a number has 4 bytes", sized("diloco", 8)),
    f("diloco", "the computing is left out: asked for are seconds per step", no_compute(diloco)),
    f("smallest_every", "rounded to the nearest: asked for is the smallest H that is enough", every_as(lambda x: max(
        1, round(x)))),
    f("smallest_every", "rounded down: with that H it is more than the share", every_as(lambda x: max(
        1, math.floor(x)))),
    f("smallest_every", "one more than needed where the ratio is an integer: at most the share is enough", strictly),
    f("smallest_every", "one more than needed", every_as(lambda x: max(1, math.ceil(x)) + 1)),
    f("smallest_every", "H is at least 1", every_as(math.ceil)),
    f("smallest_every", "H is an int: with 7.3 steps nobody can do anything", every_as(lambda x: max(1.0, x))),
    f("smallest_every", "the share is of the computing, not of the whole step", of_step),
    f("smallest_every", "the share is of the computing, not of the whole step", of_total),
    f("smallest_every", "the share is left out: that H makes waiting as long as computing", no_share),
    f("smallest_every", "the share is on the wrong side of the division", times_share),
    f("smallest_every", "computing is forward and backward", of_backward),
    f("smallest_every", "waiting may add `share` of the computing, not 1 + share of it", added),
    f("smallest_every", "a number has 4 bytes: numbers aren't bytes", sized("smallest_every", 1)),
    r("N messages of 1/N each are one half of it, a reduce-scatter; an all-reduce is two",
      messages(lambda n: n - 1, lambda n: 1 / n)),
    r("each message has 1/N of the array, not all of it", messages(lambda n: 2 * (n - 1), lambda n: 1)),
    r("the messages are 2(N-1), not 2N", messages(lambda n: 2 * n, lambda n: 1 / n)),
    r("the latency comes with every message, not once", messages(lambda n: 2 * (n - 1), lambda n: 1 / n, lambda n, s:
      1.0 * (n > 1))),
    r("the latency comes with every message, not once", messages(lambda n: 2 * (n - 1), lambda n: 1 / n, lambda n, s:
      1.0)),
    r("the latency comes with every one of 2(N-1) messages, not N-1", messages(
        lambda n: 2 * (n - 1), lambda n: 1 / n, lambda n, s: s / 2)),
    r("the latency is left out", messages(lambda n: 2 * (n - 1), lambda n: 1 / n, lambda n, s: 0.0)),
    r("a message has 1/(N-1) of the array: it is cut into as many parts as there are ranks",
      messages(lambda n: 2 * (n - 1), lambda n: 1 / max(n - 1, 1))),
    r("the latency is divided by N as well: only the bytes are", messages(
        lambda n: 2 * (n - 1), lambda n: 1 / n, lambda n, s: s / n)),
    r("the bandwidth is bytes per second, and nbytes are bytes: nothing is to be multiplied by 8",
      messages(lambda n: 2 * (n - 1), lambda n: 8 / n)),
    g("a message is whole here, and N-1 times 1/N of it is an all-gather of what each rank has a part of",
      messages(lambda n: n - 1, lambda n: 1 / n)),
    g("there are N-1 messages, not 2(N-1): nothing is summed before", messages(lambda n: 2 * (n - 1), lambda n: 1)),
    g("there are N-1 messages, not 2(N-1), and each of them is whole", messages(lambda n: 2 * (n - 1), lambda n: 1 / n)
      ),
    g("there are N-1 messages, not N: one's own needn't travel", messages(lambda n: n, lambda n: 1)),
    g("one message: everybody's must come here, one after the other", messages(lambda n: 1.0 * (n > 1), lambda n: 1)),
    g("one message: everybody's must come here, one after the other", messages(lambda n: 1.0, lambda n: 1)),
    g("the latency comes with every message, not once", messages(lambda n: n - 1, lambda n: 1, lambda n, s: 1.0)),
    g("the latency is left out", messages(lambda n: n - 1, lambda n: 1, lambda n, s: 0.0)),
    when("smallest_every: the search ends too early: no H is too large to be asked for", too_early),
    when("nearly right: is something rounded?", near),
]

DEMANDS = [
    demand(lambda case, got: f"smallest_every: right, but {float(got['result'])} is a float: H is an int",
           lambda case, got: case["what"] != "smallest_every" or isinstance(got["result"], int | np.integer)),
]
