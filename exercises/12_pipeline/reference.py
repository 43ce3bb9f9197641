"""The unsplit model of 12.2: all micro-batches' losses and gradients, in closed form, and batches to try them with."""

import numpy as np


def forward(case, x):
    """[x, the output of stage 0, of stage 1, …] of some samples."""
    found = [x]
    for stage, rank in enumerate(case):
        y = found[-1] @ rank["weight"] + rank["bias"]
        found.append(y if stage == len(case) - 1 else np.tanh(y))
    return found


def gradients(case, x, labels):
    """(sum of the losses, [gradient by the stage's output], [[by its weight, by its bias]]) of some samples."""
    activations = forward(case, x)
    slope = activations[-1] - labels
    by_output, by_parameters = [], []
    for stage in reversed(range(len(case))):
        y = activations[stage + 1]
        by_output.append(slope)
        through = slope if stage == len(case) - 1 else slope * (1 - y * y)
        by_parameters.append([np.einsum("ni,nj->ij", activations[stage], through), np.einsum("nj->j", through)])
        slope = np.einsum("nj,ij->ni", through, case[stage]["weight"])
    return 0.5 * float(np.square(activations[-1] - labels).sum()), by_output[::-1], by_parameters[::-1]


def arrivals(case):
    """{"F": [[sum of what comes into stage r with micro-batch k]], "B": …}: indices r, then k."""
    each = [gradients(case, x, t) for x, t in zip(case[0]["inputs"], case[0]["labels"], strict=True)]
    activations, count = [forward(case, x) for x in case[0]["inputs"]], sum(sizes(case))
    return {"F": [[float(a[rank].sum()) for a in activations] for rank in range(len(case))],
            "B": [[float(by_output[rank].sum()) / count for _, by_output, _ in each] for rank in range(len(case))]}


def sizes(case):
    return [len(x) for x in case[0]["inputs"]]


def whole(case):
    """The right answers: of all samples at once."""
    x, labels = (np.concatenate(case[0][name]) for name in ("inputs", "labels"))
    return answers(case, *[(total / len(x), [[g / len(x) for g in of] for of in grads])
                           for total, _, grads in [gradients(case, x, labels)]])


def answers(case, found):
    """As run_schedule gives them. found: (mean loss, [[by weight, by bias]] of the stages)."""
    return [{"mean_loss": found[0] if rank == len(case) - 1 else None, "grads": found[1][rank], "optimizer_steps": 1}
            for rank in range(len(case))]


def weighted(case, weight, loss_weight=None):
    """What sums over the micro-batches give: weight(k, rank) of the gradients, loss_weight(k) of the losses (default:
    weight of the last rank)."""
    last, total, grads = len(case) - 1, 0.0, [[0.0, 0.0] for _ in case]
    for k, (x, labels) in enumerate(zip(case[0]["inputs"], case[0]["labels"], strict=True)):
        loss, _, of = gradients(case, x, labels)
        total += loss * (weight(k, last) if loss_weight is None else loss_weight(k))
        grads = [[a + weight(k, rank) * b for a, b in zip(have, new, strict=True)]
                 for rank, (have, new) in enumerate(zip(grads, of, strict=True))]
    return answers(case, (total, grads))


def draw(rng, features, samples, name, schedule):
    """A case: the global model and batch, then each rank's part of it. name: of the schedule, for the learner."""
    def array(*shape):
        return rng.standard_normal(shape)
    inputs = [array(n, features[0]) for n in samples]
    labels = [2 + array(n, features[-1]) for n in samples]
    told = {"schedule": name, "samples": ", ".join(map(str, samples)), "inputs": inputs, "labels": labels}
    return [told | {"steps": row, "weight": array(a, b) / a ** 0.5, "bias": array(b)}
            for a, b, row in zip(features, features[1:], schedule, strict=False)]


def all_then_all(stages, count, turn=0):
    """All forwards, then all backwards; with `turn` each stage begins with another micro-batch."""
    def row(kind, first):
        return [[kind, (k + first) % count] for k in range(count)]
    return [row("F", turn * stage) + row("B", turn * (stages - stage)) for stage in range(stages)]


def by_turns(stages, count):
    """1F1B, by when things happen: stage s does the backward of k once it has done stages - s forwards more."""
    rows = []
    for stage in range(stages):
        keyed = [(k + 0.0, "F", k) for k in range(count)] + [(k + stages - stage - 0.5, "B", k) for k in range(count)]
        rows.append([[kind, k] for _, kind, k in sorted(keyed, key=lambda step: step[0])])
    return rows
