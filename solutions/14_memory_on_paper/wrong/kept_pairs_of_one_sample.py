# 14.3: the pairs are counted for one sample


def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    s, b, h, a = sequence, batch, hidden, heads
    linear = 34 * s * b * h
    pairs = 5 * a * s * s
    if recompute == "none":
        return layers * (linear + pairs)
    if recompute == "selective":
        return layers * linear + pairs
    return layers * 2 * s * b * h + linear + pairs - 2 * s * b * h
