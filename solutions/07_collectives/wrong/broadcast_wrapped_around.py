# 07.2: rank 0 waits in send(dst=2) at your line 8
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    distance = 1
    while distance < comm.size:
        dst = (me + distance + src) % comm.size
        if me < distance and dst != comm.rank:
            comm.send(x, dst)
        elif distance <= me < 2 * distance:
            comm.recv(x, (me - distance + src) % comm.size)
        distance *= 2
