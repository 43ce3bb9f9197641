# 06.1: a layer's forward runs more than twice
def checkpointed(layers, x, ct, every):
    kept = []
    for i, layer in enumerate(layers):
        if i % every == 0:
            kept.append(x)
        x = layer.forward(x)
    y = x
    for start in reversed(range(0, len(layers), every)):
        segment, first = layers[start:start + every], kept.pop()
        for i in reversed(range(len(segment))):
            x = first
            for layer in segment[:i]:
                x = layer.forward(x)
            ct = segment[i].backward(x, ct)
    return y, ct
