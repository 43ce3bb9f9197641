"""Where positions stand, and how queries and keys are told: by angles, which a model can be stretched to longer
sequences with.

    nn.GPT(…, length=8_192, positions=nn.Rotary(500_000))                   Llama 3's
    nn.GPT(…, length=131_072, positions=nn.Rotary(500_000, 16, 8_192))      the same, stretched 16 times

Nothing of this is a parameter: a longer model takes the state_dict of a shorter one as it is.
"""

from dataclasses import dataclass
from math import inf, isfinite, log, pi

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import to_device_of, xp


@dataclass(frozen=True)
class Rotary:
    """Rotary positions: each pair of features (j, j + size/2) of a query or key is turned by the angle position ·
    frequency(j), so that products of both depend on their distance only.

    base        frequency(j) = base^(-2j/size): how long the slowest pair's wave is
    stretch     how many times longer sequences are than those that it was learned with
    length      of those sequences; needed for stretch and blend
    blend       (slow, fast): pairs that make up to `slow` turns within length are turned stretch times slower, so that
                they meet no angle that they haven't learned; from `fast` turns on they stay, for they tell neighbours
                apart; between, in proportion. None: all are slower
    sharpness   scores are multiplied by (1 + sharpness · ln stretch)², for softmax has more to choose from

        Rotary(10_000, 4, 4_096)                                    YaRN
        Rotary(500_000, 8, 8_192, blend=(1, 4), sharpness=0)        Llama 3.1
        Rotary(10_000, 4, blend=None, sharpness=0)                  position interpolation

    ValueError where one of these is out of range. Sources: Su et al. 2021, "RoFormer"; Chen et al. 2023, "Extending
    context window of large language models via positional interpolation"; Peng et al. 2023, "YaRN" (equations 17 to 22;
    the released code blends in proportion to j, not to turns); Dubey et al. 2024, "The Llama 3 herd of models".
    """

    base: float = 10_000.0
    stretch: float = 1.0
    length: int | None = None
    blend: tuple[float, float] | None = (1, 32)
    sharpness: float = 0.1

    def __post_init__(self):
        if not (isfinite(self.base) and self.base > 1 and isfinite(self.stretch) and self.stretch >= 1):
            raise ValueError(f"Rotary: base={self.base} must be above 1, and stretch={self.stretch} 1 or more")
        if self.sharpness < 0 or not isfinite(self.sharpness):
            raise ValueError(f"Rotary: sharpness={self.sharpness} must be 0 or more")
        if self.blend is not None:
            slow, fast = self.blend if len(self.blend) == 2 else (0, 0)
            if not 0 <= slow < fast < inf:
                raise ValueError(f"Rotary: blend={self.blend} must be (slow, fast), numbers of turns, slow below fast")
        if self.stretch > 1 and self.blend is not None and (self.length is None or self.length < 1):
            raise ValueError(f"Rotary: length={self.length} must be that of the sequences it was learned with: on it "
                             f"depends which pairs are to be turned {self.stretch:g} times slower")

    @property
    def factor(self):
        """What scores are multiplied by besides."""
        return (1 + self.sharpness * log(self.stretch)) ** 2

    def frequencies(self, size, like=None):
        """Radians per position of each pair of `size` features: float64 (size/2,), where the array `like` is.
        ValueError for an odd size."""
        if size % 2:
            raise ValueError(f"rotary positions turn pairs of features, but a head has {size}")
        learned = self.base ** (-xp.arange(size // 2, like=like) * 2.0 / size)
        if self.stretch == 1:
            return learned
        slower = learned / self.stretch
        if self.blend is None:
            return slower
        slow, fast = self.blend
        turns = learned * (self.length / (2 * pi))
        kept = xp.minimum(xp.maximum((turns - slow) / (fast - slow), 0), 1)
        return slower + kept * (learned - slower)

    def turn(self, x, positions=None):
        """x (batch, heads, time, size), turned. positions: integers (time,) or (batch, time), default 0, 1, 2, …"""
        *_, time, size = x.shape
        here = lower(x)
        frequencies = self.frequencies(size, here)
        positions = xp.arange(time, like=here) if positions is None else to_device_of(positions, here)
        angles = positions[..., None, :, None] * frequencies
        cos, sin = xp.cos(angles).astype(x.dtype), xp.sin(angles).astype(x.dtype)
        left, right = x[..., :size // 2], x[..., size // 2:]
        return ops.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def rotary_of(rotary):
    """What a layer's `rotary` stands for: False for none, True for the usual one, or a Rotary."""
    if isinstance(rotary, Rotary):
        return rotary
    if not isinstance(rotary, bool):
        raise TypeError(f"rotary={rotary!r}; use True, False or a Rotary")
    return Rotary() if rotary else None


def places(documents):
    """Where each position stands in its document: integers (batch, time), which count from 0 anew wherever the number
    of `documents`, integers (batch, time), changes."""
    documents = lower(documents)
    index = xp.arange(documents.shape[1], like=documents)
    starts = xp.concatenate([documents[:, :1] * 0, index[1:] * (documents[:, 1:] != documents[:, :-1])], 1)
    step = 1
    while step < documents.shape[1]:        # a running maximum, in log2(time) steps (Hillis & Steele 1986)
        starts = xp.concatenate([starts[:, :step], xp.maximum(starts[:, step:], starts[:, :-step])], 1)
        step *= 2
    return index - starts
