# 08.2: right, but with 8 broadcasts of 4 parameters
def broadcast_parameters(comm, parameters):
    for parameter in parameters:
        comm.broadcast(parameter, src=0)
    for parameter in parameters:
        comm.broadcast(parameter, src=0)
