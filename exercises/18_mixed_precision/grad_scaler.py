"""18.2 The loss scaler.

Gradients below 2⁻²⁵ are 0 in float16. The gradient of 65,536 · loss is 65,536 times as large, so: scale the loss,
let backward run in float16, divide again in float32. The right factor is found by trying.
"""

import numpy as np


class GradScaler:
    """scale(loss), a backward pass, step(optimizer), update(): once each per step.

    Each rank has some of the model's parameters (chapter 11), and of the gradient only what belongs to these. So all of
    them take a step, or none does.

    comm             the Communicator: comm.all_reduce(x, op) in place, op "sum" or "max"
    init_scale       the factor to begin with
    growth_factor    what it is multiplied by after growth_interval updates in a row without inf or NaN; then counting
                     begins anew
    backoff_factor   what it is multiplied by after a step with inf or NaN; counting begins anew as well
    """

    def __init__(self, comm, init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000):
        raise NotImplementedError("begin with what must be known from step to step: the factor, and how many clean "
                                  "updates there were in a row. And within a step: whether the gradients have been "
                                  "divided, and whether any was inf or NaN")

    def get_scale(self):
        """The factor, a float."""
        raise NotImplementedError("begin with the name under which you keep it")

    def scale(self, loss):
        """The loss times the factor, a float32. loss: a float16 or float32 number; float16 ends at 65,504."""
        raise NotImplementedError("begin with the dtype in which the product is computed")

    def unscale_(self, optimizer):
        """Divide the gradients, and find out whether all are finite, on all ranks. Collective; one small message.

        optimizer  its `grads` is this rank's list of float16 arrays, as backward left them: times the factor. In their
                   places come float32 arrays, divided; what those are where something is inf or NaN is the same to us.
                   A rank may have no array at all, and an array no elements

        Whoever clips calls it before the step, at most once between two updates. RuntimeError the second time, also
        behind the step, before anything is changed.
        """
        raise NotImplementedError("begin with the second call. Then two questions of each array: is all of it finite?"
                                  " And in which dtype is it to be divided? The ranks' answers become one")

    def step(self, optimizer):
        """optimizer.step(), on divided gradients, on all ranks; or on none, if any rank's had inf or NaN."""
        raise NotImplementedError("begin with gradients that nobody has divided yet")

    def update(self):
        """At the end of the step: let the factor shrink, stay or grow."""
        raise NotImplementedError("begin with a step that was left out; and leave all ready for the next one")
