"""Models as a plan knows them: a number of parameters, or nn.GPT's sizes.

FLOPs are those of matrix products, two per multiply-add, as nn.summary counts them; a training step has three times
those of its forward pass. Sources: Kaplan et al. 2020 (6·N·D); Narayanan et al. 2021 (with attention and the output
layer).
"""

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Parameters:
    """A model of which only the number of parameters is known: it can be cut by ZeRO, and by nothing else."""

    count: float

    layers = None

    def step_flops(self, tokens, time=None, checkpointing=False):
        """6·N·D; with checkpointing forward runs twice: 8·N·D."""
        return (8 if checkpointing else 6) * self.count * tokens

    def __str__(self):
        return f"{self.count:,.0f} parameters"


@dataclass(frozen=True)
class GPT:
    """nn.GPT of these sizes, with learned positions and layer norms.

    tied     the output layer is the embedding's weight
    dropout  whether there is any: its masks are kept for backward
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    tied: bool = True
    dropout: bool = True

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocabulary", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads must divide the width {self.width}: take another --heads or --width")

    @property
    def count(self):
        """Parameters of the whole model."""
        return sum(prod(shape) for _, shape in self.embedding(1) + self.block(1) * self.layers + self.output(1))

    def embedding(self, tp):
        """[(name, shape)] of what stands before the blocks, on the tensor-parallel rank that has most of it."""
        return [("embed.weight", (-(-self.vocabulary // tp), self.width)),
                ("position.weight", (self.context, self.width))]

    def block(self, tp):
        """[(name, shape)] of a block: heads and the feed-forward's inner features are divided (parallel/
        tensor_parallel.py)."""
        h, part = self.width, self.width // tp
        return [("norm1.weight", (h,)), ("norm1.bias", (h,)),
                ("attention.qkv.weight", (3 * part, h)), ("attention.qkv.bias", (3 * part,)),
                ("attention.out.weight", (h, part)), ("attention.out.bias", (h,)),
                ("norm2.weight", (h,)), ("norm2.bias", (h,)),
                ("mlp.0.weight", (4 * part, h)), ("mlp.0.bias", (4 * part,)),
                ("mlp.2.weight", (h, 4 * part)), ("mlp.2.bias", (h,))]

    def output(self, tp):
        """[(name, shape)] of what stands behind the blocks."""
        norm = [("norm.weight", (self.width,)), ("norm.bias", (self.width,))]
        return norm + ([] if self.tied else [("head.weight", (-(-self.vocabulary // tp), self.width))])

    def block_flops(self, tokens, time):
        """Of one block, forward: its matrices, then the products of queries with keys and of weights with values."""
        return tokens * (2 * 12 * self.width ** 2 + 4 * time * self.width)

    def output_flops(self, tokens):
        """Of the output layer, forward."""
        return tokens * 2 * self.width * self.vocabulary

    def step_flops(self, tokens, time, checkpointing=False):
        """Of a training step of so many tokens in sequences of `time`; with checkpointing the blocks run twice."""
        return (4 if checkpointing else 3) * self.layers * self.block_flops(tokens, time) + \
            3 * self.output_flops(tokens)

    def __str__(self):
        return (f"GPT of {self.layers} layers, width {self.width:,}, {self.heads} heads, vocabulary "
                f"{self.vocabulary:,}{'' if self.tied else ', untied'}: {self.count:,} parameters")
