# 14.3: with full recomputation only the pairs come back here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (pairs if recompute != "none" else 0)
