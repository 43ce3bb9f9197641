# 07.2: all messages are posted, and waited for at the end
def broadcast(comm, x, src):
    me, works, distance = (comm.rank - src) % comm.size, [], 1
    while distance < comm.size:
        if me < distance and me + distance < comm.size:
            works.append(comm.isend(x, (comm.rank + distance) % comm.size))
        elif distance <= me < 2 * distance:
            comm.recv(x, (comm.rank - distance) % comm.size)
        distance *= 2
    for work in works:
        work.wait()
