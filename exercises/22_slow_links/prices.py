"""22.4 message by message."""

GPT = {"numbers": 124_000_000, "forward": 0.05, "backward": 0.1}      # of GPT-2's size, on one good device
THIN = [2_130_000, 1_040_000]      # of its matrices' P and Q, with r = 16
ENCODE = {"one bit": 0.005, "PowerSGD": 0.01}      # seconds, taken for the picture
PICTURE = {"job": GPT, "link": {"ranks": 8, "latency": 1e-4, "bandwidth": 0.0}, "buckets": 20, "every": 100,
           "thin": THIN, "encode": ENCODE,
           "bandwidths": [1.25 * 10 ** (6 + k / 6) for k in range(28)]}      # 10 Mbit/s to 300 Gbit/s


# ---------------------------------------------------------------- cases

def jobs(rng):
    """Some where computing is most, some where sending is, and one of one rank."""
    found = []
    for ranks, latency, bandwidth in ((4, 1e-3, 1e7), (3, 0.02, 4e6), (2, 0.0, 1e6), (5, 1e-4, 1e9), (7, 0.3, 1e6),
                                      (1, 0.5, 1e6)):
        found.append(({"numbers": int(rng.integers(1e5, 9e5)), "forward": float(rng.uniform(0.05, 0.1)),
                       "backward": float(rng.uniform(0.15, 0.3))},
                      {"ranks": ranks, "latency": latency * float(rng.uniform(1, 1.5)),
                       "bandwidth": bandwidth * float(rng.uniform(1, 1.5))}))
    return found


def cases(rng):
    found = []
    for number, (job, link) in enumerate(jobs(rng)):
        thin = sorted(map(int, rng.integers(1e3, 1e5, 2)))[::(-1) ** number]      # now P is larger, now Q
        more = {"all_reduce": [{"nbytes": float(rng.integers(10, 10 ** 6))}],
                "all_gather": [{"nbytes": float(rng.integers(10, 10 ** 6))}],
                "data_parallel": [{"buckets": n} for n in (1, 3, 8)],
                "one_bit": [{"encode": float(rng.uniform(0.01, 0.02))}],
                "power_sgd": [{"p": thin[0], "q": thin[1],
                               "encode": float(rng.uniform(0.01, 0.02))}],
                "diloco": [{"every": 1}, {"every": 12}, {"every": 25, "overlap": 1}, {"every": 10, "overlap": 8}],
                "smallest_every": [{"share": float(rng.uniform(0.02, 0.3))}]}
        found += [{"what": what, "job": job, "link": link, "more": one} for what, several in more.items()
                  for one in several]
    exact = {"job": {"numbers": 1000, "forward": 0.5, "backward": 0.5}, "what": "smallest_every",
             "link": {"ranks": 2, "latency": 0.5, "bandwidth": 4000.0}}      # of which one all-reduce takes 2 seconds
    return [*found, *(exact | {"more": {"share": share}} for share in (0.25, 4.0, 2 / 3.3, 2 / 3.7, 2 / 54321.5)),
            {"what": "lines"} | PICTURE]


# ---------------------------------------------------------------- rightly, and with mistakes

def ring(nbytes, link):
    """A reduce-scatter and an all-gather, message by message."""
    n = link["ranks"]
    return sum(link["latency"] + nbytes / n / link["bandwidth"] for _ in range(2) for _ in range(n - 1))


def whole(nbytes, link):
    return sum(link["latency"] + nbytes / link["bandwidth"] for _ in range(link["ranks"] - 1))


def compute(job):
    return job["forward"] + job["backward"]


def ready(job, i, buckets):
    return job["forward"] + job["backward"] * (i + 1) / buckets


def timeline(job, link, buckets, cost, ready=ready):
    """When the last bucket has arrived: the greatest over those that the wire is busy from without a pause."""
    each = [cost(4 * job["numbers"] / buckets, link)] * buckets
    return max(ready(job, i, buckets) + sum(each[i:]) for i in range(buckets))


def data_parallel(case, cost):
    return timeline(case["job"], case["link"], case["more"]["buckets"], cost)


def wait(case, cost):
    return cost(4 * case["job"]["numbers"], case["link"])


def diloco(case, cost):
    more = case["more"]
    hidden = more.get("overlap", 0) * compute(case["job"])
    return compute(case["job"]) + max(0.0, wait(case, cost) - hidden) / more["every"]


def encoded(case):
    return compute(case["job"]) + case["more"]["encode"]


def one_bit(case, cost):
    return encoded(case) + cost(case["job"]["numbers"] / 8 + 8, case["link"])


def power_sgd(case, cost):
    return encoded(case) + sum(cost(4 * case["more"][name], case["link"]) for name in "pq")


def smallest(case, cost):
    limit, waits = case["more"]["share"] * compute(case["job"]), wait(case, cost)
    found = max(1, int(waits / limit) - 2)
    while waits > found * limit * (1 + 1e-12) and found < waits / limit:      # beyond 2⁵³ no float is the next one
        found += 1
    return found


def bare(case, cost):
    return cost(case["more"]["nbytes"], case["link"])


RIGHT = {"all_reduce": (bare, ring), "all_gather": (bare, whole), "data_parallel": (data_parallel, ring),
         "one_bit": (one_bit, whole), "power_sgd": (power_sgd, ring), "diloco": (diloco, ring),
         "smallest_every": (smallest, ring)}


def run(case, what=None, formula=None, reduce=None, gather=None):
    """The result; formula (of `what`), reduce and gather are the mistakes. The latter are all the file's functions'."""
    if case["what"] == "lines":
        return {}
    right, cost = RIGHT[case["what"]]
    cost = (reduce if cost is ring else gather) or cost
    value = (formula if formula and what == case["what"] else right)(case, cost)
    return {"result": value}


def truth(case):
    return run(case)
