"""Steps that would do harm, left out: those whose loss or gradient norm is far above the ones before.

    spikes = SpikeGuard()
    norm = optim.clip_grad_norm_(model.parameters(), 1.0)
    if not spikes.spiked(step, loss=loss, norm=norm):
        optimizer.step()

    loss  ▂▂▁▂▁▁▂▁▁█▁▁▂▁▁▁       a batch that is broken, or drawn unluckily: clipping bounds its step, Adam's averages
                   └ left out    carry it on for 1/(1 - β) steps more; without the step nothing has happened

What is far is said by median and spread of the last steps: so many times 1.4826 · the median distance from the median,
which of normal numbers is the standard deviation. Neither moves by a few spikes, as mean and deviation would, after
which the next spikes pass; where the level has changed for good, they follow within half a window. All ranks see the
same numbers, and so leave out the same steps, without a message.

Sources: the means, of mean and deviation: OLMo 2 (2025), "2 OLMo 2 Furious", 3.1's SkipStepAdamW (6 deviations of the
last 128 steps); that spikes come from pairs of parameters and batches, so that a batch left out is a spike gone:
Chowdhery et al. 2022, "PaLM", 5.1; the median distance: Hampel 1974.
"""

from collections import deque
from math import isfinite
from statistics import median
from typing import NamedTuple

from .settings import check_keys

NORMAL = 1.4826     # a normal number's deviation, in median distances


class Spike(NamedTuple):
    """A step that was left out, and why."""

    step: int
    what: str
    value: float
    usual: float
    bound: float

    def __str__(self):
        return (f"step {self.step:,} is left out: its {self.what} is {self.value:.4g}, where {self.usual:.4g} is "
                f"usual, and up to {self.bound:.4g} likely")


class SpikeGuard:
    """Says which steps to leave out.

    deviations  how far above the median is too far
    window      steps that are looked back on; nothing is left out before half of them are there
    `found` has a Spike for each step left out. ValueError for what can't be.
    """

    def __init__(self, deviations=6.0, window=128):
        if not 0 < deviations < float("inf"):
            raise ValueError(f"SpikeGuard: deviations={deviations}: a number above 0, say 6")
        if window < 4:
            raise ValueError(f"SpikeGuard: window={window}: a median of half of them needs 4 steps or more, say 128")
        self.deviations, self.window, self.found, self._before = float(deviations), int(window), [], {}

    def spiked(self, step, **values):
        """Whether step number `step` is to be left out for one of its values, say loss= and norm=, floats: the first
        that is too large. What is inf or NaN is no spike (GradScaler and Diverged see to it), and isn't kept."""
        spike = None
        for what, value in values.items():
            before = self._before.setdefault(what, deque(maxlen=self.window))
            if not isfinite(value):
                continue
            if spike is None and len(before) >= self.window // 2:
                usual = median(before)
                bound = usual + self.deviations * NORMAL * median(abs(v - usual) for v in before)
                if value > bound:
                    spike = Spike(step, what, value, usual, bound)
            before.append(float(value))
        if spike:
            self.found.append(spike)
        return spike is not None

    def at(self, step):
        """The Spike that step number `step` was left out for, or None."""
        return self.found[-1] if self.found and self.found[-1].step == step else None

    def state_dict(self):
        """What a checkpoint keeps: the last steps' values and the spikes, as JSON can hold them."""
        return {"before": {what: list(values) for what, values in self._before.items()},
                "found": [list(spike) for spike in self.found]}

    def load_state_dict(self, state):
        """Go on from there; of a longer window the last values are taken. ValueError where it isn't a SpikeGuard's, and
        nothing is changed then."""
        check_keys(state, ("before", "found"), "a SpikeGuard")
        try:
            before = {what: deque(map(float, values), maxlen=self.window) for what, values in state["before"].items()}
            found = [Spike(*spike) for spike in state["found"]]
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"the saved state is not a SpikeGuard's state_dict(): {error}") from None
        self._before, self.found = before, found
