# 06.1: too much is alive at once
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        kept.append(x)
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        for layer in reversed(layers[start:start + every]):
            ct = layer.backward(kept.pop(), ct)
    return y, ct
