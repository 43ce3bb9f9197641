# 07.2: right, but every message is sent by src itself: that takes 3 steps, where 2
def broadcast(comm, x, src):
    if comm.rank == src:
        for dst in range(comm.size):
            if dst != src:
                comm.send(x, dst)
    else:
        comm.recv(x, src)
