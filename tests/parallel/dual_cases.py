"""What a rank does in the tests of DualPipeV. What must hold is checked by the parent process."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import comm, data, nn
from minitorch_dist.comm.link import SimulatedLink, VirtualClock
from minitorch_dist.parallel.collectives import all_to_all
from minitorch_dist.parallel.pipelines import Pipeline
from minitorch_dist.parallel.pipelines.schedule_dual import dual_pipe_v
from minitorch_dist.parallel.pipelines.schedule_steps import Step


class Layer(nn.Module):
    """Attention and an expert by the clock: seconds there and back of the one, a message, those of the other, a
    message."""

    def __init__(self, axis, clock, seconds):
        super().__init__()
        self.weight = nn.Parameter(np.array([2.0, 3.0]))
        self.axis, self.clock, self.seconds = axis, clock, seconds

    def forward(self, x):
        x = x * self.weight
        for there, back in self.seconds:
            self.clock.sleep(there)
            x = x * 1.0
            x.register_hook(lambda ct, back=back: self.clock.sleep(back))
            x = all_to_all(x, self.axis)
        return x


def timed(micro_batches, latency, seconds, apart=False):
    """(seconds of a step by the virtual clock, how far loss and gradients are off) of DualPipeV on one rank, beside
    another that is sent to and fro; apart: with the halves of combined steps one after the other."""
    world, clock = comm.world(), VirtualClock()
    axis = world.split(0)
    axis.hooks.append(SimulatedLink(latency, float("inf"), clock))
    schedule = dual_pipe_v(1, micro_batches)
    if apart:
        schedule = [[Step(*step) for step in row] for row in schedule]
    chunks = [nn.Sequential(Layer(axis, clock, seconds)) for _ in range(2)]
    n, rng = 4 * micro_batches, np.random.default_rng(world.rank)
    x, labels = rng.standard_normal((2, n, 2))
    batch = next(iter(data.Loader(x, labels, n, shuffle=False).epoch(0)))
    pipeline = Pipeline(chunks, world.split(world.rank), schedule)
    loss = pipeline.run(batch, lambda y, labels: mt.sum((y - labels) ** 2), seed=0, step=0)
    w, u = (chunk[0].weight for chunk in chunks)
    error = x * w.data * u.data - labels
    return clock.time, max(abs(loss - (error ** 2).sum() / n),
                           abs(w.grad.numpy() - 2 / n * (error * x * u.data).sum(0)).max(),
                           abs(u.grad.numpy() - 2 / n * (error * x * w.data).sum(0)).max())
