# 08.3: mean of means: the ranks hold
def average_gradients(comm, grads, count):
    for grad in grads:
        comm.all_reduce(grad, op="mean")
