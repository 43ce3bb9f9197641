# 14.3: everything is counted in 32 bits
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 68 * sequence * batch * hidden, 10 * heads * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 4 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept)
