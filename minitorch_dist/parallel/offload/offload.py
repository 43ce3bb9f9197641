"""Offload: what waits for its turn lies on the host or on disk, and the numbers stay the same to the last bit.

    with offload_activations(model, "/scratch"):            # what backward needs goes to disk …
        loss = loss_of(model, batch)
    loss.backward()                                         # … and comes back, one ahead of its use
    optimizer = offload_optimizer(optim.Adam(model.parameters()), "/scratch")

    forward    op 1   op 2   op 3          disk   | 1 | 2 | 3 |
    backward                 op 3   op 2   op 1
                  read 3, and 2 ahead … 1 ahead …

From a GPU things go to the host ("cpu") or to a folder, from the host to a folder. Parameters that aren't trained:
streaming.py.

Sources: Ren et al. 2021, "ZeRO-Offload" (the optimizer on the host); Rajbhandari et al. 2021, "ZeRO-Infinity" (disks).
"""

import os
import weakref
from bisect import bisect_left
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple

from ... import ledger
from ...autodiff.modes import is_recomputing, saved_tensors_hooks
from ...autodiff.primitive import lower
from ...autodiff.writes import log, tick
from ...backend import (
    Placeholder,
    byte_range,
    device_of,
    is_array,
    load_cupy,
    module_of,
    module_on,
    on,
    on_host,
    refuse_in_graph,
    to,
    whole,
    xp,
)
from ...comm.device import down, pinned
from ...optim.packed import Packed
from ..places import Place, address
from .spill import Spill, mapped

PIECE = 1 << 20     # elements of a GPU's parameters that the host updates at a time


def check_place(caller, to):
    """TypeError unless it says where things go."""
    if not isinstance(to, str | os.PathLike):
        raise TypeError(f"{caller}: to={to!r}: 'cpu', or the path of a folder")


# ---------------------------------------------------------------- activations

@contextmanager
def offload_activations(module, to="cpu", min_bytes=1 << 16, prefetch=1):
    """Arrays that ops recorded inside keep for backward lie elsewhere until backward asks for them.

    module     whose parameters and buffers live anyway, and stay where they are (wrapped or not), as long as that is
               where they were when the block began: an optimizer that is made inside moves them
    to         "cpu": arrays on a GPU go to pinned memory of the host, and those of the host stay; or a folder: all go
               into a file without a name there, with room for the tapes that live at once; it goes with the last of
               them after the block, or with the process
    min_bytes  smaller ones stay
    prefetch   so many arrays before the one that backward has asked for are read meanwhile

    An array that several ops keep, or views of one, is written once. The ledger's activations are those that are back:
    of a chain the one that backward is at, and `prefetch` more. What checkpoints keep stays; what a compiled function
    keeps is back all together. A write into an array after an op has kept it doesn't touch the copy: the gradient is
    that of the forward. OSError from the op that can't write; nothing else is changed then.
    """
    check_place("offload_activations", to)
    min_bytes, prefetch = whole("min_bytes", min_bytes), whole("prefetch", prefetch)
    if min_bytes < 1 or prefetch < 0:
        raise ValueError(f"offload_activations: min_bytes={min_bytes} must be at least 1, prefetch={prefetch} at "
                         "least 0")
    store = Activations(module, None if to == "cpu" else Spill(to), min_bytes, prefetch)
    with saved_tensors_hooks(store.pack, store.unpack):
        yield


class Stretch:
    """A stretch of memory that saved arrays look into, while it lies elsewhere."""

    def __init__(self, owner, number, nbytes):
        self.owner, self.number, self.nbytes = weakref.ref(owner), number, nbytes
        self.device, self.date = device_of(owner), tick()
        self.host = self.offset = None      # where it is: pinned memory, or the place in the file
        self.coming = None                  # (memory of the host, its Future), while it is read
        self.back = lambda: None            # the memory that it has come back to, as long as somebody has it

    def copies(self, owner):
        """Whether it is this array's memory that it holds: an id may be another one's by now."""
        return owner is self.owner() or owner is self.back()


class View(NamedTuple):
    """What stands for a saved array."""

    stretch: Stretch
    place: Place


class Activations:
    """The saved arrays of one offload_activations block. spill: the file, or None for pinned memory."""

    def __init__(self, module, spill, min_bytes, prefetch):
        self.spill, self.min_bytes, self.prefetch = spill, min_bytes, prefetch
        arrays = [lower(value) for _, value in (*module.named_parameters(), *module.named_buffers())]
        self.resident = {byte_range(owner_of(array)) for array in arrays if is_array(array)}
        self.known = weakref.WeakValueDictionary()      # (id of an array, first, last + 1 byte of it) -> Stretch
        self.numbered = weakref.WeakValueDictionary()   # the same by their numbers
        self.numbers, self.made = [], 0                 # in order, with some that have been let go of since
        self.gone = deque()                             # these
        self.copying = deque()      # (event, pinned memory): not to be given back before the copy is done
        self.reader = ThreadPoolExecutor(1, "offload")

    # ------------------------------------------------------------ away

    def pack(self, array):
        """What to keep in the place of an array."""
        if isinstance(array, Placeholder) or is_recomputing() or self.spill is None and on_host(array):
            return array
        owner, bounds = owner_of(array), byte_range(array)
        if bounds is None or bounds[1] - bounds[0] < self.min_bytes or byte_range(owner) in self.resident:
            return array
        (first, last), (begin, end) = bounds, byte_range(owner)
        if 2 * (last - first) > end - begin:    # interleaved views, say q, k and v, have all of it in common
            first, last = begin, end
        key = id(owner), first - begin, last - begin
        stretch = self.known.get(key)
        if stretch is None or not stretch.copies(owner) or log.since(array, stretch.date):
            stretch = self.known[key] = self.put(owner, *key[1:])
        return View(stretch, Place.of(array, address(owner) + first - begin))

    def put(self, owner, first, last):
        """Copy bytes [first, last) of an array's memory to where they shall wait."""
        while self.gone:
            del self.numbers[bisect_left(self.numbers, self.gone.popleft())]
        stretch, data = Stretch(owner, self.made, last - first), memory_of(owner)[first:last]
        if on_host(owner):
            stretch.offset = self.spill.put(data)
        else:
            refuse_in_graph("offloading activations")
            if self.spill is not None:
                stretch.offset = self.spill.put(down(data))
            else:
                stretch.host = pinned(data)
                data.get(out=stretch.host, blocking=False)      # its stream keeps the order
                self.hold(stretch.host)
        self.made += 1
        self.numbers.append(stretch.number)
        self.numbered[stretch.number] = stretch
        weakref.finalize(stretch, self.freed, stretch.number, stretch.offset, stretch.nbytes).atexit = False
        return stretch

    def hold(self, host):
        """A copy from or to pinned memory is under way on the current stream."""
        self.copying.append((load_cupy().cuda.get_current_stream().record(), host))
        while self.copying and self.copying[0][0].done:
            self.copying.popleft()

    def freed(self, number, offset, nbytes):
        """The tape has let go of a stretch. The garbage collector may say so between any two lines."""
        self.gone.append(number)
        if offset is not None:
            self.spill.release(offset, nbytes)

    # ------------------------------------------------------------ and back

    def unpack(self, kept):
        """The array, of the same bits and strides."""
        if not isinstance(kept, View):
            return kept
        stretch = kept.stretch
        memory = stretch.back()
        if memory is None:
            self.begin(stretch)
            at = bisect_left(self.numbers, stretch.number)
            for number in self.numbers[max(at - self.prefetch, 0):at][::-1]:
                if (ahead := self.numbered.get(number)) is not None:
                    self.begin(ahead)
            memory = self.arrived(stretch)
        return kept.place.view(memory)

    def begin(self, stretch):
        """Have a stretch read from the file, unless it is back or on its way."""
        if stretch.offset is None or stretch.coming is not None or stretch.back() is not None:
            return
        with on(stretch.device):
            memory = new_memory(stretch.nbytes, "cpu") if stretch.device == "cpu" else \
                pinned(xp.empty(stretch.nbytes, xp.uint8))
        stretch.coming = memory, self.reader.submit(self.spill.get, stretch.offset, memory)

    def arrived(self, stretch):
        """The memory that a stretch has come back to."""
        host = stretch.host
        if stretch.coming is not None:
            (host, reading), stretch.coming = stretch.coming, None
            reading.result()
        memory = host
        if stretch.device != "cpu":
            with on(stretch.device):
                memory = new_memory(stretch.nbytes, stretch.device)
                memory.set(host)
                self.hold(host)
        stretch.back = weakref.ref(memory)
        self.known[id(memory), 0, stretch.nbytes] = stretch     # a backward that is recorded keeps it once more
        return memory


def new_memory(nbytes, device):
    """A 1-d uint8 array for what comes back. What was written to its addresses before was written to something else."""
    memory = module_on(device).empty(nbytes, xp.uint8)
    log.forget(memory)
    ledger.keep(memory, "activation")
    return memory


def owner_of(array):
    """The array whose memory this one looks into; NumPy's as_strided hides it behind an object of its own."""
    base = array.base
    while base is not None:
        array, base = base if is_array(base) else array, getattr(base, "base", None)
    return array


def memory_of(owner):
    """All bytes from an owner's first to its last, a 1-d uint8 array."""
    begin, end = byte_range(owner)
    as_strided = module_of(owner).lib.stride_tricks.as_strided
    return as_strided(as_strided(owner, (1,), (owner.itemsize,)).view(xp.uint8), (end - begin,), (1,))


# ---------------------------------------------------------------- the optimizer's state

def offload_optimizer(optimizer, to="cpu"):
    """Let an optimizer's state (and the float32 masters of 16-bit parameters) lie elsewhere. Returns the optimizer.

    to  "cpu": parameters are on a GPU, their state lies on the host, and the host makes the update: gradients and
        parameters come down and parameters go up, in pieces, through pinned buffers, while other pieces are updated;
        or a folder: the state lies in files without names there, mapped into memory, and is updated tile by tile: the
        kernel brings the pages, and takes them away when it wants the room

    The bits are those of the host's update without offload. state_dict, checkpoints, clipping and fully_shard's pieces
    (of each rank's own) are as always; a folder may be each rank's own. Call it right after the optimizer was made, so
    that the state never exists in memory; later its steps and state are taken along. OSError where there is no room.
    ValueError for "cpu" where parameters live there.
    """
    check_place("offload_optimizer", to)
    if to == "cpu" and any(on_host(flat.params) for flat in optimizer.flats):
        raise ValueError("offload_optimizer: the parameters live on the host, and so does their state: give a folder "
                         "to have it on disk")
    optimizer.settle_in(StateElsewhere(None if to == "cpu" else to))
    return optimizer


class StateElsewhere:
    """Where an optimizer's state lives: in files of `folder`, or (None) on the host. See Optimizer.home."""

    def __init__(self, folder):
        self.folder, self.lanes = folder, {}

    def move(self, state):
        """{name: array} there."""
        def there(array):
            return to(array, "cpu") if self.folder is None else mapped(self.folder, to(array, "cpu"))
        return {name: array.moved(there) if isinstance(array, Packed) else there(array)
                for name, array in state.items()}

    def copy(self, array):
        """Another array of the same values there, of one that is."""
        return array.copy() if self.folder is None else mapped(self.folder, array)

    def __deepcopy__(self, memo):
        return StateElsewhere(self.folder)

    def update(self, tiled, p, g, state, group, step):
        """One run's update on the host, by `tiled` (Optimizer.tiled)."""
        if on_host(p):
            return tiled(p, g, state, group, step)
        cupy = load_cupy()
        cupy.cuda.get_current_stream().synchronize()        # the gradients are complete
        pieces = [slice(at, min(at + PIECE, p.size)) for at in range(0, p.size, PIECE)]
        lanes = [self.lane(lane, p, g) for lane in (0, 1)]
        for _, *buffers in lanes:
            for buffer in buffers:
                ledger.keep(buffer, "buffer")

        def fetch(k):
            stream, *buffers = lanes[k % 2]
            for x, host in zip((p[pieces[k]], g[pieces[k]]), buffers, strict=True):
                x.get(stream=stream, out=host[:x.size], blocking=False)
        fetch(0)
        for k, piece in enumerate(pieces):
            if k + 1 < len(pieces):
                fetch(k + 1)
            (stream, low, slope), size = lanes[k % 2], piece.stop - piece.start
            stream.synchronize()
            tiled(low[:size], slope[:size], {name: array[piece] for name, array in state.items()}, group, step)
            p[piece].set(low[:size], stream=stream)
        for stream, *_ in lanes:
            stream.synchronize()

    def lane(self, number, p, g):
        """(stream, pinned memory for parameters, for gradients): two lanes take turns, so that one's copies run while
        the other's piece is updated."""
        key = number, p.dtype, g.dtype
        if key not in self.lanes:
            self.lanes[key] = (load_cupy().cuda.Stream(non_blocking=True),
                               *(pinned(xp.empty(PIECE, x.dtype)) for x in (p, g)))
        return self.lanes[key]
