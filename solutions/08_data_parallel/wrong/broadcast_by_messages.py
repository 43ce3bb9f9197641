# 08.2: the right values, but by messages from rank 0 to each
def broadcast_parameters(comm, parameters):
    """All ranks' parameters become rank 0's, in place.

    comm        the Communicator: comm.rank, comm.size, comm.broadcast(x, src)
    parameters  list of arrays, of the same shapes on all ranks
    """
    # begin with one array: comm.broadcast(x, src) overwrites x on every rank but src, and every rank must call it
    for parameter in parameters:
        if comm.rank == 0:
            for dst in range(1, comm.size):
                comm.send(parameter, dst)
        else:
            comm.recv(parameter, 0)
