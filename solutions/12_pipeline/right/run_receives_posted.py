# 12.2: receives posted early, other tags, divided at the very end
import numpy as np


def run_schedule(comm, steps, stage, batch, loss):
    rank, last = comm.rank, comm.size - 1
    m = len(batch)
    inbox, posted, context, slopes = {}, {}, {}, {}
    if rank:
        for k, (x, _) in enumerate(batch):
            inbox["F", k] = np.empty((x.shape[0], stage.features))
            posted["F", k] = comm.irecv(inbox["F", k], rank - 1, tag=k)
    outgoing, sums, loss_sum = [], None, 0.0
    for step in steps:
        kind, k = step
        if kind == "F":
            if rank:
                posted.pop(step).wait()
                x = inbox.pop(step)
            else:
                x = batch[k][0].copy()
            y, context[k] = stage.forward(x)
            if rank == last:
                value, slopes[k] = loss(y, batch[k][1])
                loss_sum += value
            else:
                outgoing.append((y, comm.isend(y, rank + 1, tag=k)))
                inbox["B", k] = np.full(y.shape, np.nan)
                posted["B", k] = comm.irecv(inbox["B", k], rank + 1, tag=m + k)
        if kind == "B":
            if rank < last:
                posted.pop(step).wait()
                slopes[k] = inbox.pop(step)
            dx, grads = stage.backward(context[k], slopes[k])
            del context[k], slopes[k]
            if sums is None:
                sums = [np.zeros_like(g) for g in grads]
            for total, g in zip(sums, grads, strict=True):
                total += g
            if rank:
                outgoing.append((dx, comm.isend(dx, rank - 1, tag=m + k)))
    for _, work in outgoing:
        work.wait()
    samples = sum(len(labels) for _, labels in batch)
    stage.step([g / samples for g in sums])
    if rank == last:
        return np.float64(loss_sum) / samples
