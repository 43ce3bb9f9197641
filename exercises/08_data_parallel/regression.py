"""What 08.4 gives: in one process, and with known mistakes."""

import numpy as np

STEPS, INPUTS, OUTPUTS = 12, 5, 2


def gradients(w, b, x, y):
    """By the sum, in float64: (½Σ|error|², its gradient by w, by b)."""
    error = x @ w + b - y
    return 0.5 * (error ** 2).sum(), np.einsum("ni,no->io", x, error), error.sum(0)


def together(case, steps=None, lr=1.0, after=False):
    """One process that trains on all ranks' rows, from the parameters of rank 0. Losses of before each step, or after.
    """
    w, b = (p.copy() for p in case[0]["parameters"])
    losses = []
    for step in range(STEPS if steps is None else steps):
        rows = np.concatenate([r["rows"][step % STEPS] for r in case])
        value, by_w, by_b = gradients(w, b, case[0]["x"][rows], case[0]["y"][rows])
        losses += [] if after else [value / len(rows)]
        w -= lr * case[0]["lr"] * by_w / len(rows)
        b -= lr * case[0]["lr"] * by_b / len(rows)
        losses += [gradients(w, b, case[0]["x"][rows], case[0]["y"][rows])[0] / len(rows)] if after else []
    return {"parameters": [w, b], "result": losses}


def alone(inputs, start):
    """One rank that trains on its own rows. Its losses are of these."""
    return together([inputs | {"parameters": start}])


def averaged_losses(case, parts):
    """The global loss at each step, of ranks that each have parameters of their own."""
    sizes = np.array([[len(rows) for rows in r["rows"]] for r in case])
    own = np.array([part["result"] for part in parts])
    return list((np.where(sizes, own, 0) * sizes).sum(0) / sizes.sum(0))


def own_losses(case):
    """The right training, where each rank returns the losses of its own rows."""
    found = []
    for r in case:
        losses = []
        for step in range(STEPS):
            w, b = together(case, step)["parameters"]
            mine = r["rows"][step]
            losses.append(gradients(w, b, r["x"][mine], r["y"][mine])[0] / max(len(mine), 1))
        found.append(together(case) | {"result": losses})
    return found


def differences_stay(case, got):
    """Every rank has moved by the same amount, and they are as far apart as they were."""
    moved = [np.asarray(g["parameters"][0]) - r["parameters"][0] for g, r in zip(got, case, strict=True)]
    return len(case) > 1 and all(np.allclose(move, moved[0]) for move in moved)


def not_moved(case, got):
    """All ranks have rank 0's initial parameters, still."""
    return all(np.array_equal(mine, first) for g in got
               for mine, first in zip(g["parameters"], case[0]["parameters"], strict=True))


def nobody_averages(case, losses):
    """Every rank trains alone, from one start. losses: "own" or "averaged"."""
    if any(len(rows) == 0 for r in case for rows in r["rows"]):
        return None
    parts = [alone(r, case[0]["parameters"]) for r in case]
    return [part | ({"result": averaged_losses(case, parts)} if losses == "averaged" else {}) for part in parts]


def weighed(weight):
    """Every rank's mean gradient counts weight(its inputs, step), of the sum of all ranks' weights."""
    def found(case):
        w, b = (p.copy() for p in case[0]["parameters"])
        losses = []
        for step in range(STEPS):
            mine = [gradients(w, b, r["x"][r["rows"][step]], r["y"][r["rows"][step]]) for r in case]
            losses.append(sum(value for value, *_ in mine) / sum(len(r["rows"][step]) for r in case))
            weights = [weight(r, step) for r in case]
            share = [one / max(len(r["rows"][step]), 1) / sum(weights) for one, r in zip(weights, case, strict=True)]
            w -= case[0]["lr"] * sum(part * by_w for part, (_, by_w, _) in zip(share, mine, strict=True))
            b -= case[0]["lr"] * sum(part * by_b for part, (*_, by_b) in zip(share, mine, strict=True))
        return [{"parameters": [w, b], "result": losses}] * len(case)
    return found


def everybody_on_everything(case):
    """No shards: every rank takes the rows of the whole data set."""
    everything = np.arange(len(case[0]["x"]))
    found = together([case[0] | {"rows": [everything] * STEPS}])
    return [found] * len(case)
