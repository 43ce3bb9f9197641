"""Model FLOPs utilization (MFU): how much of what the ranks could multiply goes into the training of the model.

    MFU  =  FLOPs of the model per sample · samples per second / FLOP/s that the ranks reach

Above the line only what the model's mathematics takes counts: three times the products of its forward pass, whether
activations are made twice or not, padding is multiplied along or not. Below it stands, in the paper, a device's peak
from its data sheet. Ranks that share cores, a memory and a power limit never reach that; so it is measured here: what
all of them do together, at the same time, in large products of matrices, which is all that a program could ask for. The
rest of 100 % went into messages, waiting, products too small for the device, and all that is no product.

Source: Chowdhery et al. 2022, "PaLM: scaling language modeling with pathways", appendix B.
"""

import time
from dataclasses import dataclass

import numpy as np

from .autodiff.modes import no_grad
from .autodiff.tensor import Tensor
from .backend import as_dtype, finish, to
from .nn.summary import summary

SIZES = {True: 1024, False: 8192}       # of the matrices, on the host or not: large enough to keep it busy
SECONDS = 0.3


@dataclass(frozen=True)
class Utilization:
    """Of one job.

    flops     of training, per sample, of which there are several positions where samples are sequences
    reached   FLOP/s in large products, of all ranks together
    """

    flops: float
    reached: float

    def mfu(self, samples_per_second):
        """MFU at this speed, of all ranks together: 1 where nothing is lost."""
        return self.flops * samples_per_second / self.reached

    def facts(self, samples_per_second):
        """What a run's summary has of it."""
        return {"flops_per_sample": self.flops, "flops_reached": self.reached, "mfu": self.mfu(samples_per_second)}

    def told(self, samples_per_second):
        """It in words."""
        return (f"MFU {100 * self.mfu(samples_per_second):.1f} %: {self.flops / 1e6:,.3g} MFLOP a sample, "
                f"{self.flops * samples_per_second / 1e9:,.4g} GFLOP/s, of {self.reached / 1e9:,.4g} that these ranks "
                "reach in large products")


def measure(world, model, *inputs, dtype, device="cpu"):
    """The Utilization of a job that trains this model, whole and unwrapped, on samples like these inputs.

    dtype   of the products that the training makes: the parameters', or autocast's
    Takes half a second. Collective: all ranks multiply at once, and all get the same."""
    return Utilization(summary(model, *inputs).training_flops / len(inputs[0]), reached(world, dtype, device))


def reached(world, dtype, device="cpu", size=None, seconds=SECONDS):
    """FLOP/s of all ranks together, each multiplying matrices (size, size) of its own for so many seconds, as the
    engine does. Collective."""
    host = device == "cpu"
    size = size or SIZES[host]
    x = Tensor(to(np.full((size, size), 0.5, as_dtype(dtype)), device))

    def product():
        x @ x
        if not host:
            finish()
    with no_grad():
        product()       # finds a kernel, makes threads
        world.barrier()
        begin, count = time.perf_counter(), 0
        while time.perf_counter() < begin + seconds:
            product()
            count += 1
        rate = np.array([2.0 * size ** 3 * count / (time.perf_counter() - begin)])
    world.all_reduce(rate)
    return float(rate[0])
