# 03.1: wrong axes: the places of extent 1 are counted
def unbroadcast(gradient, shape):
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    gradient = gradient.sum(axis=stretched, keepdims=True)
    return gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
