"""A function's GPU work recorded once and repeated by one call of the host.

A small model's step is a few hundred short kernels, and Python takes longer to ask for them than the GPU to run them:

    host   |ask|ask|ask|ask|ask|ask|ask| …          |repeat|         |repeat|
    GPU       |k|  |k|  |k|  |k|  |k|  |k| …           |k|k|k|k|k|k|…   |k|k|k|k|k|k|…

CUDA can record what is asked of a stream as a graph. The graph repeats the very same kernels on the very same
addresses: so whatever it reads must lie where it lay, and nothing of what the host did meanwhile is done again. Each of
these is looked at here, at every call, or refused:

    inputs          are copied into the arrays that the graph reads
    outputs         are copied out, so that the next call doesn't change them
    gradients       stand on the same leaves afterwards, as the function left them
    surroundings    must be what they were: parameters live where they did, modules train or evaluate, names stand for
                    the same (surroundings.py); otherwise it is another situation, with a graph of its own
    the host's work moving data, drawing random numbers, messages, optimizers: RuntimeError
    checks          of indices and labels are repeated, and speak with the next value that is brought to the host
    the ledger      counts the launches of every call; writes are dated at every call

Source: NVIDIA, "CUDA C++ Programming Guide", section "CUDA Graphs".
"""

import functools
import gc
import weakref
from collections import Counter
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from . import kernels, ledger
from .autodiff.primitive import lower, state
from .autodiff.tensor import Tensor
from .autodiff.tree import flatten
from .autodiff.writes import log, merged
from .backend import byte_range, check_devices, device_name, is_array, load_cupy, on_host, recording, refuse, to
from .kernels.cublas import WORKSPACE, Cublas
from .surroundings import PLAIN, Place, described, of_tensor, surroundings, unchanged

SITUATIONS = 4      # in which a function is remembered to have run; a loop over more of them is never recorded
CASES = 64          # so many sets of shapes and constants are remembered


def cuda_graph(function):
    """Wrap `function` so that the GPU repeats what it did.

        @mt.cuda_graph
        def passes(x, labels):
            optimizer.zero_grad()
            loss = nn.cross_entropy(model(x), labels)
            loss.backward()
            return loss

        for x, labels in batches:
            loss = passes(x, labels)
            optimizer.step()

    function  takes tensors or arrays, nested as one likes, and anything else; gives arrays, tensors, numbers and
              texts, nested. All its arrays live on the current GPU; inputs may come from the host

    A call with inputs of new shapes, dtypes or constants, or in a new situation (a gradient is there already or not,
    a module trains or evaluates, no_grad, a name that the function reads stands for something else), runs the function,
    once or twice; the next one records it and all others repeat it. Where the function itself changes what it reads (a
    counter, a list that grows, a state that it carries on), each call is a new situation, and nothing is ever recorded.
    Under saved_tensors_hooks and ledger.record(memory=True) it simply runs.

    What is not repeated: all else that the function does in Python, like printing. What is not seen, when they change:
    containers other than lists, tuples, dicts and sets, and attributes of objects that the function's own code doesn't
    name. Pass such things as arguments.

    Outputs are new tensors, off the tape. Gradients live in the same arrays after every call, so a gradient that is to
    be kept must be copied. Each graph keeps the memory of its intermediate results. An input must not be written into.

    Raises RuntimeError where there is no GPU, and for the host's work that a graph can't repeat: bringing values to the
    host or from it, random numbers, messages between ranks, an optimizer's step.
    """
    return Graphed(function)


class Graphed:
    """A function and the graphs of it: see cuda_graph."""

    def __init__(self, function):
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = f"cuda_graph({getattr(function, '__name__', type(function).__name__)})"
        self._cases = {}        # what a call's arguments and the modes are -> Case, the last one used at the end

    def __reduce__(self):       # graphs are of this process, and of these arrays
        return Graphed, (self.function,)

    def __set_name__(self, owner, name):
        self._place = f"{owner.__module__}.{owner.__qualname__}.{name}"

    def __get__(self, instance, owner=None):
        """As a method: each instance has graphs of its own, which go with it."""
        if instance is None:
            return self
        if self._place not in (methods := vars(instance)):
            methods[self._place] = Graphed(self.function.__get__(instance))
        return methods[self._place]

    @property
    def graphs(self):
        """How many graphs there are."""
        return sum(len(case.graphs) for case in self._cases.values())

    def __call__(self, *args, **kwargs):
        if recording.graph is not None:     # a part of another function's graph
            return self.function(*args, **kwargs)
        cupy = load_cupy()
        if state.level or state.anomaly:
            what = "detect_anomaly, which looks at every value" if state.anomaly else "a transform (grad, vjp, …)"
            raise RuntimeError(f"{self.name} inside of {what}: call the function itself")
        given, rebuild = flatten((args, kwargs), order=list)
        values = [raw for raw in map(self._raw, given) if is_array(raw)]
        check_devices(self.name, [v for v in values if not on_host(v)])

        def call(arrays):
            arrays = iter(arrays)
            args, kwargs = rebuild([Tensor(next(arrays)) if isinstance(x, Tensor) else
                                    next(arrays) if is_array(x) else x for x in given])
            return self.function(*args, **kwargs)
        if state.pack is not None or state.counting:
            return copied(call([to(v, device_name("cuda")) for v in values]))
        key = (str(rebuild(range(len(given)))), tuple(map(described, given)), cupy.cuda.runtime.getDevice(), state.off,
               state.again, kernels.enabled(), state.autocast and state.autocast.dtype)
        case = self._cases.pop(key, None) or Case([cupy.empty(v.shape, v.dtype) for v in values])
        self._cases[key] = case
        if len(self._cases) > CASES:
            del self._cases[next(iter(self._cases))]
        values = [to(v, device_name("cuda")) for v in values]
        for graph in case.graphs:
            if graph.recorder.fits():
                return graph.repeat(case.inputs, values)
        for rehearsal in case.rehearsals:
            if rehearsal.fits():
                case.graphs = [graph for graph in case.graphs if not graph.recorder.moved()][1 - SITUATIONS:]
                case.graphs.append(self._record(call, case.inputs, given))
                case.rehearsals.remove(rehearsal)
                return case.graphs[-1].repeat(case.inputs, values)
        fill(case.inputs, values)
        rehearsal = Recorder(self, given)
        with products(rehearsal, cupy.cuda.get_current_stream()):   # so that its kernels are loaded when it is recorded
            result = rehearsal.run(call, case.inputs, copied)
        rehearsal.close()
        case.rehearsals = [*case.rehearsals, rehearsal][-SITUATIONS:]
        for array, value in zip(case.inputs, values, strict=True):
            refuse(differ(array, value), RuntimeError(
                f"{self.name} has written into its input of shape {value.shape}, which is a copy of the caller's: give "
                "back what is new, or write into an array that the function takes from elsewhere"))
        for check in rehearsal.checks:
            refuse(*check)
        return result

    def _raw(self, value):
        """The array of an input; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if value.node is not None:
            raise ValueError(f"{self.name}: an input of shape {value.shape} is being differentiated: gradients reach "
                             "what the function takes from elsewhere, not its inputs; detach() it")
        return value.data if is_array(value.data) else np.asarray(value.data)

    def _record(self, call, inputs, given):
        """The Graph of call(inputs). Nothing runs on the GPU meanwhile."""
        cuda = load_cupy().cuda
        # A pool for each graph: what is free in it is what the graph works in, and nobody else may have it.
        recorder, stream, pool = Recorder(self, given, True), cuda.Stream(non_blocking=True), cuda.MemoryPool()
        with stream, cuda.using_allocator(pool.malloc), no_garbage_collection():
            with products(recorder, stream) as workspace:
                stream.begin_capture()
                try:
                    outputs = recorder.run(call, inputs, detached)
                    graph = stream.end_capture()
                except BaseException as error:
                    given_up = abandon(stream)
                    recorder.undo()
                    # Some of what can't be recorded CuPy refuses itself. What CUDA refuses comes as whatever the
                    # library in between makes of it (Thrust: a bare RuntimeError), but ends the recording.
                    if isinstance(error, Exception) and (given_up or isinstance(error, (
                            NotImplementedError, cuda.runtime.CUDARuntimeError))):
                        raise RuntimeError(f"{self.name}: this function can't be recorded as a CUDA graph: {error}"
                                           ) from error
                    raise
        recorder.close()
        grads = [byte_range(seen.after.data) for seen in recorder.leaves if seen.after is not None]
        recorder.writes = merged([(*bounds, self.name) for bounds in grads if bounds] + recorder.writes)
        return Graph(graph, recorder, outputs, pool, workspace)


@dataclass
class Case:
    """Calls whose arguments have one structure, and the same shapes, dtypes and constants.

    inputs      the arrays that the graphs read
    rehearsals  Recorders of the last calls that ran the function, in situations for which there is no graph yet
    graphs      one for each situation
    """

    inputs: list
    rehearsals: list = field(default_factory=list)
    graphs: list = field(default_factory=list)


@dataclass
class Graph:
    """One recording: CuPy's Graph, and what happens beside it.

    outputs    what the function returned; its arrays are written by the graph
    pool       the memory of what is computed in between, kept alive
    workspace  cuBLAS's, kept alive
    """

    graph: object
    recorder: object
    outputs: object
    pool: object
    workspace: object

    def repeat(self, inputs, values):
        """Do it again on these values."""
        fill(inputs, values)
        with ledger.spanning("compute", self.recorder.name):
            self.graph.launch()
        for seen in self.recorder.leaves:
            seen.tensor()._grad = seen.after
        log.add_ranges(self.recorder.writes)
        for bad, error in self.recorder.checks:
            refuse(bad.copy(), error)       # the next call writes into `bad`
        for name, times in self.recorder.launches.items():
            ledger.launch(name, times)
        return copied(self.outputs)


class Seen:
    """A leaf whose gradient the function has read or set.

    tensor   the leaf; at the end of the run a weak reference to it
    traits   its array, its node, hooks; () where it stands in a Place
    first    the gradient that stood there before, a Tensor or None
    forgets  whether the function set it before it read it, so that it matters not what there was before
    after    the gradient that the function left
    """

    def __init__(self, tensor, traits, first, forgets):
        self.tensor, self.traits, self.first, self.forgets, self.after = tensor, traits, first, forgets, None

    def close(self):
        """The function has ended."""
        self.after, self.tensor = self.tensor.grad, weakref.ref(self.tensor)
        if self.forgets:
            self.first = None

    def fits(self):
        """Whether the leaf stands as it did when the function began, as far as that matters."""
        tensor = self.tensor()
        if tensor is None or self.traits and not unchanged([(of_tensor, tensor, self.traits)]):
            return False
        now = getattr(tensor, "_grad", None)
        if self.forgets or self.first is None:
            return self.forgets or now is None
        return now is not None and now.data is self.first.data


class Recorder:
    """What the layers below tell of a function while it runs (backend.recording.graph).

    name      for messages
    muted     whether launches are noted here only
    leaves    {id: Seen} while the function runs, afterwards [Seen]
    places    [Place], what the function takes from elsewhere; placed: the ids of what is looked at there
    checks    [(0-d bool, error)], see backend.refuse
    writes    [(first address, last + 1, author)], see autodiff/writes.py
    held      arrays of compiled functions that the graph reads, kept alive
    launches  {name: number}, see ledger.launch
    matmul    what makes products: see `products`
    """

    def __init__(self, graphed, given, muted=False):
        self.name, self.muted, self.drawn = graphed.name, muted, None      # (it draws nothing)
        self.places = surroundings(graphed.function, [x for x in given if not is_array(lower(x))])
        self.placed = {id(place.where) for place in self.places}
        self.leaves, self.checks, self.writes, self.held, self.launches = {}, [], [], [], Counter()

    takes_compiled = True       # compiled functions, whose kernels become a part of it

    def run(self, call, inputs, take):
        """take(call(inputs)), told of by the layers below."""
        recording.graph = self
        try:
            return take(call(inputs))
        finally:
            recording.graph = None

    def close(self):
        """The run was a success: what the function has left."""
        # Leaves that the function has made itself are gone with its tape.
        found = [(weakref.ref(seen.tensor), seen) for seen in self.leaves.values()]
        for seen in self.leaves.values():
            seen.close()
        self.leaves = [seen for tensor, seen in found if tensor() is not None]
        if any(seen.after is not None and seen.after.node is not None for seen in self.leaves):
            raise RuntimeError(f"{self.name} leaves gradients that are on the tape (create_graph=True), and a graph "
                               "has no tape: use them inside of the function, and set them to None")

    def reached(self, tensor, forgets=False):
        """The gradient of this tensor is about to be read, or set."""
        if id(tensor) not in self.leaves:
            if on_host(tensor.data):
                raise RuntimeError(f"{self.name}: the gradient of a tensor of shape {tensor.shape} on the cpu is the "
                                   "host's work, which a CUDA graph can't repeat")
            self.leaves[id(tensor)] = Seen(tensor, () if id(tensor) in self.placed else of_tensor(tensor),
                                           getattr(tensor, "_grad", None), forgets)

    def called(self, module):
        """A module's forward begins."""
        if id(module) not in self.placed:
            self.places += surroundings(module)
            self.placed.update(id(place.where) for place in self.places)

    def depends(self, places, arrays):
        """A compiled function has run: it depends on these places, and reads these Tensors and arrays."""
        self.held += arrays
        tensors = [x for x in arrays if x.__class__ is Tensor and id(x) not in self.placed]
        places = [place for place in places if id(place.where) not in self.placed]
        self.places += [*places, *(Place(of_tensor, x, of_tensor(x)) for x in tensors)]
        self.placed.update(id(place.where) for place in self.places)

    def check(self, bad, error):
        """See backend.refuse."""
        self.checks.append((bad, error))

    def assign(self, array, values):
        """See backend.assign."""
        array[...] = values

    def asked(self, tensor):
        """A tensor's values are asked for: of one on a GPU the copy is refused."""

    def launched(self, name, times):
        """A kernel was started; returns whether nobody else should count it."""
        self.launches[name] += times
        return self.muted

    def refusal(self, what):
        """The error for the host's work."""
        return RuntimeError(f"{what} inside of {self.name}: a CUDA graph repeats the work of the GPU alone, not the "
                            "host's part in it; do that before or after the call")

    def fits(self):
        """Whether the function would do the same now."""
        return unchanged(self.places) and all(seen.fits() for seen in self.leaves)

    def moved(self):
        """Whether a tensor has moved since, so that this hardly ever fits again."""
        return any(seen.tensor() is None for seen in self.leaves) or any(
            place.where.data is not place.kept[0] for place in self.places if place.look is of_tensor)

    def undo(self):
        """Put the gradients back that stood on the leaves before."""
        for seen in self.leaves.values():
            seen.tensor._grad = seen.first


@contextmanager
def products(recorder, stream):
    """Inside, cuBLAS itself makes what the recorder is asked to multiply, on this stream; gives cuBLAS's workspace."""
    workspace = load_cupy().empty(WORKSPACE, np.uint8)
    with closing(Cublas(stream.ptr, workspace)) as cublas:
        recorder.matmul = cublas.matmul
        yield workspace


@contextmanager
def no_garbage_collection():
    """While a stream is recorded, CUDA must not be asked to free what some cycle has kept, other graphs among it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def abandon(stream):
    """End a recording that has failed; returns whether CUDA had given it up."""
    try:
        stream.end_capture()
    except Exception:       # it says once more that it has failed
        return True
    return False


def differ(x, y):
    """0-d bool: whether two arrays differ; NaN equals NaN."""
    return ((x != y) & ((x == x) | (y == y))).any()


def fill(inputs, values):
    """Copy a call's values into the arrays that graphs read."""
    for array, value in zip(inputs, values, strict=True):
        array[...] = value


def detached(tree):
    """What a function has returned, its tensors off the tape; TypeError for what can't be repeated."""
    leaves, rebuild = flatten(tree, order=list)
    for x in leaves:
        if not isinstance(x, (Tensor, np.generic, np.dtype, *PLAIN)) and not is_array(x):
            raise TypeError(f"cuda_graph: the function returns a {type(x).__name__}; it must return tensors, arrays, "
                            "numbers and texts, in tuples, lists and dicts")
        if isinstance(x, np.ndarray) or isinstance(x, Tensor) and on_host(x.data):
            raise TypeError(f"cuda_graph: the function returns an array of shape {x.shape} on the cpu, which a graph "
                            "doesn't compute again")
    return rebuild([x.detach() if isinstance(x, Tensor) else x for x in leaves])


def copied(tree):
    """The same with copies of its arrays."""
    leaves, rebuild = flatten(detached(tree), order=list)
    return rebuild([Tensor(x.data.copy()) if isinstance(x, Tensor) else x.copy() if is_array(x) else x for x in leaves])
