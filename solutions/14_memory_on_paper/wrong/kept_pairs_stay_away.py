# 14.3: the pairs don't come back here


def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    s, b, h, a = sequence, batch, hidden, heads
    linear = 34 * s * b * h
    pairs = 5 * a * s * s * b
    if recompute == "none":
        return layers * (linear + pairs)
    if recompute == "selective":
        return layers * linear + pairs
    return layers * 2 * s * b * h + linear - 2 * s * b * h
