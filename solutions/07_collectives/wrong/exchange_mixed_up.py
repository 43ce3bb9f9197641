# 07.1: dst and src are mixed up: what arrived is what rank dst sent
def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    work = comm.isend(outgoing.copy(), src)
    comm.recv(incoming, dst)
    work.wait()
