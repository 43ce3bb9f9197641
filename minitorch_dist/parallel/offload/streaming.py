"""Inference with a model that doesn't fit: its parameters lie on disk, and come unit by unit as forward needs them.

    with nn.without_values():
        model = nn.GPT(vocabulary=65, length=64)
    stream_from_disk(model, "/scratch/gpt", values=checkpoints.StoredValues("runs/gpt/checkpoints/step-00000200"))
    with mt.no_grad():
        logits = model(tokens)              # or model.generate(tokens, 100)

    compute    | u0 | u1 | u2 |  …          in memory: the unit that runs, and `prefetch` more
    disk     u0 | u1 | u2 | u3 | …

With several ranks each reads 1/N of a unit, and an all-gather makes it whole.

Source: Aminabadi et al. 2022, "DeepSpeed Inference" (ZeRO-Inference).
"""

import json
import os
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ... import ledger
from ...autodiff.modes import is_grad_enabled
from ...autodiff.primitive import lower
from ...autodiff.writes import log, wrote
from ...backend import STORED, is_array, module_on, on, on_host, refuse_in_graph, to, to_device_of, whole, xp
from ...comm.device import pinned, up
from ...comm.together import together
from ...flat import round_up
from ...nn.absent import Absent, Unmade, will_come_and_go
from ...nn.decoding import by_position
from ..fsdp.grouping import default_units, either, group
from .spill import read_into, refused

ALIGN = 64      # bytes: each rank's share of a unit is a multiple of it


def stream_from_disk(module, folder, prefetch=1, units=None, values=None, comm=None):
    """Let the module's parameters lie in `folder`, and come for forward only. Returns the module, changed in place.

    folder    one file of safetensors per unit, written here over what has its name: blocks.0.safetensors, …; and
              "the rest.safetensors" with buffers, and with parameters of no unit, all of which stay in memory. The
              files stay open, a descriptor per unit: what is written over them later isn't this model's
    prefetch  so many units are read, by a thread, while one runs. The order is that of the forward before, at first the
              module's own; another one costs time and is right all the same
    units     modules whose parameters come and go together, as fully_shard's (default: those in the outermost
              Sequentials and ModuleLists, such as a GPT's blocks; else the children)
    values    {name: array} of all parameters and buffers, asked for one unit at a time (default: the module's own). Of
              a module built without_values, None stands for the files that an earlier call has written
    comm      a Communicator whose ranks all call the model alike: each reads 1/N of the files, in a folder that all
              see. Rank 0 writes them. Collective, then and in forward, where a rank that can't read is the only one
              to say so

    Outputs are those of the whole model to the last bit, where its parameters are C-ordered, as they are here: products
    of others may be added up in another order. Parameters stop wanting gradients: forward runs under no_grad() only,
    and raises RuntimeError elsewhere, since backward would keep all units; and while another thread's runs. Who reads a
    parameter at another time gets an AbsentParameterError. On all ranks, and with nothing changed: OSError where the
    folder can't be written or read, ValueError where files or values don't fit the module.
    """
    if (prefetch := whole("prefetch", prefetch)) < 0:
        raise ValueError(f"stream_from_disk: prefetch={prefetch} must be at least 0")
    if owned := [name for name, p in module.named_parameters()
                 if isinstance(p.data, Absent) and not isinstance(p.data, Unmade)
                 or p.leaf is not None and p.leaf.flat is not None]:
        raise ValueError(f"stream_from_disk: {', '.join(owned[:4])} belongs to an optimizer, DistributedDataParallel, "
                         "fully_shard or a stream already: take a model of its own")
    if units is None:
        units = default_units(module, either) or default_units(module, either, least=1) or [
            m for m in module._modules.values() if any(True for _ in m.parameters())]
    groups = group(module, units, either, caller="stream_from_disk")
    streamed = [found for found in groups if found[0] is not None]
    if not streamed:
        raise ValueError("stream_from_disk: the model has no children with parameters: pass the modules that shall "
                         "come and go as units=")
    rest = [pair for m, _, named in groups if m is None for pair in named] + list(module.named_buffers())
    files = [(path_of(folder, name), named) for _, name, named in streamed] + [(path_of(folder, "the rest"), rest)]
    made = values is not None or not any(isinstance(p.data, Unmade) for p in module.parameters())
    together(comm, lambda: made and (comm is None or comm.rank == 0) and write_files(files, values))
    found, resident = together(comm, lambda: (
        [(m, StreamedUnit(name, path_of(folder, name), named, comm)) for m, name, named in streamed],
        read_rest(path_of(folder, "the rest"), rest)))
    for p in module.parameters():
        p.requires_grad_(False)
    for value, array in resident:
        if isinstance(lower(value), Unmade):
            value.data = to(array, value.device)
        else:
            lower(value)[...] = to_device_of(array, lower(value))
            wrote(lower(value), "stream_from_disk")
    Stream(module, found, prefetch)
    return module


# ---------------------------------------------------------------- files

def path_of(folder, name):
    """The file of a unit."""
    return Path(folder) / f"{name}.safetensors"


def write_files(files, values):
    """[(path, [(name, tensor or array)])]: a file of these names each, under its path when all are whole."""
    partials = [(path.with_name(f".{path.name}.partial"), path) for path, _ in files]
    try:
        for (partial, _), (_, named) in zip(partials, files, strict=True):
            write_file(partial, {name: xp.asarray(to(fitting(name, lower(value), values), "cpu"), order="C")
                                 for name, value in named})
        for partial, path in partials:
            os.replace(partial, path)
    finally:
        for partial, _ in partials:
            if partial.parent.is_dir():
                partial.unlink(missing_ok=True)


def write_file(path, arrays):
    """{name: array}, as a file of safetensors. OSError where that can't be."""
    from safetensors import SafetensorError
    from safetensors.numpy import save_file
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(arrays, path)
    except (OSError, SafetensorError) as error:     # the latter of a full disk
        raise refused(error, path.parent, sum(a.nbytes for a in arrays.values())) from None


def fitting(name, own, values):
    """The array to write for a parameter or buffer. ValueError where that is none."""
    if values is None:
        return own
    if name not in values:
        raise ValueError(f"stream_from_disk: values has no {name!r}")
    array = lower(values[name])
    array = array if is_array(array) else xp.asarray(array)
    if array.shape != own.shape or array.dtype != own.dtype:
        raise ValueError(f"stream_from_disk: {name} has shape {own.shape} and dtype {own.dtype}, the value has shape "
                         f"{array.shape} and dtype {array.dtype}")
    return array


def places_of(file, path, named):
    """[(first, last + 1 byte in the file, a descriptor) of each]. ValueError where it has others."""
    length = int.from_bytes(os.pread(file, 8, 0), "little")
    end = os.fstat(file).st_size
    if 8 + length > end:
        raise ValueError(f"{path} has {end:,} bytes only: it was cut off, or is no file of safetensors")
    wanted = {name: (STORED[lower(value).dtype.name], list(lower(value).shape), lower(value).nbytes)
              for name, value in named}
    try:
        header = json.loads(os.pread(file, length, 8))
        there = {name: (entry["dtype"], entry["shape"], entry["data_offsets"][1] - entry["data_offsets"][0])
                 for name, entry in header.items() if name != "__metadata__"}
    except (AttributeError, LookupError, TypeError, ValueError):
        raise ValueError(f"{path} is no file of safetensors") from None
    if there != wanted:
        odd = sorted(name for name in {*there, *wanted} if there.get(name) != wanted.get(name))
        raise ValueError(f"{path} is of another model: its {odd[0]} has (dtype, shape, bytes) {there.get(odd[0])}, "
                         f"this one's {wanted.get(odd[0])}")
    places = [tuple(8 + length + at for at in header[name]["data_offsets"]) for name, _ in named]
    if any(start < 8 + length or stop > end for start, stop in places):
        raise ValueError(f"{path} has {end:,} bytes only: it was cut off, or is no file of safetensors")
    return places


def read_rest(path, named):
    """[(tensor or array, its array from the file)]."""
    found = []
    with open(path, "rb") as file:
        for (_, value), (start, _) in zip(named, places_of(file.fileno(), path, named), strict=True):
            found.append((value, xp.empty(lower(value).shape, lower(value).dtype)))
            read_into(file.fileno(), start, found[-1][1].reshape(-1).view(xp.uint8), str(path))
    return found


# ---------------------------------------------------------------- units

class OnDisk(Absent):
    """What stands in a parameter's place while its values lie on disk."""

    def __init__(self, name, tensor, path):
        super().__init__(tensor.shape, tensor.dtype, tensor.device, (
            f"{name} lies in {path}, and its values are in memory while its unit runs only: call the model under "
            "no_grad(), or read them from the file"))


class StreamedUnit:
    """Parameters that are read, used and forgotten together.

    memory  the file's arrays as they stand there, 1-d uint8, from the time on when they are being read
    """

    def __init__(self, name, path, named, comm):
        self.name, self.path, self.comm = name, path, comm
        self.tensors, self.device = [t for _, t in named], named[0][1].device
        self.file = os.open(path, os.O_RDONLY)      # and stays open: what lies there later under its name is another
        weakref.finalize(self, os.close, self.file)
        places = places_of(self.file, path, named)
        self.begin = min(start for start, _ in places)
        self.places = [(start - self.begin, stop - self.begin) for start, stop in places]
        self.nbytes = max(stop for _, stop in self.places)
        self.absent = [OnDisk(n, t, path) for n, t in named]
        for tensor in self.tensors:
            will_come_and_go(tensor)
        ranks, rank = (comm.size, comm.rank) if comm else (1, 0)
        share = round_up(-(-self.nbytes // ranks), ALIGN)
        self.size, self.mine = ranks * share, slice(rank * share, (rank + 1) * share)
        self.memory = self.reading = None

    def post(self, reader):
        """Begin to read, unless that has begun."""
        if self.memory is None:
            with on(self.device):
                self.memory = xp.empty(self.size, xp.uint8) if self.device == "cpu" else \
                    pinned(xp.empty(self.size, xp.uint8))
            ledger.keep(self.memory, "parameter")
            if ledger.open_ledgers:
                ledger.event("read", self.name)
            self.reading = reader.submit(self.read, self.memory[self.mine], self.mine.start)

    def read(self, memory, start):
        """This rank's share, which for the last ones may end with the file, or begin behind it."""
        read_into(self.file, self.begin + start, memory[:max(self.nbytes - start, 0)], str(self.path))

    def open(self, reader):
        """Give the module its parameters."""
        self.post(reader)
        if self.reading is not None:
            reading, self.reading = self.reading, None
            reading.result()
            if self.comm is not None and self.comm.size > 1:
                self.comm.all_gather(self.memory, self.memory[self.mine], what=self.name)
        if on_host(self.memory) and self.device != "cpu":
            with on(self.device):
                memory = module_on(self.device).empty(self.size, xp.uint8)
                ledger.keep(memory, "parameter")
                up(self.memory, memory)
                self.memory = memory
        memory = self.memory
        log.forget(memory)
        for tensor, (start, end), absent in zip(self.tensors, self.places, self.absent, strict=True):
            tensor.data = memory[start:end].view(absent.dtype).reshape(absent.shape)

    def close(self):
        """Take them away, and forget what was read."""
        for tensor, absent in zip(self.tensors, self.absent, strict=True):
            tensor.data = absent
        self.drop()

    def drop(self):
        """Forget what was read ahead."""
        if self.reading is not None:
            self.reading.cancel() or self.reading.exception()       # the thread writes into it until then
        if self.memory is not None and ledger.open_ledgers:
            ledger.event("free", self.name)
        self.memory = self.reading = None


class Stream:
    """The units of a model, as its modules run. It lives in the model's hooks.

    running  [(thread, the units that are wanted)] of each module that runs, the outermost first
    """

    def __init__(self, model, units, prefetch):
        self.prefetch, self.reader = prefetch, ThreadPoolExecutor(1, "stream")
        self.order, self.entered = [unit for _, unit in units], []
        self.running, self.lock = [], threading.Lock()
        for unit in self.order:
            unit.close()
        of_module = {}
        for m, unit in units:
            of_module.setdefault(id(m), (m, []))[1].append(unit)
        model.register_forward_pre_hook(by_position(lambda m, inputs: self.begin()))
        for m, units in of_module.values():
            m.register_forward_pre_hook(by_position(lambda m, inputs, units=units: self.enter(units)))
            m.register_forward_hook(by_position(lambda m, inputs, output, units=units: self.leave(units)), True)
        model.register_forward_hook(by_position(lambda m, inputs, output: self.leave(())), True)

    def begin(self):
        """The whole model begins to run, perhaps inside of itself."""
        self.take_turn(())
        self.order = self.entered + [unit for unit in self.order if unit not in self.entered]
        self.entered = []

    def enter(self, units):
        """A module begins to run."""
        refuse_in_graph("reading parameters from disk")
        if is_grad_enabled():
            raise RuntimeError(f"{units[0].name} lies on disk, and can't be trained from there: backward would keep "
                               "all units in memory. Call the model under no_grad(); to train, take fully_shard and "
                               "offload_optimizer")
        self.take_turn(units)
        closed = [unit for unit in units if unit.tensors[0].data is unit.absent[0]]
        if closed:
            coming = *units, *self.following(units[-1])
            for unit in self.order:
                if unit not in coming and not self.wanted(unit):
                    unit.drop()
            for unit in coming:
                unit.post(self.reader)
            for unit in closed:
                unit.open(self.reader)
        self.entered += [unit for unit in units if unit not in self.entered]

    def take_turn(self, units):
        """Note who runs. RuntimeError while another thread does: its parameters are the same."""
        me = threading.get_ident()
        with self.lock:
            if self.running and self.running[0][0] != me:
                raise RuntimeError("stream_from_disk: the model runs in another thread at this moment, and its "
                                   "parameters come and go with that: let one thread run it at a time")
            self.running.append((me, units))

    def wanted(self, unit):
        """Whether a module that runs wants it."""
        return any(unit in units for _, units in self.running)

    def following(self, unit):
        """The units that are expected after this one."""
        at = self.order.index(unit) + 1
        return self.order[at:at + self.prefetch]

    def leave(self, units):
        """A module has run, or raised, perhaps before it could enter."""
        if self.running and self.running[-1] == (threading.get_ident(), units):
            self.running.pop()
            for unit in units:
                if not self.wanted(unit):
                    unit.close()
