# 14.3: attention's part grows with sequence here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * heads * sequence * batch
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept)
