"""Where an optimizer finds each parameter, and its state; and which parameters one update can take together."""

from dataclasses import dataclass, field
from math import prod

from ..autodiff.tensor import Tensor


class States(list):
    """Of each flat buffer the state arrays that its parameters lie in."""

    def __getitem__(self, i):
        if isinstance(i, Tensor):
            raise TypeError("optimizer.state has an entry per flat buffer, none per parameter. A subclass names its "
                            "arrays, state_names = (\"momentum\",), and writes update(self, p, g, state, group, step), "
                            "which finds state[\"momentum\"] beside p; state_dict() has the state per parameter")
        return super().__getitem__(i)


@dataclass
class Slot:
    """One parameter's place: its segment of a flat buffer, its group, where its state begins, and how often it was
    updated. own: {name: (where it begins, shape)} of the state that isn't of the parameter's shape."""

    segment: object
    group: dict
    at: int
    steps: int = 0
    own: dict = field(default_factory=dict)

    def state(self, arrays):
        """{name: its part of each state array}: 1-d, or of its own shape."""
        found = {}
        for name, a in arrays.items():
            at, shape = self.own.get(name, (self.at, (self.segment.stop - self.segment.start,)))
            found[name] = a[at:at + prod(shape)]
            if name in self.own:
                found[name] = found[name].reshape(shape)
        return found

    def shape(self, name):
        """That of its state, as it is saved."""
        return self.own[name][1] if name in self.own else self.segment.tensor.shape


def runs(slots):
    """Neighbouring parameters that are updated alike, as (start, stop, where their state starts, group, step): each is
    one update.

    A run takes its parameters' padding along, unless the zeros there would become something else. Each parameter's step
    is counted on.
    """
    joined = []
    for slot in slots:
        if slot.segment.tensor.grad is None:
            continue
        slot.steps += 1
        s = slot.segment
        if s.start == s.end:    # of a parameter that is cut over the ranks another one has it all
            continue
        end = s.end if leaves_zeros(slot.group) else s.stop
        if joined and joined[-1][1] == s.start and joined[-1][3] is slot.group and joined[-1][4] == slot.steps:
            joined[-1][1] = end
        else:
            joined.append([s.start, end, slot.at, slot.group, slot.steps])
    return joined


def leaves_zeros(group):
    """Whether a step of a group leaves what is 0, with gradients of 0, at 0: where something is divided by eps, an eps
    of 0 would make 0/0 = NaN of it."""
    return group.get("eps", 1) > 1e-30      # in float32 it is more than 0 by any bias correction, too
