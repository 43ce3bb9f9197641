"""A GPT as stages of a pipeline.

    cut_gpt(gpt, 3)     tokens → [embed, position, blocks 0 1] → [blocks 2 3] → [blocks 4, norm, head] → logits

Parameters and random numbers keep the names that they have in the GPT: curves are those of one process, and
checkpoints go from one to the other. Where the output layer is tied to the embedding, the first stage and the last
have it (parallel/tied.py).
"""

from ...nn.loss import wants_logits
from ...nn.module import Module
from ...nn.moe import MoE
from ...nn.transformer import GPT
from .. import tied
from ..experts.moe import joined, parted
from .documents import Stage
from .stages import balanced


class GPTStage(Module):
    """Some blocks of a GPT: tokens, integers (batch, time), of the first stage, else x (batch, time, dim) -> x, of the
    last one logits (batch, time, vocabulary), or with targets losses (batch, time), as the GPT's. `first`, `last`:
    whether it is so. Its attributes are the GPT's. With experts x is (batch, time, dim + 1), of which the last feature
    is the sum of the auxiliary losses so far, and the last stage gives a pair, of which that is the second."""

    embedded, scores, losses = GPT.embedded, GPT.scores, GPT.losses

    def __init__(self, gpt, blocks, first, last):
        super().__init__()
        self.first, self.last, self.context = first, last, gpt.context
        self.mixture = any(isinstance(m, MoE) for m in gpt.modules())
        self.length, self.positions, self.output_multiplier = gpt.length, gpt.positions, gpt.output_multiplier
        if first:
            self.embed, self.dropout = gpt.embed, gpt.dropout
            if gpt.positions == "learned":
                self.position = gpt.position
        self.blocks = Stage()
        for i in blocks:
            self.blocks.add_module(str(i), gpt.blocks[i])
        if last:
            self.norm, self.head = gpt.norm, gpt.head
            if gpt.head is None:
                self.embed = gpt.embed

    def forward(self, x, documents=None, targets=None, z_loss=0.0):
        if self.first:
            x, _ = self.embedded(x, documents)
        elif self.mixture:
            x = parted(x)
        x = self.blocks(x, documents)
        if not self.last:
            return joined(x) if self.mixture else x
        x, *aux = x if self.mixture else (x,)
        x = self.norm(x)
        y = self.scores(x) if wants_logits(targets, z_loss) else self.losses(x, targets, z_loss)
        return (y, *aux) if self.mixture else y


def cut_gpt(gpt, stages, costs=None):
    """A GPT as a list of so many GPTStages, one after another, with a block each at least; for cut_sequential's place.

    costs   what each block costs (default: its number of parameters; the last one's those of the output layer, too)
    TypeError for what is no GPT; ValueError for fewer blocks than stages.
    """
    if not isinstance(gpt, GPT):
        raise TypeError(f"cut_gpt cuts an nn.GPT between its blocks; got a {type(gpt).__name__}")
    blocks = len(gpt.blocks)
    if not 1 <= stages <= blocks:
        raise ValueError(f"cut_gpt: {blocks} blocks can't be cut into {stages} stages")
    if costs is None:
        costs = [sum(p.size for p in block.parameters()) for block in gpt.blocks]
        costs[-1] += (gpt.embed if gpt.head is None else gpt.head).weight.size
    if len(costs) != blocks:
        raise ValueError(f"cut_gpt: {len(costs)} costs for {blocks} blocks")
    bounds = balanced(costs, stages)
    return tied.apart([GPTStage(gpt, range(lo, hi), lo == 0, hi == blocks)
                       for lo, hi in zip(bounds, bounds[1:], strict=False)])
