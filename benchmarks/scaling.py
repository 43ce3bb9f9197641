"""What a second rank brings, at the same global batch: ours over MPI, beside torch DDP over gloo, and the ceiling.

    python benchmarks/scaling.py [middle] [wide]        # starts `mpirun -n 2` itself

The ceiling is what two ranks could reach at best on this machine: each does the work of its half batch and says
nothing to the other, both at once. "numpy by hand" is the step written out, with MPI's Allreduce for each gradient;
"bare reduction" only sums arrays of the gradients' size in the node's window. Everything is measured in turns in one
job, each rank on one BLAS thread; the time of a turn is that of the slowest rank. While rank 0 works alone, rank 1
sleeps.
"""

from _harness import Report, installed, join_gloo, named, one_thread, result, world_of

one_thread()

import gc  # noqa: E402
import random  # noqa: E402
import statistics  # noqa: E402
import time  # noqa: E402

import _mlp  # noqa: E402
import numpy as np  # noqa: E402

from minitorch_dist.parallel import DistributedDataParallel  # noqa: E402

RANKS = 2
CEILING_AIM = 0.9
DDP_AIMS = {"middle": 1.5}      # times torch DDP on as many ranks
ADDED_AIM = 0.1                 # of the ceiling and the bare reduction together
ROUNDS = {"middle": 120, "wide": 15}
STEPS = {"middle": 4, "wide": 1}       # of one turn
LIMIT = 900


def programs(name, world, skipped):
    """{what: (step, whether all ranks take part)}."""
    widths, batch = _mlp.MODELS[name]
    x, labels = _mlp.batch_of(name)
    part = slice(batch * world.rank // world.size, batch * (world.rank + 1) // world.size)
    model = DistributedDataParallel(_mlp.our_model(widths), world)
    gradients = [world.empty(bucket.grads.size, bucket.grads.dtype) for bucket in model.buckets]
    steps = {
        "ours, 1 rank": (_mlp.ours(_mlp.our_model(widths), x, labels), False),
        f"ours, {world.size} ranks": (
            _mlp.ours(model, x[part], labels[part], count=batch), True),
        "ours, ceiling": (_mlp.ours(_mlp.our_model(widths), x[part], labels[part], count=batch), True),
        "ours, bare reduction": (lambda: [world.all_reduce(g) for g in gradients], True),
        "numpy by hand, 1 rank": (_mlp.numpy_step(widths, x, labels), False),
        f"numpy by hand, {world.size} ranks": (
            _mlp.numpy_step(widths, x[part], labels[part], count=batch, reduce=all_reduce_by_mpi), True),
    }
    if not installed(skipped, "torch"):
        return steps
    from torch.nn.parallel import DistributedDataParallel as TorchDDP
    for what, fused in (("torch", None), ("torch, fused Adam", True)):
        steps[f"{what}, 1 rank"] = (_mlp.torch_step(_mlp.torch_model(widths), x, labels, fused), False)
        steps[f"{what}, {world.size} ranks"] = (
            _mlp.torch_step(TorchDDP(_mlp.torch_model(widths)), x[part], labels[part], fused), True)
    return steps


def all_reduce_by_mpi(grads):
    """What one writes with mpi4py."""
    from mpi4py import MPI
    for g in grads:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, g)


def turn(step, together, count, world):
    """Seconds per step of the slowest rank, over `count` of them after one that isn't counted."""
    taken = np.zeros(1)
    world.barrier()
    if together or world.rank == 0:
        step()
        if together:
            world.barrier()
        start = time.perf_counter()
        for _ in range(count):
            step()
        taken[0] = (time.perf_counter() - start) / count
    if not together:    # a rank that waits in a barrier spins, and would take memory bandwidth and clock from rank 0
        token = np.zeros(1)
        if world.rank == 0:
            for peer in range(1, world.size):
                world.send(token, peer)
        else:
            arrived = world.irecv(token, 0)
            while not arrived.is_completed():
                time.sleep(0.002)
            arrived.wait()
    world.all_reduce(taken, "max")
    return float(taken[0])


def measure(name, world, skipped):
    """{what: (best, median) seconds per step}, on all ranks."""
    steps = programs(name, world, skipped)
    gc.collect()
    gc.freeze()
    turns, order = {what: [] for what in steps}, random.Random(0)      # the same on all ranks
    for round_ in range(ROUNDS[name] + 1):
        for what in order.sample(list(steps), len(steps)):      # who comes after a rank has slept finds it cold
            step, together = steps[what]
            taken = turn(step, together, STEPS[name], world)
            if round_:      # the first is for warming up
                turns[what].append(taken)
    gc.unfreeze()
    return {what: (min(times), statistics.median(times)) for what, times in turns.items()}


def report_on(name, report, seconds, size):
    """Print one model's table and note its aims."""
    batch = _mlp.MODELS[name][1]
    best = {what: s[0] for what, s in seconds.items()}
    rows = []
    for what, (fastest, median) in seconds.items():
        if "bare" in what:
            rows.append({"": what, "samples/s": "", "median": "", "ms per step": f"{1e3 * fastest:.2f}",
                         "speed-up": ""})
            continue
        alone = best[what.split(",")[0] + (", fused Adam" if "fused" in what else "") + ", 1 rank"]
        rows.append({"": what, "samples/s": f"{batch / fastest:,.0f}", "median": f"{batch / median:,.0f}",
                     "ms per step": f"{1e3 * fastest:.2f}", "speed-up": f"{alone / fastest:.2f}"})
    report.table(_mlp.title(name), rows)
    two, ceiling = best[f"ours, {size} ranks"], best["ours, ceiling"]
    report.aim(f"{name}: {size} ranks against the ceiling", f"≥ {CEILING_AIM:.0%}", f"{ceiling / two:.0%}",
               ceiling / two >= CEILING_AIM)
    bare = ceiling + best["ours, bare reduction"]
    report.aim(f"{name}: what {size} ranks add to the ceiling and the bare reduction", f"≤ {ADDED_AIM:.0%}",
               f"{two / bare - 1:.0%}", two / bare - 1 <= ADDED_AIM)
    rival = min((best[what] for what in best if what.startswith("torch") and "ranks" in what), default=None)
    if rival and name in DDP_AIMS:
        report.aim(f"{name}: {size} ranks against torch DDP (the faster Adam)", f"≥ {DDP_AIMS[name]} ×",
                   f"{rival / two:.2f} ×", rival / two >= DDP_AIMS[name])


def main(names):
    world = world_of(__file__, RANKS, LIMIT, *names)
    if world is None:
        return
    report = Report(result("scaling", names, ROUNDS),
                    f"One training step on 1 and on {world.size} ranks (`scaling.py`)")
    if installed(report.skipped, "torch"):
        join_gloo(world)
    for name in names:
        seconds = measure(name, world, report.skipped)
        report_on(name, report, seconds, world.size)
    if world.rank == 0:
        report.save()


if __name__ == "__main__":
    main(named(__doc__, ROUNDS))
