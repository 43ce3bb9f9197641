# 03.1: the result has shape [2, 3]; expected [3]
def unbroadcast(gradient, shape):
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    if gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
