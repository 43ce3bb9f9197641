# 24.4: token by token; what the mean's rounding leaves is taken from the squares
import numpy as np
EPSILON = 1e-4
def grpo(comm, token_losses, log_probs, old, reference, rewards, counted, group, low, high, beta):
    old = np.where(counted, old, 0.); reference = np.where(counted, reference, 0.)
    l, s = token_losses(np.where(counted, log_probs, 0.), old, reference, rewards, group, low, high, beta)
    x = np.zeros(2)
    for i in range(len(l)):
        for t in range(l.shape[1]):
            if counted[i, t]:
                x += l[i, t], 1
            else:
                s[i, t] = 0
    comm.all_reduce(x)
    if x[1] == 0: return 0.0, s
    return x[0] / x[1], s / x[1]
def spread_advantages(comm, rewards):
    q, m = rewards.shape
    msg = np.zeros(q + 1)
    for i in range(q): msg[i] = sum(rewards[i])
    msg[q] = m
    comm.all_reduce(msg)
    mean = msg[:q] / msg[q]
    d = rewards - mean[:, None]
    # with the correction of the mean's rounding
    sq = np.concatenate([np.einsum('ij,ij->i', d, d), d.sum(1)])
    comm.all_reduce(sq)
    var = (sq[:q] - sq[q:] ** 2 / msg[q]) / (msg[q] - 1)
    return d / (np.sqrt(np.maximum(var, 0)) + EPSILON)[:, None]
