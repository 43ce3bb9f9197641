"""07.1 Send and receive without waiting for ever.

Two ranks who both wait until the other has taken their message wait for ever. Short messages hide this: MPI copies them
aside and returns at once. With long ones the same program stands still.
"""

import numpy as np


def exchange(comm, outgoing, dst, incoming, src):
    """Send `outgoing` to rank dst and receive rank src's message into `incoming`; all ranks call this at once.

    Each sends one message, and waits for nobody before it is posted: all travel in the same step.

    comm      the Communicator: comm.rank, comm.size, comm.send(x, dst), comm.recv(x, src), and
              work = comm.isend(x, dst), which only posts the message and returns; x may not change before work.wait()
    outgoing  array, of any length; afterwards as before, unless it is `incoming`
    incoming  array of the shape and dtype of what src sends, overwritten in place. May be the same array as outgoing:
              then the rank's message goes out, and the new one takes its place
    dst, src  ranks. Whoever has d as dst is d's src. They may be this rank itself, who then sends nothing: a rank's
              message to itself is a copy
    """
    # begin with the message to oneself, which needs no communicator; then: which call can come before recv on all ranks
    # without waiting for anybody?
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    leaving = outgoing.copy() if np.shares_memory(outgoing, incoming) else outgoing
    work = comm.isend(leaving, dst)
    comm.recv(incoming, src)
    work.wait()
