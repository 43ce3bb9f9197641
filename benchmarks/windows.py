"""Causal attention with a window, forward and backward, on one pinned core: of what the window lets be seen, and of all
scores with a mask; beside torch's with that mask. Time and memory.

    python benchmarks/windows.py
"""

from _harness import Report, child, compare, forget_peak, installed, named, one_core, resident

one_core()

import numpy as np  # noqa: E402

HEADS, SIZE = 4, 64
SIZES = {"1,024 positions, 128 seen": (1024, 128), "2,048 positions, 128 seen": (2048, 128),
         "2,048 positions, 512 seen": (2048, 512)}
AIMS = {"share": 1.5, "torch": 1.0}     # of the share of all scores that are made; of torch's time
ROUNDS = 5


def arrays(name):
    """(q, k, v, who sees whom)."""
    time, window = SIZES[name]
    rng = np.random.default_rng(0)
    mask = np.tri(time, dtype=bool) & ~np.tri(time, k=-window, dtype=bool)
    return *(rng.standard_normal((1, HEADS, time, SIZE), np.float32) for _ in range(3)), mask


def ours(name, windowed):
    """A function that makes the result and all gradients, and returns a number made of them."""
    import minitorch_dist as mt
    *leaves, mask = arrays(name)
    leaves = [mt.tensor(x, requires_grad=True) for x in leaves]
    options = {"is_causal": True, "window": SIZES[name][1]} if windowed else {"attn_mask": mask}

    def run():
        for x in leaves:
            x.grad = None
        mt.sum(mt.square(mt.scaled_dot_product_attention(*leaves, **options))).backward()
        return float(abs(leaves[1].grad.numpy()).sum())
    return run


def theirs(name):
    """The same in torch."""
    import torch
    torch.set_num_threads(1)
    *leaves, mask = map(torch.from_numpy, arrays(name))
    for x in leaves:
        x.requires_grad_()

    def run():
        for x in leaves:
            x.grad = None
        torch.nn.functional.scaled_dot_product_attention(*leaves, attn_mask=mask).square().sum().backward()
        return float(leaves[1].grad.abs().sum())
    return run


WAYS = {"window": lambda name: ours(name, True), "all scores, masked": lambda name: ours(name, False), "torch": theirs}


def peak_bytes(name, way):
    """The most memory of some passes, beyond the imports and inputs, of a process of its own."""
    run = WAYS[way](name)
    forget_peak()
    before = resident()
    for _ in range(3):
        run()
    return resident() - before


def made(name):
    """Which share of all scores is made."""
    from minitorch_dist.autodiff.ops.attention import band_of, pieces
    time, window = SIZES[name]
    return sum((rows.stop - rows.start) * (columns.stop - columns.start)
               for rows, columns, _ in pieces(time, time, band_of(True, window))) / time ** 2


def main():
    """Print and save."""
    named(__doc__)
    report = Report("windows", "Attention with a window (`windows.py`)")
    ways = [way for way in WAYS if way != "torch" or installed(report.skipped, "torch")]
    for name in SIZES:
        calls = {way: WAYS[way](name) for way in ways}
        found = [call() for call in calls.values()]
        if max(found) - min(found) > 1e-4 * max(found):
            raise RuntimeError(f"{name}: the ways compute different things: {found}")
        seconds = compare(calls, rounds=ROUNDS)
        memory = {way: child("windows", "peak_bytes", name, way) for way in ways}
        whole, share = seconds["all scores, masked"].best, made(name)
        report.table(f"{name}: {HEADS} heads of {SIZE}, float32; {100 * share:.0f} % of all scores are made", [
            {"attention": way, "ms": f"{1e3 * s.best:.1f}", "× the time of all scores": f"{s.best / whole:.2f}",
             "memory beyond inputs, MB": f"{memory[way] / 1e6:.0f}"} for way, s in seconds.items()])
        took = seconds["window"].best / whole
        report.aim(f"{name}: time, of that of all scores", f"≤ {AIMS['share'] * share:.2f}", f"{took:.2f}",
                   took <= AIMS["share"] * share)
        if "torch" in seconds:
            beside = seconds["window"].best / seconds["torch"].best
            report.aim(f"{name}: time, of torch's with a mask", f"≤ {AIMS['torch']:.2f}", f"{beside:.2f}",
                       beside <= AIMS["torch"])
    report.save()


if __name__ == "__main__":
    main()
