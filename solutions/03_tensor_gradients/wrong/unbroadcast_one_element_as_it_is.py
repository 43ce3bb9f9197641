# 03.1: the axes that broadcasting added in front are still there
def unbroadcast(gradient, shape):
    if gradient.size == 1 or gradient.ndim == len(shape) == 0:
        return gradient
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
