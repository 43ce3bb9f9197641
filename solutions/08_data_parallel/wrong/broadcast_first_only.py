# 08.2: only parameters[1], parameters[2], parameters[3]: each rank still has its own parameters
def broadcast_parameters(comm, parameters):
    comm.broadcast(parameters[0], src=0)
