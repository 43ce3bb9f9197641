# 06.1: by recursion: segments, and layers inside of them
def checkpointed(layers, x, ct, every):
    """The first segment forward, everything behind it, then backward through the first; y on the way."""
    if not layers:
        return x, ct
    first, rest, end = layers[:every], layers[every:], x
    for layer in first:
        end = layer.forward(end)
    y, ct = checkpointed(rest, end, ct, every)
    del end
    return y, back(first, x, ct)


def back(layers, x, ct):
    """By recursion too: up to the last layer first, and backward on the way home."""
    if len(layers) > 1:
        ct = back(layers[1:], layers[0].forward(x), ct)
    return layers[0].backward(x, ct)
