# 07.2: a rank that has many to pass it on must get it first
def broadcast(comm, x, src):
    me = (comm.rank - src) % comm.size
    low = 1
    while me and not me & low:
        low *= 2
    if me:
        comm.recv(x, (me - low + src) % comm.size)
    distance = 1
    while distance < (low if me else comm.size):
        if me + distance < comm.size:
            comm.send(x, (me + distance + src) % comm.size)
        distance *= 2
