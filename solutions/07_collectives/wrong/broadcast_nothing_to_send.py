# 07.2: x of shape [0, 4]
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                x.size and comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
