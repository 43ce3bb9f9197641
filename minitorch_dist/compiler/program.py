"""A schedule made ready to run: steps over a list of slots."""

import ctypes
import subprocess
import warnings

import numpy as np

from .. import backend, ledger
from ..backend import is_array
from . import c_source, cc, gpu
from .fusion import Kernel
from .ir import mapped
from .rules import results as arrays_of
from .tiles import Tiles

# What copies in the op table, because users may write into it.
AS_VIEW = {"broadcast_to": lambda x, old, new: np.broadcast_to(x, new)}


class Slot:
    """Where an argument stands in the list of values."""

    __slots__ = ("number",)

    def __init__(self, number):
        self.number = number


class Step:
    """One op, run as it is. `ends` are slots that nobody reads afterwards."""

    def __init__(self, node, slots):
        self.node, self.forward, self.ends = node, AS_VIEW.get(node.name, node.op.forward), ()
        self.args = mapped(node.args, lambda v: Slot(slots[v]))
        self.nested = any(isinstance(part, (tuple, list)) and has_slots(part) for part in self.args)
        self.reads, self.outs = [slots[v] for v in node.inputs], [slots[v] for v in node.results]

    def run(self, values):
        """Fill this step's slots."""
        args = filled(self.args, values) if self.nested else [
            values[a.number] if a.__class__ is Slot else a for a in self.args]
        made = self.forward(*args)
        if not self.node.flat:
            made = [made][:len(self.outs)]
        else:
            made = arrays_of(self.node, made)
        for out, array in zip(self.outs, made, strict=True):
            values[out] = array


class KernelStep:
    """One kernel. `compiled` are its functions, in C or Triton, {strides of the inputs: function}; None: NumPy runs it
    in tiles."""

    def __init__(self, kernel, slots, emit, like):
        self.kernel, self.ends, self.compiled, self.like = kernel, (), {} if emit == "triton" else None, like
        self.run = self._on_gpu if emit == "triton" else self._on_host
        self.reads, self.outs = [slots[v] for v in kernel.inputs], [slots[v] for v in kernel.outputs]
        self.reshaped = [(slots[v], kernel.outputs.index(source), v.shape) for v, source in kernel.reshaped.items()]
        self.tiles = Tiles(kernel)
        self.makes = [(v.shape, v.dtype) for v in kernel.outputs]
        self.pointers = ctypes.c_void_p * (len(self.reads) + len(self.outs))

    def _on_gpu(self, values):
        arrays = [np.asarray(a) if isinstance(a, np.generic) else a for a in [values[i] for i in self.reads]]
        strides = tuple([a.strides for a in arrays])
        kernel = self.compiled.get(strides)
        if kernel is None:
            kernel = self.compiled[strides] = gpu.GpuKernel(self.kernel, self._in_elements(strides), self.like)
        self._fill(values, kernel(arrays))

    def _on_host(self, values):
        arrays = [np.asarray(values[i]) for i in self.reads]        # (the address of a NumPy scalar is that of a copy)
        if self.compiled is None:
            made = self.tiles(arrays)
        else:
            strides = tuple([a.strides for a in arrays])
            function = self.compiled.get(strides) or self.specialize(strides)
            made = [np.empty(shape, dtype) for shape, dtype in self.makes]
            function(self.pointers(*[a.__array_interface__["data"][0] for a in (*arrays, *made)]))
        self._fill(values, made)

    def _fill(self, values, made):
        """Fill this step's slots."""
        for out, array in zip(self.outs, made, strict=True):
            values[out] = array
        for out, source, shape in self.reshaped:
            values[out] = made[source].reshape(shape)

    def strides(self, values):
        """The strides of the inputs."""
        return tuple([np.asarray(values[i]).strides for i in self.reads])

    def source(self, strides, name):
        """The C function for inputs with these strides, by that name."""
        return c_source.write(self.kernel, self._in_elements(strides), name)

    def _in_elements(self, strides):
        return [tuple([s // v.dtype.itemsize for s in of_one]) for of_one, v in zip(
            strides, self.kernel.inputs, strict=True)]

    def specialize(self, strides):
        """Compile the kernel for other strides."""
        self.compiled[strides], = c_source.load([self.source(strides, "kernel")], ["kernel"])
        return self.compiled[strides]


def has_slots(tree):
    """Whether nested tuples hold a Slot."""
    return isinstance(tree, Slot) or isinstance(tree, (tuple, list)) and any(map(has_slots, tree))


def filled(tree, values):
    """Nested tuples with the arrays in place of the Slots."""
    if tree.__class__ is Slot:
        return values[tree.number]
    if isinstance(tree, (tuple, list)):
        parts = [filled(part, values) for part in tree]
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    return tree


class Program:
    """Call it with an array for each given value; it returns one for each wanted value.

    emit    "c", "numpy" or "triton"
    device  on which the arrays are
    insist  whether a C compiler that fails is an error; else NumPy takes its place, and a warning says so
    """

    def __init__(self, schedule, emit, device="cpu", insist=False):
        self.schedule, self.emit, self.insist, graph, slots = schedule, emit, insist, schedule.graph, {}
        for value in (*graph.given, *(v for node in graph.nodes for v in node.results)):
            slots.setdefault(value, len(slots))
        like = backend.module_on(device).empty(0)
        self.size, self.wanted = len(slots), [slots[v] for v in graph.wanted]
        self.steps = [KernelStep(item, slots, emit, like) if isinstance(item, Kernel) else Step(item, slots)
                      for item in schedule.items]
        self.ready, self.text, self.fresh = False, "", self._fresh(graph.wanted)
        last = {}
        for step in self.steps:
            for slot in (*step.reads, *step.outs, *(slot for slot, *_ in getattr(step, "reshaped", ()))):
                last[slot] = step
        for slot, step in last.items():
            if slot not in self.wanted:
                step.ends = (*step.ends, slot)

    def _fresh(self, wanted):
        """Per wanted value: whether it is in memory that nobody else has: it was just made, and is wanted once."""
        makers = {out: step for step in self.steps for out in step.outs}
        shared = {out for step in self.steps if isinstance(step, KernelStep) and step.reshaped for out in step.outs}

        def new(slot):
            step = makers.get(slot)
            return slot not in shared if isinstance(step, KernelStep) else step and step.node.name == "matmul"
        return [new(slot) and self.wanted.count(slot) == 1 for slot in self.wanted]

    def __call__(self, given):
        if self.emit == "c" and not self.ready:
            self._compile(given)
        if ledger.open_ledgers and self.emit != "triton":       # (Triton's launches count themselves)
            for kernel in self.schedule.kernels:
                ledger.launch(kernel.name)
        return self._run(given)

    def _run(self, given, before=None):
        values = [*given, *[None] * (self.size - len(given))]
        for step in self.steps:
            if before is not None:
                before(step, values)
            step.run(values)
            for slot in step.ends:
                values[slot] = None
        return [values[slot] for slot in self.wanted]

    def _compile(self, given):
        """Compile all kernels at once. Their inputs' strides are seen in a run of which nothing is kept."""
        kernels = [step for step in self.steps if isinstance(step, KernelStep)]
        random = backend.random_snapshot()
        strides = {}

        def look(step, values):
            if isinstance(step, KernelStep):
                strides[step] = step.strides(values)
        try:
            self._run(given, look)
        finally:
            backend.random_restore(random)
        texts = {step: step.source(strides[step], "kernel") for step in kernels}
        # Layers that are alike have the same kernels.
        names = {text: f"kernel_{i}" for i, text in enumerate(dict.fromkeys(texts.values()))}
        try:
            loaded = c_source.load([text.replace("void kernel(", f"void {name}(", 1) for text, name in names.items()],
                                   names.values())
        except (cc.CompilerError, OSError, subprocess.TimeoutExpired) as error:
            if self.insist:
                raise
            warnings.warn(f"{self.schedule.graph.name}: NumPy runs the kernels, because {error}", stacklevel=4)
            self.emit = "numpy"
            return
        functions = dict(zip(names, loaded, strict=True))
        for step in kernels:
            step.compiled = {strides[step]: functions[texts[step]]}
        self.text, self.ready = "\n\n".join(names), True

    def source(self):
        """The kernels' C or Triton, each once; for NumPy, that there is none."""
        if self.emit == "triton":
            return "\n\n".join(dict.fromkeys(kernel.writer.text for step in self.steps if isinstance(step, KernelStep)
                                             for kernel in step.compiled.values()))
        return self.text or "NumPy runs the kernels in tiles"

    def __str__(self):
        return str(self.schedule)


def regular(array):
    """The array, copied where its elements lie at odd distances (a field of records)."""
    array = array if is_array(array) else np.asarray(array)
    if array.flags.c_contiguous or not any(stride % array.itemsize for stride in array.strides):
        return array
    return np.ascontiguousarray(array)


def own(arrays, others, fresh):
    """The arrays, with copies of those whose memory somebody else has too; `fresh`: which can't be such."""
    if all(fresh):
        return arrays
    seen, owned = {id(storage(array)) for array in others if array is not None}, []
    for array in arrays:
        array = array if is_array(array) else np.asarray(array)
        owner = storage(array)
        if id(owner) in seen or owner.nbytes != array.nbytes or not array.flags.c_contiguous:
            array = owner = array.copy()
        seen.add(id(owner))
        owned.append(array)
    return owned


def storage(array):
    """The array that owns the memory."""
    while array.base is not None and is_array(array.base):
        array = array.base
    return array
