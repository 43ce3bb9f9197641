"""LoRA and QLoRA on paper: which matrices get adapters, what is then trained, what is frozen and of how many bytes, and
where gradients flow.

    W (out, in) frozen, of 32, 16 or 4 bits        A (rank, in), B (out, rank) trained beside it

The names of layers, the default targets and the numbers of 4 bits are compress/lora.py's and compress/nf4.py's own.
Sources: Hu et al. 2021, "LoRA"; Dettmers et al. 2023, "QLoRA".
"""

from dataclasses import dataclass
from fnmatch import filter as matching
from itertools import groupby
from math import prod
from typing import NamedTuple

from ..compress.lora import NAMES, TARGETS
from ..compress.nf4 import BLOCK, SECOND_BLOCK

BASE_BITS = {"mixed": (16, 4), "float32": (32, 4)}      # of frozen weights, the default first
NF4_BITS = 4 + 8 / BLOCK + 32 / (BLOCK * SECOND_BLOCK)      # per weight, with double quantisation: 4.127


class Parameter(NamedTuple):
    """One tensor as a rank has it: itemsize bytes per element; frozen ones have no gradient and no optimizer. Where
    nothing is frozen: its place in the order of the model, and the shape that it has where no ranks divide matrices."""

    name: str
    shape: tuple
    itemsize: int
    trained: bool = True
    place: tuple = ()
    whole: tuple = ()


@dataclass(frozen=True)
class Adapters:
    """rank: of B A; layers: the names of the matrices beside which they stand, in each block, and "head"; bits: of
    these, frozen."""

    rank: int
    layers: tuple
    bits: int

    def matrices(self, shape):
        """(shape of A, shape of B) of a weight (out, in), or of a rank's part of it."""
        return (self.rank, shape[1]), (shape[0], self.rank)


def adapters_of(model, rank, targets, bits):
    """The Adapters of a GPT. targets: patterns of paths as in file names, as lora.add's; None: its default. ValueError
    where one meets no matrix, or not the same ones in all blocks."""
    inside = "model." * (model.predict > 1)     # a MultiTokenPrediction's
    blocks = [f"{inside}blocks.{i}" for i in range(model.layers)]
    blocks += [f"further.{k}.block" for k in range(model.predict - 1)]
    own = [tuple(linears(model.block(1, window=model.window_of(i)))) for i in range(len(blocks))]
    layers = dict.fromkeys(layer for each in own for layer in each)
    joins, head = [f"further.{k}.join" for k in range(model.predict - 1)], [f"{inside}head"] * (not model.tied)
    paths = [f"{block}.{layer}" for block, each in zip(blocks, own, strict=True) for layer in each] + head + joins
    patterns = targets or TARGETS
    met = {path for pattern in patterns for path in matching(paths, pattern)}
    if targets and (unmet := [pattern for pattern in targets if not matching(paths, pattern)]):
        below = f"{blocks[0]} to {blocks[model.layers - 1]}" + ", ".join(["", *blocks[model.layers:]])
        raise ValueError(f"--lora-targets {' '.join(unmet)} meets no matrix; there are {', '.join(layers)}, each below "
                         f"{below}{''.join(f', and {name}' for name in head)}")
    # (Blocks are of a kind if they have the same matrices.)
    chosen = {(each, tuple(layer for layer in each if f"{block}.{layer}" in met))
              for block, each in zip(blocks, own, strict=True)}
    found = {layer for _, each in chosen for layer in each}
    if len(chosen) > len(set(own)) or not all(each for _, each in chosen):
        raise ValueError(f"--lora-targets {' '.join(patterns)}: plan knows adapters beside the same matrices of every "
                         f"block of a kind, one or more: give patterns such as '*{own[0][0]}'")
    if "mlp.router" in found:
        raise ValueError(f"--lora-targets {' '.join(patterns)} meets mlp.router, and of routers plan knows none: "
                         "give patterns such as '*attention.*'")
    if met & {*joins}:
        raise ValueError(f"--lora-targets {' '.join(patterns)} meets {joins[0]}, and of what joins features and "
                         "embeddings plan knows none: give patterns such as '*attention.*'")
    return Adapters(rank, (*(layer for layer in layers if layer in found), *["head"] * bool(met & {*head})), bits)


def linears(named):
    """Names of the layers among [(name, shape)] that are Linears."""
    return [name.removesuffix(".weight") for name, shape in named if name.endswith(".weight") and len(shape) == 2]


def parameters_of(named, adapters, itemsize):
    """[Parameter] of [(name, shape)], in the order of the model."""
    if adapters is None:
        return [Parameter(name, shape, itemsize) for name, shape in named]
    found = []
    for layer, members in groupby(named, lambda pair: pair[0].rpartition(".")[0]):
        members = [Parameter(name, shape, itemsize, False) for name, shape in members]
        if layer not in adapters.layers:
            found += members
            continue
        weight = next(p for p in members if p.name == f"{layer}.weight")
        pair = zip(NAMES, adapters.matrices(weight.shape), strict=True)
        new = [Parameter(f"{layer}.{name}", shape, itemsize) for name, shape in pair]
        if adapters.bits == 4:
            members.remove(weight)
            new += nf4(weight)
        found += members + new
    return found


def counts(model, adapters):
    """(parameters of all adapters, parameters of the matrices beside them, bytes of these) of a whole GPT."""
    named = model.whole
    held = parameters_of(named, adapters, adapters.bits / 8)
    beside = {f"{layer}.weight" for layer in adapters.layers}
    return (sum(prod(p.shape) for p in held if p.trained),
            sum(prod(shape) for name, shape in named if name in beside),
            sum(prod(p.shape) * p.itemsize for p in held if not p.trained and p.name.startswith(tuple(beside))))


def nf4(weight):
    """[Parameter] that stand in a weight's place in 4 bits: an NF4Weight's, with double quantisation."""
    blocks = -(-prod(weight.shape) // BLOCK)
    parts = {"codes": (blocks * BLOCK // 2, 1), "absmax": (blocks, 1), "second": (-(-blocks // SECOND_BLOCK), 4),
             "mean": (1, 4)}
    return [Parameter(f"{weight.name}.{name}", (count,), itemsize, False) for name, (count, itemsize) in parts.items()]


def flow(adapters, takes, first):
    """{product: (how many of its inputs a gradient flows to, whether one does to its output)} of a block.

    takes   {product: the products that its inputs are made of}, in their order; None: of the block's own input
    first   it is the model's first one, and what is before it is frozen as well, if anything is
    """
    found, flows = {}, {None: not (adapters and first)}
    for name, inputs in takes.items():
        count = sum(flows[each] for each in inputs)
        flows[name] = count > 0 or name in adapters.layers
        found[name] = count, flows[name]
    return found
