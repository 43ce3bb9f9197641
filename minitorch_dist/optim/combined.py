"""Combined: several optimizers of one model, as one."""

from .optimizer import Optimizer


class Combined(Optimizer):
    """Several optimizers, each of its own parameters, as one for loops, schedules, loss scaling and checkpoints.

        optimizer = Combined(Muon(hidden, lr=0.02), AdamW(others, lr=3e-4))

    Its groups are theirs, one optimizer's after another's. ValueError where two of them update one parameter.
    """

    def __init__(self, *optimizers):
        if not optimizers or not all(isinstance(o, Optimizer) for o in optimizers):
            raise TypeError("Combined takes optimizers, one at least; got "
                            f"{', '.join(type(o).__name__ for o in optimizers) or 'none'}")
        self.optimizers = [each for o in optimizers for each in (o.optimizers if isinstance(o, Combined) else [o])]
        params = [p for group in self.param_groups for p in group["params"]]
        if len({id(p) for p in params}) != len(params):
            raise ValueError("a parameter stands in two of these optimizers: each must be updated once")

    @property
    def param_groups(self):
        """The optimizers' own, which may be changed in place."""
        return [group for o in self.optimizers for group in o.param_groups]

    loaded = property(lambda self: any(o.loaded for o in self.optimizers))
    elementwise = property(lambda self: all(o.elementwise for o in self.optimizers))
    flats = property(lambda self: [flat for o in self.optimizers for flat in o.flats])

    @property
    def state(self):
        """The state arrays, in the order of `flats`."""
        return [arrays for o in self.optimizers for arrays in o.state]

    def own_shapes(self):
        return [shapes for o in self.optimizers for shapes in o.own_shapes()]

    def check_step(self):
        for o in self.optimizers:
            o.check_step()

    def step(self, grad_scale=None, found_inf=None):
        self.check_step()       # of all of them, before one has made its step
        for o in self.optimizers:
            o.step(grad_scale, found_inf)

    def settle_in(self, home):
        before = [o.home for o in self.optimizers]
        try:
            for o in self.optimizers:
                o.settle_in(home)
        except BaseException:
            for o, there in zip(self.optimizers, before, strict=True):
                if o.home is not there:
                    o.settle_in(there)
            raise

    @property
    def kind(self):
        """With the kind of each group, so that no part takes another's state."""
        return f"Combined({', '.join(o.kind for o in self.optimizers for _ in o.param_groups)})"

    def state_dict(self, copy=True):
        """As Optimizer.state_dict, of the first optimizer's parameters, then of the second's, …"""
        saved = [o.state_dict(copy) for o in self.optimizers]
        return {"class": self.kind, **{key: [entry for each in saved for entry in each[key]]
                                       for key in ("groups", "sizes", "steps", "state")}}

    def check_state(self, saved):
        self.check_kind(saved)
        for o, part in self._parts(saved):
            o.check_state(part)

    def load_state_dict(self, saved):
        self.check_state(saved)
        for o, part in self._parts(saved):
            o.load_state_dict(part)

    def _parts(self, saved):
        """[(optimizer, its part of a state_dict)]; the last one's has what is too much."""
        found, group, param = [], 0, 0
        for o in self.optimizers:
            last = o is self.optimizers[-1]
            groups = slice(group, None if last else (group := group + len(o.param_groups)))
            params = slice(param, None if last else (param := param + sum(len(g["params"]) for g in o.param_groups)))
            found.append((o, {"class": o.kind, "groups": saved["groups"][groups], "sizes": saved["sizes"][groups],
                              "steps": saved["steps"][params], "state": saved["state"][params]}))
        return found
