"""What cut and join of 16.1 give with a mistake in them: hypotheses, functions of a case."""

import numpy as np

from .tables import share


def pieces(ends):
    """Hypothesis of 16.1's cut: the parts end elsewhere. ends(n, size): [where rank r's part begins, …, n]."""
    def of(case):
        if "x" not in case or not case["placement"].startswith("S"):
            return None
        axis, size = int(case["placement"][1]), case["size"]
        at = ends(case["x"].shape[axis], size)
        return {"parts": [np.take(case["x"], range(at[r], at[r + 1]), axis) for r in range(size)]}
    return of


def first_longer(n, size):
    """np.array_split's."""
    return [rank * (n // size) + min(rank, n % size) for rank in range(size + 1)]


def strided(case):
    if "x" not in case or not case["placement"].startswith("S"):
        return None
    axis, size = int(case["placement"][1]), case["size"]
    n = case["x"].shape[axis]
    return {"parts": [np.take(case["x"], range(rank, n, size), axis) for rank in range(size)]}


def along(turn):
    """Hypothesis: axis turn(axis, ndim) is cut, or joined along."""
    def of(case):
        if not case.get("placement", "R").startswith("S"):
            return None
        if "x" in case:
            axis = turn(int(case["placement"][1]), case["x"].ndim)
            n = case["x"].shape[axis]
            return {"parts": [np.take(case["x"], range(*share(n, r, case["size"]).indices(n)), axis)
                              for r in range(case["size"])]}
        try:
            return {"joined": np.concatenate(case["parts"], turn(int(case["placement"][1]), case["parts"][0].ndim))}
        except ValueError:
            return None
    return of


def of_partial(outputs):
    """Hypothesis about "P" alone; outputs(case) of a case to be cut, or to be joined."""
    return lambda case: outputs(case) if case.get("placement") == "P" else None


def partial(cut=None, join=None):
    return of_partial(lambda case: {"parts": cut(case["x"], case["size"])} if "x" in case and cut else
                      {"joined": join(case["parts"])} if "parts" in case and join else None)


def times_zero(x, size):
    with np.errstate(invalid="ignore"):
        return [x] + [x * 0] * (size - 1)


def reversed_parts(case):
    if "parts" not in case or not case["placement"].startswith("S"):
        return None
    return {"joined": np.concatenate(case["parts"][::-1], int(case["placement"][1]))}


def strange_types(case, got):
    """[(dtype, what it should be)] of parts that don't have x's, and of a whole that doesn't have its parts'."""
    made, given = ("parts", [case["x"]]) if "x" in case else ("joined", case.get("parts"))
    return [(str(np.asarray(x).dtype), str(given[0].dtype)) for x in (got[made] if made == "parts" else [got[made]])
            if np.asarray(x).dtype != given[0].dtype] if given else []


def strangely_typed(case, got):
    made, given = strange_types(case, got)[0]
    why = "np.sum adds short integers up as int64" if made == "int64" else (
        "np.zeros(shape) is float64 whatever is added to it, np.zeros_like(x) isn't")
    return f"right, but of {given} something of {made} is made: {why}"
