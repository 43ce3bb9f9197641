"""24.5's training run: a small GPT that learns to repeat its question and stop; and what it does in one process."""

import numpy as np

from exercises.frame import demand
from exercises.frame.pictures import two_curves

from . import rolls

MODEL = {"vocabulary": 5, "length": 3, "layers": 1, "heads": 1, "dim": 8}
STEPS, QUESTIONS, UPDATES, RATE = 20, 6, 4, 0.03
HOW = {"group": 8, "count": 2, "end": 4, "temperature": 1.0}
RANKS = 1, 4        # not the first that is tried: there most mistakes are found, and sooner
LOSS = {"low": 0.2, "high": 0.28, "beta": 0.02}


def case(rng, ranks):
    """The same on all ranks: [each step's questions], of one token."""
    from minitorch_dist import nn
    shapes = [p.shape for p in nn.GPT(**MODEL).parameters()]
    return [{"what": "training", "model": MODEL, "questions": rng.integers(0, 4, (STEPS, QUESTIONS, 1)),
             "parameters": [(1.0 if len(shape) == 1 else 0.0) + rng.normal(0, 0.3, shape) for shape in shapes],
             "rate": RATE, "updates": UPDATES, "how": HOW | {"seed": int(rng.integers(1000))}, "loss": LOSS}] * ranks


def of_one(one):
    """{"means", "losses"} of one process: answers drawn one by one, and the library's loss and gradients."""
    key = tuple(each.tobytes() for each in (*one["parameters"], one["questions"])), one["how"]["seed"]
    if key not in KNOWN:
        KNOWN[key] = trained(one)
    return KNOWN[key]


KNOWN = {}


def trained(one):
    import minitorch_dist as mt
    from minitorch_dist import nn, optim
    from minitorch_dist.nn.preference import group_advantages, grpo_loss, token_log_probs
    model, reference = (nn.GPT(**one["model"], dtype=np.float64) for _ in range(2))
    for each in (model, reference):
        for p, array in zip(each.parameters(), one["parameters"], strict=True):
            p.data[...] = array
    optimizer, means, losses = optim.Adam(model.parameters(), lr=one["rate"]), [], []

    def policy(tokens):
        with mt.no_grad():
            return model(tokens).numpy()[:, -1]

    def log_probs(model, tokens):
        return token_log_probs(model(tokens[:, :-1]), tokens[:, 1:])

    for step, questions in enumerate(one["questions"]):
        how = one["how"] | {"step": step}
        rows = [(q, a) for q in range(len(questions)) for a in range(how["group"])]
        streams = [np.random.default_rng(rolls.keyed(how, q, a, 0, q)) for q, a in rows]
        tokens, counted = rolls.written(policy, questions[[q for q, _ in rows]], how, streams)
        right = tokens[:, 1:] == np.stack([tokens[:, 0], np.full(len(tokens), how["end"])], 1)
        # Who ends at once has repeated nothing: if the end behind it counted, half of the reward would be for nothing.
        rewards = (right & (tokens[:, 1:2] != how["end"])).mean(1)
        means.append(rewards.mean())
        with mt.no_grad():
            old, before = (log_probs(m, tokens).numpy() for m in (model, reference))
        for _ in range(one["updates"]):
            optimizer.zero_grad()
            loss = grpo_loss(log_probs(model, tokens), old, group_advantages(rewards, how["group"]), counted, before,
                             one["loss"]["low"], one["loss"]["high"], one["loss"]["beta"]) / counted.sum()
            loss.backward()
            optimizer.step()
            losses.append(float(loss.numpy()))
    return {"means": means, "losses": losses}


def away(case, got):
    """By how much the rewards' means, or the losses, leave those of one process."""
    right = of_one(case[0])
    return max(np.abs(np.subtract(rank[name], right[name])).max() for rank in got for name in right)


DEMANDS = [
    demand(lambda case, got: "all right by itself, but a GPT trained with it, and with 24.3 and 24.4, leaves the curve "
           f"of one process by {away(case, got):.1g}", lambda case, got: case[0]["what"] != "training" or away(
               case, got) < 1e-6),
]


def picture(runs, path):
    """The rewards' mean over steps, on each number of ranks."""
    curves = {ranks: runs[ranks][-1][1][0]["means"] for ranks in RANKS}
    said = two_curves(curves, path, "mean reward")
    return f"{said}; the reward has come from {curves[1][0]:.2f} to {np.mean(curves[1][-3:]):.2f}"
