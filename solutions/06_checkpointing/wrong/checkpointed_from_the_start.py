# 06.1: a layer's forward runs more than twice
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [kept[0]]
        for layer in layers[:start]:
            inputs[0] = layer.forward(inputs[0])
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer in reversed(segment):
            ct = layer.backward(inputs.pop(), ct)
    return y, ct
