# 07.2: src and 0 have changed places
def broadcast(comm, x, src):
    def named(rank):
        return {0: src, src: 0}.get(rank, rank)

    me, distance = named(comm.rank), 1
    while distance < comm.size:
        if me < distance:
            if me + distance < comm.size:
                comm.send(x, named(me + distance))
        elif me < 2 * distance:
            comm.recv(x, named(me - distance))
        distance *= 2
