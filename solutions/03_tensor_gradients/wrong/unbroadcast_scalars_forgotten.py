# 03.1: a number, shape (), was broadcast to the whole array
def unbroadcast(gradient, shape):
    if not shape:
        return gradient
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
