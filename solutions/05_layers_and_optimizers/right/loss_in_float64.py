# 05.2: worked out in float64, whatever the logits are
import numpy as np


def softmax_cross_entropy(logits, labels):
    z = logits.astype(np.float64)
    z -= z.max(1)[:, None]
    e = np.exp(z)
    p = e / e.sum(1)[:, None]
    hot = labels[:, None] == np.arange(logits.shape[1])
    loss = np.sum(np.log(e.sum(1)) - np.where(hot, z, 0).sum(1))
    return loss, (p - hot).astype(logits.dtype)
