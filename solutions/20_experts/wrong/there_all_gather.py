# 20.3: a row goes to its expert's rank, not to all
import numpy as np


def experts_forward(x, up, down):
    z = x @ up
    t = np.tanh(np.sqrt(2 / np.pi) * (z + 0.044715 * z ** 3))
    h = 0.5 * z * (1 + t)
    return h @ down, (x, up, down, z, t, h)


def experts_backward(kept, dy):
    x, up, down, z, t, h = kept
    slope = 0.5 * (1 + t) + 0.5 * z * (1 - t ** 2) * np.sqrt(2 / np.pi) * (1 + 3 * 0.044715 * z ** 2)
    dz = dy @ down.transpose(0, 2, 1) * slope
    return dz @ up.transpose(0, 2, 1), x.transpose(0, 2, 1) @ dz, h.transpose(0, 2, 1) @ dy


def to_experts(comm, rows):
    experts, capacity, size = rows.shape
    everything = np.empty((comm.size, *rows.shape), rows.dtype)
    comm.all_gather(everything, np.ascontiguousarray(rows))
    here = experts // comm.size
    arrived = everything[:, comm.rank * here:(comm.rank + 1) * here]
    by_rank = arrived.reshape(comm.size, experts // comm.size, capacity, size)
    return by_rank.transpose(1, 0, 2, 3).reshape(experts // comm.size, comm.size * capacity, size)


def to_tokens(comm, rows):
    here, places, size = rows.shape
    by_rank = rows.reshape(here, comm.size, places // comm.size, size).transpose(1, 0, 2, 3)
    parts = np.ascontiguousarray(by_rank).reshape(here * comm.size, places // comm.size, size)
    arrived = np.empty_like(parts)
    comm.all_to_all(arrived, parts)
    return arrived


class ExpertParallel:
    def __init__(self, comm, params, k, capacity, pieces):
        self.comm, self.params, self.k, self.capacity, self.pieces = comm, params, k, capacity, pieces

    def forward(self, x):
        logits = x @ self.params["router"]
        experts = logits.shape[1]
        expert, slot, gates = self.pieces["route"](logits, self.k)
        rows = self.pieces["rows_of"](expert, slot, experts, self.capacity)
        taken = rows >= 0
        sent = np.zeros((*rows.shape, x.shape[1]))
        sent[taken] = x[rows[taken]]
        answers, inner = experts_forward(to_experts(self.comm, sent), self.params["up"], self.params["down"])
        answers = to_tokens(self.comm, answers)
        placed = slot < self.capacity
        found = np.where(placed[..., None], answers[expert, np.where(placed, slot, 0)], 0.0)
        balance, dbalance = self.pieces["balance_loss"](logits, expert[:, 0])
        kept = x, logits, expert, slot, gates, rows, inner, found, dbalance
        return (found * gates[..., None]).sum(1), balance, kept

    def backward(self, kept, dy, weight):
        x, logits, expert, slot, gates, rows, inner, found, dbalance = kept
        dgates = (found * dy[:, None]).sum(2)
        placed = slot < self.capacity
        danswers = np.zeros((*rows.shape, x.shape[1]))
        danswers[expert[placed], slot[placed]] = (gates[..., None] * dy[:, None])[placed]
        drows, dup, ddown = experts_backward(inner, to_experts(self.comm, danswers))
        drows = to_tokens(self.comm, drows)
        dlogits = self.pieces["route_backward"](logits, expert, dgates) + weight * dbalance
        dx = dlogits @ self.params["router"].T
        np.add.at(dx, rows[rows >= 0], drows[rows >= 0])
        return dx, {"router": x.T @ dlogits, "up": dup, "down": ddown}


def global_gradients(dp, ep, grads, count):
    total, found = np.array([float(count)]), {}
    for axis in (dp, ep):
        axis.all_reduce(total)
    for name, grad in grads.items():
        found[name] = np.array(grad)
        for axis in (dp,) if name in ("up", "down") else (dp, ep):
            axis.all_reduce(found[name])
        found[name] /= total
    return found
