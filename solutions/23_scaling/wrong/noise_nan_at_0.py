# 23.2: it is nan before any step alone
"""23.2 How noisy is the gradient?

A batch's gradient is that of all samples there are, G, and noise of the variance tr(Σ)/B, where Σ is the covariance of
single samples' gradients. The two are equal in size for a batch of

    B_simple = tr(Σ) / |G|²      samples

Neither is known, but both can be estimated from what a step of data parallelism has anyway: the gradients of shards,
m_1 … m_k, of n_1 … n_k samples, and that of the whole batch of N = Σ n_i, which is their mean by samples, m. Of a mean
over n samples the square is expected to be

    E |m_i|² = |G|² + tr(Σ)/n_i        E |m|² = |G|² + tr(Σ)/N

so both are too large for |G|², and by how much they differ says how large tr(Σ) is.
"""

import math

import numpy as np


class NoiseScale:
    """What a training has seen of its gradients' noise.

    comm   the Communicator: comm.all_reduce(x) sums an array in place, over all ranks
    decay  of the moving averages of tr(Σ) and of |G|²: average = decay · average + (1 - decay) · estimate, from 0 on
    """

    def __init__(self, comm, decay=0.99):
        # begin with what is kept from step to step
        self.comm, self.decay = comm, decay
        self.trace = self.square = 0.0

    def update(self, shards, whole):
        """(tr(Σ), |G|²), estimated from Σ n_i |m_i|² and N |m|² of one step: floats, alike on all ranks, and both
        without bias, whatever the n_i. They are taken into the averages.

        shards  [(gradient, samples)], this rank's: a shard's gradient is that of its samples' mean loss, a vector of
                float32 or float64. One without samples is zeros and says nothing, and a rank may have no shard at all
        whole   m, float64, the same on all ranks

        None, on all ranks, and the averages stay, where all together have fewer than two shards with samples.
        Squares are summed in float64, and one all-reduce of three numbers is all that is sent.
        """
        # begin with E [Σ n_i |m_i|²] and E [N |m|²], from the two lines above, on paper. How many times is tr(Σ) in
        # their difference? Which three sums over all shards are needed?
        sums = np.zeros(3)
        for gradient, samples in shards:
            if samples:
                sums += samples * np.square(gradient, dtype=np.float64).sum(), 1, samples
        self.comm.all_reduce(sums)
        squares, count, samples = sums.tolist()
        if count < 2:
            return None
        size = float(whole @ whole)
        trace = (squares - samples * size) / (count - 1)
        square = size - trace / samples
        self.trace = self.decay * self.trace + (1 - self.decay) * trace
        self.square = self.decay * self.square + (1 - self.decay) * square
        return trace, square

    def scale(self):
        """B_simple, of the averages: inf where that of |G|² isn't above 0, as noise may have it; nan before any step.
        """
        # begin with which of them may be 0, and when both are
        if self.square == 0:
            return math.nan
        return self.trace / self.square if self.square > 0 else math.inf
