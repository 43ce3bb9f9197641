"""A step of optimizers of matrices, on one pinned core: Muon beside torch's, those that make less of a matrix, or more,
and AdamW. Of the blocks' matrices of GPTs.

    python benchmarks/matrix_steps.py
"""

from _harness import Report, compare, installed, named, one_core

one_core()

import numpy as np  # noqa: E402

BLOCKS = 2
WIDTHS = (256, 512)
SHAPES = ((3, 1), (1, 1), (4, 1), (1, 4))       # of a block's matrices, in widths
# Of our Muon's time; of torch's, whose products are in bfloat16: some processors make these twice as fast.
AIMS = {"NorMuon": 1.2, "Dion2": 0.25, "Dion": 0.5, "torch": 2.0}
ROUNDS = 7


def arrays(width):
    """(parameters, gradients) of some blocks."""
    rng = np.random.default_rng(0)
    shapes = [(rows * width, columns * width) for rows, columns in SHAPES] * BLOCKS
    return tuple([0.02 * rng.standard_normal(shape, np.float32) for shape in shapes] for _ in range(2))


def ours(width, make):
    """A function that makes a step, and returns how far the first parameter has come in its first step, as a norm."""
    import minitorch_dist as mt
    values, grads = arrays(width)
    params = [mt.tensor(v, requires_grad=True) for v in values]
    optimizer = make(mt.optim, params)
    for p, g in zip(params, grads, strict=True):
        p.grad = mt.tensor(g)
    optimizer.step()
    far = float(np.linalg.norm(params[0].numpy() - values[0]))

    def run():
        optimizer.step()
        return far
    return run


def theirs(width):
    """The same of torch's Muon, whose products are in bfloat16."""
    import torch
    torch.set_num_threads(1)
    values, grads = arrays(width)
    params = [torch.nn.Parameter(torch.from_numpy(v.copy())) for v in values]
    optimizer = torch.optim.Muon(params, 0.02, adjust_lr_fn="match_rms_adamw")
    for p, g in zip(params, grads, strict=True):
        p.grad = torch.from_numpy(g)
    optimizer.step()
    far = float(np.linalg.norm(params[0].detach().numpy() - values[0]))

    def run():
        optimizer.step()
        return far
    return run


WAYS = {
    "AdamW": lambda width: ours(width, lambda optim, ps: optim.AdamW(ps, 0.02)),
    "Muon": lambda width: ours(width, lambda optim, ps: optim.Muon(ps, 0.02, adjust_lr_fn="match_rms_adamw")),
    "Muon, torch": theirs,
    "NorMuon": lambda width: ours(width, lambda optim, ps: optim.NorMuon(ps, 0.02)),
    "Dion2, 1/4": lambda width: ours(width, lambda optim, ps: optim.Dion2(ps, 0.02)),
    "Dion, 1/4": lambda width: ours(width, lambda optim, ps: optim.Dion(ps, 0.02)),
}


def main():
    """Print and save."""
    named(__doc__)
    report = Report("matrix_steps", "Steps of matrices (`matrix_steps.py`)")
    ways = [way for way in WAYS if way != "Muon, torch" or installed(report.skipped, "torch")]
    rows, took = [], {}
    for width in WIDTHS:
        calls = {way: WAYS[way](width) for way in ways}
        far = {way: call() for way, call in calls.items()}
        if abs(far.get("Muon, torch", far["Muon"]) - far["Muon"]) > 0.05 * far["Muon"]:
            raise RuntimeError(f"width {width}: a step of Muon is another one here and in torch: {far}")
        took = {way: s.best for way, s in compare(calls, rounds=ROUNDS).items()}
        numbers = BLOCKS * sum(rows * columns for rows, columns in SHAPES) * width * width
        rows.append({"width": width, "parameters": f"{numbers / 1e6:.1f} M"} | {
            way: f"{1e3 * seconds:.1f}" for way, seconds in took.items()})
    report.table(f"{BLOCKS} blocks' matrices, float32: ms per step", rows)
    beside = {"NorMuon": "NorMuon", "Dion2": "Dion2, 1/4", "Dion": "Dion, 1/4"}
    for name, way in beside.items():
        ratio = took[way] / took["Muon"]
        report.aim(f"width {WIDTHS[-1]}: {way}, of Muon's time", f"≤ {AIMS[name]:.2f}", f"{ratio:.2f}",
                   ratio <= AIMS[name])
    if "Muon, torch" in ways:
        ratio = took["Muon"] / took["Muon, torch"]
        report.aim(f"width {WIDTHS[-1]}: Muon in float32, of the time of torch's in bfloat16",
                   f"≤ {AIMS['torch']:.2f}", f"{ratio:.2f}", ratio <= AIMS["torch"])
    report.save()


if __name__ == "__main__":
    main()
