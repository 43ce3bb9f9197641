# 08.2: nothing was written into the arrays
def broadcast_parameters(comm, parameters):
    for i, parameter in enumerate(parameters):
        parameters[i] = parameter.copy()
        comm.broadcast(parameters[i], src=0)
