# 14.3: the pairs are counted once for all heads
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept)
