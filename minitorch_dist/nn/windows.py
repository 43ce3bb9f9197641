"""Windows of a GPT's blocks: how many positions one sees at most in each.

    nn.GPT(…, window=None)                  all positions, in every block
    nn.GPT(…, window=1024)                  1,024, in every block
    nn.GPT(…, window=(1024, 1024, None))    1,024 in two blocks, all in the third, and again from the first
    --window 1024,1024,all                  the same on a command line
    nn.GPT(…, window=("linear", None))      in every other block all, but as a state of fixed size (linear_attention.py)
    nn.GPT(…, window=("delta", None))       the same, but a state in which what stands under a key is replaced
    nn.GPT(…, window=Blocks(4, 64))         4 blocks of 64, of which each position chooses 3 (block_attention.py)
    --window 4x64,all                       these in every other block
"""

import re
from dataclasses import dataclass

from .module import at_least_1

ALL, LINEAR, DELTA = "all", "linear", "delta"
STATES = LINEAR, DELTA      # of the blocks that keep states
WORDS = {ALL: None, LINEAR: LINEAR, DELTA: DELTA}


@dataclass(frozen=True)
class Blocks:
    """count blocks of `size` positions each, the own one among them. ValueError below 1."""

    count: int
    size: int

    def __post_init__(self):
        for name, value in zip(("count", "size"), at_least_1("Blocks", count=self.count, size=self.size), strict=True):
            object.__setattr__(self, name, value)

    def __str__(self):
        return f"{self.count}x{self.size}"


def windows_of(window):
    """A GPT's `window`, however it is given, as a tuple that goes round the blocks. ValueError where it is empty."""
    windows = tuple(window) if isinstance(window, list | tuple) else (window,)
    if not windows:
        raise ValueError(f"GPT: window={window} has none for any block: leave it out")
    return windows


def window_of(window, block):
    """The window, or None, of the block of this number, of a GPT's `window`."""
    windows = windows_of(window)
    return windows[block % len(windows)]


def read_windows(text):
    """The tuple of what stands behind --window; None, which is nothing, stays that. ValueError for another text."""
    if text is None:
        return None
    try:
        windows = tuple(map(_read, text.split(",")))
    except ValueError:
        raise ValueError(f"--window {text!r}: numbers of positions, blocks like 4x64, {', '.join(STATES)} or {ALL}, "
                         f"separated by commas, like 16,16,{ALL}") from None
    if min((each for each in windows if isinstance(each, int)), default=1) < 1:
        raise ValueError(f"--window {text!r}: one sees 1 position or more, itself")
    return windows


def _read(word):
    if word in WORDS:
        return WORDS[word]
    blocks = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", word)
    return Blocks(*map(int, blocks.groups())) if blocks else int(word)


def as_text(windows):
    """What read_windows reads."""
    return ",".join(ALL if each is None else str(each) for each in windows)
