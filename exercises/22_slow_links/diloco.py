"""22.3 Meet every H steps.

Each rank is a worker that trains by itself, with AdamW, on its own samples. After H steps they meet: how far each has
come from where all began is taken for a gradient, their mean is the outer gradient, and one step of another optimizer
goes that way. From there all begin again.

    worker 0   θ ─ AdamW ─ AdamW ─ … ─ θ₀ ┐
    worker 1   θ ─ AdamW ─ AdamW ─ … ─ θ₁ ┤  one all-reduce,  θ ← Nesterov(θ, outer gradient)
    worker 2   θ ─ AdamW ─ AdamW ─ … ─ θ₂ ┘
               ├────── H steps ──────┤

The outer optimizer is SGD with Nesterov's momentum, of the outer gradient Δ:

    v ← momentum · v + Δ          θ ← θ - lr · (Δ + momentum · v)
"""

import numpy as np


class DiLoCo:
    """A worker's training.

    comm        the Communicator: comm.all_reduce(x) sums in place; x is in one piece
    parameters  [float64 arrays], this worker's, alike on all ranks in the beginning: the model reads them where they
                are, inner writes there, and so must you. They may have no axes, or lie in memory by columns
    inner       the worker's own optimizer, of these parameters: inner.step(grads) makes one step; inner.state is
                [arrays], what it has learned of its gradients, and stays what and where it is
    every       H, inner steps from one meeting to the next, at least 1
    lr, momentum   of the outer optimizer
    """

    def __init__(self, comm, parameters, inner, every, lr=0.7, momentum=0.9):
        raise NotImplementedError("begin with what must be kept from one meeting to the next: where all began is soon"
                                  " not to be seen any more")

    def step(self, grads, samples):
        """One step of this worker; after every H-th one all meet, and the parameters are those that all begin from.

        grads    [arrays], the mean gradient over this worker's samples of this step; zeros where it has none, and that
                 is a step, too
        samples  how many these are; a worker may have none in some steps, or in a whole round, but not all workers

        Workers weigh as many samples as they have had since the last meeting. Between meetings nothing is sent, and a
        meeting is one all-reduce of everything (flat, behind each other; one more number may go along, or by itself).
        """
        raise NotImplementedError("begin with the inner step. Then the sign of the outer gradient: if all workers "
                                  "have lowered a parameter, is it above 0? And how does everybody learn how many "
                                  "samples all have had?")
