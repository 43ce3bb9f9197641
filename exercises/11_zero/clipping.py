"""11.3: gradients in parts, and what clipping them gives, also with a mistake."""

import numpy as np


def real(rank):
    return [part[:n] for part, n in zip(rank["parts"], rank["sizes"], strict=True)]


def clipped(case, norm_of, factor=lambda norm, most: min(1.0, most / norm) if norm else 1.0):
    """norm_of(rank): the norm that this rank goes by, and returns."""
    norms = [norm_of(rank) for rank in range(len(case))]
    return [{"norm": norm, "clipped": [p * factor(norm, inputs["max_norm"]) for p in real(inputs)]}
            for norm, inputs in zip(norms, case, strict=True)]


def squared(norm, most):
    return most / norm if norm ** 2 > most else 1.0


def with_a_margin(norm, most):
    return most / norm if norm > most * (1 + 1e-6) else 1.0


def elements(case):
    return sum(p.size for rank in case for p in real(rank))


def up_to_an_empty_one(case):
    """The norm is right, and each rank scales its parts as far as the first that is empty."""
    found = clipped(case, lambda rank: two_norm([p for other in case for p in real(other)]))
    for answer, inputs in zip(found, case, strict=True):
        if 0 in inputs["sizes"]:
            first = inputs["sizes"].index(0)
            answer["clipped"][first:] = real(inputs)[first:]
    return found


def two_norm(arrays):
    return float(np.linalg.norm(np.concatenate([np.zeros(0), *arrays])))


def clip_case(rng, ranks, sizes, own, most, padding=7.0):
    """A case. sizes[unit][rank]; rank 0's own part of the gradient has length `own`, and each further rank's a tenth
    more; most: max_norm, of the length of all; padding: about what stands behind a unit's shorter parts, so that all
    are equally long.
    """
    case = []
    for rank, mine in enumerate(list(zip(*sizes, strict=True))[:ranks]):
        values = [rng.standard_normal(n) for n in mine]
        scale = own * (1 + rank / 10) / (two_norm(values) or 1.0)
        behind = [padding + rng.standard_normal(max(of_unit) - n) for of_unit, n in zip(sizes, mine, strict=True)]
        case.append({"sizes": list(mine), "parts": [np.concatenate([scale * v, p])
                                                    for v, p in zip(values, behind, strict=True)]})
    max_norm = most(two_norm([p for rank in case for p in real(rank)]))
    return [rank | {"max_norm": max_norm} for rank in case]


def by_own(case, decides=False, divides=False):
    """The norm is right; each rank's own decides, or divides."""
    norm, found = norm_of_all(case)(0), []
    for rank in case:
        own, most = two_norm(real(rank)), rank["max_norm"]
        factor = most / (divides and own or norm) if (own if decides else norm) > most else 1.0
        found.append({"norm": norm, "clipped": [p * factor for p in real(rank)]})
    return found


def each_unit(case):
    norms = [two_norm(parts) for parts in zip(*map(real, case), strict=True)]
    return [{"norm": norm_of_all(case)(0), "clipped": [
        p * min(1.0, rank["max_norm"] / (norm or 1.0)) for p, norm in zip(real(rank), norms, strict=True)]}
        for rank in case]


def norm_of_all(case, squares=lambda rank: two_norm(real(rank)) ** 2, root=np.sqrt):
    total = float(root(sum(squares(rank) for rank in case)))
    return lambda rank: total


def padding_counted(case, factor=lambda norm, most: min(1.0, most / norm) if norm else 1.0):
    return clipped(case, norm_of_all(case, lambda rank: two_norm(rank["parts"]) ** 2), factor)


def full_parts_left_out(case, scaled):
    """Of a part without padding p[:-0] is taken, which is nothing; scaled: only for the norm."""
    def padded(rank):
        return [p if len(p) < len(whole) else p[:0] for p, whole in zip(real(rank), rank["parts"], strict=True)]
    norm = norm_of_all(case, lambda rank: two_norm(padded(rank)) ** 2)
    found = clipped(case, norm)
    for answer, rank in zip([] if scaled else found, case, strict=False):
        answer["clipped"] = [p if len(part) else own for p, part, own in
                             zip(answer["clipped"], padded(rank), real(rank), strict=True)]
    return found
