# 06.1: right, but too much is held, if only as copies
def checkpointed(layers, x, ct, every):
    copies = []
    for layer in layers:
        copies.append(x.copy())
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [copies[start]]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer in reversed(segment):
            ct = layer.backward(inputs.pop(), ct)
    return y, ct
