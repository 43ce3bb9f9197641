"""05.3 Gradient descent with momentum."""

import numpy as np


class SGD:
    """velocity ← momentum · velocity + gradient;  parameter ← parameter − lr · velocity.

    parameters  list of floating-point arrays, of any number of axes, or none; the steps are written into these
                very arrays
    lr          learning rate
    momentum    in [0, 1); 0 is plain gradient descent

    The velocities are 0 before the first step, and of their parameters' dtype. Each optimizer has its own.
    """

    def __init__(self, parameters, lr, momentum=0.0):
        raise NotImplementedError("begin with what has to be remembered from step to step, one array for each "
                                  "parameter")

    def step(self, grads, lr=None):
        """One step.

        grads  list of arrays, one per parameter. They stay as they are, and belong to the caller, who will write the
               next step's gradients into them
        lr     the learning rate of this step alone; None: the optimizer's
        """
        raise NotImplementedError("begin with the velocity; then the step along it. Both in place: p -= … writes, p ="
                                  " p − … gives the name p to a new array")
