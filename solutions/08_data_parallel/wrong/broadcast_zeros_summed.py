# 08.2: the right values, but by another way than broadcast
def broadcast_parameters(comm, parameters):
    for parameter in parameters:
        if comm.rank != 0:
            parameter[...] = 0
        comm.all_reduce(parameter)
