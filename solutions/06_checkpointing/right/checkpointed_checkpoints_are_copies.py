# 06.1: checkpoints are copies, and so are a segment's inputs
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x.copy())
        x = layer.forward(x)
    for start in reversed(range(0, len(layers), every)):
        segment, inputs = layers[start:start + every], [kept.pop()]
        for layer in segment[:-1]:
            inputs.append(layer.forward(inputs[-1]).copy())
        for layer in reversed(segment):
            ct = layer.backward(inputs.pop(), ct)
    return x, ct
