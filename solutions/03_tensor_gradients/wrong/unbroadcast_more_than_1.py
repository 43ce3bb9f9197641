# 03.1: extent 0: (1, 3) is broadcast to (0, 3) as well
def unbroadcast(gradient, shape):
    gradient = gradient.sum(axis=tuple(range(gradient.ndim - len(shape))))
    for axis, extent in enumerate(shape):
        if extent == 1 and gradient.shape[axis] > 1:
            gradient = gradient.sum(axis=axis, keepdims=True)
    return gradient
