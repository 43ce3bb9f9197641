# 03.1: keepdims is lost
def unbroadcast(gradient, shape):
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched)
