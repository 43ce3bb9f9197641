# 06.1: the last segment's inputs stay from forward to backward
def checkpointed(layers, x, ct, every):
    n, kept, inputs = len(layers), [], []
    last = (n - 1) // every * every
    for i in range(n):
        if i >= last:
            inputs.append(x)
        elif i % every == 0:
            kept.append(x)
        x = layers[i].forward(x)
    at = n - 1
    while True:
        while inputs:
            ct = layers[at].backward(inputs.pop(), ct)
            at -= 1
        if not kept:
            return x, ct
        inputs.append(kept.pop())
        while len(inputs) < every:
            inputs.append(layers[at - every + len(inputs)].forward(inputs[-1]))
