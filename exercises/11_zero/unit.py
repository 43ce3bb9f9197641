"""11.2 Gather, use, free.

ZeRO's third stage, which FSDP made popular: of a layer's parameters a rank holds its part alone. All of them are here
only while the layer runs, and in backward they come once more.

    forward    gather u0, use, free | gather u1, use, free | …
    backward   … | gather u1, use, free, reduce its gradients | gather u0, use, free, reduce its gradients
"""

import numpy as np


class Unit:
    """A layer whose parameters and gradients are cut over the ranks, padded at the end as in 11.1.

    comm   the Communicator, with reduce_scatter and all_gather as in 11.1
    layer  layer.size                  how many parameters it has, without the padding
           layer.forward(w, x)         → y; w: flat array of all layer.size parameters, x: this rank's samples
           layer.backward(w, x, ct)    → (cotangent of x, gradient: flat array of layer.size), of this rank's samples;
                                       x: what forward was given
    shard  this rank's part: float64, N · shard.size ≥ layer.size. The optimizer writes its steps into this very array

    grad   an array as long as shard: this rank's part of the gradient, summed over the ranks, of the last backward;
           None before the first

    After forward, and after backward, a unit holds shard, grad and x, and nothing of the size of the layer. It sends
    what it must: one all_gather in forward, one all_gather and one reduce_scatter in backward.
    """

    def __init__(self, comm, layer, shard):
        self.comm, self.layer, self.shard, self.grad = comm, layer, shard, None

    def forward(self, x):
        """The layer's output for this rank's samples, which may be none: (rows, inputs) → (rows, outputs)."""
        raise NotImplementedError("begin with collecting all ranks' parts: a local name dies when the function returns")

    def backward(self, ct):
        """Cotangent of y → cotangent of x, both of this rank's samples. Leaves self.grad."""
        raise NotImplementedError("begin with the parameters, which are gone; then layer.backward, then the sum over "
                                  "the ranks")
