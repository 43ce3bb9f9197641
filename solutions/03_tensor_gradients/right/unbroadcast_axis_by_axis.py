# 03.1: one axis after the other
def unbroadcast(gradient, shape):
    while gradient.ndim > len(shape):
        gradient = gradient.sum(0)
    for axis, extent in enumerate(shape):
        if extent != gradient.shape[axis]:
            gradient = gradient.sum(axis, keepdims=True)
    return gradient
