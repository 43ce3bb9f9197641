# 14.3: is counted whole, and its input, which was kept, twice
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    kept = {"none": features + pairs, "selective": features, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * kept + (features + pairs - kept if recompute == "selective" else
                            features + pairs if recompute == "full" else 0)
