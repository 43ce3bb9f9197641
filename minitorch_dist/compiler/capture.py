"""Capture: a function is run on Symbols, which have a shape and a dtype but no elements, and what it asks for becomes a
graph. The tape works on Symbols as on arrays, so that backward is captured by the rules that run it."""

import random
import zlib
from contextlib import contextmanager, nullcontext
from functools import partial

import numpy as np

from .. import backend, kernels
from ..autodiff import ops
from ..autodiff.methods import METHODS
from ..autodiff.ops.shape import Bundle
from ..autodiff.primitive import OPS, TRACED, mode
from ..autodiff.tensor import Tensor, user_line
from ..backend import DEVICE_ARRAYS, Placeholder, device_of, is_array, module_on
from ..nn.absent import comes_and_goes
from ..surroundings import Place, of_tensor, put_back, surroundings, unchanged
from .expressions import TYPES
from .ir import Call, Node, Value, values_in
from .rules import DEFINITIONS, VIEWS, WHOLE, WHOLE_WHERE, results_of

WATCHED = 1 << 20       # bytes of an array from elsewhere that is looked at again when the function has ended
CHANGES = "the function changes what it reads, which would be done once only"
PLAIN_ARRAYS = (np.ndarray, np.memmap)      # others have operators of their own


class Break(RuntimeError):
    """What a compiled function does can't be part of a graph: the function runs uncompiled. The Capture takes note, for
    the function may catch this."""

    def __init__(self, reason):
        super().__init__(reason)
        graph = backend.recording.graph
        graph = getattr(graph, "capture", graph)
        if isinstance(graph, Capture) and graph.broke is None:
            graph.broke = self


class Symbol(Placeholder):
    """A Value of the graph as the function sees it: an array without elements."""

    __slots__ = ("value",)
    shape = property(lambda self: self.value.shape)
    dtype = property(lambda self: self.value.dtype)
    size = property(lambda self: self.value.size)
    ndim = property(lambda self: len(self.shape))
    itemsize = property(lambda self: self.dtype.itemsize)
    nbytes = property(lambda self: self.size * self.dtype.itemsize)
    T = property(lambda self: self.transpose())
    module = property(lambda self: OnDevice(self.place))
    base = None

    def __init__(self, value, place):
        self.value, self.place = value, place

    def __len__(self):
        if not self.shape:
            raise TypeError("len() of a 0-d array")
        return self.shape[0]

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        if method != "__call__" or out is not None or options:
            raise Break(f"NumPy's {ufunc.__name__} with out=, or as {method}, is called on a value of the graph")
        return current().apply(BY_UFUNC.get(ufunc) or Call(ufunc.__name__, ufunc), inputs, ())

    def __array_function__(self, function, types, args, options):
        if function is np.result_type:
            return backend.result_type(*(a.dtype if isinstance(a, Symbol) else a for a in args))
        here = module_on(self.place)
        if function in MAKERS:      # with like=
            return getattr(here, function.__name__)(*args, **options)
        if function in LIKE and options.keys() <= {"dtype"}:
            return getattr(here, LIKE[function])(args[0].shape, options.get("dtype") or args[0].dtype)
        if function is np.where and len(args) == 3 and not options:
            return ops.where(*args)
        if function.__name__ in BY_NAME:
            return BY_NAME[function.__name__](*args, **options)
        if function in SHAPED_BY_SHAPES:
            names = tuple(options)
            return current().apply(Call(function.__name__, lambda *a: function(
                *a[:len(a) - len(names)], **dict(zip(names, a[len(a) - len(names):], strict=True)))),
                (*args, *options.values()), ())
        raise Break(f"NumPy's {function.__name__} is called on a value of the graph")

    def astype(self, dtype, copy=True):
        """As an array's."""
        dtype = np.dtype(dtype)
        return self if dtype == self.dtype else current().apply(OPS["astype"], (self, self.dtype, dtype), ())

    def view(self, dtype):
        """The same bytes as another dtype."""
        return current().apply(Call("view", lambda x, new: x.view(new)), (self, np.dtype(dtype)), ())

    def copy(self):
        """Itself: nothing writes into it."""
        return self

    def _refuse(self, *args, **options):
        current()
        raise Break(f"the function asks for the value of something that is computed in the graph, at {user_line()}")

    def _refuse_write(self, *args):
        raise Break(f"the function writes into an array, at {user_line()}")


def _checked(function):
    def method(*args, **options):
        current()
        with nullcontext() if any(a.__class__ in TRACED for a in args) else mode(autocast=None):    # as NumPy's own
            return function(*args, **options)
    return method


for _name, _function in METHODS.items():
    if _name not in ("astype", "view", "cpu", "cuda", "__hash__"):
        setattr(Symbol, _name, _checked(_function) if callable(_function) else _function)
for _name in ("__bool__", "__float__", "__int__", "__index__", "__complex__", "__array__", "item", "tolist", "tobytes"):
    setattr(Symbol, _name, Symbol._refuse)
for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "mod", "floordiv"):
    setattr(Symbol, f"__i{_name}__", Symbol._refuse_write)      # other names, and views, would not see it
Symbol.__setitem__ = Symbol._refuse_write
Symbol.__hash__ = object.__hash__

BY_UFUNC = {op.forward: op for op in OPS.values() if isinstance(getattr(op, "forward", None), np.ufunc)} | {
    np.matmul: OPS["matmul"], np.power: OPS["power"]}
BY_NAME = {name: getattr(Symbol, name) for name in (
    "sum", "mean", "max", "min", "argmax", "argmin", "reshape", "transpose", "swapaxes", "squeeze", "cumsum", "prod",
    "any", "all", "clip")} | {"broadcast_to": ops.broadcast_to}
LIKE = {np.zeros_like: "zeros", np.ones_like: "ones"}
MAKERS = {np.arange, np.zeros, np.ones, np.empty, np.full, np.tri, np.eye}
# What these give has a shape that depends on the shapes of what they are given, not on values.
SHAPED_BY_SHAPES = {np.argsort, np.sort, np.take_along_axis, np.flip, np.cumprod, np.tril, np.triu, np.roll,
                    np.concatenate, np.stack, np.expand_dims, np.moveaxis, np.split}


class OnDevice:
    """NumPy, whose functions carry themselves to Symbols; but arrays from nothing are made on the graph's device."""

    def __init__(self, device):
        self.device = device

    def __getattr__(self, name):
        return getattr(module_on(self.device) if getattr(np, name) in MAKERS else np, name)


def current():
    """The Capture under way."""
    capture = backend.recording.graph
    if not isinstance(capture, Capture):
        raise RuntimeError("a value of a compiled function's graph was kept and used after the function had ended")
    return capture


def reads(function, given=()):
    """Its surroundings. Of a tensor whose values come and go, all but where they are: each call looks there anew."""
    return [Place(of_node, where, kept[1:]) if look is of_tensor and comes_and_goes(where) else Place(look, where, kept)
            for look, where, kept in surroundings(function, given)]


def of_node(tensor):
    """What of a tensor decides what a function does with it, but for its array."""
    return of_tensor(tensor)[1:]


class Capture:
    """What a function has asked for so far. A compiled function inside of it is the function itself.

    whole    names of the fused ops that aren't taken apart; None: all
    device   on which its arrays are: all of them on one
    broke    the first Break, or None
    given    [(Symbol, where its array is found)]: a Tensor or an array that the function takes from elsewhere
    nodes    [Node], in order
    places   what the function depends on beside its arguments (see surroundings.py)
    sums     checksums of those arrays that aren't a tensor's, as they were
    draws    the random numbers that were drawn; drawn: how many of them are behind the point where the function is
    effects  {id of an array: (array, Symbol)}: what is to be written into arrays at the end
    """

    def __init__(self, name, function, given=(), emit="c", device="cpu"):
        self.name, self.places, self.broke = name, reads(function, given), None
        self.whole, self.device = WHOLE[emit], device
        self.placed = {id(place.where) for place in self.places}
        self.given, self.sums, self.nodes, self.swapped = [], [], [], []
        self.effects, self.targets = {}, {}
        self.draws, self.drawn, self.path = [], 0, backend.random_state.path
        self.by_sample = backend.random_state.by_sample
        # Small arrays that stand elsewhere, as they are now.
        self.watched = [(x, checksum(x)) for place in self.places for x in place.kept
                        if is_array(x) and x.nbytes <= WATCHED]
        seen = [*given, *(x for place in self.places for x in place.kept)]
        # (get, put) the state of each generator that the function might draw from, the two global ones among them
        self.generators = [(random.getstate, random.setstate), (np.random.get_state, np.random.set_state)] + [
            (partial(getattr, bits, "state"), partial(setattr, bits, "state"))
            for bits in [x.bit_generator for x in seen if isinstance(x, np.random.Generator)]] + [
            (x.get_state, x.set_state) for x in seen if isinstance(x, np.random.RandomState)] + [
            (x.getstate, x.setstate) for x in seen if isinstance(x, random.Random)]
        self.states = [get() for get, _ in self.generators]
        self.wanting = {}       # node of a tensor from elsewhere that gradients reach -> the tensor
        self.symbols = {}       # id of an array -> its Symbol; `given` keeps the array

    takes_compiled = False

    def __enter__(self):
        # What is kept is decided later: by the op that a call of the whole is. A checkpoint inside is made part of the
        # graph, and nothing is gathered for it again.
        self.modes = mode(capture=self, pack=None, again_in=None, counting=False)
        self.modes.__enter__()
        self.outer, backend.recording.graph = backend.recording.graph, self
        return self

    def __exit__(self, kind, *error):
        backend.recording.graph = self.outer
        self.modes.__exit__(None, None, None)
        # In this order: what the function has changed is put back in any case.
        reasons = [self._put_back(), self._drawn(), self._written(), self._changed()]
        if kind is None and any(reasons):
            raise Break(next(filter(None, reasons)))

    def _put_back(self):
        """Give modules their buffers again."""
        kept = [vars(module).get(name) is symbol for module, name, _, symbol in self.swapped]
        for module, name, array, _ in reversed(self.swapped):
            put(module, name, array)
        return None if all(kept) else ("a module's forward puts another array in the place of one of its own; write "
                                       "into it with backend.assign")

    def _drawn(self):
        """Let generators stand where they stood, for the run that counts."""
        drawn = [(set_to, state) for (get, set_to), state in zip(self.generators, self.states, strict=True)
                 if repr(get()) != repr(state)]
        for set_to, state in drawn:
            set_to(state)
        return "the function draws from a generator of its own, not from the library's streams" if drawn else None

    def _changed(self):
        """Let what the function has set be what it was, for the run that counts: a count that goes up, a state that is
        carried on, a cache that is filled at the first call, here with values of the graph."""
        if unchanged(self.places):
            return None
        put_back(self.places)
        return CHANGES

    def _written(self):
        buffers = {id(array) for _, _, array, _ in self.swapped}        # another thread may train with these
        before = [*self.watched, *((where, known) for (_, where, value), known in zip(
            self.given, self.sums, strict=True) if where is value)]
        changed = any(checksum(array) != known for array, known in before if id(array) not in buffers)
        self.watched = []
        return "the function writes into an array that it has made, or has from elsewhere" if changed else None

    # ------------------------------------------------------------ values

    def argument(self, array):
        """A Symbol for an array that each call brings."""
        return Symbol(Value(array.shape, array.dtype), self.device)

    def symbol(self, value, where=None):
        """The Symbol of an array that the function takes from elsewhere; anything else as it is."""
        if isinstance(value, np.generic) and where.__class__ is Tensor:
            value = where.data = np.asarray(value)
        if not is_array(value) or isinstance(value, Symbol):
            return value
        if where.__class__ is Tensor and where.node is not None:
            self.wanting[where.node] = where
        self.usable(value)
        if id(value) not in self.symbols:
            self.symbols[id(value)] = self.argument(value)
            where = where if where.__class__ is Tensor else value
            self.given.append((self.symbols[id(value)], where, value))
            self.sums.append(checksum(value) if where is value else None)
        return self.symbols[id(value)]

    def usable(self, array):
        """Break where the graph can't have this array."""
        if type(array) not in PLAIN_ARRAYS and type(array) not in DEVICE_ARRAYS:
            raise Break(f"an array is a {type(array).__name__}")
        if (device := device_of(array)) != self.device:
            raise Break(f"an array of shape {array.shape} is on {device}, the arguments are on {self.device}")

    def apply(self, op, raw, params):
        """The results of an op as Symbols, in the form in which its forward gives them."""
        def known(tree):
            if isinstance(tree, (tuple, list)):
                parts = [known(part) for part in tree]
                return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
            symbol = self.symbol(tree.data, tree) if tree.__class__ is Tensor else self.symbol(tree)
            return symbol.value if symbol.__class__ is Symbol else symbol
        if op.name in VIEWS and isinstance(raw[0], np.generic):     # a view of a constant is a value all the same
            raw = (np.asarray(raw[0]), *raw[1:])
        node = Node(op, known((*raw, *params)))
        if op.name in ("getitem", "scatter_add") and any(v.dtype.kind == "b" for v in values_in(node.args[1])):
            raise Break(f"an index is a mask, at {user_line()}: how many elements it selects depends on its values")
        with suspended():
            shapes, rebuild = results_of(node, module_on(self.device))
        node.flat = rebuild is not None
        node.results = tuple(Value(shape, dtype, node, i) for i, (shape, dtype) in enumerate(shapes))
        self.nodes.append(node)
        symbols = [Symbol(value, self.device) for value in node.results]
        return rebuild(symbols) if rebuild else symbols[0] if symbols else None

    def definition(self, primitive, args, params):
        """A fused op in ordinary ops, for those that are better taken apart. In dtypes that kernels don't know it stays
        whole: its own kernel computes in float32 what would overflow in float16."""
        dtype = getattr(args[0], "dtype", None)
        if self.whole is None or primitive.name in self.whole or dtype is not None and dtype.name not in TYPES:
            return None
        if primitive.name in WHOLE_WHERE and WHOLE_WHERE[primitive.name](*args, *params):
            return None
        return DEFINITIONS.get(primitive.name) or primitive.definition

    def pullback_of(self, primitive):
        """The pullback of a fused op that isn't taken apart, as an op."""
        def pullback(ct, wanted, saved):
            wanted = tuple(map(bool, wanted))

            def pull(ct, *saved):
                return primitive.pullback(Bundle(ct) if primitive.multi else ct, wanted, saved)
            return self.apply(Call(f"pullback of {primitive.name}", pull),
                              (ct.parts if primitive.multi else ct, *saved), ())
        return pullback

    # ------------------------------------------------------------ what the layers below tell (backend.recording)

    def called(self, module):
        """A module's forward begins: its buffers are read anew at each call."""
        if module._hooks is not None:
            raise Break(f"a {type(module).__name__} has forward hooks" + (
                ", by which stage 3 of fully_shard gathers its values: compile the modules that are units, each for "
                "itself" if any(map(comes_and_goes, module.parameters())) else ""))
        if id(module) not in self.placed:
            self.places += reads(module)
            self.placed.update(id(place.where) for place in self.places)
        for name, value in list(vars(module).items()):
            if is_array(value) and not isinstance(value, Symbol):
                symbol = self.symbol(value)
                self.swapped.append((module, name, value, symbol))
                put(module, name, symbol)

    def assign(self, array, values):
        """See backend.assign."""
        if not isinstance(values, Symbol):
            raise Break("backend.assign is given what was computed of other arrays than the graph's")
        if isinstance(array, Symbol) and array.value.node is not None and id(array) not in self.targets:
            raise Break("backend.assign writes into an array that the function has computed")
        target = self.targets.get(id(array), array)
        target = next((where for symbol, where, _ in self.given if symbol is array), target)
        self.effects[id(target)] = target, values
        self.symbols[id(target)] = values
        self.targets[id(values)] = target
        for i, (module, name, before, symbol) in enumerate(self.swapped):
            if symbol is array:         # who reads it from now on
                self.swapped[i] = module, name, before, values
                put(module, name, values)

    def check(self, bad, error):
        """See backend.refuse: an op without a result, which raises."""
        def look(bad):
            backend.refuse(bad, type(error)(*error.args))       # a new one: each keeps the frames that it comes through
        self.apply(Call("check", look, pure=False), (bad,), ())

    def random_rows(self, shape):
        """See backend.random_rows: drawn at each call, by the key of the module that runs now."""
        inside, device = backend.random_state.path[len(self.path):], self.device
        inner = backend.random_state.by_sample and not self.by_sample       # of a wrapper inside, not called again

        def draw(shape, *before):
            outer = backend.random_state.path
            backend.random_state.path = (*outer, *inside)
            try:
                with backend.random_by_sample(inner) if inner else nullcontext():
                    return random_rows(shape, device)
            finally:
                backend.random_state.path = outer
        if self.drawn == len(self.draws):
            # In this order: each waits for the one before.
            self.draws.append(self.apply(Call("random_rows", draw, pure=False), (tuple(shape), *self.draws[-1:]), ()))
        self.drawn += 1     # (a checkpoint goes back, and gets the same again)
        return self.draws[self.drawn - 1]

    def matmul(self, x, y, out):
        """See backend.matmul."""
        return self.apply(OPS["matmul"], (x, y), ())

    def asked(self, tensor):
        """The values of a tensor are asked for."""
        if isinstance(tensor.primal_array(), Symbol):
            tensor.primal_array().item()
        raise Break(f"the function asks for the values of a tensor of shape {tensor.shape}, at {user_line()}")

    def reached(self, tensor, forgets=False):
        """A tensor's gradient is read or set."""
        raise Break(f"the function reads or sets the gradient of a tensor of shape {tensor.shape}: call backward() on "
                    "what it returns")

    def launched(self, name, times):
        """A kernel was started."""
        raise Break(f"the function starts the kernel {name!r} by itself")

    def refusal(self, what):
        """The error for what would be done once only."""
        return Break(f"{what}, which would be done once only")


@contextmanager
def suspended():
    """Inside, ops are run, on made-up values: what can't be repeated is refused as ever."""
    capture = backend.recording.graph
    backend.recording.graph = Trial(capture)
    try:
        with mode(capture=None):
            yield
    finally:
        backend.recording.graph = capture


class Trial:
    """What the layers below tell of while an op is run for its result's shape."""

    takes_compiled = False

    def __init__(self, capture):
        self.capture, self.refusal, self.drawn = capture, capture.refusal, None
        self.launched = lambda name, times: True
        self.matmul = lambda x, y, out: np.matmul(x, y, out=out)


def random_rows(shape, device):
    """backend.random_rows on a device, where a kernel makes the same numbers."""
    if device == "cpu":
        return backend.random_rows(shape)
    like = module_on(device).empty((), np.float32)
    return kernels.load("dropout").uniform_of_draws(shape, backend.random_draws(shape), like)


def checksum(array):
    """Of an array's bytes."""
    array = array if isinstance(array, np.ndarray) else array.get()
    return zlib.crc32(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def put(module, name, array):
    """Let an attribute of a module, and its entry among the buffers, be this array."""
    vars(module)[name] = array
    if name in getattr(module, "_buffers", ()):
        module._buffers[name] = array
