"""Curves of broken data parallelism, made by running the bugs: `python -m exercises.00_demo.gallery` draws curves.png.

Two ranks train a small network on the digits that ship, both of them inside one process: a list of replicas stands for
the ranks, and a sum over the list for the all-reduce. Each bug changes one thing.
"""

import functools
from pathlib import Path

import numpy as np

HERE = Path(__file__).parent
RANKS, BATCH, EPOCHS, LR, HIDDEN = 2, 60, 4, 0.1, 24
SAMPLES = 650       # 10 batches of 60, and one of 50 whose parts are made uneven

BUGS = {    # name -> what the curve looks like beside that of one rank, and why
    "summed": "the gradients are summed over the ranks and never divided: every step is twice as long, so the curves "
              "part right after the first step, and both go down",
    "stale gradients": "nobody sets the gradients to zero, and the second backward adds to the first one's: the first "
                       "update is still right, so that the curves part at the third loss; then the updates grow, and "
                       "the loss swings",
    "no broadcast": "the ranks begin with different weights: the loss differs at the very first step already, and "
                    "stays apart, because two half-trained models never become one",
    "mean of means": "the ranks' means are averaged though the ranks hold unequal numbers of samples: the curves are "
                     "equal until the first uneven batch, the last one of the epoch, and nearly so afterwards",
    "only the loss": "the loss is averaged over the ranks, the gradients are not: each rank learns from its own half "
                     "of every batch; the curves part right after the first step, a little, and stay close",
    "own order": "each rank shuffles for itself: the batches are others than those of one rank, so the loss differs "
                 "from the first step on, to and fro by the noise of the batches, and comes to the same in the end",
}
LETTERS = {letter: HERE / f"curve_{letter}.txt" for letter in "ABC"}


PIXELS = 14 * 14    # of an image, every other one of a row and of a column


@functools.cache
def data():
    """(x (650, 196), labels) of the digits that ship."""
    from minitorch_dist.data import load
    digits = load("digits")
    x = digits.train_images[:SAMPLES].reshape(SAMPLES, 28, 28)[:, ::2, ::2].astype(np.float64)
    return x.reshape(SAMPLES, PIXELS), digits.train_labels[:SAMPLES]


def initial(seed):
    draw = np.random.default_rng(seed)
    return [draw.standard_normal((PIXELS, HIDDEN)) / 14, np.zeros(HIDDEN), draw.standard_normal((HIDDEN, 10)) / 5,
            np.zeros(10)]


def loss_and_gradients(params, x, labels):
    """The mean loss over the rows, and its gradients."""
    w0, b0, w1, b1 = params
    h = np.tanh(x @ w0 + b0)
    z = h @ w1 + b1
    z -= z.max(axis=1, keepdims=True)
    p = np.exp(z) / np.exp(z).sum(axis=1, keepdims=True)
    loss = -np.log(p[np.arange(len(x)), labels]).mean()
    p[np.arange(len(x)), labels] -= 1
    p /= len(x)
    dh = (p @ w1.T) * (1 - h * h)
    return loss, [x.T @ dh, dh.sum(0), h.T @ p, p.sum(0)]


def cut(rows):
    """A batch in two parts. A whole batch in halves, the short one at the end of an epoch unevenly."""
    return np.split(rows, [len(rows) // 2 if len(rows) == BATCH else len(rows) // 8])


@functools.cache
def train(bug=None, ranks=RANKS, seed=0):
    """The loss of each global batch, as the run would log it. bug: a name of BUGS, or None."""
    x, labels = data()
    replicas = [initial([seed, rank if bug == "no broadcast" else 0]) for rank in range(ranks)]
    held = [[np.zeros_like(p) for p in params] for params in replicas]
    losses = []
    for epoch in range(EPOCHS):
        orders = [np.random.default_rng([seed, epoch, rank if bug == "own order" else 0]).permutation(SAMPLES)
                  for rank in range(ranks)]
        for start in range(0, SAMPLES, BATCH):
            parts = [cut(order[start:start + BATCH])[rank] if ranks > 1 else order[start:start + BATCH]
                     for rank, order in enumerate(orders)]
            found = [loss_and_gradients(params, x[rows], labels[rows])
                     for params, rows in zip(replicas, parts, strict=True)]
            share = np.array([len(rows) for rows in parts]) / sum(map(len, parts))
            losses.append(float(share @ [loss for loss, _ in found]))
            weight = np.full(ranks, 1 / ranks) if bug == "mean of means" else share
            total = [sum(w * g[i] for w, (_, g) in zip(weight, found, strict=True)) for i in range(4)]
            for rank, params in enumerate(replicas):
                for i, p in enumerate(params):
                    g = found[rank][1][i] if bug == "only the loss" else total[i] * (ranks if bug == "summed" else 1)
                    held[rank][i] = g + (held[rank][i] if bug == "stale gradients" else 0)
                    p -= LR * held[rank][i]
    return np.array(losses)


def shown(letter):
    """The curve behind a letter, as the picture shows it."""
    return np.loadtxt(LETTERS[letter])


@functools.cache
def which(letter):
    """The bug behind a letter: the one whose run, made now, gives that curve."""
    curve = shown(letter)
    fits = [bug for bug in BUGS if np.allclose(train(bug), curve, rtol=1e-3)]
    assert len(fits) == 1, f"curve {letter} is that of {fits}: python -m exercises.00_demo.gallery draws all anew"
    return fits[0]


def draw(path=HERE / "curves.png"):
    """Three pictures like the demo's: one rank and two, and their difference."""
    from exercises.frame.pictures import LAYERS, canvas, save
    figure, axes = canvas(2, 3, size=(12, 4.6), sharex=True, sharey="row", height_ratios=(2, 1))
    one = train(ranks=1)
    steps = np.arange(1, len(one) + 1)
    for letter, (above, below) in zip(LETTERS, axes.T, strict=True):
        two = shown(letter)
        above.plot(steps, one, color=LAYERS[0], lw=6, label="1 rank")
        above.plot(steps, two, color=LAYERS[1], lw=1.4, ls="--", label="2 ranks")
        above.set_title(letter, loc="left")
        below.plot(steps, np.abs(two - one), color=LAYERS[2], lw=1.2)
        below.set_yscale("symlog", linthresh=1e-4)
        below.set_xlabel("step (11 per epoch)")
        below.set_xticks(steps[::11])
        below.set_xticks(steps, minor=True)
    axes[0, 0].set_yscale("log")
    axes[0, 0].set_ylabel("loss")
    axes[1, 0].set_ylabel("|Δloss|")
    axes[0, 0].legend(frameon=False)
    save(figure, path)


def main(chosen):
    """Write the three curves (`python -m exercises.00_demo.gallery BUG BUG BUG` chooses anew), and draw them."""
    for letter, bug in zip(LETTERS, chosen, strict=bool(chosen)):
        np.savetxt(LETTERS[letter], train(bug), fmt="%.6f")
    draw()


if __name__ == "__main__":
    import sys
    main(sys.argv[1:])
