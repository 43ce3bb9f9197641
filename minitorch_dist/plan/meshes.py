"""All meshes of so many devices that a model can be trained on, the fastest first."""

from dataclasses import replace
from itertools import islice
from math import isqrt

from .paper import plan

MOST = 2_000    # meshes that are tried: minutes


def divisors(n):
    """[1, …, n]."""
    small = [d for d in range(1, isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


def every(job, device, devices, stages=None, micro_batches=None, sequence_parallel=False, cp=1, ep=1):
    """([Plan] of every mesh and stage that can be, [why not] of those that can't be). First those that fit, by the
    seconds of a step; if none does, by what they hold.

    job            says all else
    stages         ZeRO's to try (default: all where dp, cp and ep are more than 1)
    micro_batches  of each (default: 1; in a pipeline 4 per stage, or as many as there are samples)
    sequence_parallel  along tp, where there is any
    cp, ep         at most so many ranks along these axes
    Tensor parallelism stays within a machine: each block waits for it. ValueError where there are more than MOST.
    """
    found, refused = [], []
    tried = list(islice(meshes(devices, device.per_node, cp, ep), MOST + 1))
    if len(tried) > MOST:
        raise ValueError(f"{devices:,} devices with at most cp={cp} and ep={ep} are more than {MOST:,} meshes: "
                         "give fewer --cp or --ep, or one mesh by --tp and --pp, without --meshes")
    for mesh in tried:
        pieces = micro_batches
        if pieces is None:
            pieces = 1 if mesh["pp"] == 1 else max(1, min(4 * mesh["pp"], job.batch // (mesh["dp"] * mesh["ep"])))
        for stage in stages or (range(4) if mesh["dp"] * mesh["cp"] * mesh["ep"] > 1 else [0]):
            try:
                found.append(plan(replace(job, **mesh, stage=stage, micro_batches=pieces,
                                          sequence_parallel=mesh["tp"] > 1 and sequence_parallel), device))
            except ValueError as error:
                refused.append(f"{error}")
    fit = any(p.fits for p in found)
    return sorted(found, key=lambda p: (not p.fits, p.seconds.step if fit else p.fullest.memory)), refused


def meshes(devices, most_tp, most_cp, most_ep):
    """{axis: ranks}, of every mesh of so many devices."""
    for tp in [d for d in divisors(devices) if d <= most_tp]:
        for cp in [d for d in divisors(devices // tp) if d <= most_cp]:
            for ep in [d for d in divisors(devices // tp // cp) if d <= most_ep]:
                for pp in divisors(devices // tp // cp // ep):
                    yield {"dp": devices // tp // cp // ep // pp, "tp": tp, "pp": pp, "cp": cp, "ep": ep}
