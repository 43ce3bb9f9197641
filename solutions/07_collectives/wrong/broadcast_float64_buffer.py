# 07.2: send and recv must name arrays of one shape and dtype
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            import numpy as np
            received = np.empty(x.shape)
            comm.recv(received, (me - distance + src) % comm.size)
            x[...] = received
        distance *= 2
