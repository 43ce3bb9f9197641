"""What it takes to write with a model, on paper: weights, the cache of keys and values, and what a token reads of them.

    python -m minitorch_dist plan … --generate 16x4096      # 16 sequences, each with room for 4,096 tokens

A step makes one more token of each sequence. It multiplies every weight by as many numbers as there are sequences, and
what is kept of a sequence by one: too few for the peak FLOP/s, so that it takes at least the time in which memory gives
all of that. Bytes are those that nn/kept.py holds and needs, to the byte; seconds are a bound.

Sources: Williams et al. 2009, "Roofline"; Pope et al. 2022, "Efficiently scaling transformer inference" (2.1).
"""

from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from math import prod

from ..nn.windows import STATES, blocks_of


@dataclass(frozen=True)
class Generation:
    """Writing with a job's model, in its precision, on its ranks: each has the tensor-parallel part of the weights, and
    the heads' part of what is kept of its sequences. The tensor-parallel rank with the largest parts is meant.

    sequences  over all ranks; those along dp and ep have some each
    tokens     of each, those that it begins with too: a cache has room for so many from the beginning
    ValueError where nothing can be kept: for what decoding.uncacheable refuses, and for a model of unknown sizes.
    """

    job: object
    device: object
    sequences: int
    tokens: int

    def __post_init__(self):
        job, model = self.job, self.job.model
        what = f"--generate {self.sequences}x{self.tokens}"
        if min(self.sequences, self.tokens) < 1:
            raise ValueError(f"{what}: 1 or more sequences, times 1 or more tokens")
        if model.layers is None:
            raise ValueError(f"{what} of a model of which only the number of parameters is known: what it keeps "
                             "depends on its heads: give --layers, --width and --heads instead of --parameters")
        if self.tokens > model.context:
            raise ValueError(f"{what}: tokens for a context of {model.context}, beyond which nothing is kept: raise "
                             "--context")
        if job.pp > 1:
            raise ValueError(f"{what} with pp={job.pp}: a token would wait in each stage for the one before it, and "
                             "the library writes with whole layers: take --pp 1")
        if job.cp > 1:
            raise ValueError(f"{what} with cp={job.cp}: each rank has a part of the sequences, and a new token would "
                             "move them: take --cp 1")
        if job.sequence_parallel:
            raise ValueError(f"{what} with --sequence-parallel, which divides the sequences over ranks, where a new "
                             "token comes alone: leave it out")
        if self.sequences % self.groups:
            raise ValueError(f"{what}: dp{' · ep' * (job.ep > 1)} = {self.groups} ranks must share the sequences "
                             f"equally: take {-(-self.sequences // self.groups) * self.groups}")
        factor = model.capacity_factor
        if model.experts and factor is not None and factor * model.top_k < model.experts:
            least = f"{model.experts / model.top_k:g}"
            raise ValueError(f"{what}: the mixture drops tokens that others leave no room for: capacity_factor={factor}"
                             f", and only None, or experts/k = {least}, drops none: --no-capacity, or "
                             f"--capacity-factor {least}")

    @property
    def groups(self):
        """Of ranks, each of which has other sequences."""
        return self.job.dp * self.job.ep

    @property
    def own(self):
        """Sequences that a rank has."""
        return self.sequences // self.groups

    @property
    def weights(self):
        """[Parameter] of a rank. Whoever predicts further tokens has none of that while it writes."""
        job = replace(self.job, model=replace(self.job.model, predict=1), lora_targets=self.job.targets)
        return [p for part in job.parameters((range(job.model.layers), True, True)) for p in part]

    @property
    def parameters(self):
        """Bytes of them."""
        return sum(prod(p.shape) * p.itemsize for p in self.weights)

    @property
    def per_layer(self):
        """Bytes that a rank keeps of a token in a layer: keys and values of its heads; latents, of which all ranks have
        the same, and the key of all heads."""
        model = self.job.model
        numbers = (model.features["key"] + model.features["value"]) // self.job.tp if model.latent is None else \
            model.latent.kv_rank + model.latent.rope_size
        return numbers * self.job.sizes["parameter"]

    @property
    def per_token(self):
        """The same in all layers that keep some: not in those that keep states."""
        return (self.job.model.layers - self.of_states) * self.per_layer

    @property
    def windows(self):
        """{window: how many layers have it}."""
        return Counter(map(self.job.model.window_of, range(self.job.model.layers)))

    @property
    def of_states(self):
        """How many layers keep states."""
        return sum(self.windows[kind] for kind in STATES)

    @property
    def states(self):
        """Bytes of a sequence's states in all layers that keep some, whatever its length."""
        model = self.job.model
        each = model.width ** 2 // model.heads // self.job.tp * self.job.sizes["parameter"]
        return self.of_states * each

    def within(self, tokens, windows=1):
        """Bytes of a sequence's last tokens in all layers: of each so many as that many of its windows; and states."""
        of_keys = {size: layers for size, layers in self.windows.items() if not isinstance(size, str)}
        return self.states + sum(layers * self.of_blocks(tokens, *blocks_of(window), windows > 1)
                                 for window, layers in self.windows.items() if blocks_of(window)) + \
            self.per_layer * sum(layers * min(tokens, windows * (size or tokens)) for size, layers in of_keys.items())

    def of_blocks(self, tokens, count, size, whole):
        """Bytes of a sequence of so many tokens in a layer that chooses `count` blocks: of all keys, values and mean
        keys, for which there is room by whole blocks; or what the last token reads of them."""
        blocks, mean = -(-tokens // size), self.per_layer // 2      # keys and values are as large
        if whole:
            return blocks * (size * self.per_layer + mean)
        if count >= blocks:
            return tokens * self.per_layer
        own = tokens - (blocks - 1) * size
        return ((count - 1) * size + own) * self.per_layer + (blocks - 1) * mean

    def kept(self, tokens):
        """Bytes of a sequence of so many tokens, at most, while one is written after the other: of two windows. (All of
        a longer beginning that is read at once are there until the next token: that isn't counted.)"""
        return self.within(tokens, 2)

    @property
    def cache(self):
        """Bytes that a rank holds of them."""
        return self.own * self.kept(self.tokens)

    @property
    def memory(self):
        """All that a rank holds."""
        return self.parameters + self.cache

    @property
    def fits(self):
        return self.memory <= self.device.memory

    @property
    def room(self):
        """Bytes that a rank has for what is kept."""
        return max(0, int(self.device.memory - self.parameters))

    @property
    def most_sequences(self):
        """Of so many tokens, over all ranks."""
        return self.room // self.kept(self.tokens) * self.groups

    @property
    def most_tokens(self):
        """Of so many sequences, each: up to the model's context."""
        return bisect_right(range(1, self.job.model.context + 1), self.room // self.own, key=self.kept)

    @property
    def weights_read(self):
        """Bytes of weights that a rank needs for a step: all, but of tables the rows that are looked up, which the
        output layer may need whole, and of experts those that are chosen, if each token chooses others."""
        model, found = self.job.model, 0
        for p in self.weights:
            rows = p.shape[0]
            if p.name == "embed.weight" and not model.tied or p.name == "position.weight":
                rows = min(rows, self.own if p.name == "embed.weight" else 1)
            elif p.name.startswith("mlp.experts."):
                rows = min(rows, self.own * self.job.ep * model.top_k)
            found += rows * prod(p.shape[1:]) * p.itemsize
        return found

    @property
    def read(self):
        """Bytes that a rank needs for the last step, which looks at all that is kept, or at a window of it."""
        return self.weights_read + self.own * self.within(self.tokens)

    @property
    def seconds(self):
        """Of the last step, at least."""
        return self.read / self.device.memory_bandwidth

    @property
    def tokens_per_second(self):
        """Of all sequences together, at most, by the last step."""
        return self.sequences / self.seconds
