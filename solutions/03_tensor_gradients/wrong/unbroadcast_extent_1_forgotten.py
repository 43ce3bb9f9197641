# 03.1: nothing is summed over the axes that had extent 1
def unbroadcast(gradient, shape):
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    return gradient
