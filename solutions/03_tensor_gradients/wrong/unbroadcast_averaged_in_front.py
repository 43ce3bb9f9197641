# 03.1: over the axes in front the copies' gradients are averaged
def unbroadcast(gradient, shape):
    lead = gradient.ndim - len(shape)
    gradient = gradient.mean(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
