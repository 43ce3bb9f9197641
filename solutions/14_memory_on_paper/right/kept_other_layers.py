# 14.3: one whole layer and what the others keep
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    tokens = sequence * batch
    whole = tokens * hidden * sum((2, 2, 2, 2, 2, 2, 2, 1, 2, 8, 8, 1)) + heads * sequence ** 2 * batch * (2 + 1 + 2)
    if recompute == "none":
        return layers * whole
    stays = tokens * hidden * (34 if recompute == "selective" else 2)
    return (layers - 1) * stays + whole
