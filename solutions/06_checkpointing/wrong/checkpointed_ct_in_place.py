# 06.1: the argument ct isn't what it was before the call
def store_all(layers, x, ct):
    values = [x]
    for layer in layers:
        values.append(layer.forward(values[-1]))
    y = values.pop()
    for layer, value in zip(layers[::-1], values[::-1], strict=True):
        ct = layer.backward(value, ct)
    return y, ct


def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [kept.pop()]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer in reversed(segment):
            ct[...] = layer.backward(inputs.pop(), ct)
    return y, ct
