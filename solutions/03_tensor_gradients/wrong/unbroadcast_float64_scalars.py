# 03.1: float64 comes out where float32 went in
def unbroadcast(gradient, shape):
    if not shape:
        return gradient.sum(dtype=float)
    lead = gradient.ndim - len(shape)
    gradient = gradient.sum(axis=tuple(range(lead)))
    stretched = tuple(i for i, extent in enumerate(shape) if extent == 1)
    return gradient.sum(axis=stretched, keepdims=True)
