# 07.3: the result is the array of one rank: what was received has overwritten
def all_reduce(comm, x, broadcast):
    distance = 1
    while distance < comm.size:
        if comm.rank % (2 * distance) == distance:
            comm.send(x, comm.rank - distance)
        elif comm.rank % (2 * distance) == 0 and comm.rank + distance < comm.size:
            comm.recv(x, comm.rank + distance)
        distance *= 2
    broadcast(comm, x, 0)
