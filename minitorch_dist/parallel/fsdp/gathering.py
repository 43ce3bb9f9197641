"""Stage 3's values: which units are gathered when, in forward, in backward and ahead of both.

    forward    gather u0 | run u0, gather u1 ahead | free u0, run u1 | free u1
    backward   gather u1 | run u1, gather u0 ahead | free u1, run u0 | free u0

Each goes a route: a list of steps, each of which is the units that are wanted together. What neither this step nor the
next one wants is freed, so what both want stays. Forward goes as the forward before it; backward as forward has left
things for it to do, the other way round: the units of which the tape keeps something, and, where a checkpoint runs
again, those that were open around it:

    kept of     embedding | block 0 | block 1 | norm, head      blocks checkpointed; the rest is open around all of them
    route       {rest} | {block 1, rest} | {block 0, rest}

A wrong guess costs a gather, and is right all the same. All ranks guess alike.

Where neighbours keep the values between forward and backward (hybrid.py: hpZ), what a forward that is recorded has
gathered from all ranks it gathers from them from then on, and so does backward. They let go when a backward is through,
a forward begins, or somebody reads whole values: all of which all ranks do, so nobody asks what has been written since.
"""

from contextlib import contextmanager, nullcontext
from itertools import chain

from ...autodiff.modes import is_grad_enabled
from ...autodiff.primitive import lower, mode, state
from ...autodiff.tree import flatten
from ...autodiff.writes import tick
from ...backend import is_array
from ...nn.decoding import by_position
from .units import Kept

ALIVE = 2       # modules whose units are gathered: one, and the next ahead. (Nested ones: all those that run.)


class Gathering:
    """The units of a model, as its modules run.

    reshard  free a unit's values after its forward, and gather them again in backward
    outer    the units that the whole model holds
    together {unit: those of its module}, which are of several dtypes or Grids, and needed in turns
    in_backward     in_backward(): whether a backward pass that has come to the model is under way
    used            used(): backward asks for a value
    entered  [(date, units)] as the last forward has begun them
    needed   [(date, units)] as it has come to what backward will want them for
    route, place    steps to go, and where in them we are
    here     units that have been gathered for this step
    """

    def __init__(self, units, outer, reshard, in_backward, used):
        self.units, self.outer, self.reshard = units, outer, reshard
        self.in_backward, self.used = in_backward, used
        self.together = {unit: [unit] for unit in units} | dict.fromkeys(outer, outer)
        self.entered, self.needed = [], []
        self.go([])
        self.running = self.held = 0    # forwards of the whole model under way; gathered() blocks that are open

    def watch(self, module, units):
        """Let the units' values come before each forward of the module, and go after it."""
        self.together |= dict.fromkeys(units, units)
        module.register_forward_pre_hook(by_position(lambda m, inputs: self.enter(units)))
        module.register_forward_hook(by_position(lambda m, inputs, output: self.leave(units, output)))

    # ------------------------------------------------------------ forward

    @contextmanager
    def forward(self):
        """Of the whole model. What a forward before it has kept may be older than the optimizer's last step."""
        outermost = not (self.running or self.in_backward())
        if outermost:
            self.settle()
            self.begin()
        self.running += 1
        try:
            yield
        finally:
            self.running -= 1
        if outermost:
            self.settle(keep=is_grad_enabled())

    def begin(self):
        """A forward, of the whole model or of a module by itself, goes as the one before it."""
        self.go(units for _, units in self.entered)
        if self.recorded():
            self.entered, self.needed = [], []

    def settle(self, keep=False):
        """Nothing runs: close what an exception has left open (which the module may have caught by itself), and free
        what was gathered for nothing. Not where the exception is: all ranks must come along. keep: for backward."""
        for unit in self.units:
            if unit.users != self.held:
                unit.users = self.held
                if not unit.users:
                    unit.close()
            if not (unit.users or keep and not self.reshard):
                unit.drop()
            if not keep:
                unit.let_go()

    def recorded(self):
        """Whether this is a forward that a backward can follow."""
        return is_grad_enabled() and state.callbacks is None

    def note(self, order, units):
        """Add units that are wanted together to an order. Its last that are among them are no steps of their own."""
        if self.recorded():
            while order and set(order[-1][1]) <= set(units):
                order.pop()
            order.append((tick(), units))

    def enter(self, units):
        """A module begins to run."""
        closed = [unit for unit in units if not unit.users]
        if closed:
            if not (self.running or self.in_backward()):    # the module was called by itself
                self.begin()
                for unit in closed:
                    unit.drop()
                    unit.let_go()
            self.note(self.entered, units)
            self.reach(closed)
            for unit in closed:
                unit.open()
        for unit in units:
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
            if not self.in_backward() and (self.reshard or not is_grad_enabled()):
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

    def again(self, start, outer=None):
        """For a checkpoint that is made now, of what has run since `start`: a context in which the units that run now
        do again, and whether an array lies in them. outer: such a function of somebody around."""
        units, date = [unit for unit in self.units if unit.users > self.held], tick()
        inside = [step for then, step in self.needed if then > start]
        for step in (*inside[-2::-1], units):       # it is run as it was, and only then comes backward
            self.note(self.needed, step)
        around, answers_for = outer(start) if outer else (nullcontext, lambda array: False)

        @contextmanager
        def reopened():
            with mode(again_in=lambda start: self.again(start, outer)), around():
                self.used()
                for unit in units:
                    unit.check_unwritten(date)
                self.enter(units)
                yield
                self.leave(units, ())
        return reopened, lambda array: answers_for(array) or any(unit.holds(array) for unit in units)

    # ------------------------------------------------------------ both

    def go(self, route):
        """Begin a route."""
        self.route, self.place, self.here = list(route), 0, []
        self.known = {unit for step in self.route for unit in step}

    def reach(self, units):
        """Gather units, and all that the route's step with them wants; then begin with the next, if there is room."""
        wanted = self.known.intersection(units)
        steps = chain(range(self.place, len(self.route)), range(self.place))
        self.place = next((i for i in steps if wanted.issubset(self.route[i])), self.place)
        now, following, *_ = *self.route[self.place:self.place + 2], [], []
        self.here = list(dict.fromkeys([*units, *now]))
        if self.reshard:
            stay = {*self.here, *following, *(beside for unit in units for beside in self.together[unit])}
            for other in self.units:
                if not (other.users or other in stay):
                    other.drop()
        for unit in self.here:
            unit.gather(keep_second=self.recorded())
        if len({id(self.together[u]) for u in self.units if u.whole is not None}) < ALIVE:
            for unit in following:
                unit.post_gather()

    # ------------------------------------------------------------ backward

    def backward_begins(self):
        """Settle its order. Returns the order in which units' gradients will be complete: that in which forward has
        begun them, the other way round; those that it hasn't come to are the last."""
        self.go(units for _, units in reversed(self.needed))
        begun = list(dict.fromkeys(unit for _, units in self.entered for unit in units))
        return [*begun[::-1], *(unit for unit in self.units if unit not in begun)]

    def packing(self, outer_pack, outer_unpack):
        """saved_tensors_hooks that keep the place of a view of gathered values; all else goes the way of the hooks
        around (None: there are none)."""
        def pack(array):
            for unit in self.units:
                if unit.users and unit.holds(array):
                    last = self.needed[-1][1] if self.needed else []
                    self.note(self.needed, [u for u in self.together[unit] if u is unit or u in last])
                    return unit.kept(array)
            return array if outer_pack is None else outer_pack(array)

        def unpack(kept):
            if not isinstance(kept, Kept):
                return kept if outer_unpack is None else outer_unpack(kept)
            self.used()
            unit = kept.unit
            if unit not in self.here or unit.whole is None:
                self.reach([unit])
            return kept.view()
        return pack, unpack

    def backward_ends(self):
        """Or is given up."""
        self.settle()
        self.go([])
