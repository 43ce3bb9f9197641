# 07.2: right, but the data is handed from rank to rank in a chain
def broadcast(comm, x, src):
    if comm.rank != src:
        comm.recv(x, (comm.rank - 1) % comm.size)
    if (comm.rank + 1) % comm.size != src:
        comm.send(x, (comm.rank + 1) % comm.size)
