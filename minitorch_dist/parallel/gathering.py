"""Stage 3's values: which units are gathered when, in forward, in backward and ahead of both.

    forward    gather u0 | run u0, gather u1 ahead | free u0, run u1 | free u1
    backward   gather u1 | run u1, gather u0 ahead | free u1, run u0 | free u0

The order of backward is that in which forward has left the units, the other way round, without those of which the tape
has kept nothing, as of frozen layers below all that is trained; the units that forward comes to are those of the time
before. A wrong guess costs a gather, and is right all the same. All ranks guess alike.
"""

from contextlib import contextmanager, nullcontext

from ..autodiff.modes import is_grad_enabled
from ..autodiff.primitive import lower, mode, state
from ..autodiff.tree import flatten
from ..autodiff.writes import tick
from ..backend import is_array
from .units import Kept

ALIVE = 2       # modules whose units are gathered at most: one, and the next. (Nested ones: all those that run.)


class Gathering:
    """The units of a model, as its modules run.

    reshard  free a unit's values after its forward, and gather them again in backward
    outer    the units that the whole model holds
    together {unit: those of its module}, which are of several dtypes or Grids, and needed in turns
    in_backward     in_backward(): whether a backward pass that has come to the model is under way
    used            used(): backward asks for a value
    entered, left   units in the order in which forward has begun and ended them, since the last backward
    needed          those of which backward will want values
    """

    def __init__(self, units, outer, reshard, in_backward, used):
        self.units, self.outer, self.reshard = units, outer, reshard
        self.in_backward, self.used = in_backward, used
        self.together = {unit: [unit] for unit in units} | dict.fromkeys(outer, outer)
        self.entered, self.left, self.needed = [], [], []
        self.ahead, self.route, self.reached = {}, [], set()    # the unit after each in forward; backward's order
        self.current = None     # the one that backward is at
        self.passed = False     # a backward has come since the last forward
        self.running = self.held = 0    # forwards of the whole model under way; gathered() blocks that are open

    def watch(self, module, units):
        """Let the units' values come before each forward of the module, and go after it."""
        self.together |= dict.fromkeys(units, units)
        module.register_forward_pre_hook(lambda m, inputs: self.enter(units))
        module.register_forward_hook(lambda m, inputs, output: self.leave(units, output))

    # ------------------------------------------------------------ forward

    @contextmanager
    def forward(self):
        """Of the whole model. What a forward before it has kept may be older than the optimizer's last step."""
        outermost = not (self.running or self.in_backward())
        if outermost:
            self.settle()
            if self.passed:
                self.entered, self.left, self.needed, self.passed = [], [], [], False
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
        if outermost:
            self.settle(keep=not self.reshard and is_grad_enabled())

    def settle(self, keep=False):
        """Nothing runs: close what an exception has left open (which the module may have caught by itself), and free
        what was gathered for nothing. Not where the exception is: all ranks must come along."""
        for unit in self.units:
            if unit.users != self.held:
                unit.users = self.held
                if not unit.users:
                    unit.close()
            if not (unit.users or keep):
                unit.drop()

    def note(self, units, unit):
        """Add a unit to an order, if this is a forward that a backward can follow."""
        if is_grad_enabled() and state.callbacks is None and unit not in units:
            units.append(unit)

    def enter(self, units):
        """A module begins to run."""
        self.current = None
        for unit in units:
            if not unit.users:
                if not (self.running or self.in_backward()):    # the unit was called by itself
                    unit.drop()
                self.note(self.entered, unit)
                self.reach(unit, self.following(unit) if self.in_backward() else self.ahead.get(unit))
                unit.open()
            unit.users += 1

    def leave(self, units, output):
        """A module has run."""
        for unit in units:
            unit.users -= 1
            if unit.users:
                continue
            unit.close()
            if any(is_array(v) and unit.holds(v) for v in map(lower, flatten(output)[0])):
                raise RuntimeError(f"the forward of {unit.name} returns a view of one of its parameters, which are "
                                   "freed now: return a copy, or let a larger unit hold it")
            if not self.in_backward():
                self.note(self.left, unit)
                if self.reshard or not is_grad_enabled():
                    unit.drop()

    def hold(self, change):
        """A gathered() block begins (1), or ends (-1)."""
        self.held += change
        for unit in self.units:
            unit.users += change
            if change < 0 and not unit.users:
                unit.close()
        if not (self.running or self.in_backward()):
            self.settle()

    def again(self, outer=None):
        """For a checkpoint that is made now: a context in which the units that run now do again, and whether an array
        lies in them. outer: such a function of somebody around."""
        units, date = [unit for unit in self.units if unit.users > self.held], tick()
        for unit in units:
            self.note(self.needed, unit)
        around, answers_for = outer() if outer else (nullcontext, lambda array: False)

        @contextmanager
        def reopened():
            with mode(again_in=lambda: self.again(outer)), around():
                self.used()
                for unit in units:
                    unit.check_unwritten(date)
                self.enter(units)
                yield
                self.leave(units, ())
        return reopened, lambda array: answers_for(array) or any(unit.holds(array) for unit in units)

    def reach(self, unit, following):
        """Gather a unit; then begin with the one that is to follow, if there is room."""
        ahead = [] if following is None else self.together[following]
        if self.reshard:
            for other in self.units:
                if not (other.users or other in self.together[unit] or other in ahead):
                    other.drop()
        unit.gather()
        if len({id(self.together[u]) for u in self.units if u.whole is not None}) < ALIVE:
            for each in ahead:
                each.post_gather()

    # ------------------------------------------------------------ backward

    def backward_begins(self):
        """Settle its order. Returns the order in which units' gradients will be complete: that in which forward has
        begun them, the other way round; those that it hasn't come to are the last."""
        self.route = [unit for unit in self.left[::-1] if unit in self.needed]
        self.reached, self.current, self.passed = set(), None, True
        self.ahead = dict(zip(self.left, self.left[1:], strict=False))
        return [*self.entered[::-1], *(unit for unit in self.units if unit not in self.entered)]

    def following(self, unit):
        """The unit that backward will come to after this one."""
        self.reached.update(self.together[unit])
        at = self.route.index(unit) + 1 if unit in self.route else len(self.route)
        return next((u for u in self.route[at:] if u not in self.reached), None)

    def packing(self, outer_pack, outer_unpack):
        """saved_tensors_hooks that keep the place of a view of gathered values; all else goes the way of the hooks
        around (None: there are none)."""
        def pack(array):
            for unit in self.units:
                if unit.users and unit.holds(array):
                    self.note(self.needed, unit)
                    return unit.kept(array)
            return array if outer_pack is None else outer_pack(array)

        def unpack(kept):
            if not isinstance(kept, Kept):
                return kept if outer_unpack is None else outer_unpack(kept)
            self.used()
            unit = kept.unit
            if unit is not self.current or unit.whole is None:
                self.reach(unit, self.following(unit))
                self.current = unit
            return kept.view()
        return pack, unpack

    def backward_ends(self):
        """Or is given up."""
        self.settle()
        self.current, self.passed = None, True
