# 03.1: only one axis is summed in front
def unbroadcast(gradient, shape):
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    lead = gradient.ndim - len(shape)
    stretched = tuple(lead + i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
