# 08.2: the list has lost arrays
def broadcast_parameters(comm, parameters):
    while parameters:
        comm.broadcast(parameters.pop(), src=0)
