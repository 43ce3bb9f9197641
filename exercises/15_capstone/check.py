"""First pieces are called with known numbers (seams.py); then all of them train on digits (training.py)."""

import numpy as np

from exercises.frame import Check, demand
from exercises.frame.pictures import COLORS, canvas, save
from minitorch_dist.data import digits

from . import seams
from .training import ADAM, of_ranks, train, what_is_wrong

HIDDEN = 25
EPOCHS = {"optimizer": 2, "loss": 1, "sampler": 1, "all": 4}      # of the runs
RATES = {"adam": 0.003, "plain": 0.03}      # "plain": the gradient descent in which factors show


def of_the_seams(holds):
    """A demand's predicate that concerns the first case only."""
    return lambda case, got: "calls" not in case[0] or holds(got)


class Pieces(Check):
    exercise = "15.1"
    same_bits = ("synced",)
    signatures = seams.SIGNATURES
    demands = [
        demand(lambda case, got: f"your sampler (08.1): {seams.of_sampler(got)}",
               of_the_seams(lambda got: seams.of_sampler(got) is None)),
        demand("your gradient_sync adds up the library's shares by itself, which is right; but the average_gradients "
               "that came in is never called, and `--mine` would name it as the one that runs: the averaging is to be "
               "its work", of_the_seams(lambda got: all(rank["averaged"] for rank in got))),
        demand("your gradient_sync adds up the library's shares by itself, which is right; but not all of them go "
               "through average_gradients: the averaging is to be its work",
               lambda case, got: "calls" not in case[0] or seams.averaged(case, got) >= 1),
        demand("right, but average_gradients is called more than once with the same arrays: what is the mean already "
               "stays the mean, and all messages are sent again",
               lambda case, got: "calls" not in case[0] or seams.averaged(case, got) <= 1),
        demand(what_is_wrong, lambda case, got: "calls" in case[0] or what_is_wrong(case, got) is None),
    ]

    def cases(self, rng, ranks):
        images, labels, _, _ = digits.arrays()
        rows = rng.choice(len(images), seams.SAMPLES, replace=False)
        def normal(*shape):
            return rng.standard_normal(shape) / np.sqrt(shape[-1])
        case = {"images": images[rows].astype(np.float64) * digits.STD + digits.MEAN, "labels": labels[rows],
                "batch_size": seams.BATCH, "epochs": EPOCHS, "seed": int(rng.integers(1000)),
                "weight_decay": ADAM["weight_decay"],
                "rates": {name: [rate / (1 + 0.2 * epoch) for epoch in range(EPOCHS["all"])]
                          for name, rate in RATES.items()},
                "parameters": [normal(HIDDEN, 784), 0.5 + normal(HIDDEN), normal(10, HIDDEN), normal(10)],
                "orders": [np.split(order, range(seams.BATCH, seams.SAMPLES, seams.BATCH)) for order in
                           (rng.permutation(seams.SAMPLES) for _ in range(EPOCHS["all"]))]}
        return [seams.case(rng, ranks), [case] * ranks]

    def truth(self, case):
        return seams.truth(case) if "calls" in case[0] else [{}] * len(case)

    def picture(self, runs, path):
        figure, (above, below) = canvas(2, 1, size=(8.6, 5.4), sharex=True, height_ratios=(3, 1))
        widths, largest = iter((8, 4)), 0.0
        for n, color in zip(sorted(runs), (COLORS[4], COLORS[0]), strict=False):
            case, got = runs[n][1]
            library, parameters = train(case[0], "all", of_ranks(got, "all"))
            mine, steps = np.asarray(got[0]["all"]["losses"]), range(1, len(library) + 1)
            above.plot(steps, mine, color=color, lw=next(widths), label=f"your five pieces, {n} rank{'s' * (n > 1)}")
            below.plot(steps, np.abs(mine - library), "o-", ms=3, color=color, lw=1.4)
            largest = max(largest, *(np.abs(a - b).max() for a, b in
                                     zip(got[0]["all"]["parameters"], parameters, strict=True)))
        above.plot(steps, library, color=COLORS[1], lw=1.4, label="the same in plain NumPy, one process")
        above.set(ylabel="loss of the global batch")
        above.legend(frameon=False)
        below.set(ylabel="|Δ|", xlabel="step   (an epoch's last batch, every third, has one sample)")
        save(figure, path)
        return f"your optimizer, loss, collective, gradient_sync and sampler: one curve on " \
               f"{' and '.join(map(str, sorted(runs)))} ranks; parameters at the end within {largest:.0e}"
