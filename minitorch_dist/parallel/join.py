"""join: ranks that run out of data before the others keep step, instead of letting them wait for ever."""

import numpy as np

from .batch_norm import layers


class Join:
    """See DistributedDataParallel.join."""

    def __init__(self, model, update):
        if model.exact:
            raise RuntimeError("join in exact mode: it needs one fixed number of micro-shards per step on every rank")
        if layers(model.module) or model.synchronised_buffers:
            raise RuntimeError("join: this model's forward talks to other ranks (BatchNorm or broadcast buffers), "
                               "which a rank without data can't answer; use LayerNorm, or cut the data evenly "
                               "(data.Loader)")
        if model.apart:
            raise RuntimeError("join: a rank without data can't answer the others' tokens for its experts; cut the "
                               "data evenly (data.Loader)")
        self.model, self.update = model, update

    def __enter__(self):
        return self

    def __call__(self, samples):
        """The number of samples in this step's global batch; `samples` (≥ 1) of them are here. Once per step."""
        if samples < 1 or samples != int(samples):
            raise ValueError(f"join: a step of {samples} samples; it takes a whole number, at least 1: leave the loop "
                             "when the data is through")
        return self._agree(samples)

    def _agree(self, samples):
        counts = np.zeros(self.model.comm.size, np.int64)
        self.model.comm.all_gather(counts, np.array([samples], np.int64))
        return int(counts.sum())

    def __exit__(self, kind, error, trace):
        if kind is not None:        # a rank that fails must not go on as if its data were through
            return
        while self._agree(0):
            self.model.step_without_data()
            self.update()
