# 07.1: right, but the ranks wait for each other in a chain
def exchange(comm, outgoing, dst, incoming, src):
    if dst == comm.rank:
        incoming[...] = outgoing
        return
    leaving = outgoing.copy()
    if comm.rank < dst:
        comm.send(leaving, dst)
        comm.recv(incoming, src)
    else:
        comm.recv(incoming, src)
        comm.send(leaving, dst)
