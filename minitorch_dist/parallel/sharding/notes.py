"""What sharded ops do, noted while somebody wants to look at it."""

from contextlib import contextmanager
from dataclasses import dataclass, field

from ... import ledger

APART = ", taken apart:"     # ends the name of an op of which the next lines are the parts
pages = []      # where the notes go, innermost last; empty: nobody looks


@dataclass
class Note:
    """One op: how its operands and its result lay, what this rank sent for it, and between what it could choose.

    sent     {(collective, axis): (how many, bytes)}, in forward
    choices  [Choice], the best first
    depth    in how many ops that were taken apart it stands
    """

    op: str
    operands: list
    depth: int
    result: str = ""
    sent: dict = field(default_factory=dict)
    choices: list = field(default_factory=list)

    def lines(self, widths=(0, 0)):
        """As text; widths: of its first two columns."""
        sent = "" if self.op.endswith(APART) else listed(self.sent)
        flow = f"{' '.join(self.operands)} -> {self.result}"
        lines = [f"{'  ' * self.depth + self.op:{widths[0]}}  {flow:{widths[1]}}  {sent}".rstrip()]
        if len(self.choices) > 1:
            lines += [f"{'  ' * self.depth}    {'chosen' if i == 0 else 'else  '}  {choice}"
                      for i, choice in enumerate(self.choices)]
        return lines


class Blank:
    """What is written on where nobody looks."""

    choices = ()


@contextmanager
def noted(op, values):
    """A Note of the op that runs inside, to be given its `result` and `choices`."""
    if not pages:
        yield Blank()
        return
    page = pages[-1]
    note = Note(op, [str(value.layout) for value in values if value.local is not None], page.depth)
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
        pages[-1].calls.append((primitive, args, params, out if primitive.multi else (out,)))


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
    calls     None, or [(primitive, args, params, results)] of all ops but the parts of those taken apart
    """

    def __init__(self, calls=False):
        self.notes, self.depth, self.book, self.result = [], 0, None, None
        self.backward, self.calls = 0, [] if calls else None

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
