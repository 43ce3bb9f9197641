"""The alpha-beta-gamma model: how long an all-reduce takes, worked out on paper.

    seconds = α · steps + β · bytes moved + γ · bytes added up

α is what a message costs however short it is, 1/β the wire's speed and 1/γ that of the addition; steps, moved and
added are those of the longest chain of messages that wait for each other (comm/algorithms.py). Source: Hockney 1994
for α and β; Thakur, Rabenseifner, Gropp 2005 for its use here.
"""

from typing import NamedTuple

import numpy as np

from .algorithms import ALGORITHMS


class Costs(NamedTuple):
    """alpha in seconds per step; beta and gamma in seconds per byte."""

    alpha: float
    beta: float
    gamma: float


def terms(name, size, nbytes):
    """(steps, bytes moved, bytes added up) of algorithm `name` on `size` ranks."""
    algorithm = ALGORITHMS[name]
    return np.array([algorithm.steps(size), algorithm.moved(size) * nbytes, algorithm.added(size) * nbytes])


def predict(name, size, nbytes, costs):
    """Seconds that algorithm `name` takes for an array of `nbytes` on `size` ranks."""
    return float(terms(name, size, nbytes) @ np.array(costs))


def fastest(size, nbytes, costs):
    """The name of the algorithm that should win."""
    return min(ALGORITHMS, key=lambda name: predict(name, size, nbytes, costs))


def fit(measurements):
    """The Costs that explain measurements best, of [(name, size, nbytes, seconds)].

    Least squares of the relative errors, so that microseconds count as much as seconds; a cost that would come out
    negative is 0. ValueError where measurements are too few or too much alike to tell the three apart.
    """
    rows = np.array([terms(name, size, nbytes) / seconds for name, size, nbytes, seconds in measurements])
    scale = np.linalg.norm(rows, axis=0)
    if not scale.all() or np.linalg.matrix_rank(rows / scale) < 3:
        raise ValueError(f"{len(rows)} measurements can't tell three costs apart: measure several algorithms on "
                         f"two ranks or more, with short and long arrays")
    used, found = [0, 1, 2], np.zeros(3)
    while used:
        solution = np.linalg.lstsq(rows[:, used] / scale[used], np.ones(len(rows)), rcond=None)[0]
        if (solution >= 0).all():
            found[used] = solution / scale[used]
            break
        del used[int(solution.argmin())]
    return Costs(*map(float, found))
