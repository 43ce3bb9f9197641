# 14.3: the pairs are forgotten
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 0
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept)
