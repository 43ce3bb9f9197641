"""06.1 A checkpoint every few layers.

Backward needs the input of every layer, so a network of n layers keeps n arrays alive. Keep only every few of them, and
compute those between again when backward gets there.
"""


def store_all(layers, x, ct):
    """The usual way, to compare with. Given.

    layers  each has forward(x) -> y and backward(x, ct) -> ct of its input (x: the input that it had)
    x, ct   the network's input, and the cotangent of its output

    Returns (y, ct of x).
    """
    values = [x]
    for layer in layers:
        values.append(layer.forward(values[-1]))
    y = values.pop()
    for layer, value in zip(layers[::-1], values[::-1], strict=True):
        ct = layer.backward(value, ct)
    return y, ct


def checkpointed(layers, x, ct, every):
    """The same numbers as store_all, with fewer arrays alive at once.

    x, ct   stay as they are
    every   a segment's length: of the layers' inputs only number 0, every, 2·every, … are kept; the last segment may be
            shorter, and its inputs may stay until backward, which begins there

    No layer's forward runs more than twice. At any time at most one segment's inputs are alive beside the checkpoints
    of those before it.
    """
    # begin with forward: keep x where a segment begins. Then, from the last segment to the first: its inputs once more,
    # from its checkpoint, and backward through them
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
            ct = layer.backward(inputs.pop(), ct)
    return y, ct
