"""compile(f): f captured as a graph once, and run as fused kernels from then on."""

import functools
import inspect
import sys
import threading
import warnings
from collections import Counter

import numpy as np

from .. import kernels
from ..autodiff.checkpointing import Segment
from ..autodiff.primitive import Primitive, lower, state
from ..autodiff.reverse import run as run_backward
from ..autodiff.tensor import Leaf, Tensor, attach
from ..autodiff.transforms import check_function
from ..autodiff.tree import flatten, skeleton
from ..backend import device_of, is_array, module_on, recording
from ..nn.module import Module
from ..optim import Optimizer
from ..surroundings import PLAIN, described, is_module, unchanged
from . import cc
from .capture import CHANGES, Break, Capture
from .fusion import fused
from .ir import Graph
from .partition import partitioned
from .passes import optimized
from .program import Program, own, regular
from .recaptured import once_more
from .updates import compile_optimizer

CAPTURING = threading.RLock()       # a module's buffers are Symbols meanwhile
PATIENCE = 10       # seconds to wait for another thread's capture
VARIANTS = 32       # graphs that a compiled function keeps


def compile(function, emit=None):
    """The function (or the module) with its array work captured as a graph, fused, and run as kernels of its own.

    function  takes and returns tensors, arrays, numbers and texts, in tuples, lists and dicts. A module comes back as a
              module with the same parameters under the same names. An optimizer is itself afterwards, and its update of
              NumPy's arrays a loop in C, with the same bits (updates.py); TypeError for Muon and its like,
              Dion and Adafactor, whose steps aren't made element by element

    emit      what the kernels become: "c", compiled by the system's C compiler ($CC, cc, gcc or clang); "numpy", run in
              tiles that stay in the cache; "triton", for arrays on a GPU (and with TRITON_INTERPRET=1 for NumPy's, to
              look at them); None: Triton on a GPU, else C where there is a compiler

    The first call for given shapes, dtypes, constants and modes runs the function on arrays without elements, and keeps
    what it asked for; so do calls after something has changed that the function reads from elsewhere: parameters'
    places, closures, globals, what lists and dicts hold, modules' attributes, training or evaluation (see
    surroundings.py; where that goes on and on, a warning tells what). Gradients reach arguments and parameters as
    before, by a graph of their own. Random numbers of the library's streams are drawn anew in each call; a value that
    isn't an array is what it was at the first call.

    What a graph can't hold (asking for a value, writing into an array, a message to other ranks, arrays of several
    devices) makes the function run uncompiled: `breaks` counts these calls by reason, and the first is told as a
    warning. NumPy's functions are seen where they meet a value of the graph (which is no np.ndarray, if the function
    asks); what they make of other arrays alone is made once. What is not seen: containers other than lists, tuples,
    dicts and sets, and what globals() and getattr(x, "text") look up; pass such things as arguments. What a function
    does before it breaks is done twice, that one time, but for what it sets of what it reads. Where that is a cache,
    the next call of the kind finds it filled, and is captured.

    Inside of a transform (grad, jvp, …) and of detect_anomaly a compiled function is the function itself; to have a
    derivative compiled, compile the transformed function. On the tape a call is one op, which can be differentiated
    once, and what it keeps goes through saved_tensors_hooks and comes back together. Of fully_shard's stage 3, which
    gathers values as modules begin to run, compile the modules that are its units, before: for i, block in
    enumerate(gpt.blocks): gpt.blocks[i] = mt.compile(block).

    `print(f.show("captured"))` and its like show the last graph: captured, optimized, fused, kernels, backward.
    """
    if emit not in (None, "c", "numpy", "triton"):
        raise ValueError(f"compile: emit={emit!r}; use 'c', 'numpy', 'triton' or None")
    if emit == "triton" and not kernels.installed():
        raise RuntimeError("compile: emit='triton' needs Triton: pip install triton")
    if emit == "c" and cc.compiler() is None:
        raise RuntimeError("compile: emit='c' needs a C compiler, and there is no cc, gcc or clang on PATH, nor does "
                           "$CC name one")
    if isinstance(function, Optimizer):
        return compile_optimizer(function, emit)
    check_function("compile", function)
    return CompiledModule(function, emit) if is_module(function) else Compiled(function, emit)


class Compiled:
    """A function and its variants: see compile.

    breaks  Counter {reason: calls that ran uncompiled}
    """

    def __init__(self, function, emit=None):
        functools.update_wrapper(self, function, updated=())
        self.function = function
        self.name = f"compile({getattr(function, '__name__', type(function).__name__)})"
        self.variants, self.captures, self.breaks, self.emit = [], 0, Counter(), emit
        self.bound, self.kept = {}, {}      # of objects that have no room for it
        self.changed, self.told = [], set()     # keys of calls that changed what is read; reasons that were told

    def __reduce__(self):
        place = sys.modules.get(getattr(self.function, "__module__", None))
        for part in getattr(self.function, "__qualname__", "").split("."):
            place = getattr(place, part, None)
        return self.function.__qualname__ if place is self else (Compiled, (self.function, self.emit))

    def __get__(self, instance, owner=None):
        """As a method: each instance has graphs of its own."""
        if instance is None or not hasattr(type(self.function), "__get__"):
            return self
        name = f"compiled {self.function.__qualname__}"
        table = getattr(instance, "__dict__", None)
        if not isinstance(table, dict):     # __slots__, or a class
            table, name = self.bound, (id(instance), name)
            self.kept[id(instance)] = instance
        # copy.copy has copied the table of another instance.
        if name not in table or getattr(table[name].function, "__self__", None) is not instance:
            table[name] = Compiled(self.function.__get__(instance), self.emit)
        return table[name]

    def __call__(self, *args, **kwargs):
        recorder = recording.graph      # of a CUDA graph, or another function is being captured
        if state.level or state.anomaly or (recorder is not None and not recorder.takes_compiled):
            return self.function(*args, **kwargs)
        given, rebuild = flatten((args, kwargs), order=list)
        key = (skeleton((args, kwargs)), tuple(map(described, given)),
               tuple([x.__class__ is Tensor and x.node is not None for x in given]), state.off >= 0, state.again,
               kernels.enabled(), state.autocast and state.autocast.dtype)
        if not CAPTURING.acquire(timeout=PATIENCE):     # a function that is being captured may wait for this thread
            return self.function(*args, **kwargs)
        try:
            variant = next((v for v in self.variants if v.key == key and v.fits()), None)
            if variant is None and recorder is not None and recorder.muted:
                return self.function(*args, **kwargs)       # while the GPU only takes note, nothing can be tried
            if variant is None:
                self._captured(key)
                variant = self._variant(key, given, rebuild)
        finally:
            CAPTURING.release()
        if not variant.broken:
            self._used(variant)
            if recorder is not None:
                recorder.depends(variant.places, [where for where, *_ in variant.elsewhere])
            return variant(given)
        again = variant.broken == CHANGES and key not in self.changed       # it may have filled a cache: another try
        result = self._uncompiled(variant.broken, args, kwargs, tell=not again)
        if again:
            self.changed = [key, *self.changed][:VARIANTS]
        else:
            self._used(variant)
        return result

    def _uncompiled(self, reason, args, kwargs, tell=True):
        """A call of the function itself."""
        result = self.function(*args, **kwargs)     # an error of its own comes out here
        self.breaks[reason] += 1
        if tell and reason not in self.told:
            self.told.add(reason)
            warnings.warn(f"{self.name} runs uncompiled: {reason}", stacklevel=3)
        return result

    def _used(self, variant):
        """The last one used stands first; those that weren't for longest go."""
        if not self.variants or self.variants[0] is not variant:
            self.variants = [variant, *(v for v in self.variants if v is not variant)][:VARIANTS]

    def _captured(self, key):
        """It is about to be, once more."""
        self.captures += 1
        if self.captures == VARIANTS + 1 and self.variants:
            warnings.warn(f"{self.name} is captured {once_more(VARIANTS, self.variants[0], key)}", stacklevel=3)

    def _variant(self, key, given, rebuild):
        devices = {device_of(lower(x)) for x in given if is_array(lower(x))} or {"cpu"}
        device = max(devices)       # cuda:0 is more than cpu
        emit = self.emit or ("triton" if device != "cpu" else "c" if cc.compiler() else "numpy")
        try:
            capture = Capture(self.name, self.function, [x for x in given if not is_array(lower(x))], emit, device)
        except Exception as error:      # of an object that doesn't like to be looked at
            return Broken(key, [], f"what it reads can't be looked at: {type(error).__name__}: {error}")
        try:
            for value in map(lower, given):
                if is_array(value):
                    capture.usable(value)
            self._check_emit(emit, device)
            return Variant(key, capture, self.function, given, rebuild, emit, insist=self.emit == "c")
        except Exception as error:
            reason = str(capture.broke or error)
            # What the function itself has changed meanwhile it would change at each call.
            places = capture.places if reason != CHANGES and unchanged(capture.places) else []
            return Broken(key, places, reason if isinstance(capture.broke or error, Break)
                          else f"while it was captured, {type(error).__name__}: {reason}")

    def _check_emit(self, emit, device):
        """Break where kernels of this kind can't run on this device."""
        if device != "cpu" and emit != "triton":
            raise Break(f"the arguments are on {device}, where emit={emit!r} can't run")
        if device == "cpu" and emit == "triton" and not kernels.interpreting():
            raise Break("emit='triton' and the arguments are on the cpu: move them to the GPU with .to('cuda'), or set "
                        "TRITON_INTERPRET=1")
        if device != "cpu" and kernels.interpreting():
            raise Break("the arguments are on a GPU, and with TRITON_INTERPRET=1 kernels run on the host")
        if device != "cpu" and not (kernels.installed() and kernels.enabled()):
            raise Break("the arguments are on a GPU, and Triton " + (
                "is disabled" if kernels.installed() else "is not installed"))

    def show(self, stage="fused"):
        """The last graph as text: "captured", "optimized", "fused" or "kernels"; "fused backward" is backward's."""
        variant = next((v for v in self.variants if not v.broken), None)
        if variant is None:
            raise RuntimeError(f"{self.name}: there is no graph yet; " + (
                f"it runs uncompiled: {next(iter(self.breaks))}" if self.breaks else "call it first"))
        return variant.show(stage)


class CompiledModule(Module):
    """A module whose forward is compiled; its parameters keep their names."""

    def __init__(self, module, emit=None):
        super().__init__()
        self.add_module("", module)
        object.__setattr__(self, "compiled", Compiled(module, emit))
        self.training = module.training

    def forward(self, *args, **kwargs):
        return self.compiled(*args, **kwargs)

    # The module says itself what its parameters are: fully_shard's are this rank's pieces.
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return self._modules[""].named_parameters(prefix, recurse, remove_duplicate)

    def state_dict(self):
        return self._modules[""].state_dict()

    def load_state_dict(self, state, strict=True):
        return self._modules[""].load_state_dict(state, strict)

    def __setattr__(self, name, value):
        # Another forward, like a checkpoint of this one, stands around the compiled module, which it calls.
        if name in ("training", "forward") or "compiled" not in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(self._modules[""], name, value)

    def __getattr__(self, name):
        """Anything else is the module's own, and runs uncompiled: model.generate(…)."""
        if name in ("compiled", "_modules"):        # not set yet
            raise AttributeError(name)
        return getattr(self.compiled if name in ("show", "breaks") else self._modules[""], name)


class Broken:
    """Calls that run uncompiled, and why."""

    def __init__(self, key, places, reason):
        self.key, self.places, self.broken = key, places, reason

    def fits(self):
        """Whether the function is what it was then."""
        return unchanged(self.places)


class Variant:
    """One graph of a function, for arguments of one kind, in one state of what it reads.

    given     its arguments' arrays come first, then what stands elsewhere: [(Tensor or array, its node, shape, dtype)]
    """

    broken = None

    def __init__(self, key, capture, function, given, rebuild, emit, insist):
        self.key, self.capture, self.name, self.emit = key, capture, capture.name, (emit, capture.device, insist)
        self.places = capture.places
        self.module = module_on(capture.device)
        self.dated = [x.__class__ is Tensor for x in given if x.__class__ is Tensor or is_array(x)]
        with capture:
            leaves, arguments = [], []
            for x in given:
                if x.__class__ is Tensor:
                    symbol = capture.argument(x.data)
                    leaf = None if x.node is None else Leaf(x.shape, x.dtype)
                    arguments.append((symbol, leaf))
                    leaves.append(Tensor(symbol, leaf))
                elif is_array(x):
                    arguments.append((capture.argument(x), None))
                    leaves.append(arguments[-1][0])
                else:
                    leaves.append(x)
            args, kwargs = rebuild(leaves)
            outs, self.rebuild = flatten(function(*args, **kwargs), order=list)
            self._outputs(outs)
            forward = list(capture.nodes)
            tops = [o.node for o in self.traced]
            found, cotangents = {}, [capture.argument(o) for o in self.traced]
            stops = {leaf for _, leaf in arguments if leaf is not None} | capture.wanting.keys()
            if capture.broke:       # and the function has gone on
                raise capture.broke
            if tops:
                run_backward(list(zip(tops, cotangents, strict=True)), retain=True, into=found, stops=stops)
            nodes = [leaf for _, leaf in arguments] + [
                where.node if where.__class__ is Tensor else None for _, where, _ in capture.given]
            self.extra = [n for n in capture.wanting if n not in nodes]     # a second tensor of the same array
            nodes += self.extra
        found = {node: g.value for node, g in found.items()}
        self.reached = [reachable(o.node, stops, c.value, capture.nodes, found)
                        for o, c in zip(self.traced, cotangents, strict=True)]
        self._finish([s.value for s, _ in arguments], nodes, forward, [c.value for c in cotangents], found)

    def _outputs(self, outs):
        """Sort what the function returns: arrays that gradients reach, other arrays, the rest."""
        self.values, self.plan, self.traced = [], [], []    # plan: (kind, its place among the values, or the constant)
        for out in outs:
            raw = lower(out)
            if not is_array(raw):
                if not isinstance(out, (*PLAIN, np.generic, np.dtype, Tensor)):
                    raise Break(f"the function returns a {type(out).__name__}")
                self.plan.append(("constant", out))
                continue
            kind = "array" if out.__class__ is not Tensor else "tensor" if out.node is None else "traced"
            self.plan.append((kind, len(self.values)))
            self.values.append(self.capture.symbol(raw, out).value)
            if kind == "traced":
                self.traced.append(out)

    def _finish(self, arguments, nodes, forward, cotangents, found):
        capture = self.capture
        self.arguments = len(arguments)
        self.elsewhere = [(where, getattr(where, "node", None), s.shape, s.dtype) for s, where, _ in capture.given]
        given = [*arguments, *(s.value for s, _, _ in capture.given)]
        self.effects = [target for target, _ in capture.effects.values()]
        effects = [v.value for _, v in capture.effects.values()]
        backward = Graph(f"backward of {self.name}", [], capture.nodes[len(forward):],
                         [found[n] for n in nodes if n in found])
        # Tensors are dated; an array may be filled anew before backward, which then must not read it again.
        undated = {v for v, dated in zip(arguments, self.dated, strict=True) if not dated}
        undated |= {s.value for s, where, _ in capture.given if where.__class__ is not Tensor}
        backward, kept = partitioned(backward, forward, undated)
        self.captured = Graph(self.name, given, forward, [*self.values, *effects, *kept])
        self.graph = optimized(self.captured)
        renamed = dict(zip(kept, self.graph.wanted[len(self.graph.wanted) - len(kept):], strict=True))
        # Passes may have found that a value that is kept is given, or the same as another one.
        backward = backward.replaced(dict(renamed))
        distinct = list(dict.fromkeys(v for v in renamed.values() if v not in given))
        self.graph.wanted[len(self.graph.wanted) - len(kept):] = distinct
        self.kept = len(distinct)
        backward.given = [*cotangents, *distinct, *given]
        self.backward = optimized(backward)
        self.forward_program = Program(fused(self.graph), *self.emit)
        self.backward_program = Program(fused(self.backward), *self.emit) if nodes and self.backward.wanted else None
        read = {v for node in self.backward.nodes for v in node.inputs} | set(self.backward.wanted)
        self.reads = [v in read for v in given]
        self.gradients = [n in found for n in nodes]
        self.op = self._op(len(nodes)) if self.traced else None
        self.nodes = nodes

    def _op(self, count):
        """The Primitive that stands on the tape for a call."""
        names = [f"x{i}" for i in range(count)]
        shapes = [(o.shape, o.dtype) for o in self.traced]

        def pullback(ct, wanted, *saved):
            *inputs, kept = saved
            ct = ct.parts if len(shapes) > 1 else (ct,)
            parts = [self.module.zeros(*shape) if part is None else self._array(part)
                     for part, shape in zip(ct, shapes, strict=True)]
            given = [*parts, *kept, *inputs[:len(inputs) - len(self.extra)]]
            made = iter(own(self.backward_program(given), given, self.backward_program.fresh))
            # None where an output that has no part in this pass is the only way.
            there = set().union(*(reached for reached, part in zip(self.reached, ct, strict=True) if part is not None))
            made = [g if node in there else None for node, g in zip(
                self.nodes, (next(made) if known else None for known in self.gradients), strict=True)]
            return [g if w else None for g, w in zip(made, wanted, strict=True)]
        pullback.__signature__ = inspect.Signature(
            [inspect.Parameter(n, inspect.Parameter.POSITIONAL_OR_KEYWORD) for n in ("ct", "wanted", *names, "aux")])
        # own_sums: the graph's ops see to that, and what is done again is compared with what was rounded in forward.
        return Primitive(self.name, None, " ".join(names), aux=True, multi=len(shapes) > 1, pullback=pullback,
                         own_sums=True, listed=False)

    def fits(self):
        """Whether the function would ask for the same now."""
        for where, node, shape, dtype in self.elsewhere:
            if where.__class__ is Tensor and (
                    where.node is not node or where.data.shape != shape or where.data.dtype != dtype):
                return False
        return unchanged(self.places)

    def __call__(self, given):
        arguments = [x for x in given if x.__class__ is Tensor or is_array(x)]
        arrays = [self._array(lower(x), order="C") for x in arguments]
        arrays += [regular(where.data if where.__class__ is Tensor else where) for where, *_ in self.elsewhere]
        made = self.forward_program(arrays)
        n, kept = len(self.values), len(made) - self.kept
        for target, value in zip(self.effects, made[n:kept], strict=True):
            target[...] = value
        fresh = self.forward_program.fresh
        made[kept:] = own(made[kept:], arrays, fresh[kept:])
        outs = own(made[:n], [*arrays, *made[kept:]], fresh[:n])
        traced = iter(self._on_tape(arguments, arrays, outs, made[kept:]) if self.op else ())
        return self.rebuild([what if kind == "constant" else outs[what][()] if kind == "array" else
                             Tensor(outs[what]) if kind == "tensor" else next(traced) for kind, what in self.plan])

    def _array(self, x, order=None):
        """An array as the programs take it."""
        return np.asarray(x, order=order) if self.module is np else self.module.asarray(x, order=order)

    def _on_tape(self, arguments, arrays, outs, kept):
        """The outputs that gradients reach, as results of one op on the tape, which keeps what backward reads."""
        parents = [x.node if x.__class__ is Tensor else None for x in arguments] + self.nodes[self.arguments:]
        arrays = [array if read else None for array, read in zip(arrays, self.reads, strict=True)]
        values = tuple(outs[i] for kind, i in self.plan if kind == "traced")
        several = self.op.multi
        made = attach(self.op, parents, [*arrays, *(None for _ in self.extra)], (), values if several else values[0],
                      tuple(kept), 0)
        return made if several else (made,)

    def show(self, stage):
        """See Compiled.show."""
        stage, _, backward = stage.partition(" ")
        graph = self.backward if backward else self.graph
        program = self.backward_program if backward else self.forward_program
        stages = {"captured": lambda: str(self.captured), "optimized": lambda: str(graph),
                  "fused": lambda: str(program), "kernels": program.source}
        if stage not in stages:
            raise ValueError(f"show({stage!r}): there are {', '.join(stages)}")
        return stages[stage]()


def reachable(node, stops, cotangent, backward, gradients):
    """Those of the nodes `stops` that a gradient reaches from a node, whose cotangent this is. backward: ops of the
    graph, in order; gradients: {node: its Value}."""
    found, seen, stack = set(), set(), [node]
    while stack:
        node = stack.pop()
        if node in stops:
            found.add(node)
        elif node not in seen:
            seen.add(node)
            stack += [p for p in node.parents if p is not None]
    if any(isinstance(node.primitive, Segment) for node in seen):   # has one node for all results of a checkpoint
        made = {cotangent}
        for op in backward:
            if not made.isdisjoint(op.inputs):
                made.update(op.results)
        found = {node for node in found if gradients.get(node) in made}
    return found
