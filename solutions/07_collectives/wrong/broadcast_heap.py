# 07.2: right, but the messages take more than ⌈log₂N⌉ = 3 steps


def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    if me > 0:
        comm.recv(x, ((me - 1) // 2 + src) % comm.size)
    for child in 2 * me + 1, 2 * me + 2:
        if child < comm.size:
            comm.send(x, (child + src) % comm.size)
