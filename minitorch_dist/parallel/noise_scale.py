"""The gradient noise scale: how large a batch is worth it.

The gradient of a batch of B samples is that of all samples, G, and noise of the variance tr(Σ)/B, Σ being the
covariance of single samples' gradients. While the noise is the larger of the two, twice the samples make a step nearly
twice as good; when it is the smaller, most of them are wasted. The two are equal at a batch of

    B_simple = tr(Σ) / |G|²         samples

In the paper's model of training, batches of B take 1 + B_simple/B times the fewest steps that it could be done in (with
infinite batches), and 1 + B/B_simple times the fewest samples (with tiny ones). B_simple grows as the loss falls.

    noise = GradientNoiseScale(model)       # a DistributedDataParallel, a fully_shard model, or a plain one
    for batch in batches:
        for shard in batch.shards:
            loss = cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count
            loss.backward()
            noise.after_backward(len(shard.labels))
        noise.update()                      # before gradients are clipped
        optimizer.step()
    print(noise.told(batch.count))

What it needs is at hand: gradients of small batches, those of each backward pass on each rank before they are summed,
and of the whole one. Pass i has n_i of the batch's N samples, and the gradient g_i of their sum of losses divided by N:
so that the batch's is g = Σ g_i, and that of the pass's mean m_i = N/n_i · g_i. The squares' expected values are

    E |m_i|² = |G|² + tr(Σ)/n_i         E |g|² = |G|² + tr(Σ)/N

    E [Σ n_i |m_i|² - N |g|²] = (N |G|² + k tr(Σ)) - (N |G|² + tr(Σ)) = (k - 1) tr(Σ)         for k passes

    tr(Σ) ≈ (N² Σ |g_i|²/n_i - N |g|²) / (k - 1)         |G|² ≈ |g|² - tr(Σ)/N

without bias, whatever the n_i (and of normal gradients no estimate from the same numbers varies less: it is the
variance within groups of an analysis of variance). For equal n_i these are the paper's. Of the two, which are noisy and
of which the second may be below 0, moving averages are kept, and B_simple is their ratio.

Source: McCandlish et al. 2018, "An empirical model of large-batch training", sections 2.2 and 2.3, appendix A.1.
"""

from functools import partial
from math import inf
from numbers import Real

import numpy as np

from ..backend import module_of, to
from ..optim.clip import check_known, measured, others
from ..optim.settings import check_keys, check_settings
from .wrapping import ReducingModule, check_not_annotated, divided


class GradientNoiseScale:
    """Moving averages of tr(Σ) and |G|², from one training's own gradients; see above.

    model  a DistributedDataParallel or fully_shard model (all stages, exact mode), of parts by tensor parallelism too,
           or one that no other rank has samples for; with its parameters as they will be trained
    decay  of the averages, per step: they look back over some 1/(1 - decay) steps. What B_simple is at the end of a
           short training, whose gradients were far larger at its beginning, wants a smaller one

    A batch of several samples must have two backward passes at least, on all ranks together: else update raises
    ValueError on all of them.
    ValueError for parameters on a mesh (sharding/annotate.py), and for experts or sequences that are divided over ranks
    with samples of their own, where a pass's gradient isn't that of the rank's samples alone. (Nor is it in
    a pipeline's stages, whose micro-batches can't be told of: their second backward raises.)

    A step costs a pass over the gradients per backward, and an all-reduce of three numbers, with the norm of the whole
    gradient (as clip_grad_norm_'s), which is collective where gradients are cut.
    """

    def __init__(self, model, decay=0.99):
        if not 0 <= decay < 1:
            raise ValueError(f"GradientNoiseScale: decay is {decay}; it must be in [0, 1)")
        wrapped = isinstance(model, ReducingModule)
        check_not_annotated(model, "GradientNoiseScale", "a pass's gradients there are those of all ranks")
        for path, m in divided(model):
            raise ValueError(f"GradientNoiseScale: {path or 'the model'} is divided over the ranks of "
                             f"{m.divided_over.name!r}, so that a rank's gradients come from the others' samples too: "
                             "measure a model that isn't, on fewer samples")
        self.model, self.decay, self.comm = model, decay, model.comm if wrapped else None
        params = self._trained()
        check_known(list(params.values()), "GradientNoiseScale")
        if own := [p for p in params.values() if p.leaf.unsummed is not None]:
            raise ValueError(f"GradientNoiseScale: {len(own)} of the parameters are `unsummed`, and nobody knows the "
                             "gradient of the whole batch, with which those of its parts are compared: measure a model "
                             "whose gradients are summed")
        self.sharers = {key: others(p) for key, p in params.items()}
        self._handles = [p.register_hook(partial(self._see, key)) for key, p in params.items()]
        self.steps, self.trace_sum, self.square_sum = 0, 0.0, 0.0
        self.forget()

    def _trained(self):
        """{id: parameter}."""
        inner = self.model.module if isinstance(self.model, ReducingModule) else self.model
        return {id(p): p for p in inner.parameters() if p.requires_grad}

    def _see(self, key, grad):
        values = grad.data
        if key in self.seen:
            raise RuntimeError("GradientNoiseScale: a second backward pass, and after_backward hasn't been told of the "
                               "first: tell it after each, or add the losses up and go back once")
        self.seen[key] = module_of(values).square(values, dtype=np.float64).sum().reshape(1)

    def forget(self):
        """Give up the step under way: what backward passes have left since the last update counts for nothing."""
        self.seen, self.passes, self.samples = {}, 0, 0
        self.own = {}       # id of a parameter -> Σ |g_i|²/n_i, an array of one element where the gradients are

    def remove(self):
        """Look at no more gradients."""
        for handle in self._handles:
            handle.remove()

    def after_backward(self, samples):
        """The backward pass that has just ended was of so many samples: 0 for one that had none."""
        if not 0 <= samples < inf:
            raise ValueError(f"GradientNoiseScale.after_backward: samples={samples}: those that the pass was of, at "
                             "least 0")
        if samples:
            for key, square in self.seen.items():
                self.own[key] = self.own.get(key, 0.0) + square / samples
            self.passes += 1
            self.samples += samples
        self.seen = {}

    def update(self, grad_scale=1.0):
        """A batch's gradients are complete, and as backward has left them: take its estimates into the averages.
        Collective. Of gradients that are inf or NaN nothing is taken, nor of a batch of one sample, as an epoch's last
        one may be: it has no parts.

        grad_scale  what losses were multiplied by beside 1/N (GradScaler.get_scale())
        """
        if not 0 < grad_scale < inf:
            raise ValueError(f"GradientNoiseScale.update: grad_scale={grad_scale}: losses were multiplied by a number "
                             "above 0")
        if self.seen:
            raise RuntimeError("GradientNoiseScale: there was a backward pass of which after_backward hasn't been told")
        if self._trained().keys() != self.sharers.keys():
            raise RuntimeError("GradientNoiseScale: parameters were frozen or unfrozen since it was made: make it "
                               "anew, and load_state_dict what this one knows")
        sums = np.array([self._squares(), self.passes, self.samples], np.float64)
        self.forget()
        if self.comm is not None:
            self.comm.all_reduce(sums)
        squares, passes, samples = sums.tolist()
        if samples == 1:
            return
        if passes < 2:
            raise ValueError(f"GradientNoiseScale: this step's {samples:g} samples had {passes:g} backward pass on all "
                             "ranks together, with nothing to compare it with: take more ranks, or accumulate")
        if not np.isfinite(squares):
            return
        whole = measured({0: self.model.parameters()})[0] ** 2
        if not np.isfinite(whole):      # where parts were not: by a sum in 16 bits
            return
        self._take(*estimates(squares / grad_scale ** 2, whole / grad_scale ** 2, passes, samples))

    def _squares(self):
        """Σ |g_i|²/n_i of this rank's passes; of parts of parameters with what the others have. Collective there."""
        shares = {id(comm): (comm, np.zeros(1)) for comm in self.sharers.values()}
        for key, square in self.own.items():
            part = shares[id(self.sharers[key])][1]
            part += to(square, "cpu")
        for comm, part in shares.values():
            if comm is not None:
                comm.all_reduce(part)
        return sum(float(part[0]) for _, part in shares.values())

    def _take(self, trace, square):
        self.steps += 1
        self.trace_sum = self.decay * self.trace_sum + (1 - self.decay) * trace
        self.square_sum = self.decay * self.square_sum + (1 - self.decay) * square

    # ------------------------------------------------------------ what has come of it

    @property
    def trace(self):
        """The average of tr(Σ), the variance of a single sample's gradient; NaN before the first step."""
        return self.trace_sum / (1 - self.decay ** self.steps) if self.steps else float("nan")

    @property
    def square(self):
        """The average of |G|², which noise may bring below 0; NaN before the first step."""
        return self.square_sum / (1 - self.decay ** self.steps) if self.steps else float("nan")

    @property
    def scale(self):
        """B_simple, in samples; inf while |G|² can't be told from 0, 0 while tr(Σ) can't, NaN before the first step."""
        return inf if self.square <= 0 else max(self.trace, 0.0) / self.square      # NaN stays: it is the first

    def costs(self, batch):
        """(how many times the fewest steps, how many times the fewest samples) batches of this size take."""
        return 1 + self.scale / batch, 1 + batch / self.scale if self.scale else inf

    def told(self, batch):
        """A line about batches of this size."""
        steps, samples = self.costs(batch)
        return f"gradient noise scale {self.scale:,.0f}: batches of {batch:,} take {steps:,.2f} times the fewest " \
               f"steps, and {samples:,.2f} times the fewest samples"

    def state_dict(self):
        """What a run needs to go on: plain numbers."""
        return {"steps": self.steps, "trace": self.trace_sum, "square": self.square_sum}

    def load_state_dict(self, saved):
        """Go on from what state_dict gave. ValueError where it lacks something, or has what is no number."""
        names = "steps", "trace", "square"
        check_keys(saved, names, "a GradientNoiseScale")
        check_settings(**{name: (saved[name], isinstance(saved[name], Real), "a number") for name in names})
        self.steps, self.trace_sum, self.square_sum = saved["steps"], saved["trace"], saved["square"]


def estimates(squares, whole, passes, samples):
    """(tr(Σ), |G|²) of one batch: squares is Σ |g_i|²/n_i over its passes, whole |g|², samples N. See above."""
    trace = (samples ** 2 * squares - samples * whole) / (passes - 1)
    return trace, whole - trace / samples
