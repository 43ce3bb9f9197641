# 03.1: over the axes that had extent 1 the copies' gradients are averaged
def unbroadcast(gradient, shape):
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.mean(axis=stretched, keepdims=True)
