"""What the pieces are tried with: digits, a small network, few steps; and the same training in plain NumPy."""

import numpy as np

from exercises.frame import Check, demand
from exercises.frame.pictures import COLORS, canvas, save
from minitorch_dist.data import digits

TOLERANCE = 1e-8      # of losses and parameters, relative
SAMPLES, BATCH, HIDDEN, EPOCHS = 133, 33, 25, 5      # the last batch of an epoch has one sample: some rank has none
RATES = {True: 0.003, False: 0.03}      # of Adam, and of the plain gradient descent in which factors show
PLACES = {"optimizer": "05.4", "loss": "05.2", "collective": "10.3", "gradient_sync": "08.3", "sampler": "08.1"}


# ---------------------------------------------------------------- the same training, in NumPy

def train(case, batches, adam, weigh=None):
    """(losses, parameters) in float64. batches[step][rank]: rows.

    weigh  a mistake: each rank's share of the gradient is multiplied by weigh(count, total, ranks)
    """
    parameters = [p.copy() for p in case["parameters"]]
    moments = [[np.zeros_like(p), np.zeros_like(p)] for p in parameters]
    losses = []
    for step, ranks in enumerate(batches, 1):
        total, loss, grads = sum(map(len, ranks)), 0.0, [0.0] * 4
        for rows in ranks:
            share, of_rank = loss_and_gradients(parameters, case["images"][rows], case["labels"][rows], total)
            factor = 1.0 if weigh is None else weigh(len(rows), total, len(ranks))
            loss, grads = loss + share, [g + factor * d for g, d in zip(grads, of_rank, strict=True)]
        losses.append(loss)
        for p, g, (m, v) in zip(parameters, grads, moments, strict=True):
            m[...], v[...] = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            p -= RATES[adam] * (m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.999 ** step)) + 1e-8) if adam else g)
    return np.array(losses), parameters


def loss_and_gradients(parameters, x, labels, total):
    """Sums over the rows, divided by total."""
    w1, b1, w2, b2 = parameters
    hidden = x @ w1.T + b1
    active = np.maximum(hidden, 0)
    logits = active @ w2.T + b2
    logits = logits - logits.max(axis=1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    d = (np.exp(logp) - np.eye(10)[labels]) / total
    dh = (d @ w2) * (hidden > 0)
    return -logp[np.arange(len(labels)), labels].sum() / total, [dh.T @ x, dh.sum(0), d.T @ active, d.sum(0)]


# ---------------------------------------------------------------- what is wrong with a run

def of_ranks(got, place):
    """batches[step][rank] of a run, as the ranks had them."""
    return [list(parts) for parts in zip(*(rank[place]["rows"] for rank in got), strict=True)]


def leaves(got, place, expected):
    """The first step at which some rank's loss isn't the expected one; 0 if only parameters differ; None: all right."""
    losses, parameters = expected
    far = np.zeros(len(losses), bool)
    for rank in got:
        mine = np.asarray(rank[place]["losses"], dtype=float)
        far |= ~(np.abs(mine - losses) <= TOLERANCE * np.abs(losses))
    if far.any():
        return int(np.argmax(far)) + 1
    same = all(np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()
               for rank in got for a, b in zip(rank[place]["parameters"], parameters, strict=True))
    return None if same else 0


def wrong_sampler(got, place):
    """A sentence if the ranks' rows aren't the epochs' samples, each once and in batches of the right sizes."""
    batches, per_epoch = of_ranks(got, place), -(-SAMPLES // BATCH)
    for epoch in range(EPOCHS):
        here = batches[epoch * per_epoch:(epoch + 1) * per_epoch]
        seen = np.bincount(np.concatenate([part for ranks in here for part in ranks]), minlength=SAMPLES)
        if seen.max() > 1:
            return f"sample {seen.argmax()} is trained on {seen.max()} times in epoch {epoch + 1}"
        if seen.min() == 0:
            return f"{(seen == 0).sum()} of {SAMPLES} samples never come in epoch {epoch + 1}"
        for step, ranks in enumerate(here):
            size, right = sum(map(len, ranks)), min(BATCH, SAMPLES - step * BATCH)
            if size != right:
                return f"batch {step + 1} has {size} samples instead of {right}"
    return None


def at(step):
    return f"the curve leaves the library's at step {step}" if step else \
        "the losses are right, but not the parameters after the last step"


SYNC = [      # what a gradient_sync may do to a rank's share of the gradient, and what is then said
    (lambda count, total, ranks: count / total,
     "Your average_gradients weighs each rank's gradients by count / total, and what the library hands out is weighed "
     "like that already: turn it into means over the rank's own samples first"),
    (lambda count, total, ranks: ranks * count / total,
     "You multiply by the number of ranks, which makes means only while all ranks hold equally many samples: here they "
     "hold 16 and 17, and in an epoch's last batch 0 and 1"),
    (lambda count, total, ranks: (count / total) ** 2,
     "The conversion is upside down: a share, divided by the samples of all ranks, becomes a mean over the rank's own "
     "by total / count"),
    (lambda count, total, ranks: count / total * (total // max(count, 1)),
     "total // count cuts the fraction off: of 33 samples a rank with 17 has 1.94 times its share, not once"),
    (lambda count, total, ranks: total, "The gradients are sums over the samples of all ranks: nobody divided by their "
                                        "number"),
    (lambda count, total, ranks: total / max(count, 1), "Each rank's mean is added up: the ranks' means must be "
                                                        "weighed by their numbers of samples"),
    (lambda count, total, ranks: 1 / ranks, "The result is divided by the number of ranks: the library's shares add up "
                                            "to the mean as they are"),
]


def why_sync(case, got):
    """More about a gradient_sync that is wrong."""
    if any(np.abs(a - b).max() > TOLERANCE * np.abs(a).max() for rank in got for a, b in
           zip(rank["gradient_sync"]["parameters"], got[0]["gradient_sync"]["parameters"], strict=True)):
        return ". The ranks end with different parameters: grads must be changed in place, on every rank"
    for weigh, sentence in SYNC:
        if leaves(got, "gradient_sync", train(case[0], of_ranks(got, "gradient_sync"), False, weigh)) is None:
            return ". " + sentence
    return ""


def found(case, got):
    """What is wrong with the runs: a sentence, or None."""
    culprits, more = {}, ""
    sampler = wrong_sampler(got, "sampler")
    if sampler:
        culprits["sampler"] = sampler
    for place in PLACES:
        if place not in culprits:
            step = leaves(got, place, train(case[0], of_ranks(got, place), place == "optimizer"))
            if step is not None:
                culprits[place] = at(step)
    if "gradient_sync" in culprits:
        more = why_sync(case, got)
    if culprits:
        told = "; ".join(f"with your {place} ({PLACES[place]}) alone, and the library's pieces for all else, {what}"
                         for place, what in culprits.items())
        right = [place for place in PLACES if place not in culprits]
        return told + more + (f". Right: your {', '.join(right)}" if right else "")
    step = leaves(got, "all", train(case[0], of_ranks(got, "all"), True))
    if step is not None:
        return f"each of your pieces alone is right, but with all five together {at(step)}: is one of them disturbed " \
               "by another, or by what it kept from an earlier run?"
    return None


def what_is_wrong(case, got):
    try:
        return found(case, got)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"the runs have left outputs that can't be read: {error}"


# ---------------------------------------------------------------- 15.1

class Pieces(Check):
    exercise = "15.1"
    demands = [demand(what_is_wrong, lambda case, got: what_is_wrong(case, got) is None)]

    def cases(self, rng, ranks):
        images, labels, _, _ = digits.arrays()
        rows = rng.choice(len(images), SAMPLES, replace=False)
        def normal(*shape):
            return rng.standard_normal(shape) / np.sqrt(shape[-1])
        case = {"images": images[rows].astype(np.float64) * digits.STD + digits.MEAN, "labels": labels[rows],
                "batch_size": BATCH, "epochs": EPOCHS, "seed": int(rng.integers(1000)),
                "rates": [RATES[False], RATES[True]],
                "parameters": [normal(HIDDEN, 784), 0.5 + normal(HIDDEN), normal(10, HIDDEN), normal(10)],
                "orders": [np.split(order, range(BATCH, SAMPLES, BATCH)) for order in
                           (rng.permutation(SAMPLES) for _ in range(EPOCHS))]}
        return [[case] * ranks]

    def truth(self, case):
        return [{}] * len(case)

    def picture(self, runs, path):
        figure, (above, below) = canvas(2, 1, size=(8.6, 5.4), sharex=True, height_ratios=(3, 1))
        widths, largest = iter((8, 4)), 0.0
        for n, color in zip(sorted(runs), (COLORS[4], COLORS[0]), strict=False):
            case, got = runs[n][0]
            library, parameters = train(case[0], of_ranks(got, "all"), True)
            mine, steps = np.asarray(got[0]["all"]["losses"]), range(1, len(library) + 1)
            above.plot(steps, mine, color=color, lw=next(widths), label=f"your five pieces, {n} rank{'s' * (n > 1)}")
            below.plot(steps, np.abs(mine - library), "o-", ms=3, color=color, lw=1.4)
            largest = max(largest, *(np.abs(a - b).max() for a, b in
                                     zip(got[0]["all"]["parameters"], parameters, strict=True)))
        above.plot(steps, library, color=COLORS[1], lw=1.4, label="the same in plain NumPy, one process")
        above.set(ylabel="loss of the global batch")
        above.legend(frameon=False)
        below.set(ylabel="|Δ|", xlabel="step   (an epoch's last batch, every fifth, has one sample)")
        save(figure, path)
        return f"your optimizer, loss, collective, gradient_sync and sampler: one curve on " \
               f"{' and '.join(map(str, sorted(runs)))} ranks; parameters at the end within {largest:.0e}"
