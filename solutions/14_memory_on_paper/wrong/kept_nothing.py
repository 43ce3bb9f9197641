# 14.3: nothing is kept with full recomputation here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 0}[recompute]
    return layers * kept + (features + pairs - kept)
