"""The training run of drive.py once more, in plain NumPy and one process; what an optimizer's adapter may forget."""

import numpy as np

TOLERANCE = 1e-8      # of losses and parameters, relative
ALONE = {"optimizer": "05.4", "loss": "05.2", "sampler": "08.1"}      # the other two are called one by one: seams.py
ADAM = {"weight_decay": 0.1, "decoupled": False, "scheduled": True}
RULES = {"optimizer": ADAM | {"decoupled": True}, "all": ADAM}      # in the other runs: plain gradient descent
FORGOTTEN = {      # what is said, and what of a rule is then another
    "It trains as if weight_decay were 0: hand on everything that it is made with": {"weight_decay": 0.0},
    "It trains as AdamW where Adam is asked for, or the reverse: hand on `decoupled` as well": {"decoupled": None},
    "It trains with the lr that it was made with for ever: step(grads, lr=…) has another one every epoch":
        {"scheduled": False},
}


def train(case, run, batches, **other):
    """(losses, parameters) in float64 of a run: "all", or the name of a place in ALONE. batches[step][rank]: rows.

    other  settings of the rule that a mistake has changed
    """
    rule = RULES.get(run) and RULES[run] | other
    rates = case["rates"]["adam" if rule else "plain"]
    parameters = [p.copy() for p in case["parameters"]]
    moments, losses = [[np.zeros_like(p), np.zeros_like(p)] for p in parameters], []
    for step, rows in enumerate(map(np.concatenate, batches), 1):
        loss, grads = loss_and_gradients(parameters, case["images"][rows], case["labels"][rows])
        losses.append(loss)
        epoch = (step - 1) // len(case["orders"][0])
        rate = rates[epoch if rule is None or rule["scheduled"] else 0]
        for p, g, (m, v) in zip(parameters, grads, moments, strict=True):
            p -= rate * g if rule is None else adam(p, g, m, v, step, rate, **rule)
    return np.array(losses), parameters


def adam(p, g, m, v, step, rate, weight_decay, decoupled, scheduled):
    """What a step takes away from p."""
    l2 = 0.0 if decoupled else weight_decay * p
    m[...], v[...] = 0.9 * m + 0.1 * (g + l2), 0.999 * v + 0.001 * (g + l2) ** 2
    shrunk = rate * weight_decay * p if decoupled else 0.0
    return shrunk + rate * m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.999 ** step)) + 1e-8)


def loss_and_gradients(parameters, x, labels):
    """Means over the rows."""
    w1, b1, w2, b2 = parameters
    hidden = x @ w1.T + b1
    active = np.maximum(hidden, 0)
    logits = active @ w2.T + b2
    logits = logits - logits.max(axis=1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    d = (np.exp(logp) - np.eye(10)[labels]) / len(labels)
    dh = (d @ w2) * (hidden > 0)
    return -logp[np.arange(len(labels)), labels].mean(), [dh.T @ x, dh.sum(0), d.T @ active, d.sum(0)]


# ---------------------------------------------------------------- what is wrong with a run

def of_ranks(got, run):
    """batches[step][rank] of a run, as the ranks had them."""
    return [list(parts) for parts in zip(*(rank[run]["rows"] for rank in got), strict=True)]


def leaves(case, got, run, **other):
    """The first step at which some rank's loss isn't the expected one; 0 if only parameters differ; None: all right."""
    losses, parameters = train(case[0], run, of_ranks(got, run), **other)
    far = np.zeros(len(losses), bool)
    for rank in got:
        mine = np.asarray(rank[run]["losses"], dtype=float)
        far |= ~(np.abs(mine - losses) <= TOLERANCE * np.abs(losses))
    if far.any():
        return int(np.argmax(far)) + 1
    same = all(np.abs(a - b).max() <= TOLERANCE * np.abs(b).max()
               for rank in got for a, b in zip(rank[run]["parameters"], parameters, strict=True))
    return None if same else 0


def at(step):
    return f"the curve leaves the library's at step {step}" if step else \
        "the losses are right, but not the parameters after the last step"


def forgotten(case, got, run):
    """More about a wrong run with your optimizer."""
    for sentence, other in FORGOTTEN.items():
        if "decoupled" in other:
            other = {"decoupled": not RULES[run]["decoupled"]}
        if leaves(case, got, run, **other) is None:
            return ". " + sentence
    return ""


def found(case, got):
    """What is wrong with the runs: a sentence, or None."""
    culprits = {place: step for place in ALONE if (step := leaves(case, got, place)) is not None}
    if culprits:
        told = "; ".join(f"with your {place} ({ALONE[place]}) alone, and the library's pieces for all else, {at(step)}"
                         for place, step in culprits.items())
        more = forgotten(case, got, "optimizer") if "optimizer" in culprits else ""
        return told + more
    step = leaves(case, got, "all")
    if step is None:
        return None
    return f"each of your pieces by itself is right, but with all five together {at(step)}" + (
        forgotten(case, got, "all") or ": is one of them disturbed by another, or by what it kept from an earlier run?")


def what_is_wrong(case, got):
    try:
        return found(case, got)
    except (KeyError, ValueError, TypeError, IndexError, AttributeError) as error:
        return f"the runs have left outputs that can't be read: {error}"
