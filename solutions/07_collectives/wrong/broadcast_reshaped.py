# 07.2: cannot reshape array of size 0
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    x = x.reshape(len(x), -1)
    distance = 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, (me + distance + src) % comm.size)
        elif me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
