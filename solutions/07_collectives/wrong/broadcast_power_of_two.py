# 07.2: is no rank of this communicator
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        if me < distance:
            comm.send(x, me + distance if src == 0 else (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
