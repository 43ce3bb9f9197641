"""check_grads for functions that all ranks call together: is the derivative across ranks right?

Each rank has an x of its own, or all have the same one (`one_input`); each gets a y of its own, or all the same one
(`one_output`). The number that is differentiated is the sum over the ranks of ⟨u, y⟩ with random u, one term for one
value. What decides is the central difference, each element of each rank's x moved in turn, while all ranks watch.
"""

import numpy as np

from ..autodiff.check import GradientError
from ..autodiff.transforms import jvp, vjp


def check_grads_across(f, x, comm, one_input=False, one_output=False, order=2, step=1e-5, rtol=1e-6, atol=1e-8, seed=0):
    """Compare reverse and forward derivatives of f at x (float64) with central differences, to the given order.

    Collective; GradientError on every rank where this rank's derivative is wrong on any.
    """
    x = np.array(x, np.float64)
    rng = np.random.default_rng([seed, order])
    own = np.random.default_rng([seed, order, comm.rank])
    y, pull = vjp(f, x)
    u = (rng if one_output else own).standard_normal(y.shape)
    _compare("reverse", pull(u)[0], _numeric(f, x, u, comm, one_input, one_output, step), comm, rtol, atol)
    v = (rng if one_input else own).standard_normal(x.shape)
    expected = (np.asarray(f(x + step * v)) - np.asarray(f(x - step * v))) / (2 * step)
    _compare("forward", jvp(f, (x,), (v,))[1], expected, comm, rtol, atol)
    if order > 1:
        check_grads_across(lambda z: vjp(f, z)[1](u)[0], x, comm, one_input, one_input, order - 1, step,
                           10 * rtol, 10 * atol, seed)


def _numeric(f, x, u, comm, one_input, one_output, step):
    """The derivative of Σ⟨u, y⟩ by every element of this rank's x."""
    sizes = comm.all_gather_object(x.size)
    moves = [(mover, i) for mover in range(1 if one_input else comm.size) for i in range(sizes[mover])]
    terms = np.empty((len(moves), 2))
    for number, (mover, i) in enumerate(moves):
        for side, h in enumerate((step, -step)):
            moved = x.copy()
            if one_input or comm.rank == mover:
                moved.reshape(-1)[i] += h
            terms[number, side] = (np.asarray(f(moved)) * u).sum()
    everyone = np.empty((comm.size, *terms.shape))
    comm.all_gather(everyone, terms)
    up, down = (everyone[0] if one_output else everyone.sum(axis=0)).T
    mine = [one_input or mover == comm.rank for mover, _ in moves]
    return ((up - down) / (2 * step))[mine].reshape(x.shape)


def _compare(mode, got, expected, comm, rtol, atol):
    got = np.asarray(got)
    wrong = got.shape != expected.shape or not (abs(got - expected) <= atol + rtol * abs(expected)).all()
    said = f"rank {comm.rank}: got {got.reshape(-1)[:8]}, expected {expected.reshape(-1)[:8]} (central difference)"
    told = [text for text in comm.all_gather_object(said if wrong else None) if text]
    if told:
        raise GradientError(f"the {mode}-mode derivative across {comm.size} ranks is wrong:\n" + "\n".join(told))
