# 08.2: the parameters are the mean over the ranks
def broadcast_parameters(comm, parameters):
    for parameter in parameters:
        comm.all_reduce(parameter)
        parameter /= comm.size
