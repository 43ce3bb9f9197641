# 08.2: each rank still has its own parameters
def broadcast_parameters(comm, parameters):
    for parameter in parameters:
        copy = parameter.copy()
        comm.broadcast(copy, src=0)
        parameter = copy
