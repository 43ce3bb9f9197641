"""FlatBuffer: many tensors as views of one buffer.

One object is gradient bucket, optimizer storage and shared window at once: what
used to be a loop over parameters is one operation over one array.

    params  |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad| … pad to 4,096
    grads   |--- w1 ---|pad|- b1 -|pad|------ w2 ------|pad| …
"""

from dataclasses import dataclass
from math import prod

from .autodiff.tensor import Tensor
from .autodiff.writes import wrote
from .backend import module_of, zeros

ALIGN = 16      # elements: each tensor starts on a cache line, and a GPU kernel may load 128 bits at a time
BLOCK = 4096    # elements: norms are summed per block, and shards are cut between blocks


def round_up(n, unit):
    """The smallest multiple of unit that is at least n."""
    return -(-n // unit) * unit


@dataclass(frozen=True)
class Segment:
    """Where one tensor lives in a flat buffer: elements [start, stop), padded up to `end`."""

    tensor: Tensor
    start: int
    stop: int
    end: int


def layout(tensors, spare=0):
    """([Segment …], total): each tensor aligned to ALIGN elements, the total, with `spare` elements after the last
    one, a multiple of BLOCK."""
    segments, at = [], 0
    for t in tensors:
        size = t.data.size
        segments.append(Segment(t, at, at + size, round_up(at + size, ALIGN)))
        at = segments[-1].end
    return segments, round_up(max(at + spare, 1), BLOCK)


class FlatBuffer:
    """Move leaf tensors of one dtype and device into one array, and their gradients into another.

    tensors  leaves that require grad; their values are kept, their storage is replaced by views
    empty    empty(size, dtype, device) -> array for the gradients (e.g. Communicator.empty, which is collective)

    spare    so many elements of the gradients' padding are set apart as `tail`, for what is to travel with them
    storage  (params, grads), two 1-d arrays to live in instead of new ones; the padding of the first is kept

    forgotten  ids of leaves whose gradient has been forgotten (set to None) since somebody cleared this set
    unit     where the tensors are one rank's pieces of larger ones: the Unit (parallel/fsdp/units.py), which knows
             the rest
    over     as their leaves say: where they are this rank's share of parameters, the Communicator of the ranks with the
             others; None: whole

    Afterwards `params` and `grads` are 1-d arrays of `size` elements with zeros
    in the padding; each tensor's first gradient of a step is written into its
    view of `grads`, later ones are added there.
    """

    unit = norm_table = None        # the latter: what clip_grad_norm_ has worked out about these segments

    def __init__(self, tensors, empty=zeros, spare=0, storage=None):
        tensors = list(tensors)
        dtypes = {t.dtype for t in tensors}
        if len(dtypes) != 1:
            raise ValueError(f"a FlatBuffer holds tensors of one dtype, got {sorted(map(str, dtypes))}")
        devices = {t.device for t in tensors}
        if len(devices) != 1:
            raise ValueError(f"a FlatBuffer holds tensors of one device, got {sorted(devices)}: move the model as a "
                             "whole, with model.to(device)")
        for t in tensors:
            if t.leaf is None:
                raise ValueError(f"a FlatBuffer holds leaves that require grad; one of shape {t.shape} is not")
        if len({id(t) for t in tensors}) != len(tensors):
            raise ValueError("a tensor stands twice in a FlatBuffer: it can live in one place only")
        (self.dtype,), (self.device,) = dtypes, devices
        overs = {id(t.leaf.over): t.leaf.over for t in tensors}
        if len(overs) > 1:
            raise ValueError("a FlatBuffer holds whole parameters, or shares of them on the same ranks, not both")
        self.over, = overs.values()
        self.segments, self.size = layout(tensors, spare)
        if storage is None:
            self.params = zeros(self.size, self.dtype, self.device)
            self.grads = empty(self.size, self.dtype, self.device)
        elif (room := min(array.size for array in storage)) < self.size:
            raise ValueError(f"a FlatBuffer of {self.size} elements can't live in {room}")
        else:
            (self.params, self.grads), self.size = storage, storage[0].size
        self.grads[...] = 0
        self.forgotten = set()
        end = max((s.end for s in self.segments), default=0)
        self.tail = self.grads[end:end + spare]
        self.views = []     # of `params`, in the order of the segments
        for s in self.segments:
            self._adopt(s)

    def _adopt(self, s):
        tensor, grad = s.tensor, s.tensor.grad
        view = self.params[s.start:s.stop].reshape(tensor.shape)
        view[...] = tensor.data
        tensor.data = view
        self.views.append(view)
        tensor.leaf.grad_view = self.grads[s.start:s.stop].reshape(tensor.shape)
        tensor.leaf.flat = self
        if grad is not None:
            tensor.leaf.grad_view[...] = grad.data
            tensor.grad = Tensor(tensor.leaf.grad_view)

    @property
    def live(self):
        """The segments of tensors that live here still, and haven't moved to another FlatBuffer."""
        return [s for s in self.segments if s.tensor.leaf.flat is self]

    def live_in(self, params):
        """Move the parameters to other storage of this size, and take the values that stand there."""
        self.params = params
        self.views = [params[s.start:s.stop].reshape(s.tensor.shape) for s in self.segments]
        for s, view in zip(self.segments, self.views, strict=True):
            if s.tensor.leaf.flat is self:
                s.tensor.data = view

    def collect(self, fill_missing):
        """Make `grads` hold every tensor's gradient, those that users have replaced by hand too.

        fill_missing  tensors without a gradient get one of zeros; otherwise only their stretch is zeroed
        RuntimeError where a tensor has been given another array, which nobody here would see.
        """
        for s, values in zip(self.segments, self.views, strict=True):
            if s.tensor.data is not values and s.tensor.leaf.flat is self:
                raise RuntimeError(f"a parameter of shape {s.tensor.shape} was given another array, by p.data = …, "
                                   "since it moved into the flat buffer of its optimizer or wrapper, which would train "
                                   "the one before: write into it, under no_grad: p[...] = values")
            grad, view = s.tensor.grad, self.grad_view(s)
            if grad is None:
                view[...] = 0
                wrote(view, "zeroing an unused gradient")
                if fill_missing:
                    s.tensor.grad = Tensor(view)
            elif grad.data is not view:
                view[...] = grad.data
                wrote(view, "moving a gradient into its flat buffer")
                s.tensor.grad = Tensor(view)

    def grad_view(self, segment):
        """Where the gradient of a segment's tensor lives."""
        return segment.tensor.leaf.grad_view

    def zero_grad(self):
        """Forget all gradients; the next backward overwrites them."""
        for s in self.segments:
            s.tensor.grad = None


def flat_buffers(tensors):
    """The FlatBuffers that hold the given leaves, in order of first use. Leaves without one move into new ones,
    one per dtype, device, and ranks that have the other shares of them."""
    tensors = list({id(t): t for t in tensors}.values())
    homeless = {}
    for t in tensors:
        if t.leaf.flat is None:
            homeless.setdefault((t.dtype, t.device, id(t.leaf.over)), []).append(t)
    for group in homeless.values():
        FlatBuffer(group)
    return list({id(t.leaf.flat): t.leaf.flat for t in tensors}.values())


def joined(arrays):
    """(one 1-d array of all elements of some, of one dtype and device, [views of it of their shapes]): a message, and
    what of it is whose."""
    flat, found, end = module_of(arrays[0]).concatenate([a.reshape(-1) for a in arrays]), [], 0
    for a in arrays:
        found.append(flat[end:end + a.size].reshape(a.shape))
        end += a.size
    return flat, found


def boxes_of(shape, start, stop):
    """[box] of the elements start to stop of an array in C order: each a range itself, at most 2d - 1 for d axes.

        . . . .
        . . a a        the end of a row
        b b b b        whole rows
        c . . .        the beginning of one
    """
    if (start, stop) == (0, prod(shape)):
        return [tuple((0, extent) for extent in shape)]
    if start == stop:
        return []
    size = prod(shape[1:])
    first, last = -(-start // size), stop // size       # whole rows
    if first > last:
        return _in_row(shape, last, start - last * size, stop - last * size)
    head = _in_row(shape, first - 1, start - (first - 1) * size, size) if start < first * size else []
    rows = [((first, last), *((0, extent) for extent in shape[1:]))] if first < last else []
    return head + rows + _in_row(shape, last, 0, stop - last * size)


def _in_row(shape, row, start, stop):
    return [((row, row + 1), *box) for box in boxes_of(shape[1:], start, stop)]
