"""Sharded: a value that lies on a mesh of ranks, as ops see it; and Values, as raw code sees it."""

import math
from copy import deepcopy

from ...autodiff.methods import METHODS
from ...autodiff.primitive import OPS, TRACED, Traced, bind, lower
from ...autodiff.reverse import check_cotangent
from ...autodiff.tensor import Tensor
from ...autodiff.tree import flatten
from ...backend import device_of, is_array, module_of, xp
from .layouts import WHOLE, Layout
from .notes import called, moved, noted, opened
from .resharding import on_tape, reshard


class Sharded(Traced):
    """A value that lies on a mesh of ranks.

    local    this rank's part: a Tensor, or what takes its place in a functional transform
    shape    of the whole
    layout   how it lies there, a Layout
    comms    {axis of the mesh: its Communicator}
    """

    __slots__ = ("local", "shape", "layout", "comms", "__weakref__")
    level = math.inf        # above all transforms: the parts are what they differentiate

    def __init__(self, local, shape, layout, comms):
        self.local, self.shape, self.layout, self.comms = local, tuple(shape), layout, comms

    dtype = property(lambda self: self.local.dtype)
    device = property(lambda self: device_of(lower(self.local)))
    size = property(lambda self: math.prod(self.shape))
    sizes = property(lambda self: {axis: comm.size for axis, comm in self.comms.items()})
    ranks = property(lambda self: {axis: (comm.rank, comm.size) for axis, comm in self.comms.items()})

    def lowered(self):
        return Values(self)

    def __deepcopy__(self, memo):
        return Sharded(deepcopy(self.local, memo), self.shape, self.layout, self.comms)

    def __reduce__(self):
        raise TypeError("a Sharded can't be pickled, for its other parts are on other ranks: pickle .numpy(), or of a "
                        "model annotate.full_state_dict(model)")

    def __getattr__(self, name):
        part = f": that of this rank's part is x.local.{name}" if not name.startswith("_") and hasattr(
            self.local, name) else ""
        raise AttributeError(f"a Sharded has no {name}{part}", name=name, obj=self)

    def __repr__(self):
        return f"Sharded({self.layout}, shape={self.shape}, dtype={self.dtype})"

    @staticmethod
    def process(primitive, args, params, level):
        from .running import apply
        out = apply(primitive, args, params)
        called(primitive, args, params, out)
        return out

    # ------------------------------------------------------------ layouts

    def redistribute(self, layout):
        """The same value in another Layout. Differentiable; collective. ValueError where it can't lie so."""
        if not isinstance(layout, Layout):
            raise TypeError(f"redistribute: {layout!r} is no Layout; annotate.mesh_split(x, mesh, …) takes the axes "
                            "per dimension")
        layout.check("redistribute", self.shape, self.sizes)
        if cut := [axis for axis in layout.pending if axis in self.layout.shards]:
            raise ValueError(f"redistribute: {self.layout} can't become {layout}: what is cut over {', '.join(cut)} is "
                             "no sum; make it whole first")
        moved(self)
        with noted("redistribute", [self]) as note:
            target = {axis: layout[axis] for axis in self.comms}
            local = reshard(self.local, self.shape, self.layout, target, self.comms)
            note.results = [layout]
        return Sharded(local, self.shape, layout, self.comms)

    def full(self):
        """The whole value on every rank, as one: a Tensor. Differentiable; collective."""
        return self.redistribute(Layout(len(self.shape))).local

    def settle(self, axes=None):
        """The value with the sums made that are pending (over these axes): once for all who use it. Collective."""
        axes = [axis for axis in self.layout.pending if axes is None or axis in axes]
        if not axes:
            return self
        layout = Layout(len(self.shape), self.layout.placements | dict.fromkeys(axes, WHOLE))
        local = reshard(self.local, self.shape, self.layout, dict.fromkeys(axes, WHOLE), self.comms)
        done = Sharded(local, self.shape, layout, self.comms)
        if done.requires_grad == self.requires_grad:    # not so under no_grad: others still want its gradient
            self.local, self.layout = local, layout
        return done

    # ------------------------------------------------------------ as a Tensor

    @property
    def requires_grad(self):
        """Whether a derivative flows to it: its part is on the tape, or a dual number."""
        return on_tape(self.local)

    def requires_grad_(self, flag=True):
        """Make this rank's part a leaf that wants a gradient. Returns self. ValueError where it is a summand."""
        if self.layout.pending:
            raise ValueError(f"requires_grad_ of a value that lies {self.layout}: its sum would take the leaf's place; "
                             "settle() it first")
        self.local.requires_grad_(flag)
        return self

    @property
    def grad(self):
        """The gradient of a leaf, in its layout, or None."""
        grad = self.local.grad
        return None if grad is None else Sharded(grad, self.shape, self.layout, self.comms)

    def __setitem__(self, index, value):
        raise TypeError("in-place assignment to a Sharded: use x = x.at[index].set(value)")

    def detach(self):
        """The same value, off the tape."""
        return Sharded(Tensor(lower(self.local)), self.shape, self.layout, self.comms)

    def backward(self, gradient=None, **options):
        """Add the gradients of all leaves below, as Tensor.backward does. gradient: the whole one, or a Sharded."""
        if gradient is None and self.size != 1:
            raise RuntimeError(f"backward() of a value of shape {self.shape}: only one element has a gradient of its "
                               "own; pass gradient=, or take .sum() first")
        done = self.settle()
        if gradient is not None:
            given = as_sharded(gradient)
            check_cotangent(given, self.shape, self.dtype)
            comms = merged("backward", [done, given])
            gradient = reshard(given.local, given.shape, given.layout, {a: done.layout[a] for a in comms}, comms)
        done.local.backward(gradient, **options)

    def numpy(self):
        """The whole value as a read-only NumPy array, on every rank. Collective."""
        return self.detach().full().numpy()

    def item(self):
        """The one element as a Python number. Collective."""
        return self.detach().full().item()

    def tolist(self):
        """The whole value as nested lists. Collective."""
        return self.detach().full().tolist()

    def _number(self):
        return self.numpy()


def as_sharded(x):
    """Anything as a Sharded: what was none is taken to be the same on all ranks."""
    if x.__class__ is Sharded:
        return x
    if x.__class__ is Values:
        return x.opened()
    shape = tuple(getattr(x, "shape", ()))
    return Sharded(x, shape, Layout(len(shape)), {})


def merged(name, values):
    """{axis: Communicator} of all values; ValueError where they lie on different meshes."""
    comms = {}
    for value in values:
        for axis, comm in value.comms.items():
            if comms.setdefault(axis, comm) is not comm:
                raise ValueError(f"{name}: two of its values lie on axes {axis!r} of different meshes: annotate all "
                                 "with one mesh")
    for a, b in ((a, b) for a in comms for b in comms if a < b):
        if common := {*comms[a].world_ranks} & {*comms[b].world_ranks} - {comms[a].world_ranks[comms[a].rank]}:
            raise ValueError(f"{name}: two of its values lie on axes {a!r} and {b!r} of different meshes, for in both "
                             f"this rank is in a row with {sorted(common)}: annotate all with one mesh")
    return comms


# ---------------------------------------------------------------- raw values

class Values:
    """What `lower` gives of a Sharded: the array underneath, of which nobody has all. NumPy's functions and an array's
    methods work on it as ops do; questions for an element, and functions that no op stands for, bring it together."""

    __slots__ = ("sharded",)
    shape = property(lambda self: self.sharded.shape)
    dtype = property(lambda self: self.sharded.dtype)
    size = property(lambda self: self.sharded.size)
    ndim = property(lambda self: len(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    stands_on = property(lambda self: self.sharded.device)
    here = property(lambda self: lower(self.sharded.settle().local))    # this rank's part

    def __init__(self, sharded):
        self.sharded = sharded

    def opened(self):
        """A Sharded again, off the tape."""
        seen = self.sharded.settle().detach()
        opened(self.sharded, seen)
        return seen

    def anywhere(self, flag):
        """Whether a bool that the ranks have worked out from their parts, on the host, is true on one. Collective."""
        flag = xp.array(flag, xp.uint8)
        for axis in self.sharded.layout.shards:
            self.sharded.comms[axis].all_reduce(flag, "max")
        return bool(flag)

    def whole(self):
        """All of it, a raw array. Collective."""
        return lower(self.sharded.detach().full())

    def __len__(self):
        return self.shape[0]

    def __array__(self, dtype=None, copy=None):
        if self.sharded.layout.placements:
            raise TypeError(f"NumPy was handed a part, {self.sharded.layout} of shape {self.shape}, of what it would "
                            "take for the whole: annotate the other operand, too, with replicate(x, mesh), or use "
                            "x.full()")
        return xp.asarray(self.here, dtype)

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        if method != "__call__" or options or ufunc not in BY_UFUNC:
            raise TypeError(f"NumPy's {ufunc.__name__}, as {method}, of a value that lies {self.sharded.layout}: use "
                            "the op of minitorch_dist, or x.full()")
        if beside_arrays(inputs):
            return ufunc(*brought_together(inputs))
        return raw(bind(BY_UFUNC[ufunc], as_ops_see(inputs)))

    def __array_function__(self, function, types, args, options):
        if function is xp.where and len(args) == 3 and not beside_arrays(args):
            return raw(bind(OPS["where"], as_ops_see(args)))
        if function.__name__ in BY_NAME:
            return raw(METHODS[function.__name__](*as_ops_see(args), **options))
        args, options = brought_together((args, options))
        return getattr(module_of(self.here), function.__name__)(*args, **options)


def beside_arrays(args):
    """Whether some arguments are arrays: a plain tensor's op has met Values, and can use whole ones only."""
    return any(is_array(a) and a.ndim for a in args)


def brought_together(tree):
    """Values in a nesting as whole arrays. Collective."""
    leaves, rebuild = flatten(tree)
    return rebuild([leaf.whole() if leaf.__class__ is Values else leaf for leaf in leaves])


BY_UFUNC = {op.forward: op for op in OPS.values() if isinstance(getattr(op, "forward", None), xp.ufunc)} | {
    xp.matmul: OPS["matmul"], xp.power: OPS["power"]}
BY_NAME = ("sum", "mean", "max", "min", "argmax", "argmin", "reshape", "transpose", "swapaxes", "squeeze", "cumsum",
           "prod", "any", "all", "clip")


def as_ops_see(args):
    """Values as Sharded."""
    return [as_sharded(a) if a.__class__ is Values else a for a in args]


def raw(out):
    """A Sharded as Values."""
    return Values(out) if out.__class__ is Sharded else out


def _method(function):
    def method(*args, **options):
        out = function(*as_ops_see(args), **options)
        return out if any(a.__class__ in TRACED for a in args) else raw(out)
    return method


def _number(convert):
    return lambda self: getattr(self.whole(), convert)()


for _name, _function in METHODS.items():
    if _name != "__hash__":
        setattr(Values, _name, _method(_function) if callable(_function) else _function)
for _name in ("__bool__", "__float__", "__int__", "__index__", "item", "tolist"):
    setattr(Values, _name, _number(_name))
Values.__hash__ = object.__hash__
Values.astype = lambda self, dtype, copy=True: raw(_cast(self.opened(), xp.dtype(dtype)))


def _cast(x, dtype):
    return x if x.dtype == dtype else bind(OPS["astype"], (x,), (x.dtype, dtype))
