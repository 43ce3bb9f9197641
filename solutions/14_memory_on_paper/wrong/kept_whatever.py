# 14.3: recompute makes no difference here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    features, pairs = 34 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    return layers * (features + pairs)
