# 08.2: the ranks call different collectives
def broadcast_parameters(comm, parameters):
    if comm.rank == 0:
        for parameter in parameters:
            comm.broadcast(parameter, src=0)
