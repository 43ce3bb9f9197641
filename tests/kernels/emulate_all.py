"""Samples of every kernel, compiled and emulated; prints a JSON line of what was found for each.

A process of its own, because Triton either interprets or compiles:

    python -m tests.kernels.emulate_all samples 90 IDS.json    each against its definition, as on NumPy's arrays
    python -m tests.kernels.emulate_all launches 90            a call of each module through launch.py's own start
    python -m tests.kernels.emulate_all counts 90              what these calls cost
    python -m tests.kernels.emulate_all steps 90               a GPT's training, on the host and on the stand-in
    python -m tests.kernels.emulate_all generated 90           kernels that mt.compile writes
    python -m tests.kernels.emulate_all broken 90              a kernel's PTX without one of its barriers or guards
"""

import json
import re
import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import kernels, ledger, nn, optim
from minitorch_dist.kernels import adam, build, launch
from minitorch_dist.kernels.emulator import EmulationError, Emulator, calls, emulated, execute
from minitorch_dist.kernels.emulator.machine import Code
from minitorch_dist.kernels.emulator.ptx import parse
from minitorch_dist.nn.transformer import FAMILIES

from . import harness


def lending(emulator):
    """A context in which the arrays that Adam puts addresses of into its table are lent to the emulator."""
    def address(array, *more, before=adam.address):
        emulator.lent.append(getattr(array, "host", array))
        return before(array, *more)
    return mock.patch.object(adam, "address", address)


def samples(capability, ids):
    """{"id", "error"} of each sample: what test_interpreted.py asks, of the compiled kernel."""
    emulator, wanted_ids = Emulator(capability, lent=[]), set(json.loads(Path(ids).read_text()))
    for sample in harness.samples():
        if sample.id not in wanted_ids:
            continue
        error = None
        emulator.lent.clear()
        with pytest.MonkeyPatch.context() as patch, lending(emulator):
            guard = harness.guarded(patch)
            try:
                wanted = sample.definition(*map(harness.exact, harness.copied(sample.args)))
                with emulated(emulator) as launches:
                    before = len(launches)
                    got = sample.entry(*harness.copied(sample.args))
                assert {counts.kernel for counts in launches[before:]} == set(sample.names)
                guard.check()
                harness.compare(sample, got, wanted)
            except (AssertionError, EmulationError) as caught:
                error = f"{type(caught).__name__}: {caught}"
        yield {"id": sample.id, "error": error}


class EmulatingDriver:
    """In CupyDriver's place: loads machine code by running the PTX that it was made of."""

    def __init__(self, capability, lent):
        self.cc, self.lent, self.codes = capability, lent, {}
        self.current, self.using = lambda: 0, lambda device: nullcontext()
        self.capability = lambda device: capability

    def packed(self, numbers):
        """A launch's numbers as bytes: what a driver gets is where they lie, and takes from there what it needs."""
        return tuple(np.asarray(number).tobytes() for number in numbers), None

    def made(self, *args):
        """In build.compile_triton's place: it remembers the PTX."""
        compiled = self.compile(*args)
        self.codes[bytes(compiled.asm["cubin"])] = Code(parse(compiled.asm["ptx"]))
        return compiled

    compile = staticmethod(build.compile_triton)

    def load(self, binary, device):
        code = self.codes[binary.cubin]

        def function(grid, block, args, shared_mem=0):
            assert block == (32 * binary.warps, 1, 1) and shared_mem == binary.shared
            given = {}
            for (name, kind), a in zip(code.program.parameters.items(), args, strict=True):
                kind = np.dtype(kind.replace("s", "i").replace("b", "u")[0] + str(int(kind[1:]) // 8))
                given[name] = a.host if hasattr(a, "host") else np.frombuffer(a, kind, 1)[0]
                assert hasattr(a, "host") or len(a) == kind.itemsize, (name, kind, a)
            execute(code, grid, block[0], given, shared_mem, self.lent)
        return function


def launches(capability):
    """{"id", "error"}: of each kernel the smallest sample with many elements, through launch.start, on a stand-in for
    CuPy whose driver is emulated: types, alignment, order and width of the arguments are launch.py's."""
    from ..device.fake_cupy import cupy, ndarray
    chosen = {}
    for sample in harness.samples():
        if sample.size >= 31:
            chosen.setdefault(sample.names, sample)
    driver = EmulatingDriver(capability, [])
    for sample in chosen.values():
        driver.lent.clear()
        wanted, error = sample.definition(*map(harness.exact, harness.copied(sample.args))), None
        with on_emulated_gpu(driver):
            args = [cupy.asarray(a) if isinstance(a, np.ndarray) else a for a in sample.args]
            try:
                got = [a.host if isinstance(a, ndarray) else a for a in harness.as_tuple(sample.entry(*args))]
                harness.compare(sample, tuple(got), harness.as_tuple(wanted))
            except (AssertionError, EmulationError) as caught:
                error = f"{type(caught).__name__}: {caught}"
        yield {"id": sample.id, "error": error}


@contextmanager
def on_emulated_gpu(driver, **libraries):
    """A stand-in for CuPy whose launches go through launch.py's own start to an EmulatingDriver."""
    start = launch.start
    with harness.on_stand_in(**libraries), lending(driver), mock.patch.object(launch, "start", start), \
            mock.patch.object(launch, "_driver", driver), mock.patch.dict(launch._functions, clear=True), \
            mock.patch.object(build, "compile_triton", driver.made), \
            mock.patch.object(build, "read", lambda path: None):
        yield


def steps(capability):
    """{"family", "losses", "wanted", "launches"} of three steps of small GPTs with AdamW and clipped gradients: by
    kernels that are emulated, and on the host."""
    from ..device import fake_cublas
    for family in FAMILIES:
        wanted, _ = trained(family, "cpu")
        with on_emulated_gpu(EmulatingDriver(capability, []), cublas=fake_cublas.NAMES):
            losses, launched = trained(family, "cuda")
        yield {"family": family, "losses": losses, "wanted": wanted, "launches": launched}


def generated(capability):
    """{"what", "error"}: kernels that mt.compile has written, on the emulated GPU: random programs, and models that
    train as they do uncompiled on the host."""
    from minitorch_dist.kernels import cublas

    from ..compiler import test_on_gpu
    from ..device import fake_cublas

    def alike(name):
        on_host = test_on_gpu.train(name, steps=2)
        test_on_gpu.alike(test_on_gpu.train(name, "compiled", steps=2), on_host)
    tasks = {"random programs": lambda: test_on_gpu.test_random_programs_.hold(5, "triton", 12, "cuda")} | {
        name: partial(alike, name) for name in (*test_on_gpu.MODELS, *test_on_gpu.SMALL)}
    with on_emulated_gpu(EmulatingDriver(capability, []), cublas=fake_cublas.NAMES), \
            mock.patch.object(cublas, "load_library", fake_cublas.FakeCublas):
        for what, task in tasks.items():
            error = None
            try:
                task()
            except (AssertionError, EmulationError) as caught:
                error = f"{type(caught).__name__}: {caught}"
            yield {"what": what, "error": error}


def trained(family, device):
    """(losses, launches of kernels by name) of three steps."""
    mt.manual_seed(3)
    model = nn.GPT(65, 24, layers=2, heads=2, dim=32, dropout=0.1, **FAMILIES[family]).to(device)
    optimizer = optim.AdamW(model.parameters(), lr=1e-2)
    rng, losses = np.random.default_rng(0), []
    with ledger.record() as book:
        for _ in range(3):
            tokens = rng.integers(0, 65, (2, 24))
            loss = nn.cross_entropy(model(mt.tensor(tokens[:, :-1], device=device)),
                                    mt.tensor(tokens[:, 1:], device=device))
            optimizer.zero_grad()
            loss.backward()
            optim.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses, dict(book.launches)


def counts(capability):
    """{"module", "launches": [Counts as dicts]} of what `kernels NAME --count` runs."""
    for module in kernels.MODULES:
        found = calls.counted(module, capability)
        yield {"module": module, "launches": [
            {"kernel": one.kernel, "read": one.read, "written": one.written, "barriers": one.barriers,
             "flops": one.flops} | {kind: asdict(one.access(kind)) for kind in
                                    ("global load", "global store", "shared load", "shared store")} for one in found]}


def broken(capability):
    """{"what", "errors"}: of PTX with one thing taken out, what the emulator says: of layer norm each of its barriers,
    of vector addition the guards of its loads and of its stores."""
    def run(module, change):
        found = Emulator.code

        def code(self, *args):
            made, binary = found(self, *args)
            text = change(self.text)
            return (Code(parse(text)), binary) if text else (made, binary)

        def compiled(*args):
            made = build_one(*args)
            Emulator.text = made.asm["ptx"]
            return made
        with mock.patch("minitorch_dist.kernels.emulator.compile_triton", compiled), \
                mock.patch.object(Emulator, "code", code), emulated(Emulator(capability)):
            try:
                {"norm": lambda: kernels.load("norms").rms_norm(harness.random(3, 700), harness.random(700), 1, 1e-5),
                 "add": lambda: kernels.load("add").add(*harness.random(2, 1000))}[module]()
            except EmulationError as error:
                return str(error)
        return None
    build_one = build.compile_triton
    barriers = []
    run("norm", lambda text: barriers.extend(re.findall(r"bar\.sync[^;]*;", text)))
    for which in range(len(barriers)):
        places = iter(range(len(barriers)))
        yield {"what": "barrier", "error": run("norm", lambda text, places=places, which=which: re.sub(
            r"bar\.sync[^;]*;", lambda found: "" if next(places) == which else found[0], text))}
    for access in ("ld.global", "st.global"):
        yield {"what": access, "error": run("add", lambda text, access=access: re.sub(
            rf"@%p\d+ ({re.escape(access)})", r"\1", text))}


if __name__ == "__main__":
    task, capability, *rest = sys.argv[1:]
    tasks = {"samples": samples, "launches": launches, "counts": counts, "steps": steps, "generated": generated,
             "broken": broken}
    for line in tasks[task](int(capability), *rest):
        print(json.dumps(line), flush=True)
