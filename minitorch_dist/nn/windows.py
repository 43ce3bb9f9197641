"""Windows of a GPT's blocks: how many positions one sees at most in each.

    nn.GPT(…, window=None)                  all positions, in every block
    nn.GPT(…, window=1024)                  1,024, in every block
    nn.GPT(…, window=(1024, 1024, None))    1,024 in two blocks, all in the third, and again from the first
    --window 1024,1024,all                  the same on a command line
    nn.GPT(…, window=("linear", None))      in every other block all, but as a state of fixed size (linear_attention.py)
    nn.GPT(…, window=("delta", None))       the same, but a state in which what stands under a key is replaced
    nn.GPT(…, window="4x64")                4 blocks of 64 positions, which each position chooses (block_attention.py)
"""

import re

ALL, LINEAR, DELTA = "all", "linear", "delta"
STATES = LINEAR, DELTA      # of the blocks that keep states
WORDS = {ALL: None, LINEAR: LINEAR, DELTA: DELTA}


def blocks_of(window):
    """(4, 64) of "4x64": how many blocks a position chooses, and of how many positions; None: it is another window."""
    found = re.fullmatch("([1-9][0-9]*)x([1-9][0-9]*)", window) if isinstance(window, str) else None
    return found and tuple(map(int, found.groups()))


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
    return WORDS[word] if word in WORDS else word if blocks_of(word) else int(word)


def as_text(windows):
    """What read_windows reads."""
    return ",".join(ALL if each is None else str(each) for each in windows)
