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
    parameters      must live where they did; training and evaluation of a module are graphs of their own
    the host's work moving data, drawing random numbers, messages, optimizers: RuntimeError
    checks          of indices and labels are repeated, and speak with the next value that is brought to the host
    the ledger      counts the launches of every call; writes are dated at every call

Source: NVIDIA, "CUDA C++ Programming Guide", section "CUDA Graphs".
"""

import functools
from contextlib import closing, contextmanager
from dataclasses import dataclass, field

import numpy as np

from . import kernels, ledger
from .autodiff.primitive import state
from .autodiff.tensor import Tensor
from .autodiff.tree import flatten
from .autodiff.writes import log
from .backend import check_devices, is_array, load_cupy, on_host, recording, refuse, to_device_of
from .kernels.cublas import WORKSPACE, Cublas

SITUATIONS = 4      # in which a function is remembered to have run; a loop over more of them is never recorded


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

    function  takes tensors or arrays, nested as one likes, and anything that can be a key of a dict; gives the same.
              All its arrays live on the current GPU; inputs may come from the host

    A call with inputs of new shapes or dtypes, or in a new situation (a gradient is there already or not, a module
    trains or evaluates, no_grad, kernels are disabled), runs the function, once or twice; the next one records it and
    all others repeat it. What else the function does in Python (printing, counting, hooks) is not repeated.

    Outputs are new tensors, off the tape. Gradients live in the same arrays after every call. Arrays that the function
    takes from elsewhere, but for parameters, must not be replaced by others. Each graph keeps the memory of its
    intermediate results.

    Raises RuntimeError where there is no GPU, and for the host's work that a graph can't repeat: bringing values to the
    host or from it, random numbers, messages between ranks, an optimizer's step.
    """
    return Graphed(function)


class Graphed:
    """A function and the graphs of it: see cuda_graph."""

    def __init__(self, function):
        functools.update_wrapper(self, function)
        self.function = function
        self.name = f"cuda_graph({getattr(function, '__name__', type(function).__name__)})"
        self._cases = {}        # what a call's arguments and the modes are -> Case
        self._pool = None       # intermediate results of all graphs live here: they run one after the other

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
        given, rebuild = flatten((args, kwargs))
        values = [raw for raw in map(self._raw, given) if is_array(raw)]
        check_devices(self.name, [v for v in values if not on_host(v)])
        key = (str(rebuild(range(len(given)))), tuple(map(described, given)), cupy.cuda.runtime.getDevice(), state.off,
               kernels.enabled())
        case = self._cases.get(key)
        if case is None:
            case = self._cases[key] = Case([cupy.empty(v.shape, v.dtype) for v in values])
        values = [to_device_of(v, array) for v, array in zip(values, case.inputs, strict=True)]
        for graph in case.graphs:
            if graph.recorder.fits():
                return graph.repeat(case.inputs, values)

        arrays = iter(case.inputs)
        args, kwargs = rebuild([Tensor(next(arrays)) if isinstance(x, Tensor) else next(arrays) if is_array(x) else x
                                for x in given])

        def call():
            return self.function(*args, **kwargs)
        for rehearsal in case.rehearsals:
            if rehearsal.fits():
                case.graphs = [graph for graph in case.graphs if not graph.recorder.moved()]
                case.graphs.append(self._record(call, rehearsal))
                case.rehearsals.remove(rehearsal)
                return case.graphs[-1].repeat(case.inputs, values)
        fill(case.inputs, values)
        rehearsal = Recorder(self.name, case.rehearsals[-1] if case.rehearsals else None)
        result = rehearsal.run(call)
        case.rehearsals = [*case.rehearsals, rehearsal][-SITUATIONS:]
        for check in rehearsal.checks:
            refuse(*check)
        return copied(result)

    def _raw(self, value):
        """The array of an input; anything else as it is."""
        if not isinstance(value, Tensor):
            return value
        if value.node is not None:
            raise ValueError(f"{self.name}: an input of shape {value.shape} is being differentiated: gradients reach "
                             "what the function takes from elsewhere, not its inputs; detach() it")
        return value.data

    def _record(self, call, rehearsal):
        """The Graph of call(). Nothing runs on the GPU meanwhile."""
        cuda = load_cupy().cuda
        self._pool = self._pool or cuda.MemoryPool()
        recorder, stream = Recorder(self.name, rehearsal), cuda.Stream(non_blocking=True)
        with stream, cuda.using_allocator(self._pool.malloc), ledger.aside() as book:
            workspace = load_cupy().empty(WORKSPACE, np.uint8)
            with closing(Cublas(stream.ptr, workspace)) as cublas:
                recorder.matmul = cublas.matmul
                stream.begin_capture()
                try:
                    outputs = detached(recorder.run(call))
                    graph = stream.end_capture()
                except BaseException as error:
                    abandon(stream)
                    recorder.undo()
                    if isinstance(error, (NotImplementedError, cuda.runtime.CUDARuntimeError)):
                        raise RuntimeError(f"{self.name}: this function can't be recorded as a CUDA graph: {error}"
                                           ) from error
                    raise
        return Graph(graph, recorder, outputs, dict(book.launches), workspace)


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
    launches   the ledger's
    workspace  cuBLAS's, kept alive
    """

    graph: object
    recorder: object
    outputs: object
    launches: dict
    workspace: object

    def repeat(self, inputs, values):
        """Do it again on these values."""
        fill(inputs, values)
        with ledger.spanning("compute", self.recorder.name):
            self.graph.launch()
        for seen in self.recorder.leaves.values():
            seen.tensor._grad = seen.after
        log.add_ranges(self.recorder.writes)
        for bad, error in self.recorder.checks:
            refuse(bad.copy(), error)       # the next call writes into `bad`
        for name, times in self.launches.items():
            ledger.launch(name, times)
        return copied(self.outputs)


@dataclass
class Seen:
    """A leaf that backward reached.

    tensor   the leaf
    data     the array that it had
    first    the gradient that backward found there, a Tensor or None
    after    the one that the function left
    forgets  whether the function is known to set it to None itself, so that it matters not what there was before
    """

    tensor: Tensor
    data: object
    first: object
    forgets: bool
    after: object = None

    def fits(self):
        """Whether the leaf stands as it did when the function began, as far as that matters."""
        if self.tensor.data is not self.data:
            return False
        now = self.tensor.grad
        if self.first is None:
            return self.forgets or now is None
        return now is not None and now.data is self.first.data


class Recorder:
    """What the layers below tell of a function while it runs (backend.recording.graph).

    name     for messages
    leaves   {id: Seen}
    modules  {id: (module, whether it was training)}
    checks   [(0-d bool, error)], see backend.refuse
    writes   [(first address, last + 1, author)], see autodiff/writes.py
    """

    matmul = staticmethod(lambda x, y, out: np.matmul(x, y, out=out))

    def __init__(self, name, earlier=None):
        self.name = name
        self.before = {id(s.tensor): (s.tensor, s.tensor.grad) for s in earlier.leaves.values()} if earlier else {}
        self.leaves, self.modules, self.checks, self.writes = {}, {}, [], []

    def run(self, call):
        """call(), told of by the layers below."""
        with telling(self):
            result = call()
        for seen in self.leaves.values():
            seen.after = seen.tensor.grad
        return result

    def reached(self, tensor):
        """Backward is about to add to this leaf's gradient."""
        if id(tensor) not in self.leaves:
            _, before = self.before.get(id(tensor), (tensor, None))
            self.leaves[id(tensor)] = Seen(tensor, tensor.data, tensor.grad, before is not None and tensor.grad is None)

    def called(self, module):
        """A module's forward begins."""
        self.modules.setdefault(id(module), (module, module.training))

    def fits(self):
        """Whether the function would do the same now."""
        return all(module.training == training for module, training in self.modules.values()) and all(
            seen.fits() for seen in self.leaves.values())

    def moved(self):
        """Whether a leaf lives elsewhere now, so that this never fits again."""
        return any(seen.tensor.data is not seen.data for seen in self.leaves.values())

    def undo(self):
        """Put the gradients back that stood on the leaves before."""
        for seen in self.leaves.values():
            seen.tensor._grad = seen.first
        for tensor, grad in self.before.values():
            tensor._grad = grad


@contextmanager
def telling(recorder):
    """Inside, the layers below tell the recorder."""
    recording.graph = recorder
    try:
        yield
    finally:
        recording.graph = None


def abandon(stream):
    """End a recording that has failed."""
    try:
        stream.end_capture()
    except Exception:       # it says once more that it has failed
        pass


def described(value):
    """What a graph is made for: an array's kind, shape and dtype, or the value."""
    raw = value.data if isinstance(value, Tensor) else value
    kind = Tensor if isinstance(value, Tensor) else None if is_array(raw) else type(value)
    return (kind, raw.shape, raw.dtype.str) if is_array(raw) else (kind, value)


def fill(inputs, values):
    """Copy a call's values into the arrays that graphs read."""
    for array, value in zip(inputs, values, strict=True):
        array[...] = value


def detached(tree):
    """The same nesting with its tensors off the tape."""
    leaves, rebuild = flatten(tree)
    return rebuild([x.detach() if isinstance(x, Tensor) else x for x in leaves])


def copied(tree):
    """The same nesting with copies of its arrays, tensors off the tape."""
    leaves, rebuild = flatten(tree)
    return rebuild([Tensor(x.data.copy()) if isinstance(x, Tensor) else x.copy() if is_array(x) else x for x in leaves])
