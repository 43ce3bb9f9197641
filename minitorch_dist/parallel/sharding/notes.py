"""What sharded ops do, noted while somebody wants to look at it."""

from contextlib import contextmanager
from dataclasses import dataclass, field

from ... import ledger
from ...autodiff.modes import is_grad_enabled

APART = ", taken apart:"     # ends the name of an op of which the next lines are the parts
pages = []      # where the notes go, innermost last; empty: nobody looks


@dataclass
class Note:
    """One op: how its operands and its results lay, what this rank sent for it, and between what it could choose.

    operands, results   [Layout]
    sent     {(collective, axis): (how many, bytes)}, in forward
    choices  [Choice], the best first
    depth    in how many ops that were taken apart it stands
    """

    op: str
    operands: list
    depth: int
    results: list = field(default_factory=list)
    sent: dict = field(default_factory=dict)
    choices: list = field(default_factory=list)

    @property
    def flow(self):
        """As text."""
        return f"{' '.join(map(str, self.operands))} -> {' '.join(map(str, self.results))}"

    def lines(self, widths=(0, 0)):
        """As text; widths: of its first two columns."""
        sent = "" if self.op.endswith(APART) else listed(self.sent)
        lines = [f"{'  ' * self.depth + self.op:{widths[0]}}  {self.flow:{widths[1]}}  {sent}".rstrip()]
        if len(self.choices) > 1:
            lines += [f"{'  ' * self.depth}    {'chosen' if i == 0 else 'else  '}  {choice}"
                      for i, choice in enumerate(self.choices)]
        return lines


class Blank:
    """What is written on where nobody looks."""

    choices = ()


@contextmanager
def noted(op, values):
    """A Note of the op that runs inside, to be given its `results` and `choices`."""
    if not pages:
        yield Blank()
        return
    page = pages[-1]
    note = Note(op, [value.layout for value in values if value.local is not None], page.depth)
    page.notes.append(note)
    page.depth += 1
    try:
        with ledger.record() as book:
            yield note
    finally:
        page.depth -= 1
    note.sent = sent(book)


def called(primitive, args, params, out):
    """An op has run, of a page that keeps its calls."""
    if pages and pages[-1].calls is not None and pages[-1].depth == 0:
        pages[-1].calls.append((primitive, args, params, out if primitive.multi else (out,), is_grad_enabled()))


def opened(value, seen):
    """Raw code has met a value, and ops meet it as `seen`, of a page that keeps its calls."""
    if pages and pages[-1].calls is not None:
        pages[-1].raw[id(seen)] = value, seen


def moved(value):
    """A value was to lie otherwise, and no op wanted it, of a page that keeps its calls."""
    if pages and pages[-1].calls is not None and pages[-1].depth == 0:
        pages[-1].moved.append(value)


def sent(book):
    """{(collective, axis): (how many, bytes)} of a Ledger."""
    return {(op, axis): (calls, book.bytes_sent[axis, op]) for (axis, op), calls in book.calls.items()}


def listed(sent):
    """As text."""
    return ", ".join(f"{op} {axis} {f'{calls} × ' if calls > 1 else ''}{nbytes // calls:,} bytes"
                     for (op, axis), (calls, nbytes) in sent.items())


class Page:
    """Notes of one run, in order; it prints.

    result    what the run gave
    book      its Ledger
    backward  bytes that a rank will send in backward for the moves of operands, by the closed forms of the ring
    calls     None, or [(primitive, args, params, results, whether gradients were recorded)] of all ops but the parts
              of those taken apart
    raw       {id(y): (x, y)} of the values x that raw code has met, and ops as y
    moved     values that were to lie otherwise, but not for an op
    """

    def __init__(self, calls=False):
        self.notes, self.depth, self.book, self.result = [], 0, None, None
        self.backward, self.calls, self.raw, self.moved = 0, [] if calls else None, {}, []

    @property
    def rest(self):
        """What was sent, but not by an op in forward: by backward, and by what isn't Sharded."""
        left = sent(self.book)
        for note in self.notes:
            for key, (calls, nbytes) in note.sent.items() if note.depth == 0 else ():
                left[key] = left[key][0] - calls, left[key][1] - nbytes
        return {key: counts for key, counts in left.items() if counts[0]}

    def __str__(self):
        first = max((len(note.op) + 2 * note.depth for note in self.notes), default=0)
        second = max((len(note.lines()[0].strip()) - len(note.op) for note in self.notes if not note.sent), default=0)
        lines = [line for note in self.notes for line in note.lines((first, second))]
        return "\n".join([*lines, f"backward, and what isn't Sharded: {listed(self.rest) or 'nothing sent'}"])


@contextmanager
def looking(calls=False):
    """A Page on which all sharded ops inside are noted."""
    page = Page(calls)
    pages.append(page)
    try:
        with ledger.record() as page.book:
            yield page
    finally:
        pages.remove(page)
