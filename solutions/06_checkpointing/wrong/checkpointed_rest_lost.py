# 06.1: behind the last full segment are lost
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y = x
    for k in reversed(range(max(1, len(layers) // every))):
        segment, inputs = layers[k * every:(k + 1) * every], [kept[k]]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]))
        for layer in reversed(segment):
            ct = layer.backward(inputs.pop(), ct)
    return y, ct
