"""How the answers of this chapter are called: schedules as lists, and a stage that watches what is done with it."""

import operator
import weakref

import numpy as np


def listed(rows):
    """A schedule as lists, or what it looks like where it is none."""
    try:
        rows = [[[str(kind), k] for kind, k in row] for row in rows]
        return [[[kind, whole(k)] for kind, k in row] for row in rows]
    except (TypeError, ValueError):
        return repr(rows)[:80]


def whole(k):
    """A number that can stand in brackets: 0.0 can't."""
    return operator.index(k)


def one_forward_one_backward(learner, inputs, run):
    """Both functions of the file."""
    numbers = inputs["stages"], inputs["micro_batches"]
    return {"gpipe": listed(run.module.gpipe(*numbers)), "one_forward_one_backward": listed(learner(*numbers))}


class Kept:
    """What a forward pass leaves for the backward pass of the same micro-batch."""

    def __init__(self, number, x, y):
        self.number, self.x, self.y, self.sums, self.used = number, x, y, (x.sum(), y.sum()), False


def other(array, total):
    """Whether its sum isn't the one that it was; nan, of an array that nobody had written, stays nan."""
    return not np.array_equal(array.sum(), total, equal_nan=True)


class Stage:
    """tanh(x W + b), of the last stage x W + b. Notes what is called, with what, and which Kept are alive.

    events  [[kind, number of the forward, sum of what came in, Kept that have been used and live, which array that
            the backward needs isn't as it was: "x", "y" or ""]]
    """

    def __init__(self, weight, bias, linear):
        self.weight, self.bias, self.linear = weight.copy(), bias.copy(), linear
        self.features, self.contexts, self.events, self.stepped = len(weight), [], [], []

    def note(self, kind, number, came, changed=""):
        living = [kept for ref in self.contexts if (kept := ref()) is not None]
        self.events.append([kind, number, float(came.sum()), sum(kept.used for kept in living), changed])

    def forward(self, x):
        if np.ndim(x) != 2 or x.shape[1] != self.features:
            raise ValueError(f"stage.forward: x has shape {list(np.shape(x))}; this stage takes [samples, "
                             f"{self.features}]: what the stage before it has made, on the first the batch's inputs")
        y = x @ self.weight + self.bias
        y = y if self.linear else np.tanh(y)
        kept = Kept(len(self.contexts), x, y)
        self.note("F", kept.number, x)
        self.contexts.append(weakref.ref(kept))
        return y, kept

    def backward(self, kept, dy):
        if not isinstance(kept, Kept):
            raise TypeError(f"stage.backward(kept, dy): kept is a {type(kept).__name__}; it must be what forward gave")
        if kept.used:
            raise ValueError("stage.backward goes for a second time through what one forward pass has kept: each "
                             "micro-batch has its own, and several are under way at a time")
        if np.shape(dy) != kept.y.shape:
            raise ValueError(f"stage.backward: dy has shape {list(np.shape(dy))}, and what was kept is of an output of "
                             f"shape {list(kept.y.shape)}: of another micro-batch?")
        x, y = kept.sums
        changed = "x" if other(kept.x, x) else "y" if other(kept.y, y) and not self.linear else ""
        self.note("B", kept.number, dy, changed)
        kept.used = True
        through = dy if self.linear else dy * (1 - kept.y ** 2)
        return through @ self.weight.T, [kept.x.T @ through, through.sum(0)]

    def step(self, grads):
        self.stepped.append(None if grads is None else [np.array(g) for g in grads])
        for parameter, grad in zip((self.weight, self.bias), grads or (), strict=False):
            parameter -= 0.1 * grad


def half_squares(y, labels):
    """Σ ½(y - label)² of a micro-batch, and its gradient by y."""
    return 0.5 * float(((y - labels) ** 2).sum()), y - labels


def run_schedule(learner, inputs, run):
    stage = Stage(inputs["weight"], inputs["bias"], run.comm.rank == run.comm.size - 1)
    steps, batch = [tuple(step) for step in inputs["steps"]], list(zip(inputs["inputs"], inputs["labels"], strict=True))
    given = steps.copy(), batch.copy()
    mean = learner(run.comm, steps, stage, batch, half_squares)
    kept = [len(mine) == len(one) and all(map(operator.is_, mine, one)) for mine, one in zip((steps, batch), given,
                                                                                            strict=True)]
    return {"mean_loss": mean, "grads": stage.stepped[-1] if stage.stepped else None,
            "optimizer_steps": len(stage.stepped), "events": stage.events, "lists kept": all(kept),
            "inputs": inputs["inputs"], "labels": inputs["labels"]}


def cut_layers(learner, inputs, run):
    """The cut as lists of whole numbers, or what it looks like where it is none."""
    costs = list(inputs["costs"])
    cut = learner(costs, inputs["stages"])
    try:
        cut = [[whole(i) for i in stage] for stage in cut]
    except (TypeError, ValueError):
        cut = repr(cut)[:80]
    return {"result": cut, "costs": costs}
