# 03.1: cannot reshape array of size 0
def unbroadcast(gradient, shape):
    lead = gradient.ndim - len(shape)
    gradient = gradient.reshape(-1, *gradient.shape[lead:]).sum(axis=0)
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
