# 03.1: axis=None sums over all axes
def unbroadcast(gradient, shape):
    while gradient.ndim > len(shape):
        gradient = gradient.sum(axis=0)
    return gradient.sum(axis=tuple(axis for axis, extent in enumerate(shape) if extent == 1) or None, keepdims=True)
