# 14.3: 36 bytes for each position and feature here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 36 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept)
