# 06.1: too much is alive at once
def checkpointed(layers, x, ct, every):
    kept, everything = [], []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [kept.pop()]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        everything.append(inputs)
        for layer, x in zip(reversed(segment), reversed(inputs)):
            ct = layer.backward(x, ct)
    return y, ct
