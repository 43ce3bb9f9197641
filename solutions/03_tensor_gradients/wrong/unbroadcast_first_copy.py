# 03.1: the gradient of the first copy is taken
def unbroadcast(gradient, shape):
    while gradient.ndim > len(shape):
        gradient = gradient[0]
    for axis, extent in enumerate(shape):
        if extent == 1:
            gradient = gradient.take([0], axis) if gradient.size else gradient.sum(axis, keepdims=True)
    return gradient
