# 07.1: the message that arrives is written over the one that is still being sent
def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    work = comm.isend(outgoing, dst)
    comm.recv(incoming, src)
    work.wait()
