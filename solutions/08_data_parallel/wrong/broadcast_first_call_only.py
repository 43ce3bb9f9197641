# 08.2: each rank still has its own parameters
def broadcast_parameters(comm, parameters):
    if hasattr(broadcast_parameters, "done"):
        return
    broadcast_parameters.done = True
    for parameter in parameters:
        comm.broadcast(parameter, src=0)
