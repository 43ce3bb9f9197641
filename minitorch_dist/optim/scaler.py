"""Loss scaling: gradients that float16 would flush to zero, moved up into its range.

    float16    0 ←| 2⁻²⁴ ······ 2⁻¹⁴ ·························· 2¹⁵ |→ inf
    gradients        ▁▂▄▆█▆▄▂▁                                              half of them lost
    times 2¹⁶                            ▁▂▄▆█▆▄▂▁                          and divided again, in float32

    scaler = optim.GradScaler()
    with mt.autocast("float16"):
        loss = …
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)                          # where somebody looks at gradients before the step
    optim.clip_grad_norm_(model.parameters(), 1.0, error_if_nonfinite=False)
    scaler.step(optimizer)                              # or not, where a gradient is inf or NaN
    scaler.update()

The right factor is found by trying: it doubles after 2,000 steps without inf or NaN, and after one with it is halved
and the step is left out. A factor that is a power of 2 rounds nothing: gradients that float32 holds have the same bits
with and without it. Names, defaults and errors are torch.amp.GradScaler's.
Source: Micikevicius et al. 2018, "Mixed precision training".
"""

from dataclasses import dataclass

from ..autodiff.primitive import lower
from ..autodiff.writes import wrote
from ..backend import device_of, to, xp, zeros
from ..flat import flat_buffers
from .clip import check_known, others
from .settings import check_keys, check_settings, holds

# What float32 can hold, and 1 divided by it too.
LEAST, MOST = 2.0 ** -126, 2.0 ** 127
FACTOR = lambda value, _: LEAST <= value <= MOST, "from 2^-126 to 2^127"
RULES = {"init_scale": FACTOR, "new_scale": FACTOR, "scale": FACTOR,
         "growth_factor": (lambda value, _: value > 1, "above 1"),
         "backoff_factor": (lambda value, _: 0 < value < 1, "in (0, 1)"),
         "growth_interval": (lambda value, _: value >= 1 and value % 1 == 0, "a whole number, at least 1"),
         "_growth_tracker": (lambda value, _: value >= 0 and value % 1 == 0, "a whole number, at least 0")}


def _check(**values):
    """ValueError for one that can't be."""
    check_settings(**{name: (value, holds(RULES[name][0], value, None), RULES[name][1])
                      for name, value in values.items()})


@dataclass
class Stage:
    """How far an optimizer has come since the last update.

    found     float32 array of one element: 1 where a gradient of some rank is inf or NaN, else 0
    unscaled  whether its gradients have been divided; stepped: whether it has had its step
    """

    optimizer: object
    found: object = None
    unscaled: bool = False
    stepped: bool = False


class GradScaler:
    """Scales losses, and divides gradients again; see above.

    init_scale       the factor to begin with
    growth_factor    what it grows by after growth_interval steps in a row without inf or NaN
    backoff_factor   what it shrinks by after a step that is left out
    enabled          False: does nothing; step is the optimizer's
    comm             the Communicator of ranks that leave out steps together, beside those that parameters know of:
                     DistributedDataParallel's sums have inf on all ranks; fully_shard's pieces and parts of parameters
                     say which ranks have the others. Of a model that a pipeline cuts give all ranks

    Without unscale_ before it step hands the factor on to the optimizer, and the gradients stay scaled. On a GPU nobody
    waits: factor and decision stay there, and Adam's kernel takes them; other optimizers ask for them. unscale_ and
    step are collective where gradients are cut: a rank whose part of the model is frozen gives None for its optimizer;
    where it does so for several, their steps come in the order in which they were unscaled.
    """

    def __init__(self, init_scale=2.0 ** 16, growth_factor=2.0, backoff_factor=0.5, growth_interval=2000, enabled=True,
                 comm=None):
        _check(init_scale=init_scale, growth_factor=growth_factor, backoff_factor=backoff_factor,
               growth_interval=growth_interval)
        self.growth_factor, self.backoff_factor, self.growth_interval = growth_factor, backoff_factor, growth_interval
        self.enabled, self.comm = enabled, comm
        self._scale, self._clean = (xp.full((), x, xp.float32) for x in (init_scale, 0))    # steps in a row
        self._stages = {}       # id of an optimizer -> Stage

    def scale(self, outputs):
        """A loss, or a tuple or list of them, times the factor; in float32 at least."""
        if not self.enabled:
            return outputs
        if isinstance(outputs, (tuple, list)):
            return type(outputs)([self.scale(y) for y in outputs])
        self.move_to(device_of(lower(outputs)))
        return outputs * self._scale

    def unscale_(self, optimizer):
        """Divide the gradients of the optimizer's parameters by the factor, in place; once between two updates.

        RuntimeError a second time, or after step. ValueError for gradients of 16 bits, in which they would be flushed
        to zero after all: leave it to step.
        """
        if not self.enabled:
            return
        stage = self._stage(optimizer, "unscale_")
        if stage.unscaled:
            raise RuntimeError("unscale_() has already been called on this optimizer since the last update(): its "
                               "gradients are divided")
        self._look(stage, divide=True)
        stage.unscaled = True

    def found_inf(self, optimizer):
        """Whether a gradient was inf or NaN, on any rank: known after unscale_ or step. A GPU is waited for."""
        stage = next((s for s in reversed(self._stages.values()) if s.optimizer is optimizer), None)
        return stage is not None and stage.found is not None and bool(to(stage.found, "cpu")[0])

    def step(self, optimizer):
        """optimizer.step() on the divided gradients, unless one of them is inf or NaN: then nothing changes, and no
        step is counted. One that isn't the library's takes no factor (step_supports_amp_scaling): its gradients are
        unscaled before. RuntimeError if called twice without an update between."""
        if not self.enabled:
            if optimizer is not None:
                optimizer.step()
            return
        stage = self._stage(optimizer, "step")
        if optimizer is None or getattr(optimizer, "step_supports_amp_scaling", False):
            if not stage.unscaled:
                self._look(stage, divide=False)
            if optimizer is not None:
                optimizer.step(grad_scale=None if stage.unscaled else self._scale, found_inf=stage.found)
        else:
            if not stage.unscaled:
                self.unscale_(optimizer)
            if not self.found_inf(optimizer):
                optimizer.step()
        stage.stepped = True

    def update(self, new_scale=None):
        """After the step of every optimizer: let the factor shrink or grow; or set it to new_scale, a number.
        RuntimeError where no optimizer has had unscale_ or step since the last time."""
        if not self.enabled:
            return
        if new_scale is None:
            found = [stage.found for stage in self._stages.values() if stage.found is not None]
            if not found:
                raise RuntimeError("update() without unscale_() or step() since the last update(): nobody has looked "
                                   "whether gradients are finite")
            bad = xp.concatenate(found).max() > 0
            clean = xp.where(bad, 0, self._clean + 1)
            with xp.errstate(over="ignore"):
                grown = self._scale * self.growth_factor
            grows = (clean >= self.growth_interval) & xp.isfinite(grown)
            self._clean[...] = xp.where(clean >= self.growth_interval, 0, clean)
            shrunk = xp.maximum(self._scale * self.backoff_factor, LEAST)
            new_scale = xp.where(bad, shrunk, xp.where(grows, grown, self._scale))
        else:
            _check(new_scale=new_scale)
        self._scale[...] = new_scale
        wrote(self._scale, "GradScaler.update")
        self._stages.clear()

    def get_scale(self):
        """The factor, a float (1.0 where not enabled). A GPU is waited for."""
        return to(self._scale, "cpu").item() if self.enabled else 1.0

    def state_dict(self):
        """All that a run needs to go on: numbers, which JSON keeps exactly. Empty where not enabled."""
        return {"scale": self.get_scale(), "growth_factor": self.growth_factor, "backoff_factor": self.backoff_factor,
                "growth_interval": self.growth_interval, "_growth_tracker": int(to(self._clean, "cpu"))
                } if self.enabled else {}

    def load_state_dict(self, saved):
        """Go on from what state_dict gave. RuntimeError for that of a scaler that wasn't enabled, ValueError where it
        lacks something or has what can't be; nothing is changed then."""
        if not self.enabled:
            return
        if not saved:
            raise RuntimeError("the saved state is empty: it comes from a GradScaler that wasn't enabled")
        names = "scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker"
        check_keys(saved, names, "a GradScaler")
        _check(**{name: saved[name] for name in names})
        self._scale[...], self.growth_factor, self.backoff_factor, self.growth_interval, self._clean[...] = (
            saved[name] for name in names)

    def _stage(self, optimizer, call):
        if optimizer is None:       # of several that are frozen here each has a stage of its own, in their order
            waiting = [s for s in self._stages.values() if s.optimizer is None and not s.stepped]
            stage = waiting[0] if waiting and call == "step" else Stage(None)
            self._stages[id(stage)] = stage
            return stage
        stage = self._stages.setdefault(id(optimizer), Stage(optimizer))
        if stage.stepped:
            raise RuntimeError(f"{call}() after step() of this optimizer: call update() at the end of each step")
        return stage

    def move_to(self, device):
        """Let factor and count live where losses and gradients do: a rank without either is told by those who know."""
        self._scale, self._clean = (to(x, device) for x in (self._scale, self._clean))

    def _look(self, stage, divide):
        """Find out whether all gradients are finite, on all ranks that are concerned, and divide them if asked."""
        groups = [] if stage.optimizer is None else stage.optimizer.param_groups
        params = [p for group in groups for p in group["params"]]
        if self.comm is None:
            check_known(params, "GradScaler")
        flats = flat_buffers(params)
        mine = {id(p) for p in params}
        if flats:
            self.move_to(flats[0].device)
        found = zeros(1, xp.float32, device_of(self._scale))
        if short := [flat.dtype for flat in flats if divide and flat.dtype.itemsize == 2]:
            raise ValueError(f"unscale_: gradients of {short[0]} can't be divided in place, which would flush them to "
                             "zero: let step() hand the factor to the optimizer, without unscale_ before it")
        for flat in flats:
            flat.collect(fill_missing=False)
            for start, stop in stretches(flat, mine):
                grads = flat.grads[start:stop]
                found += xp.logical_not(xp.isfinite(grads).all())
                if divide:
                    grads *= 1 / self._scale.astype(grads.dtype)
                    wrote(grads, "GradScaler.unscale_")
        for comm in concerned(self.comm, flats, params):
            comm.all_reduce(found, op="max")
        stage.found = found


def stretches(flat, mine):
    """[[start, stop]] of a flat buffer where the tensors with these ids have gradients."""
    joined = []
    for s in flat.live:
        if id(s.tensor) in mine and s.tensor.grad is not None and s.end > s.start:
            if joined and joined[-1][1] == s.start:
                joined[-1][1] = s.end
            else:
                joined.append([s.start, s.end])
    return joined


def concerned(comm, flats, params):
    """The Communicators of ranks that must step together: those of ranks outside of comm that have other parts of these
    parameters, of their flat buffers, or of their gradients; then comm, if any, whose other ranks may have no parts."""
    known = set() if comm is None else {*comm.world_ranks}
    sharing = [*(flat.unit.comm for flat in flats if flat.unit), *(others(p) for p in params),
               *(p.leaf.unsummed for p in params)]
    found = {id(each): each for each in sharing if each is not None and not known.issuperset(each.world_ranks)}
    return [*found.values(), *([] if comm is None else [comm])]
