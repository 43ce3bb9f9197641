# 06.1: the usual way, segment by segment
def store_all(layers, x, ct):
    values = [x]
    for layer in layers:
        values.append(layer.forward(values[-1]))
    y = values.pop()
    for layer, value in zip(layers[::-1], values[::-1], strict=True):
        ct = layer.backward(value, ct)
    return y, ct


def checkpointed(layers, x, ct, every):
    segments = [layers[i:i + every] for i in range(0, len(layers), every)]
    kept = []
    for segment in segments:
        kept.append(x)
        for layer in segment:
            x = layer.forward(x)
    while segments:
        _, ct = store_all(segments.pop(), kept.pop(), ct)
    return x, ct
