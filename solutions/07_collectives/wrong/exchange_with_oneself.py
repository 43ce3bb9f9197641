# 07.1: is the calling rank itself
def exchange(comm, outgoing, dst, incoming, src):
    work = comm.isend(outgoing.copy(), dst)
    comm.recv(incoming, src)
    work.wait()
