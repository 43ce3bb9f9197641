# 07.1: has overwritten what it was still to send
def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
    elif comm.rank % 2 == 0:
        comm.send(outgoing, dst)
        comm.recv(incoming, src)
    else:
        comm.recv(incoming, src)
        comm.send(outgoing, dst)
