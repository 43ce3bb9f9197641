# 06.1: each segment begins again with the cotangent of the output
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y, ct_y = x, ct
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [kept.pop()]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        ct = ct_y
        for layer in reversed(segment):
            ct = layer.backward(inputs.pop(), ct)
    return y, ct
