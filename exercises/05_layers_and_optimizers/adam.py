"""05.4 Adam, and AdamW.

Each number gets a step length of its own: the mean of its gradients over the root of the mean of their squares. If they
agree, the step is lr, whatever their size; if they are noise about 0, it is short.
"""

import numpy as np


class Adam:
    """m ← β₁m + (1−β₁)g,  v ← β₂v + (1−β₂)g²,  parameter ← parameter − lr · m̂ / (√v̂ + eps).

    m̂ = m / (1−β₁ᵗ) and v̂ = v / (1−β₂ᵗ) in the t-th step, from 1: both means begin at 0, and this takes that bias out.
    Both have their parameters' dtype.

    parameters    list of floating-point arrays, of any number of axes, or none; the steps are written into these
                  very arrays
    lr            learning rate
    betas         (β₁, β₂)
    eps           keeps the denominator from 0; it stands beside the root, not under it
    weight_decay  λ ≥ 0
    decoupled     False (Adam): L2, g is gradient + λ · parameter, in all that follows
                  True (AdamW): the gradient stays itself, and the parameter also shrinks: the step begins with
                  parameter ← parameter · (1 − lr · λ)
    """

    def __init__(self, parameters, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, decoupled=False):
        raise NotImplementedError("begin with what has to be remembered from step to step: two arrays for each "
                                  "parameter, and one number for all")

    def step(self, grads, lr=None):
        """One step.

        grads  list of arrays, one per parameter. They stay as they are, and belong to the caller, who will write the
               next step's gradients into them
        lr     the learning rate of this step alone; None: the optimizer's
        """
        raise NotImplementedError("begin with the number of this step, then go through the parameters: decay, the two"
                                  " means, their correction, the step")
