# 08.3: the ranks' gradients were summed, not averaged: where the ranks hold equally many samples, every gradient is exactly 2.000 times too large
def average_gradients(comm, grads, count):
    for grad in grads:
        comm.all_reduce(grad)
