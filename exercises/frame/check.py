"""What a chapter says of an exercise. All of it runs in the parent; docs/authoring.md shows one at work."""

from collections.abc import Callable
from dataclasses import dataclass


class Outputs(dict):
    """What one process gave back for one case: {name: value}.

    calls    what it called on the communicator, in order: [{"op", "peer", "bytes", "begin", "end", "line"}]; bytes is
             the size of the array, the times are seconds of one clock for all ranks of a machine, end is None for
             what was posted and never finished, line is the learner's
    sent     {op: bytes that this rank put on the wire}, by the ledger's count
    events   [(name, detail)], in order: what the library or the drive noted in the ledger
    seconds  that the case took
    """

    calls, sent, events, seconds = (), {}, (), 0.0

    def ops(self):
        """The names of the calls, in order."""
        return [call["op"] for call in self.calls]


@dataclass(frozen=True)
class Signature:
    """A known mistake: its sentence, and what it does. sentence: text with {ranks}, or function of the case."""

    sentence: str | Callable
    outputs: Callable | None = None     # case -> the outputs that the mistake would give
    when: Callable | None = None        # (case, got) -> True if it looks like this mistake


@dataclass(frozen=True)
class Demand:
    """What must hold beside right numbers. holds: (case, got) -> bool; its sentence is said when it doesn't."""

    sentence: str | Callable
    holds: Callable


def gives(sentence, outputs):
    """Signature of a mistake that can be computed. outputs(case): what it would give; keys may be left out."""
    return Signature(sentence, outputs=outputs)


def when(sentence, predicate):
    """Signature of a mistake that is recognised. predicate(case, got) must hold in every case that went wrong."""
    return Signature(sentence, when=predicate)


def demand(sentence, holds):
    """A condition on outputs and calls that are right in numbers. holds(case, got) must be true in every case."""
    return Demand(sentence, holds)


class Check:
    """One exercise's check. A chapter's check.py defines a subclass per exercise.

    A case holds the inputs: of a plain exercise a dict {argument: value}, of one with ranks a list of such dicts, one
    per rank. Outputs have the same form. Values are arrays, numbers, strings, None, and lists and dicts of these.
    Where a function below gets `got`, it is an Outputs, or with ranks a list of them.

    exercise     its id, e.g. "08.1"
    tolerance    of floating-point outputs, relative to the largest magnitude in the array
    signatures   [gives(…), when(…)]: the first that explains everything that is wrong gives the diagnosis
    demands      [demand(…)]: asked when the outputs are right
    integers     names of outputs of which nothing may be a float where truth() has an integer
    same_bits    names of outputs that must be equal to the last bit on all ranks
    may_change   names of inputs that an answer may overwrite although truth() says nothing of them
    unsaid       where the expected outputs are the solution: they are never shown, and this sentence is said when no
                 signature fits
    """

    exercise = None
    tolerance = 1e-9
    signatures = ()
    demands = ()
    integers = ()
    same_bits = ()
    may_change = ()
    unsaid = None

    def cases(self, rng, ranks):
        """[case]; a plain exercise ignores `ranks`. Every number comes from rng, a numpy.random.Generator."""
        raise NotImplementedError

    def truth(self, case):
        """The right outputs, worked out independently in float64; only the names in it are compared.

        Without a drive.py the names are "result" (what was returned) and the arguments (as they are after the call).
        """
        raise NotImplementedError

    def picture(self, runs, path):
        """Draw the learner's own run into the file `path` (.png). runs: {number of ranks: [(case, got)]}.

        Return a sentence about it. Left out: no picture.
        """
