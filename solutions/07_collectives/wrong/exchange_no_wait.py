# 07.1: a posted message is never waited for
def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    comm.isend(outgoing.copy(), dst)
    comm.recv(incoming, src)
