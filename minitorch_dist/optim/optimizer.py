"""Optimizer: groups of parameters, run over flat storage in tiles that fit into the cache."""

from copy import deepcopy
from itertools import accumulate
from math import prod

from .. import ledger
from ..autodiff.primitive import lower
from ..autodiff.writes import wrote
from ..backend import TILE, device_of, module_of, refuse_in_graph, to, to_device_of, xp, zeros_like
from ..flat import flat_buffers
from ..torch_names import NAMES, refuse_settings, tell
from .groups import as_numbers, groups_of
from .packed import Packed, arrays_of, values_of
from .settings import AT_LEAST_0, check_saved_optimizer, check_settings, holds
from .slots import Slot, States, runs

DEVICE_TILE = 1 << 22           # elements for which a GPU has temporary arrays at a time, of unpacked state say
OWN = "params", "state_bits"    # of a group's entries those that are no settings of its steps, and not saved


class Optimizer:
    """Base of all optimizers.

    params    leaf tensors, or (name, tensor) pairs (named_parameters()), or a list of groups
              {"params": …, "lr": …} whose other entries override the defaults
    defaults  the settings of a group that doesn't say otherwise

    The parameters move into FlatBuffers, unless they live in some already
    (DistributedDataParallel puts them there); each state array is flat too,
    and holds this optimizer's parameters alone, where others share the buffer.
    Where parameters have moved to other FlatBuffers since, the next step lets
    the state follow. A subclass names its state arrays and updates one tile.

    State is float32 at least. Parameters of 16 bits have a float32 master copy
    ("master" in the state), which is updated and then rounded: in 16 bits a
    step that is small beside its parameter would be lost. What somebody sets a
    parameter to between two steps counts.

    param_groups may be read, and a group's settings be changed between two
    steps (as a schedule does), but for "params" and "state_bits": these are
    settled when the optimizer is made. For parameters that come later:
    Combined(optimizer, another one of them).

    A group with {"state_bits": 8} keeps its state, but for masters, in 8 bits
    (packed.py), unpacked and packed again tile by tile around `update`; other
    groups keep theirs as they say, so norms or embeddings may have 32. How it is
    kept is no part of what is saved: state_dict has the values, which any such
    optimizer can go on from.

    State may have a shape of its own: a vector per row, say, of a matrix
    (`kinds_of_state`). Then every rank that has a piece of the matrix, or a
    part, has all of that state, and a step leaves the same in it on each.
    """

    rules = {}              # {setting: rule}, of every group
    state_names = ()
    unsigned = ()           # those of them that are never below 0
    initial = {}            # {name: what all its elements are before the first step}, where that isn't 0
    state_bits = (32, 8)    # what a group may ask for
    step_supports_amp_scaling = True        # for GradScaler: step takes grad_scale and found_inf
    adds_up = False         # gradients of `unsummed` parameters, of which each rank has its own
    elementwise = True      # an element's update depends on that element alone: pieces take the steps of the whole
    loaded = False      # whether its state, and settings, have come by load_state_dict
    loops = None        # what mt.compile has made of the update (compiler/updates.py)
    home = None         # who keeps the state, where it doesn't live beside the parameters (parallel/offload/offload.py)

    def __new__(cls, *args, **settings):
        refuse_settings(cls, settings)
        return object.__new__(cls)

    def __init__(self, params, defaults):
        defaults = defaults | {"state_bits": defaults.get("state_bits", 32)}
        self.param_groups = groups_of(params, defaults, type(self).__name__)
        self._check_groups(self.param_groups)
        self._scratch = {}
        self._settle()

    def _check_groups(self, groups):
        """ValueError for a setting outside of its rule, TypeError for one that is a tensor."""
        for group in groups:
            as_numbers(group, type(self).__name__)
        bits = f"{' or '.join(map(str, self.state_bits))} for {type(self).__name__}"
        rules = self.rules | {"state_bits": (lambda value, group: value in self.state_bits, bits)}
        for group in groups:
            check_settings(**{name: (group[name], holds(fits, group[name], group), must)
                              for name, (fits, must) in rules.items()})

    def _settle(self):
        """Make empty state where the parameters live now, an entry per flat buffer, state_bits, and names of state; an
        exception changes nothing."""
        group_of = {id(p): group for group in self.param_groups for p in group["params"]}
        flats, all_slots, states = [], [], []
        for flat in flat_buffers([p for group in self.param_groups for p in group["params"]]):
            alike = {}      # (state_bits, names) -> the segments, and the shapes of their own state
            for s in flat.live:
                if id(s.tensor) in group_of:
                    self._check_summed(s.tensor)
                    names, own = self.kinds_of_state(s.tensor)
                    alike.setdefault((group_of[id(s.tensor)]["state_bits"], names), []).append((s, own))
            for (bits, names), both in alike.items():
                mine, owns = zip(*both, strict=True)
                ends = [0, *accumulate(s.end - s.start for s in mine)]
                parts = [flat.params] if len(mine) == len(flat.segments) else [flat.params[s.start:s.end] for s in mine]
                state = self.empty_state(parts, bits, names)
                slots = [Slot(s, group_of[id(s.tensor)], at) for s, at in zip(mine, ends, strict=False)]
                state |= {name: self._own_state(name, slots, owns, flat.params) for name in owns[0]}
                flats.append(flat)
                all_slots.append(slots)
                states.append(state if self.home is None else self.home.move(state))
        self.flats, self.slots, self.state = flats, all_slots, States(states)

    def _check_summed(self, tensor):
        if not self.adds_up and tensor.leaf.unsummed is not None:
            raise ValueError(f"{type(self).__name__}: a parameter of shape {tensor.shape} is `unsummed`: each of the "
                             f"{tensor.leaf.unsummed.size} ranks has its own gradient, and their parameters would "
                             "part: give it to Dion, or wrap the model without it in `unsummed`")

    def kinds_of_state(self, tensor):
        """(names, {name: shape}) of a parameter's state: of the arrays that have an element for each of its elements,
        and of those of a shape of their own; parameters of the same names have the latter's as well."""
        return self.state_names, {}

    def _own_state(self, name, slots, owns, like):
        """A flat array of zeros for the state of a shape of its own, of which the slots learn their places."""
        end = 0
        for slot, own in zip(slots, owns, strict=True):
            slot.own[name] = end, own[name]
            end += prod(own[name])
        return zeros_like(like, end, xp.promote_types(like.dtype, xp.float32))

    def own_shapes(self):
        """[{name: shape}] of the parameters' state that isn't of their shape, in the groups' order."""
        return [{name: shape for name, (_, shape) in slot.own.items()} for slot, _ in self._in_order()]

    def empty_state(self, parts, bits, names):
        """The state arrays before the first step, {name: array as long as all parts, or a Packed for 8 bits}. parts:
        the parameters' of one flat buffer, 1-d, with their padding."""
        size, dtype = sum(part.size for part in parts), parts[0].dtype
        exact = xp.promote_types(dtype, xp.float32)
        state = {}
        if exact != dtype:
            whole = parts[0] if len(parts) == 1 else module_of(parts[0]).concatenate(parts)
            state["master"] = whole.astype(exact)
        for name in names:
            first = self.initial.get(name, 0)
            if bits == 8:
                state[name] = Packed.full(size, first, exact, device_of(parts[0]), name not in self.unsigned)
            else:
                state[name] = zeros_like(parts[0], size, exact)
                if first:
                    state[name][...] = first
        return state

    def _follow(self):
        """Take the state along to where the parameters live now."""
        loaded, saved = self.loaded, self.state_dict()
        self._settle()
        self.load_state_dict(saved)
        self.loaded = loaded

    def _have_moved(self):
        """Whether parameters live elsewhere by now."""
        return any(slot.segment.tensor.leaf.flat is not flat
                   for flat, slots in zip(self.flats, self.slots, strict=True) for slot in slots)

    def _follow_moved(self):
        if self._have_moved():
            self._follow()

    def settle_in(self, home):
        """Let the state live with `home` from now on: home.move(state) gives a FlatBuffer's state arrays there, on the
        host, home.copy(array) another one of those; home.update(tiled, p, g, state, group, step) makes one run's
        update, by `self.tiled` on the host."""
        before, self.home = self.home, home
        try:
            if self.loaded or any(self.state_dict(copy=False)["steps"]):
                self._follow()
            else:
                self._settle()
        except BaseException:
            self.home = before
            raise

    def __deepcopy__(self, memo):
        """A twin of the parameters' copies, whose state lies where this one's does, in a copy of its own."""
        if self.home is not None:
            for array in (part for state in self.state for each in state.values() for part in arrays_of(each)):
                memo[id(array)] = self.home.copy(array)
        twin = memo[id(self)] = object.__new__(type(self))
        vars(twin).update(deepcopy(vars(self), memo))
        return twin

    @property
    def lr(self):
        """The learning rate of the first group."""
        return self.param_groups[0]["lr"]

    def zero_grad(self):
        """Forget all gradients."""
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None

    def step(self, grad_scale=None, found_inf=None):
        """Update every parameter that has a gradient, in place.

        grad_scale  the gradients were multiplied by it (loss scaling): they are divided by it on the way, and stay
        found_inf   where it isn't 0, no parameter changes and no step is counted

        Both are numbers, or float32 arrays of one element where the parameters are. A GPU is waited for, but for Adam's
        kernel.
        """
        if callable(grad_scale):
            raise TypeError(f"{type(self).__name__}.step takes no closure: forward and loss.backward() come before it")
        self.check_step()
        begin = ledger.now() if ledger.open_ledgers else None
        self._follow_moved()
        for flat, state in zip(self.flats, self.state, strict=True):
            if ledger.open_ledgers and self.home is None:
                for array in (part for each in state.values() for part in arrays_of(each)):
                    ledger.keep(array, "optimizer")
            flat.collect(fill_missing=False)
        self.apply(lower(grad_scale), lower(found_inf))
        for flat, slots in zip(self.flats, self.slots, strict=True):
            # All ranks that share a unit note the same, those without a piece of it too: all have gradients, or none.
            if flat.unit is not None and any(slot.segment.tensor.grad is not None for slot in slots):
                wrote(flat.params, f"{type(self).__name__}.step")
        if begin is not None:
            ledger.span("compute", "optimizer", begin)

    def check_step(self):
        """Raise where no step may be made now; nothing has changed then."""
        refuse_in_graph(f"{type(self).__name__}.step")
        given, known = (sum(map(len, each)) for each in ([g["params"] for g in self.param_groups], self.slots))
        if given != known:
            raise RuntimeError(f"{type(self).__name__}.step: param_groups have {given} parameters, and had {known} "
                               "when the optimizer was made: for more of them, Combined(this one, one of the rest)")
        for group in self.param_groups:     # which schedules write into
            as_numbers(group, type(self).__name__)
            if not holds(AT_LEAST_0[0], group["lr"], group):
                self._check_groups([group])

    def apply(self, grad_scale, found_inf):
        """Update all parameters, or none; their gradients lie in the flat buffers."""
        grad_scale, found_inf = on_the_host(grad_scale, found_inf)
        if not found_inf:
            self.factor = 1.0 if grad_scale is None else 1.0 / grad_scale
            self.update_all()

    def update_all(self):
        """Update all parameters. Here: in tiles, by `update`."""
        for flat, state, slots in zip(self.flats, self.state, self.slots, strict=True):
            for start, stop, at, group, steps in runs(slots):
                run, of_state = slice(start, stop), slice(at, at + stop - start)
                arrays = flat.params[run], flat.grads[run], {name: a[of_state] for name, a in state.items()}
                if self.home is None:
                    self.tiled(*arrays, group, steps)
                else:
                    self.home.update(self.tiled, *arrays, group, steps)
                wrote(flat.params[run], f"{type(self).__name__}.step")
                if self.home is not None or isinstance(flat.params, xp.ndarray):
                    ledger.launch(type(self).__name__.lower())      # a dozen of CuPy's own kernels nobody counts

    def tiled(self, p, g, state, group, step):
        """`update`, on the host tile by tile; state that is packed is unpacked around it."""
        if self.loops is not None and self.loops.take(p, g, state):
            self.loops.update(self, p, g, state, group, step)
            return
        kept = [name for name, array in state.items() if isinstance(array, Packed)]
        tile = TILE if isinstance(p, xp.ndarray) else DEVICE_TILE if kept else p.size
        for start in range(0, p.size, tile):
            part = slice(start, start + tile)
            low, of_state = p[part], {name: array[part] for name, array in state.items()}
            exact = self.exact(low, of_state)
            work = of_state | {name: of_state[name].unpack(self.scratch(exact, name)) for name in kept}
            self.update(exact, self.divided(g[part], exact), work, group, step)
            for name in kept:
                of_state[name].pack(work[name])
            if low is not exact:
                low[...] = exact

    def exact(self, p, state):
        """What is to be updated: a parameter, or the master copy of one of 16 bits, as somebody may have set it since
        the last step."""
        master = state.get("master", p)
        if master is not p:
            xp.copyto(master, p, where=master.astype(p.dtype) != p)
        return master

    def divided(self, g, p):
        """A gradient divided by the loss scale, in p's dtype."""
        if self.factor == 1.0 and g.dtype == p.dtype:
            return g
        return xp.multiply(g, self.factor, out=self.scratch(p, "gradient"), dtype=p.dtype)

    def update(self, p, g, state, group, step):
        """Update one tile in place: p, g and the state arrays are 1-d and of equal length, of one dtype; step counts
        from 1. g may be overwritten only by writing it back as it was: users read gradients after the step."""
        raise NotImplementedError

    def scratch(self, like, k=0):
        """Working array k of a tile's length and dtype; its content is whatever was left there."""
        if not isinstance(like, xp.ndarray) or like.size > TILE:
            return module_of(like).empty_like(like)     # from CuPy's memory pool
        key = (k, like.dtype)
        if key not in self._scratch:
            self._scratch[key] = xp.empty(TILE, like.dtype)
        return self._scratch[key][:like.size]

    kind = property(lambda self: type(self).__name__, doc="What it is called in saved state.")

    def state_dict(self, copy=True):
        """{"class": the optimizer's, "groups": the settings, "sizes": how many parameters each group has, "steps": per
        parameter, "state": per parameter {name: NumPy array}}; arrays are copied to the host. copy=False: they are
        views of those that the optimizer works with, where those are."""
        order = self._in_order()
        return {
            "class": self.kind,
            "groups": [{k: v for k, v in group.items() if k not in OWN} for group in self.param_groups],
            "sizes": [len(group["params"]) for group in self.param_groups],
            "steps": [slot.steps for slot, _ in order],
            "state": [{name: (xp.array(to(values_of(part), "cpu")) if copy else values_of(part)).reshape(
                slot.shape(name)) for name, part in slot.state(state).items()} for slot, state in order],
        }

    def _in_order(self):
        """[(Slot, the state arrays that it lies in)] of the parameters, in the groups' order."""
        return [(slot, state) for _, state, slot in self._places()]

    def _places(self):
        """[(its FlatBuffer, the state arrays that it lies in, its Slot)] of the parameters, in the groups' order: that
        in which they were given, while buffers may have unequal parts in another one on other ranks."""
        places = {id(slot.segment.tensor): (flat, state, slot) for flat, state, slots
                  in zip(self.flats, self.state, self.slots, strict=True) for slot in slots}
        return [places[id(p)] for group in self.param_groups for p in group["params"]]

    def check_kind(self, saved):
        """ValueError where saved state is none, another kind of optimizer's, or of other groups."""
        check_saved_optimizer(saved, self.kind)
        if len(saved["groups"]) != len(saved["sizes"]):
            raise ValueError(f"the saved state has settings of {len(saved['groups'])} groups, and parameters of "
                             f"{len(saved['sizes'])}")
        if list(saved["sizes"]) != (sizes := [len(group["params"]) for group in self.param_groups]):
            raise ValueError(f"the saved state has groups of {saved['sizes']} parameters, this {self.kind} of {sizes}")

    def _with_settings(self, saved):
        """The groups as they will be with saved settings. ValueError for one that is unknown, or doesn't fit."""
        groups = [{**group, **{k: v for k, v in settings.items() if k not in OWN}}
                  for group, settings in zip(self.param_groups, saved["groups"], strict=True)]
        if odd := sorted({name for group in groups for name in group} - {*self.param_groups[0]}):
            raise ValueError(f"the saved state has the settings {', '.join(odd)}, which a {self.kind} hasn't")
        self._check_groups(groups)
        return groups

    def check_state(self, saved):
        """ValueError unless load_state_dict can take it."""
        self.check_kind(saved)
        self._with_settings(saved)
        order = self._in_order()
        if {len(saved["state"]), len(saved["steps"])} != {len(order)}:
            raise ValueError(f"the saved state is of {len(saved['state'])} parameters, with {len(saved['steps'])} "
                             f"numbers of steps, this {self.kind} has {len(order)}")
        for (slot, state), arrays in zip(order, saved["state"], strict=True):
            if set(arrays) != set(state):
                raise ValueError(f"the saved state holds {sorted(arrays)}, a {type(self).__name__} needs "
                                 f"{sorted(state)}: it comes from another optimizer")
            for name, part in state.items():
                found, wanted = arrays[name], (slot.shape(name), part.dtype)
                if (found.shape, found.dtype) != wanted:
                    raise ValueError(f"saved {name} is of shape {found.shape} and dtype {found.dtype}; of a parameter "
                                     "of shape {} and dtype {} it is {} and {}".format(
                                         slot.segment.tensor.shape, slot.segment.tensor.dtype, *wanted))

    def load_state_dict(self, saved):
        """Restore what state_dict gave; ValueError where the parameters don't fit, and nothing is changed then."""
        self.check_state(saved)
        for group, settings in zip(self.param_groups, self._with_settings(saved), strict=True):
            group.update(settings)
        for (slot, state), steps, arrays in zip(self._in_order(), saved["steps"], saved["state"], strict=True):
            slot.steps = steps
            for name, part in slot.state(state).items():
                if isinstance(part, Packed):
                    part.pack(to_device_of(arrays[name].ravel(), part.codes))
                else:
                    part[...] = to_device_of(arrays[name].reshape(part.shape), part)
        self.loaded = True


tell(Optimizer, NAMES["Optimizer"])


def on_the_host(*values):
    """Numbers as they are; arrays of one element as numbers, which a GPU is asked for once."""
    arrays = [v.reshape(1) for v in values if hasattr(v, "reshape")]
    numbers = iter(to(module_of(arrays[0]).concatenate(arrays), "cpu").tolist() if arrays else ())
    return [next(numbers) if hasattr(v, "reshape") else v for v in values]
