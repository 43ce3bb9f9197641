# 03.1: the axes that broadcasting added in front are still there
def unbroadcast(gradient, shape):
    stretched = tuple(i for i, extent in enumerate(shape, gradient.ndim - len(shape)) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
