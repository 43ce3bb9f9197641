"""Tensor: an array, the tape's node that made it, and a gradient."""

import os
import traceback
import weakref

from .. import backend
from ..backend import module_of, recording, to, to_device_of, xp
from ..ledger import keep
from .hooks import RemovableHandle, without
from .primitive import GENERAL, TRACED, Traced, aux_of, bind, lower, run_forward, state
from .saved import Packed
from .traced import dtype_of_data, shape_of_data
from .writes import tick, wrote


class Node:
    """One recorded op: what was applied, to whom, and what its rules will want to know.

    `saved` is laid out as primitive.layout: (ans, inputs …, params …, aux), None where no rule asks; or Packed, or
    FREED. `where` is the user's line, noted under detect_anomaly only; `grad_hooks` see the gradient pass.
    """

    __slots__ = ("primitive", "parents", "saved", "shape", "dtype", "date", "where", "grad_hooks", "__weakref__")

    def __init__(self, primitive, parents, saved, shape, dtype):
        self.primitive, self.parents, self.saved = primitive, parents, saved
        self.shape, self.dtype, self.date = shape, dtype, tick()


class Leaf:
    """The tape's end: a tensor that wants a gradient.

    It holds its tensor weakly, so that tensor → leaf is no cycle. `grad_view`,
    where set, is the array that the gradient must live in (a slice of a flat
    buffer), and `flat` the buffer that it is a slice of. `over`: where it is this
    rank's share of a parameter, the Communicator of the ranks with the others;
    `part_of`: the shape of that parameter; `part`: which part, where tensor
    parallelism has cut it; `piece_of`: of a piece that fully_shard has cut, and
    of its copies, which no Unit knows of: the name; `tied`: of one that several
    stages of a pipeline have: parallel.tied's Tie; `unsummed`: the Communicator of
    ranks of which each keeps its own gradient, for an optimizer to add up.
    """

    __slots__ = ("tensor", "shape", "dtype", "hooks", "grad_hooks", "grad_view", "flat", "over", "part_of",
                 "part", "piece_of", "tied", "unsummed", "__weakref__")
    primitive, parents = None, ()

    def __init__(self, shape, dtype, tensor=None):
        self.shape, self.dtype = shape, dtype
        self.tensor = weakref.ref(tensor) if tensor is not None else None
        self.hooks = self.grad_view = self.flat = self.over = self.part_of = self.part = None
        self.piece_of = self.tied = self.unsummed = None


class Tensor(Traced):
    """An array that can be differentiated.

    data   the array (numpy or cupy); of a leaf it may be written under no_grad, never rebound. What is written through
           it between forward and backward (`p.data *= 3`) no check sees, for the arrays tell nobody; `p *= 3` is seen
    node   None where nothing is recorded, a Leaf, or the Node of the op that made it

    Made by `tensor` (copies), `from_numpy` (aliases) or by ops. `y.backward()`
    adds dy/dx to `x.grad` of every leaf x.
    """

    __slots__ = ("data", "node", "_grad", "_frozen", "__weakref__")

    def __init__(self, data, node=None):
        self.data = data
        self.node = node

    shape, dtype = property(shape_of_data), property(dtype_of_data)

    def lowered(self):
        return self.data

    # ------------------------------------------------------------ gradients

    @property
    def requires_grad(self):
        """Whether backward reaches this tensor."""
        return self.node is not None

    @requires_grad.setter
    def requires_grad(self, flag):
        self.requires_grad_(flag)

    @property
    def is_leaf(self):
        """True for tensors that no recorded op made."""
        return self.node is None or self.node.primitive is None

    def requires_grad_(self, flag=True):
        """Make this leaf want a gradient (or stop). Returns self. Only floating dtypes can."""
        if not self.is_leaf:
            raise RuntimeError(f"requires_grad_ on the result of {self.node.primitive.name!r}: use detach() first")
        if flag and self.node is None and self.leaf is not None:
            self.node = self.leaf       # with its hooks, and its place in a flat buffer
        elif flag and self.node is None:
            if not backend.is_floating(self.dtype):
                raise TypeError(f"a {self.dtype} tensor can't get a gradient: only floating dtypes can; "
                                "cast it with .astype(np.float32)")
            self.node = Leaf(self.shape, self.dtype, self)
        elif not flag and self.node is not None:
            self._frozen, self.node = self.node, None
        return self

    @property
    def leaf(self):
        """The Leaf of a tensor that wants a gradient, or has wanted one before it was frozen; None for all others."""
        if self.node is not None:
            return self.node if self.node.primitive is None else None
        try:
            return self._frozen
        except AttributeError:      # the slot is filled by freezing
            return None

    @property
    def grad(self):
        """The accumulated gradient, a Tensor of the same shape and dtype, or None. Who still has it when it is
        forgotten keeps its numbers; on a GPU, and of a view as numpy() or detach() give, only a copy does."""
        if recording.graph is not None:
            recording.graph.reached(self)
        try:
            return self._grad
        except AttributeError:      # the slot is filled on first use: interior tensors never pay for it
            return None

    @grad.setter
    def grad(self, value):
        if recording.graph is not None:
            recording.graph.reached(self, forgets=True)
        if value is not None:
            if not hasattr(value, "dtype"):
                raise TypeError(f"grad is a tensor or an array, got a {type(value).__name__}: take mt.tensor(values)")
            value = value if isinstance(value, Tensor) else Tensor(value)
            if value.shape != self.shape or value.dtype != self.dtype or value.device != self.device:
                raise ValueError(f"grad of shape {value.shape} and dtype {value.dtype} on {value.device} for a tensor "
                                 f"of shape {self.shape} and dtype {self.dtype} on {self.device}: they must be equal")
        elif (leaf := self.leaf) is not None and leaf.flat is not None:
            leaf.flat.forgotten.add(id(leaf))
        before, self._grad = getattr(self, "_grad", None), value
        if before is not None and before is not value:
            held = weakref.ref(before)
            del before
            if (kept := held()) is not None:    # by somebody else
                self._leave(kept)

    def _leave(self, grad):
        """Copy a gradient that somebody keeps out of the flat buffer, where the next one is written. (On a GPU that
        may be a CUDA graph, which wants it there.)"""
        leaf = self.leaf
        if leaf is not None and leaf.flat is not None and backend.on_host(grad.data) and xp.may_share_memory(
                grad.data, leaf.flat.grads):
            grad.data = grad.data.copy()

    def backward(self, gradient=None, retain_graph=False, create_graph=False):
        """Add d(self)/d(leaf) to `.grad` of every leaf below.

        gradient      cotangent of self's shape and dtype; may be left out for one-element tensors (1)
        retain_graph  keep what backward needs, for a second call
        create_graph  make the gradients differentiable themselves (implies retain_graph)
        """
        from .reverse import backward_from
        backward_from(self, gradient, retain_graph or create_graph, create_graph)

    def register_post_accumulate_grad_hook(self, hook):
        """Call hook(self) whenever a backward pass has added its last contribution to self.grad.

        This is how buckets learn that a gradient is ready. Returns a RemovableHandle.
        """
        if not self.is_leaf or self.node is None:
            raise RuntimeError("only a leaf that requires grad can have a post-accumulate-grad hook")
        self.node.hooks = (self.node.hooks or ()) + (hook,)

        def take_away(leaf=self.node):
            leaf.hooks = without(leaf.hooks, hook)
        return RemovableHandle(take_away)

    def register_hook(self, hook):
        """Call hook(gradient) when the gradient of this tensor, leaf or not, is complete in a backward pass. What it
        returns, a tensor of the same shape and dtype, takes the gradient's place; None leaves it.
        Returns a RemovableHandle."""
        from .reverse import add_hook
        if self.node is None:
            raise RuntimeError("register_hook: no gradient reaches this tensor")
        return add_hook(self.node, hook)

    def retain_grad(self):
        """Let .grad of this interior tensor be set by backward, as for a leaf. Returns self."""
        from .reverse import own
        target = weakref.ref(self)

        def keep(gradient):
            if (tensor := target()) is not None:
                tensor._grad = own(gradient if tensor.grad is None else tensor.grad + gradient)
        if not self.is_leaf:
            self.register_hook(keep)
        return self

    def detach(self):
        """The same array, off the tape, in a transform off all levels. Writes to one are seen in the other."""
        return Tensor(lower(self.data))

    # ------------------------------------------------------------ values

    def numpy(self):
        """A read-only view of the values as a NumPy array. TypeError for a tensor on a GPU."""
        self._asked()
        if isinstance(self.data, backend.Placeholder):      # of a graph that is finished
            return self.data.tolist()
        if not backend.on_host(self.data):
            raise TypeError(f"a tensor on {self.device} is no NumPy array: bring it to the host first, with "
                            ".cpu().numpy()")
        view = xp.asarray(self.data).view()
        view.flags.writeable = False
        return view

    def __setitem__(self, index, value):
        """Write in place; only outside recording. While recording, x.at[i].set(v) gives a new tensor."""
        if state.off < 0 and (self.node is not None or getattr(value, "node", None) is not None):
            raise RuntimeError("in-place assignment to a tensor that is being differentiated: "
                               "use x = x.at[index].set(value), or write under no_grad()")
        if hasattr(value, "tangent"):
            raise RuntimeError("in-place assignment of a value with a tangent (jvp, linearize), which would be lost: "
                               "use x = x.at[index].set(value)")
        if not hasattr(self.data, "__setitem__"):       # as that of x.sum(), and of x[0] of one axis
            raise TypeError(f"{type(self.data).__name__} can't be written in place: it is one number, in no array; "
                            "write into the array that it was taken from, or into a copy, mt.tensor(x)")
        if backend.DEVICE_ARRAYS:
            from .ops.indexing import located
            index = located(index, self)
        elif index.__class__ is not tuple:
            index = lower(index)
        elif not TRACED.isdisjoint(map(type, index)):
            index = tuple(map(lower, index))
        self.data[index] = to_device_of(lower(value), self.data)
        wrote(self.data, "in-place assignment")

    def __repr__(self):
        array = xp.asarray(to(self.data, "cpu"))
        short = backend.is_bfloat16(self.dtype)     # (NumPy would print 1 for its 1.0)
        values = xp.array2string(array.astype(xp.float32) if short else array, precision=4 if short else None,
                                 separator=", ", prefix="tensor(", threshold=100)
        kind = "" if self.dtype in (xp.float32, xp.int64, xp.bool_) else f", dtype={self.dtype}"
        kind += "" if self.device == "cpu" else f", device={self.device!r}"
        made = "" if self.node is None else ", requires_grad" if self.is_leaf else f", from {self.node.primitive.name}"
        return f"tensor({values}{kind}{made})"

    def __deepcopy__(self, memo):
        if not self.is_leaf:
            raise RuntimeError("only leaf tensors can be deep-copied: use detach() first")
        with backend.on(self.device):       # a copy by CuPy is made on the current GPU
            twin = Tensor(self.data.copy())
        if self.leaf is not None:
            twin.requires_grad_()
            for name in "over", "part_of", "part", "piece_of", "tied":
                setattr(twin.leaf, name, getattr(self.leaf, name))
            twin.requires_grad_(self.requires_grad)
        if self.grad is not None:
            with backend.on(self.grad.device):
                twin.grad = Tensor(self.grad.data.copy())
        memo[id(self)] = twin
        return twin

    def __reduce__(self):
        leaf = self.leaf
        if leaf is not None and leaf.over is not None:
            raise TypeError(f"this parameter of shape {self.shape} is a share of one of shape {leaf.part_of}, whose "
                            "others are on other ranks: it can't be pickled, or copied by copy.copy. Take detach(), "
                            "its values alone, or copy.deepcopy")
        return _restore, (xp.array(to(self.data, "cpu")), self.requires_grad and self.is_leaf, self.device,
                          leaf and (leaf.part_of, leaf.piece_of, leaf.tied))

    @staticmethod
    def process(primitive, args, params, level):
        return record(primitive, args, params, level)


class Lifted(Tensor):
    """A tape value of a functional transform; its data may be any value of a lower level."""

    __slots__ = ("level",)

    def __init__(self, data, node, level):
        self.data, self.node, self.level = data, node, level

    numpy = Traced.numpy

    def __repr__(self):
        return f"Lifted({self.data!r}, level={self.level})"


def _restore(array, requires_grad, device="cpu", of_leaf=None):
    made = Tensor(to(array, device))
    if of_leaf is not None:     # of a frozen one too
        leaf = made.requires_grad_().leaf
        leaf.part_of, leaf.piece_of, leaf.tied = of_leaf
    return made.requires_grad_(requires_grad)


def tensor(values, dtype=None, requires_grad=False, device=None):
    """A Tensor holding a COPY of `values` (nested lists, numbers, an array, a Tensor).

    dtype   given, or the array's own; Python floats become float32, Python ints int64 (torch's defaults)
    device  where it shall live ("cpu", "cuda", "cuda:1"); default: where `values` are

    TypeError for a value inside a transform, whose derivative would be lost.
    """
    if values.__class__ in TRACED:
        values._may_leave("tensor(), a copy without a tape")
    values = lower(values)
    if isinstance(values, (list, tuple)) and any(v.__class__ in TRACED for v in values):
        raise TypeError("tensor: a list of Tensors, whose derivatives a copy would lose: mt.stack(values) keeps them; "
                        "for the numbers alone take [x.tolist() for x in values]")
    if dtype is None and not hasattr(values, "dtype"):
        dtype = {"f": xp.float32, "i": xp.int64}.get(xp.asarray(values).dtype.kind)
    dtype = dtype if dtype is None else backend.as_dtype(dtype)
    if backend.on_host(values):
        array = xp.array(values, dtype=dtype)
    else:
        with backend.on(backend.device_of(values)):     # a copy by CuPy is made on the current GPU
            array = module_of(values).array(values, dtype=dtype)
    if array.dtype.kind not in "iub" and not backend.is_floating(array.dtype):
        raise TypeError(f"tensor of dtype {array.dtype}: only floating, integer and bool arrays can be tensors")
    if device is not None:
        array = to(array, device)
    return Tensor(array).requires_grad_() if requires_grad else Tensor(array)


def from_numpy(array):
    """A Tensor that SHARES memory with `array`. Writes made through NumPy are not seen by the
    tape's staleness check: write through the Tensor, or use `tensor` for a copy."""
    if not isinstance(array, xp.ndarray):
        raise TypeError(f"from_numpy takes a NumPy array, got {type(array).__name__}")
    return Tensor(array)


# ---------------------------------------------------------------- recording

def wrap(out, node, level):
    """`out` as a tape value of `level`."""
    return Tensor(out, node) if level == 0 else Lifted(out, node, level)


def record(primitive, args, params, level):
    """Apply a primitive to tape values of `level` and write it on the tape: the general path."""
    capture = state.capture
    if capture is not None and (definition := capture.definition(primitive, args, params)):
        return definition(*args, *params)
    raw, parents = [], []
    for a in args:
        here = a.__class__ in TRACED and a.level == level
        value = a.data if here else a
        raw.append(value if capture is None else capture.symbol(value, a))
        parents.append(a.node if here else None)
    aux = None
    if level and any(r.__class__ in TRACED for r in raw):
        if primitive.definition:
            return primitive.definition(*args, *params)
        out = bind(primitive, raw, params)
        if primitive.aux:
            aux = aux_of(primitive, raw, params)
    else:
        out = run_forward(primitive, raw, params)
        if primitive.aux:
            out, aux = out
    if level and not any(primitive.differentiable):
        return out                      # piecewise constant: it belongs to the level below
    return attach(primitive, parents, raw, params, out, aux, level)


def attach(primitive, parents, raw, params, out, aux, level):
    """An op's output as a tape value of `level`, with a node where a gradient can flow."""
    wanted = ()     # per input: whether a gradient flows to it
    if state.off < level:
        parents = [p if d else None for p, d in zip(parents, primitive.differentiable, strict=True)]
        wanted = tuple([p is not None for p in parents])
    if True not in wanted:
        return tuple(wrap(o, None, level) for o in out) if primitive.multi else wrap(out, None, level)
    everything = (out, *raw, *params, aux) if primitive.aux else (out, *raw, *params)
    saved = tuple([v if k else None for v, k in zip(everything, primitive.keeps(wanted), strict=True)])
    general = state.special is GENERAL
    if general and state.pack is not None:
        saved = Packed(saved, *state.pack)
    shape, dtype = (None, None) if primitive.multi else (out.shape, out.dtype)
    node = Node(primitive, parents, saved, shape, dtype)
    if general and state.counting:
        for p, r in zip(parents, raw, strict=True):
            if isinstance(p, Leaf):
                keep(lower(r), "parameter")
        count_kept(saved)
    if general and state.anomaly:
        node.where = check_forward(primitive, raw, out)
    return outputs(node, out, level) if primitive.multi else wrap(out, node, level)


def count_kept(values):
    """Tell the ledger of all arrays among what a node has saved, through tuples and levels."""
    stack = [values]
    while stack:
        value = lower(stack.pop())
        if isinstance(value, (tuple, list)):
            stack.extend(value)
        elif isinstance(value, Packed):
            stack.extend(part for _, part in value.parts)
        else:
            keep(value, "activation")


def check_forward(primitive, raw, out, several=False):
    """Under detect_anomaly: raise if finite inputs have given inf or NaN; returns the user's line."""
    where = user_line()
    values = [lower(o) for o in (out if several or primitive.multi else (out,))]
    if not all(_finite(v) for v in values) and all(_finite(lower(r)) for r in raw):
        raise FloatingPointError(f"{primitive.name!r} made {_bad(values)} out of finite inputs, at {where}")
    return where


def _finite(value):
    return not hasattr(value, "dtype") or not backend.is_floating(value.dtype) or bool(xp.isfinite(value).all())


def _bad(values):
    return "NaN" if any(xp.isnan(v).any() for v in values if not _finite(v)) else "inf"


def user_line():
    """'file:line: source' of the innermost frame outside of this package."""
    package = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith(package):
            return f"{frame.filename}:{frame.lineno}: {frame.line}"
    return "unknown"


def outputs(node, values, level):
    """The tape values of a node with several outputs: each one picks its place out of the node."""
    from .ops.shape import PICK
    return tuple(wrap(v, Node(PICK, (node,), (None, None, k, len(values)), v.shape, v.dtype), level)
                 for k, v in enumerate(values))
