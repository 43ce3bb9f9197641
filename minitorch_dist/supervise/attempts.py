"""What to do after a failure, and what it has cost: functions of the attempts so far, which start nothing."""

from dataclasses import dataclass, field
from itertools import takewhile
from typing import NamedTuple

LONGEST_PAUSE = 60      # seconds
USAGE = 2               # the status of a command line that can't be run: it can't be run the next time either
INTERRUPTED = (130, 143)        # Ctrl-C, SIGTERM: somebody wanted it


class Rule(NamedTuple):
    """How a job is started again.

    ranks         numbers of ranks that the program can run on, largest first
    max_restarts  of a job that gets no further; a step further than ever before, and the count begins anew
    shrink_after  failures on one number of ranks, after which the next of `ranks` is taken
    backoff       seconds before the first restart; twice as long before each more, until the job gets further
    grow          a job that has failed on fewer ranks, but got further there, is started on the next more again; if it
                  gets no further with these, it goes back, and the try isn't counted
    """

    ranks: tuple
    max_restarts: int = 3
    shrink_after: int = 2
    backoff: float = 1.0
    grow: bool = False


@dataclass
class Attempt:
    """One start of a job.

    ranks       how many
    status      that mpirun ended with
    first       the step that it went on from; None where no run had begun, or the program doesn't tell
    durations   seconds of each step since
    saved       the last step of which it has written a checkpoint, if it tells
    said        the last lines that it wrote
    """

    ranks: int
    status: int = None
    first: int = None
    durations: list = field(default_factory=list)
    said: list = field(default_factory=list)
    saved: int = None

    @property
    def last(self):
        """The last step that was done, as far as it tells; None: it doesn't."""
        return self.saved if self.first is None else self.first + len(self.durations)

    @property
    def ends_saved(self):
        """Whether the last step that was done is in a checkpoint, as far as it tells."""
        return self.saved is not None and self.saved == self.last

    @property
    def place(self):
        """Where it ended, in words."""
        if self.last is None:
            return "before a step was noted"
        if self.first is None:
            return f"after the checkpoint of step {self.last:,}"
        return f"after step {self.last:,}" if self.status in INTERRUPTED else f"in step {self.last + 1:,}"


class Start(NamedTuple):
    """What comes next: so many ranks, after a pause in seconds."""

    ranks: int
    pause: float = 0.0


class End(NamedTuple):
    """Nothing comes next; why, in words, and whether the last attempt's own words belong to it."""

    why: str
    tells: bool = False


def next_start(attempts, rule):
    """The Start, or the End, that follows from these attempts, the last of which has ended."""
    if not attempts:
        return Start(rule.ranks[0])
    last = attempts[-1]
    if last.status == 0:
        return End("done")
    if last.status == USAGE:
        return End(f"status {USAGE}, a command that can't be run: it isn't started again")
    if last.status in INTERRUPTED:
        return End(f"interrupted (status {last.status}): the job is not started again")
    failures = without_progress(attempts)
    if failures > rule.max_restarts:
        return End(_loop(attempts[-failures:], rule), tells=True)
    return Start(_ranks(attempts, rule), min(rule.backoff * 2.0 ** min(failures - 1, 99), LONGEST_PAUSE))


def without_progress(attempts):
    """How many attempts have failed since the job was last a step further than ever before, that one counted; but those
    that have only tried more ranks again."""
    count = 0
    for i in range(len(attempts)):
        if gets_further(attempts[:i + 1]):
            count = 1
        elif not _is_try(attempts[:i + 1]):
            count += 1
    return count


def gets_further(attempts):
    """Whether the last has come a step further than all before."""
    *before, last = (-1 if attempt.last is None else attempt.last for attempt in attempts)
    return last > max(before, default=-1)


def _is_try(attempts):
    """Whether the last had more ranks than the one before, and got no further."""
    return len(attempts) > 1 and attempts[-1].ranks > attempts[-2].ranks and not gets_further(attempts)


def _ranks(attempts, rule):
    """How many ranks the next attempt has."""
    last, at = attempts[-1].ranks, rule.ranks.index(attempts[-1].ranks)
    if _is_try(attempts):
        return attempts[-2].ranks
    if rule.grow and at and gets_further(attempts):
        return rule.ranks[at - 1]
    here = len(list(takewhile(lambda attempt: attempt.ranks == last, reversed(attempts))))
    return rule.ranks[min(at + (here >= rule.shrink_after), len(rule.ranks) - 1)]


def _loop(failed, rule):
    places = list(dict.fromkeys(attempt.place for attempt in failed))
    return (f"a crash loop: {len(failed)} failure{'s' * (len(failed) > 1)} and no step further, {' and '.join(places)} "
            f"(--max-restarts {rule.max_restarts}); the last words:")


class Goodput(NamedTuple):
    """What came of the time.

    counted  seconds in steps whose work has stayed
    lost     steps that were done and had to be done again, or were never saved; lost_seconds: how long they took
    """

    counted: float
    lost: int
    lost_seconds: float


def goodput(attempts):
    """The Goodput of these attempts. Of a job that has failed for good, what came after the newest checkpoint that some
    attempt has told of, or went on from, is lost."""
    kept, lost, lost_seconds = {}, 0, 0.0

    def drop_after(step):
        nonlocal lost, lost_seconds
        gone = [kept.pop(number) for number in sorted(kept) if number > step]
        lost, lost_seconds = lost + len(gone), lost_seconds + sum(gone)
    for attempt in attempts:
        if attempt.first is not None:
            drop_after(attempt.first)
            kept |= {attempt.first + 1 + i: seconds for i, seconds in enumerate(attempt.durations)}
    if attempts and attempts[-1].status not in (0, *INTERRUPTED):
        drop_after(max((step for attempt in attempts for step in (attempt.first, attempt.saved) if step is not None),
                       default=0))
    return Goodput(sum(kept.values()), lost, lost_seconds)
