"""All meshes of so many devices that a model can be trained on, the fastest first."""

from dataclasses import replace

from .paper import plan


def divisors(n):
    """[1, …, n]."""
    return [d for d in range(1, n + 1) if n % d == 0]


def every(job, device, devices, stages=None, micro_batches=None, sequence_parallel=False):
    """([Plan] of every mesh and stage that can be, first those that fit, by the seconds of a step; how many can't be).

    job            says all else
    stages         ZeRO's to try (default: all where dp is more than 1)
    micro_batches  of each (default: 1; in a pipeline 4 per stage, or as many as there are samples)
    sequence_parallel  along tp, where there is any
    Tensor parallelism stays within a machine: each block waits for it.
    """
    found, impossible = [], 0
    for tp in [d for d in divisors(devices) if d <= device.per_node]:
        for pp in divisors(devices // tp):
            dp = devices // tp // pp
            pieces = micro_batches
            if pieces is None:
                pieces = 1 if pp == 1 else max(1, min(4 * pp, job.batch // dp))
            for stage in stages or (range(4) if dp > 1 else [0]):
                try:
                    found.append(plan(replace(job, dp=dp, tp=tp, pp=pp, stage=stage, micro_batches=pieces,
                                              sequence_parallel=tp > 1 and sequence_parallel), device))
                except ValueError:
                    impossible += 1
    return sorted(found, key=lambda p: (not p.fits, p.seconds.step)), impossible
