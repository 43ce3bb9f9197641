"""Text for language models: characters as integers, and every window of a long sequence as a sample.

Windows are indexed like rows of an array, so the Loader that shards images shards text too:

    windows = Windows(tokens, length=64)
    loader = Loader(windows.inputs, windows.targets, batch_size=16, rank=…, size=…)
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..backend import stream, whole

IGNORED = -100      # a target that counts for nothing; the number that torch ignores too


class Characters:
    """A vocabulary: the distinct characters of a text, in code-point order.

        encode("hello") -> int64 (5,)        decode(array) -> "hello"
    """

    def __init__(self, text):
        self.symbols = sorted(set(text))
        self.numbers = {c: i for i, c in enumerate(self.symbols)}

    def __len__(self):
        return len(self.symbols)

    def encode(self, text):
        """The characters' numbers, int64. ValueError for one that the vocabulary lacks."""
        try:
            return np.array([self.numbers[c] for c in text], np.int64)
        except KeyError as error:
            raise ValueError(f"the character {error.args[0]!r} does not occur in the text that the vocabulary of "
                             f"{len(self)} was made from") from None

    def decode(self, numbers):
        """The text of these numbers. ValueError for one that the vocabulary lacks."""
        numbers = [int(number) for number in numbers]
        if bad := [number for number in numbers if not 0 <= number < len(self)]:
            raise ValueError(f"{bad[0]} is no character's number: the vocabulary has {len(self)}")
        return "".join(self.symbols[number] for number in numbers)


class Bytes:
    """A vocabulary for any text: its bytes in UTF-8, and a number more for the end of a document.

        encode("né") -> uint8 (3,)      decode(array) -> "né"; bytes that are no UTF-8 show as "�"
    """

    end = 256

    def __len__(self):
        return 257

    def encode(self, text):
        """The text's bytes, uint8."""
        return np.frombuffer(text.encode(), np.uint8)

    def decode(self, numbers):
        """The text of these numbers, ends left out. ValueError for one that the vocabulary lacks."""
        numbers = np.asarray(numbers)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() <= self.end:
            raise ValueError(f"Bytes: numbers from {numbers.min()} to {numbers.max()}; there are 0 to {self.end}")
        return numbers[numbers != self.end].astype(np.uint8).tobytes().decode(errors="replace")


class Windows:
    """All windows of `length` tokens, each with the tokens that follow: inputs[i] = tokens[i : i+length], targets[i] =
    tokens[i+1 : i+length+1], both read-only views (len(tokens) - length, length). ValueError where the text is too
    short for one."""

    def __init__(self, tokens, length):
        if whole("length", length) < 1 or len(tokens) < length + 1:
            raise ValueError(f"a text of {len(tokens)} characters has no window of {length} and one more; take "
                             "a longer text or shorter windows")
        windows = np.lib.stride_tricks.sliding_window_view(tokens, length)
        self.inputs, self.targets = windows[:-1], windows[1:]
        self._made_of = tokens, length

    def __reduce__(self):
        return Windows, self._made_of       # a copy of a view would hold each token `length` times


@dataclass(frozen=True)
class Text:
    """A text for training: its vocabulary, and its tokens (int64), cut into 90 % to train and 10 % to validate."""

    vocabulary: Characters
    train: np.ndarray
    validation: np.ndarray


def read_text(path, validation=0.1):
    """A UTF-8 file as a Text; or a list of them, one after another, a blank line between. ValueError, naming the file,
    where it is empty or not UTF-8."""
    if not 0 <= validation < 1:
        raise ValueError(f"validation={validation}: a share of the text, at least 0 and less than 1")
    text = "\n\n".join(_read(each) for each in (path if isinstance(path, list) else [path]))
    vocabulary = Characters(text)
    tokens = vocabulary.encode(text)
    cut = round(len(tokens) * (1 - validation))
    return Text(vocabulary, tokens[:cut], tokens[cut:])


def _read(path):
    try:
        text = Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start}") from error
    if len(text) < 2:
        raise ValueError(f"{path} holds {len(text)} characters: there is nothing to learn from it")
    return text


# ---------------------------------------------------------------- addition, for when there is no file and no network

@dataclass(frozen=True)
class Addition:
    """Problems like 27+58=85 as rows of tokens.

    train, test   int64 (n, width); a row is the problem, the sum with its digits REVERSED (the carry then runs the way
                  the model writes), and padding; no problem stands in both
    question      how many of a row's tokens are given: up to and with the "="
    """

    vocabulary: Characters
    train: np.ndarray
    test: np.ndarray
    question: int

    def windows(self, rows):
        """(inputs, targets) for training: the targets are the next tokens, IGNORED while the question is being read."""
        inputs, targets = rows[:, :-1], rows[:, 1:].copy()
        targets[:, :self.question - 1] = IGNORED
        return np.ascontiguousarray(inputs), targets


def addition(digits=2, test=0.1, seed=0, base=10):
    """All sums of two numbers of up to `digits` digits, a random `test` part of them held back.

    Operands and sums are padded with zeros to a fixed width: 07+58=560 for 7 + 58 = 65 (the sum reversed). In another
    base, 2 to 10, the digits mean something else, and the vocabulary is the same: 07+53=260 in base 8.
    """
    if not 1 <= digits <= 3:
        raise ValueError(f"addition: {digits} digits; 1 to 3 can be listed in full (3 give a million problems)")
    if not 2 <= base <= 10:
        raise ValueError(f"addition: base {base}; there are digits for the bases 2 to 10")
    if not 0 <= test < 1:
        raise ValueError(f"addition: test={test}; a share of the problems, at least 0 and less than 1")
    limit = base ** digits
    a, b = (n.ravel() for n in np.meshgrid(np.arange(limit), np.arange(limit), indexing="ij"))
    vocabulary = Characters("0123456789+=")
    columns = [*_digits(a, digits, base), None, *_digits(b, digits, base), None,
               *reversed(_digits(a + b, digits + 1, base))]
    rows = np.empty((len(a), len(columns)), np.int64)
    for i, column in enumerate(columns):
        rows[:, i] = vocabulary.numbers["+" if i == digits else "="] if column is None else \
            column + vocabulary.numbers["0"]
    order = stream("addition", seed).permutation(len(rows))
    cut = round(len(rows) * test)
    return Addition(vocabulary, rows[order[cut:]], rows[order[:cut]], question=2 * digits + 2)


def _digits(numbers, width, base):
    """The digits, most significant first, as `width` arrays."""
    return [numbers // base ** place % base for place in reversed(range(width))]
