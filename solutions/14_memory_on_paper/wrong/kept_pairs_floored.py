# 14.3: cuts the fraction off


def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    s, b, h, a = sequence, batch, hidden, heads
    linear = s * b * h * 34
    pairs = s * b * h * (5 * a * s // h)
    if recompute == "none":
        return layers * (linear + pairs)
    if recompute == "selective":
        return layers * linear + pairs
    return layers * 2 * s * b * h + linear + pairs - 2 * s * b * h
