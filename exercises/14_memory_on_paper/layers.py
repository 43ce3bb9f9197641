"""What a transformer's layers leave behind for backward: rightly and with known mistakes."""

from .jobs import results

#         what is kept                        elements / (s·b·h)  bytes of each
FEATURES = [("first layer norm: its input", 1, 2), ("queries, keys, values: their input", 1, 2), ("queries", 1, 2),
            ("keys", 1, 2), ("values", 1, 2), ("attention's projection: its input", 1, 2), ("dropout: its mask", 1, 1),
            ("second layer norm: its input", 1, 2), ("MLP's first layer: its input", 1, 2), ("GELU: its input", 4, 2),
            ("MLP's second layer: its input", 4, 2), ("dropout: its mask", 1, 1)]
#         what is kept                        elements / (a·s²·b) bytes of each
PAIRS = [("softmax: its output", 1, 2), ("dropout: its mask", 1, 1), ("dropout: its output", 1, 2)]


def added(table, size=lambda name, size: size):
    return sum(elements * size(name, bytes_) for name, elements, bytes_ in table)


def activations(case, size=lambda name, size: size, again=True, **changes):
    """The right bytes, tensor by tensor. size(name, bytes) and the other keywords are mistakes."""
    s, b, h, a, layers = ((case | changes)[name] for name in ("sequence", "batch", "hidden", "heads", "layers"))
    features, pairs = added(FEATURES, size) * s * b * h, added(PAIRS, size) * a * s * s * b
    checkpoint = size("checkpoint", 2) * s * b * h
    of_a_layer = {"none": features + pairs, "selective": features, "full": checkpoint}[case["recompute"]]
    one = features + pairs - of_a_layer
    return results(float(layers * of_a_layer + (one if again else 0)))


def paper(case):
    """The columns of the paper's table 2: what all layers keep, and nothing else."""
    return activations(case, again=False)


def twice(case):
    """All layers' checkpoints, and one whole layer, in which its checkpoint is again."""
    if case["recompute"] != "full":
        return activations(case)
    return results(activations(case)["result"] + 2 * case["sequence"] * case["batch"] * case["hidden"])


def nothing_kept(case):
    whole = activations(case | {"recompute": "none"}, layers=1)["result"]
    return results(whole) if case["recompute"] == "full" else activations(case)


def linear_pairs(case):
    """Pairs of positions taken for positions: s instead of s²."""
    found = {"none": case["layers"], "selective": 1, "full": 1}[case["recompute"]]
    pairs = 5 * case["heads"] * case["sequence"] * case["batch"]
    return results(activations(case)["result"] - found * pairs * (case["sequence"] - 1))


def one_head(case):
    """The pairs of a single head."""
    found = {"none": case["layers"], "selective": 1, "full": 1}[case["recompute"]]
    pairs = 5 * case["sequence"] ** 2 * case["batch"]
    return results(activations(case)["result"] - found * pairs * (case["heads"] - 1))


def pairs_kept(case):
    if case["recompute"] != "selective":
        return activations(case)
    features, pairs = (activations(case | {"recompute": "none"}, **less)["result"] / case["layers"]
                       for less in ({"heads": 0}, {"hidden": 0}))
    return results(case["layers"] * pairs + features)


def one_more(case):
    whole = activations(case | {"recompute": "none"}, layers=1)["result"]
    return results(activations(case, again=False)["result"] + whole)


def pairs_come_back(case):
    found = activations(case)
    if case["recompute"] == "full":
        found["result"] -= (added(FEATURES) - 2) * case["sequence"] * case["batch"] * case["hidden"]
    return found


def pairs_stay_away(case):
    found = activations(case)
    if case["recompute"] == "full":
        found["result"] -= added(PAIRS) * case["heads"] * case["sequence"] ** 2 * case["batch"]
    return found


def pairs_changed(case, by):
    """by: how many pairs there are more than there should be, in one layer."""
    found = {"none": case["layers"], "selective": 1, "full": 1}[case["recompute"]]
    return results(activations(case)["result"] + found * added(PAIRS) * by)


def pairs_of_one_sample(case):
    return pairs_changed(case, case["heads"] * case["sequence"] ** 2 * (1 - case["batch"]))


def pairs_floored(case):
    """Of s·b·h·(34 + 5·a·s/h), with // for the division."""
    cut = added(PAIRS) * case["heads"] * case["sequence"] % case["hidden"]
    return pairs_changed(case, -cut * case["sequence"] * case["batch"] / added(PAIRS))


def counted(case, got, table):
    """The number that an answer has in place of the table's sum, if that is all that is wrong with it; or 0."""
    everywhere = {"none": (FEATURES, PAIRS), "selective": (FEATURES,), "full": ()}[case["recompute"]]
    s, b = case["sequence"], case["batch"]
    elements = s * b * case["hidden"] if table is FEATURES else case["heads"] * s * s * b
    more = (got["result"] - activations(case)["result"]) / elements / (case["layers"] if table in everywhere else 1)
    return added(table) + round(more) if 0.5 < abs(more) < added(table) and abs(more - round(more)) < 1e-6 else 0
