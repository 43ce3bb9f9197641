"""12.2 The schedule, run.

Every rank has its own stage of the model and its own list of steps. What it needs from its neighbours arrives as
messages: activations from the stage before, gradients from the stage behind.
"""

import numpy as np


def run_schedule(comm, steps, stage, batch, loss):
    """Train one step on one batch; this rank does its part of it, in the order of the schedule.

    comm   the Communicator: rank s is stage s. comm.send(x, dst, tag), comm.recv(x, src, tag), which needs an array of
           the right shape to receive into, and work = comm.isend(x, dst, tag), which only posts the message: x may not
           change before work.wait(). A receive takes the message with its own tag (an integer ≥ 0), so that messages
           may be received in another order than they were sent
    steps  this rank's list of ("F", k) and ("B", k), of any schedule that can be done
    stage  this rank's layers:
             stage.features               how many features each sample has that comes in; dtype float64
             y, kept = stage.forward(x)   arrays [samples, features]; kept is what the backward pass will need, x
                                          itself included
             dx, grads = stage.backward(kept, dy)   the gradient by x, and a list of those by the stage's parameters
             stage.step(grads)            the optimizer: changes the parameters
    batch  list of (x, labels), one per micro-batch; all ranks have it. The last may have fewer samples
    loss   loss(y, labels) -> the SUM of the micro-batch's losses, and its gradient by y; for the last stage's y

    What is minimised is the MEAN loss over all samples of the batch, and the optimizer steps once. Returns this mean on
    the last rank, None on the others. Between two neighbours one message travels per micro-batch each way; steps and
    batch stay as they are.
    """
    raise NotImplementedError("begin with a loop over the steps, and the forward: where does x come from on the first"
                              " rank, and where on the others? Where does y go? What must still be known when the "
                              "backward of the same k comes?")
