"""Causal attention by states, which are sums or follow the delta rule, and to blocks of keys that are chosen, forward
and backward, on one pinned core, as the length grows; beside attention by all keys, ours and torch's. Time and memory.

    python benchmarks/states.py
"""

from _harness import Report, child, compare, forget_peak, installed, named, one_core, resident

one_core()

import numpy as np  # noqa: E402

HEADS, SIZE = 4, 64
LENGTHS = (512, 1024, 2048, 4096)
BLOCKS = {"size": 64, "count": 4}
AIMS = {"twice": 2.2, "torch": 1.0}     # of the time of half as many, of torch's by keys
ROUNDS = 5


def arrays(time):
    """(queries, keys, values, logs of what is kept, rates at which it is replaced) of `time` positions."""
    rng = np.random.default_rng(0)
    return *(rng.standard_normal((1, HEADS, time, SIZE), np.float32) for _ in range(3)), \
        -rng.exponential(0.05, (1, HEADS, time)).astype(np.float32), rng.random((1, HEADS, time), np.float32)


def ours(time, attend, count):
    """A function that makes the result and all gradients of the first `count` arrays, and returns a number made of
    them."""
    import minitorch_dist as mt
    leaves = [mt.tensor(x, requires_grad=True) for x in arrays(time)[:count]]

    def run():
        for x in leaves:
            x.grad = None
        mt.sum(mt.square(attend(mt, *leaves))).backward()
        return float(abs(leaves[1].grad.numpy()).sum())
    return run


def by_states(mt, *leaves):
    """In stretches."""
    from minitorch_dist.nn.states import linear_attention
    return linear_attention(*leaves)


def by_the_delta_rule(mt, q, k, *others):
    """In stretches, of keys of unit length."""
    from minitorch_dist.nn.delta_rule import delta_rule
    return delta_rule(q, mt.rms_norm(k, (SIZE,)) * SIZE ** -0.5, *others)


def by_blocks(mt, *leaves):
    """Attention to chosen blocks."""
    return mt.block_attention(*leaves, **BLOCKS)


def by_keys(mt, *leaves):
    """Attention of all scores."""
    return mt.scaled_dot_product_attention(*leaves, is_causal=True)


def theirs(time):
    """Attention of all scores in torch."""
    import torch
    torch.set_num_threads(1)
    leaves = [torch.from_numpy(x).requires_grad_() for x in arrays(time)[:3]]

    def run():
        for x in leaves:
            x.grad = None
        torch.nn.functional.scaled_dot_product_attention(*leaves, is_causal=True).square().sum().backward()
        return float(leaves[1].grad.abs().sum())
    return run


WAYS = {"states": lambda time: ours(time, by_states, 4),
        "delta rule": lambda time: ours(time, by_the_delta_rule, 5), "blocks": lambda time: ours(time, by_blocks, 3),
        "keys": lambda time: ours(time, by_keys, 3), "keys, torch": theirs}


def peak_bytes(time, way):
    """The most memory of some passes, beyond the imports and inputs, of a process of its own."""
    run = WAYS[way](time)
    forget_peak()
    before = resident()
    for _ in range(3):
        run()
    return resident() - before


def main():
    """Print and save."""
    named(__doc__)
    report = Report("states", "Attention by states, and to chosen blocks (`states.py`)")
    ways = [way for way in WAYS if way != "keys, torch" or installed(report.skipped, "torch")]
    took, rows = {}, []
    for time in LENGTHS:
        calls = {way: WAYS[way](time) for way in ways}
        found = {way: call() for way, call in calls.items()}
        if abs(found.get("keys, torch", found["keys"]) - found["keys"]) > 1e-4 * found["keys"]:
            raise RuntimeError(f"{time} positions: keys are different things here and in torch: {found}")
        took[time] = {way: s.best for way, s in compare(calls, rounds=ROUNDS).items()}
        rows.append({"positions": f"{time:,}"} | {way: f"{1e3 * took[time][way]:.1f}" for way in ways} | {
            f"MB, {way}": f"{child('states', 'peak_bytes', time, way) / 1e6:.0f}" for way in ways})
    report.table(f"{HEADS} heads of {SIZE}, float32; {BLOCKS['count']} blocks of {BLOCKS['size']}: ms, and MB "
                 "beyond the inputs", rows)
    last = LENGTHS[-1]
    for way in ("states", "blocks"):
        twice = took[last][way] / took[last // 2][way]
        report.aim(f"twice as many positions: time of {way}, of that of half", f"≤ {AIMS['twice']:.1f}", f"{twice:.2f}",
                   twice <= AIMS["twice"])
        if "keys, torch" in ways:
            beside = took[last][way] / took[last]["keys, torch"]
            report.aim(f"{last:,} positions: {way}, of the time of torch's attention by keys",
                       f"≤ {AIMS['torch']:.2f}", f"{beside:.2f}", beside <= AIMS["torch"])
    report.save()


if __name__ == "__main__":
    main()
