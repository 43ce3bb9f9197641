# 14.3: selective recomputation keeps the wrong part here
def activation_bytes(sequence, batch, hidden, heads, layers, recompute):
    f, p = 34 * sequence * batch * hidden, 5 * heads * sequence ** 2 * batch
    k = {"none": f + p, "selective": p, "full": 2 * sequence * batch * hidden}[recompute]
    return layers * k + f + p - k
