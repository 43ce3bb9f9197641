"""07.2 One to all, in log₂N steps.

If src sends to every rank in turn, the last one waits for N-1 messages. But whoever has the data can pass it on: with
every step twice as many have it.
"""


def broadcast(comm, x, src):
    """x becomes rank src's x on all ranks, in place, in ⌈log₂N⌉ steps and N-1 messages.

    comm  the Communicator: comm.rank, comm.size, comm.send(x, dst), comm.recv(x, src)
    x     array, of the same shape and dtype on all ranks
    src   the rank whose x it is, the same number on all ranks; not always 0

    In a step every rank sends at most one message and receives at most one. N need not be a power of two.
    """
    # begin with src = 0: who has the data after 0, 1, 2 … steps, and to whom does each of them send next? For another
    # src, count the ranks from there: me = (comm.rank - src) % comm.size
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
