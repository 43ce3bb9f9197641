# 07.2: nothing is sent of an empty array
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    if not x.size:
        return
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
