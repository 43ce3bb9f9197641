"""Module: a tree of layers with named parameters."""

from .. import backend
from ..autodiff.hooks import RemovableHandle, without
from ..autodiff.modes import no_grad
from ..autodiff.tensor import Tensor, tensor
from ..autodiff.writes import wrote
from ..backend import whole
from ..torch_names import NAMES, refuse_settings, tell
from .absent import Absent, Unmade, building

FEW = 1000      # elements of a list that are looked at each time somebody walks over a module's parameters


def Parameter(values, requires_grad=True):
    """A leaf Tensor holding a copy of `values`; as an attribute of a Module it becomes one of its parameters, a frozen
    one where requires_grad is False. Inside without_values it has their shape and dtype alone.

    (In torch this is a class. Here any leaf that requires grad, or has before it was frozen, can be a parameter.)
    """
    made = values if building.without_values and hasattr(values, "dtype") else tensor(values)
    if building.without_values:
        made = Tensor(Unmade(made.shape, made.dtype))
    return made.requires_grad_().requires_grad_(requires_grad)


def at_least_1(name, **sizes):
    """A module's sizes as a list of ints; None: not given. ValueError where one isn't 1 or more, TypeError where it is
    no whole number."""
    sizes = {key: size if size is None else whole(key, size) for key, size in sizes.items()}
    if wrong := ", ".join(f"{key}={size}" for key, size in sizes.items() if size is not None and size < 1):
        raise ValueError(f"{name}: {wrong} must be 1 or more")
    return list(sizes.values())


class Module:
    """Base of all layers. Subclasses set parameters and sub-modules as attributes and write forward().

    Names are attribute paths: "0.weight", "encoder.linear.bias". They are what
    optimizers, checkpoints and sharding speak; the same tree gives the same
    names in the same order on every rank.
    """

    keeps_dtypes = False        # whether to(dtype) leaves this module's own parameters and buffers as they are

    def __new__(cls, *args, **settings):
        refuse_settings(cls, settings)
        return object.__new__(cls)

    def __init__(self):
        for table in ("_parameters", "_buffers", "_modules", "_lists"):
            object.__setattr__(self, table, {})
        object.__setattr__(self, "_name", "")
        object.__setattr__(self, "_hooks", None)    # (before forward, after it), two tuples, as soon as there is one
        self.training = True

    def __setattr__(self, name, value):
        if "_modules" not in self.__dict__:
            raise RuntimeError(f"{type(self).__name__}: call super().__init__() before setting attributes")
        if isinstance(value, (list, dict, set)):
            self._look_at(name, value)
        if isinstance(value, Module):
            self.add_module(name, value)
        elif isinstance(value, Tensor) and value.leaf is not None:
            self._check_name(name)
            self._register(self._parameters, name, value)
        elif name in self._parameters and value is not None:
            raise TypeError(f"{type(self).__name__}.{name} is a parameter; to change its values write to it under "
                            f"no_grad(), to replace it assign an nn.Parameter, got {type(value).__name__}")
        elif name in self._modules and value is not None:
            raise TypeError(f"{type(self).__name__}.{name} is a module; to replace it assign a Module, to remove it "
                            f"None, got {type(value).__name__}")
        else:
            self._register(self._buffers if name in self._buffers else {}, name, value)

    def _look_at(self, name, values):
        """TypeError for a list, dict or set that holds strangers. How many are in it is noted, to look again."""
        if self._strangers(values):
            raise TypeError(f"{type(self).__name__}.{name} is a {type(values).__name__} of modules or parameters, "
                            "which would be neither trained nor saved: use nn.ModuleList, or make them attributes "
                            "first (where that is meant: a tuple)")
        self._lists[name] = len(values)

    def _look_again(self):
        """The same at those that have been filled since, or may have been: who walks over the parameters at each step
        shall not walk over a long list of other things, too."""
        for name, count in self._lists.items():
            values = self.__dict__.get(name)
            if isinstance(values, (list, dict, set)) and (len(values) != count or count <= FEW):
                self._look_at(name, values)

    def _strangers(self, values):
        """The modules in a list, dict or set, and in those inside of it, and the parameters in lists, that aren't in
        this module's tree."""
        found, stack, seen = [], [values], set()
        while stack:
            if id(values := stack.pop()) in seen:       # lists may lie in each other
                continue
            seen.add(id(values))
            for value in values.values() if isinstance(values, dict) else values:
                if isinstance(value, (list, dict, set)):
                    stack.append(value)
                elif isinstance(value, Module) or isinstance(values, list) and isinstance(value, Tensor) \
                        and value.leaf is not None:
                    found.append(value)
        known = {id(x) for m in self.modules() for x in (m, *m._parameters.values())} if found else ()
        return [value for value in found if id(value) not in known]

    def __delattr__(self, name):
        for table in (self._parameters, self._buffers, self._modules):
            table.pop(name, None)
        object.__delattr__(self, name)

    def _register(self, table, name, value):
        """Set an attribute that stands in this table and in no other: what was there under the name is gone."""
        if table is self._buffers and isinstance(value, (backend.xp.generic, int, float)):
            value = backend.xp.asarray(value)       # of an array without axes x + 1 is a number, which nobody can load
        elif table is self._buffers and value is not None and not hasattr(value, "dtype"):
            raise TypeError(f"{type(self).__name__}.{name} is a buffer, an array or a tensor; got "
                            f"{type(value).__name__}: take an array, or an attribute of another name")
        for other in (self._parameters, self._buffers, self._modules):
            if other is not table:
                other.pop(name, None)
        table[name] = value
        if name:
            object.__setattr__(self, name, value)

    def _check_name(self, name):
        """ValueError for dots: of two arrays by one name state would have one."""
        if "." in name:
            raise ValueError(f"{type(self).__name__}.{name}: names have no dots, which stand between those of modules")

    def add_module(self, name, module):
        """Register a sub-module. The name "" makes it transparent: its parameters keep their own names.
        TypeError for what is no Module, ValueError for a name with dots."""
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__}.{name} must be a Module, got {type(module).__name__}"
                            + (": give its modules one by one, *layers" if isinstance(module, (list, tuple)) else
                               ": call it in a Module's forward()" if callable(module) else ""))
        self._check_name(name)
        self._register(self._modules, name, module)
        object.__setattr__(module, "_name", name)

    def register_buffer(self, name, value):
        """An array that belongs to the state but is not trained (running statistics, masks). ValueError for the name of
        a module or a method, and for one with dots, which stand between those of modules."""
        if "." in name or name in self._modules or callable(getattr(type(self), name, None)):
            raise ValueError(f"{type(self).__name__}.register_buffer({name!r}): take a name without dots, which no "
                             "module and no method here has")
        self._register(self._buffers, name, value)

    def forward(self, *inputs):
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def __call__(self, *inputs, **options):
        state = backend.random_state        # random numbers are keyed by the path of the module that draws them
        outer = state.path
        state.path = (*outer, self._name) if self._name else outer
        if backend.recording.graph is not None:
            backend.recording.graph.called(self)
        try:
            if self._hooks is None:
                return self.forward(*inputs, **options)
            return self._forward_with_hooks(inputs, options)
        except AttributeError as error:
            if error.obj.__class__ in (list, tuple, int, float) and any(error.obj is given for given in inputs):
                raise TypeError(f"{type(self).__name__} takes arrays and tensors; got a {type(error.obj).__name__}: "
                                "make it one by mt.tensor, or numpy.array") from error
            raise
        finally:
            state.path = outer

    # ------------------------------------------------------------ hooks

    def register_forward_pre_hook(self, hook):
        """Call hook(module, inputs) before each forward. What it returns, a tuple or one value, takes the inputs'
        place; None leaves them. Returns a RemovableHandle: its remove() takes the hook away again."""
        return self._add_hook(0, hook)

    def register_forward_hook(self, hook, always_call=False):
        """Call hook(module, inputs, output) after each forward. What it returns takes the output's place; None leaves
        it. always_call: after a forward or another hook that raises too, with None for the output. Returns a
        RemovableHandle."""
        return self._add_hook(1, hook, always_call)

    def _add_hook(self, which, hook, always_call=False):
        entry = (hook, always_call)     # of its own: the same function may be registered twice

        def put(change):
            hooks = list(self._hooks or ((), ()))
            hooks[which] = change(hooks[which])
            object.__setattr__(self, "_hooks", tuple(hooks) if any(hooks) else None)
        put(lambda entries: (*entries, entry))
        return RemovableHandle(lambda: put(lambda entries: without(entries, entry)))

    def _forward_with_hooks(self, inputs, options):
        before, after = self._hooks
        after = iter(after)     # of which those remain that haven't been called
        try:
            for hook, _ in before:
                changed = hook(self, inputs)
                if changed is not None:
                    inputs = changed if isinstance(changed, tuple) else (changed,)
            output = self.forward(*inputs, **options)
            for hook, _ in after:
                changed = hook(self, inputs, output)
                output = output if changed is None else changed
        except BaseException:
            for hook, always_call in after:
                if always_call:
                    hook(self, inputs, None)
            raise
        return output

    # ------------------------------------------------------------ the tree

    def named_modules(self, prefix="", remove_duplicate=True):
        """(path, module) for this module and all below it, parents first; one that is shared comes once, under its
        first path, or with remove_duplicate=False under each."""
        seen, stack = set(), [(prefix, self, ())]
        while stack:
            path, module, above = stack.pop()
            if id(module) in (seen if remove_duplicate else above):     # above: it may be inside of itself
                continue
            seen.add(id(module))
            yield path, module
            if module._modules:     # most have none
                above = above if remove_duplicate else (*above, id(module))
                stack += [(_join(path, name), child, above) for name, child in reversed(module._modules.items())]

    def modules(self):
        """All modules of the tree, each once."""
        return (module for _, module in self.named_modules())

    def _named(self, table, prefix="", recurse=True, remove_duplicate=True):
        seen = set()
        for path, module in self.named_modules(prefix, remove_duplicate) if recurse else [(prefix, self)]:
            if module._lists:
                module._look_again()
            for name, value in getattr(module, table).items():
                if value is not None and not (remove_duplicate and id(value) in seen):
                    seen.add(id(value))
                    yield _join(path, name), value

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(name, Tensor) of every parameter; one that is shared comes once, under its first name, or with
        remove_duplicate=False under each. Names begin with the prefix, if any, and a dot; recurse=False: this module's
        own. TypeError where a list, dict or set has been filled with modules that are nobody's attributes."""
        return self._named("_parameters", prefix, recurse, remove_duplicate)

    def parameters(self, recurse=True):
        """Every parameter once."""
        return (p for _, p in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix="", recurse=True, remove_duplicate=True):
        """(name, array) of every buffer, as named_parameters."""
        return self._named("_buffers", prefix, recurse, remove_duplicate)

    def buffers(self, recurse=True):
        """Every buffer once."""
        return (b for _, b in self.named_buffers(recurse=recurse))

    def named_children(self):
        """(name, module) of the modules directly below, each once."""
        first = {id(module): name for name, module in reversed(self._modules.items())}
        return ((name, module) for name, module in self._modules.items() if first[id(module)] == name)

    def children(self):
        """The modules directly below, each once."""
        return (module for _, module in self.named_children())

    def apply(self, function):
        """Call function(module) for all modules of the tree, children first. Returns self."""
        for module in list(self.children()):
            module.apply(function)
        function(self)
        return self

    def requires_grad_(self, flag=True):
        """Freeze all parameters (False), or let them be trained. Returns self. Before the model is wrapped."""
        for p in self.parameters():
            p.requires_grad_(flag)
        return self

    # ------------------------------------------------------------ state

    def state_dict(self):
        """{name: NumPy array} of all parameters and buffers, copied to the host; what is shared comes once, under its
        first name (torch: under each)."""
        return {name: backend.xp.array(backend.to(_array(value), "cpu"))
                for name, value in (*self.named_parameters(), *self.named_buffers())}

    def load_state_dict(self, state, strict=True):
        """Write {name: array}, from any device, into parameters and buffers; nothing is written unless everything fits.
        strict=False: what the state hasn't stays as it is, and what the model hasn't is passed over. Returns the names
        of both, (missing, unexpected), as torch.

        What is shared may stand there under any of its names, or under several with the same values. Raises KeyError
        for missing or unknown names, ValueError for another shape or dtype, and for different values of one parameter.
        """
        missing, unexpected = (), ()
        if not strict:
            state, missing, unexpected = self._known(state)
        targets, values = self.fitting(state)
        for target in targets.values():
            if isinstance(target, Absent):
                target.refuse()
        with no_grad():
            for name, target in targets.items():
                with backend.on(backend.device_of(target)):
                    target[...] = backend.to_device_of(values[name], target)
                wrote(target, "load_state_dict")
        return list(missing), list(unexpected)

    def _known(self, state):
        """(the state with this model's values for what it hasn't, without what the model hasn't; the names of both)."""
        own = {name: _array(value) for name, value in (*self.named_parameters(), *self.named_buffers())}
        state = self._by_first_names(state)
        return ({name: state.get(name, value) for name, value in own.items()}, sorted(own.keys() - state.keys()),
                sorted(state.keys() - own.keys()))

    def fitting(self, state, shapes=None):
        """({name: this module's array}, {name: the state's}) if the state fits; load_state_dict's errors if not.
        shapes: {name: shape of the state's} where that isn't this module's."""
        targets = {name: _array(value) for name, value in (*self.named_parameters(), *self.named_buffers())}
        state = state if getattr(state, "keys", tuple)() == targets.keys() else self._by_first_names(state)
        if missing := sorted(set(targets) - set(state)):
            raise KeyError(f"load_state_dict: no values for {missing}; to keep this model's: strict=False")
        if unknown := sorted(set(state) - set(targets)):
            raise KeyError(f"load_state_dict: the model has no {unknown}; it has {sorted(targets)}")
        values = {name: _array(state[name]) for name in targets}
        if odd := [name for name, value in values.items() if not hasattr(value, "dtype")]:
            raise TypeError(f"load_state_dict: {odd[0]} is a {type(values[odd[0]]).__name__}, and must be an array")
        for name, target in targets.items():
            shape = (shapes or {}).get(name, target.shape)
            if values[name].shape != shape or values[name].dtype != target.dtype:
                lost = "; np.savez doesn't keep bfloat16: give values.view(mt.bfloat16)" * (values[name].dtype == "V2")
                raise ValueError(f"load_state_dict: {name} has shape {shape} and dtype {target.dtype}, the values have "
                                 f"shape {values[name].shape} and dtype {values[name].dtype}{lost}")
        return targets, values

    def _by_first_names(self, state):
        """The state with what is shared under its first name alone. TypeError for what has no names."""
        if not hasattr(state, "keys"):
            raise TypeError(f"load_state_dict: takes {{name: array}}, got a {type(state).__name__}; a file is read "
                            "before: .npz by dict(np.load(path)), a checkpoint by checkpoints.load(path, model)")
        first, names, found = {}, {}, dict(state)
        for table in ("_parameters", "_buffers"):
            for name, value in self._named(table, remove_duplicate=False):
                names[name] = first.setdefault(id(value), name)
        for name in [name for name in state if names.get(name, name) != name]:
            other = found.pop(name)
            if not _same_values(found.setdefault(names[name], other), other):
                raise ValueError(f"load_state_dict: {name} and {names[name]} are one and the same in this model, and "
                                 "the state has different values for them")
        return found

    # ------------------------------------------------------------ devices

    def to(self, *targets, device=None, dtype=None):
        """Move all parameters (with their gradients) and buffers to a device, and cast the floating ones to a dtype.
        Returns self.

        Parameters stay the same tensors. As in torch: first move the model, then make its optimizer or wrap it in
        DistributedDataParallel, which lay the parameters into arrays of their own; afterwards RuntimeError.
        """
        for target in (*targets, device, dtype):
            if target is not None:
                self._to(target)
        return self

    def _to(self, target):
        dtype = None if backend.names_device(target) else backend.as_dtype(target)
        if dtype is not None and not backend.is_floating(dtype):
            raise TypeError(f"{type(self).__name__}.to({target!r}): parameters are cast to floating dtypes alone; for "
                            "weights of few bits take compress.quantize_model")

        def moved(array):
            if dtype is None:
                return array.to(target) if isinstance(array, Absent) else backend.to(array, target)
            return array.astype(dtype, copy=False) if backend.is_floating(array.dtype) else array

        for name, p in self.named_parameters():
            if isinstance(p.data, Absent):
                moved(p.data)       # one that can't be refuses before any other is
            if p.leaf is not None and p.leaf.flat is not None and moved(p.data) is not p.data:
                raise RuntimeError(f"{type(self).__name__}.to({target!r}): {name} lives in the flat buffer of an "
                                   "optimizer or of DistributedDataParallel already: call .to() before making those")
        kept = {id(p) for m in self.modules() if m.keeps_dtypes and dtype is not None for p in m._parameters.values()}
        for p in (p for p in self.parameters() if id(p) not in kept):
            p.data, grad = moved(p.data), p.grad
            if p.leaf is not None:      # of one that is frozen as well: it may want a gradient again
                p.leaf.dtype = p.dtype
            if grad is not None:
                p.grad = moved(grad.data)
        for module in self.modules():
            for name, value in () if module.keeps_dtypes and dtype is not None else module._buffers.items():
                if isinstance(value, Tensor):
                    value.data = moved(value.data)
                elif value is not None:
                    module._register(module._buffers, name, moved(value))

    def cpu(self):
        """to("cpu")."""
        return self.to("cpu")

    def cuda(self, device="cuda"):
        """to("cuda"), the current GPU."""
        return self.to(device)

    def train(self, mode=True):
        """Set training mode (dropout on) for the whole tree. Returns self."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self):
        """Set evaluation mode for the whole tree. Returns self."""
        return self.train(False)

    def zero_grad(self):
        """Forget all gradients."""
        for p in self.parameters():
            p.grad = None

    def extra_repr(self):
        """What the printed line says between the brackets."""
        return ""

    def __repr__(self):
        head = f"{type(self).__name__}({self.extra_repr()}"
        lines = [f"  ({name}): " + repr(module).replace("\n", "\n  ") for name, module in self._modules.items()]
        return head + ("\n" + "\n".join(lines) + "\n)" if lines else ")")


def _join(prefix, name):
    return f"{prefix}.{name}" if prefix and name else prefix or name


def _same_values(a, b):
    """Whether two arrays, on any devices, are equal to the bit."""
    a, b = (backend.to(_array(x), "cpu") for x in (a, b))
    return a is b or a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


def _array(value):
    return value.data if isinstance(value, Tensor) else value


tell(Module, NAMES["Module"])
