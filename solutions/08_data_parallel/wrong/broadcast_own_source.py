# 08.2: the ranks call different collectives
def broadcast_parameters(comm, parameters):
    for parameter in parameters:
        comm.broadcast(parameter, src=comm.rank)
