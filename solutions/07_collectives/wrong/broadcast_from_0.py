# 07.2: every rank has rank 0's array; rank src's was asked for
def broadcast(comm, x, src):
    distance = 1
    while distance < comm.size:
        if comm.rank < distance and comm.rank + distance < comm.size:
            comm.send(x, comm.rank + distance)
        elif distance <= comm.rank < 2 * distance:
            comm.recv(x, comm.rank - distance)
        distance *= 2
