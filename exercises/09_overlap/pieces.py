"""09.3: what the pieces of the ranks add up to, and what they give with a mistake."""

import numpy as np

WIDTH = 3


def moments(pieces):
    """[Σ x, Σ x xᵀ] over the rows of some pieces."""
    rows = np.concatenate(pieces)
    return [rows.sum(0), np.einsum("ni,nj->ij", rows, rows)]


def everybodys(case, choose=lambda pieces: pieces, divide=lambda inputs: inputs["count"]):
    """The totals of both batches: over the chosen pieces of all ranks."""
    return [[sum(m[a] for m in (moments(choose(r["batches"][b])) for r in case)) / divide(case[0])
             for a in range(2)] for b in range(2)]


def reduced_each_time(case, carry):
    """Every piece's backward is reduced: what was summed already is summed again."""
    totals = []
    for b in range(2):
        held = [[np.zeros(WIDTH), np.zeros((WIDTH, WIDTH))] for _ in case]
        for piece in range(len(case[0]["batches"][b])):
            for h, r in zip(held, case, strict=True):
                for a, m in enumerate(moments([r["batches"][b][piece]])):
                    h[a] = h[a] * carry + m / r["count"]
            everybody = [sum(h[a] for h in held) for a in range(2)]
            held = [[g.copy() for g in everybody] for _ in case]
        totals.append(held[0])
    return totals


def right(case, **changed):
    """Where one backward is tried, rank r has r + 1 for its gradient."""
    ranks, all_ = len(case), everyones(case)
    return [{"totals": everybodys(case), "after_exception": np.full((2, 2), all_), "after_failure": np.full(2, all_),
             "nested": nested(case, rank), "raised": ["KeyError", "KeyboardInterrupt"], "heard": "KeyError",
             "not_entered": np.full(2, all_), "beside": np.full((2, 2), [[rank + 1.0], [all_]])} | changed
            for rank in range(ranks)]


def everyones(case):
    """1 + 2 + … + ranks"""
    return len(case) * (len(case) + 1) / 2


def nested(case, rank, reduced=(False, False, False, True)):
    """What nested() of drive.py finds if these of its backwards reduce."""
    held, found = np.arange(len(case)) * 0.0, []
    for now in reduced:
        held = held + np.arange(1, len(case) + 1)
        held = np.full(len(case), held.sum()) if now else held
        found.append([held[rank]] * 2)
    return np.array(found)


def each(case, **changed):
    """The right outputs, but for some: {name: f(rank)}; None of one rank, where nothing shows."""
    return [answer | {name: f(rank) for name, f in changed.items()}
            for rank, answer in enumerate(right(case))] if len(case) > 1 else None


def own_totals(case):
    return [answer | {"totals": everybodys([r])} for r, answer in zip(case, right(case), strict=True)]


def last_piece_reduced(case):
    last = everybodys(case, lambda pieces: pieces[-1:])
    before = [everybodys([r], lambda pieces: [p[:0] for p in pieces] + pieces[:-1]) for r in case]
    return [answer | {"totals": [[a + b for a, b in zip(*two, strict=True)] for two in zip(last, own, strict=True)]}
            for answer, own in zip(right(case), before, strict=True)]


def each_divided(case, divide):
    """The totals, if the gradients of piece k of `pieces` are divided by divide(piece, k, pieces)."""
    return [[sum(moments([piece])[a] / divide(piece, k, r["batches"][b]) for r in case
                 for k, piece in enumerate(r["batches"][b])) for a in range(2)] for b in range(2)]


def piece_by_piece(case, got):
    """Pieces without samples may be left out."""
    return all(sorted(filter(None, rows)) == sorted(filter(None, map(len, pieces)))
               for g, r in zip(got, case, strict=True) for rows, pieces in zip(g["rows"], r["batches"], strict=True))
