"""Muon: steps along the momentum, with the same length in all of its directions.

    b = momentum · b + g          u = g + momentum · b          p -= lr · orthogonalized(u)

    u = U S Vᵀ     S: 9.1  2.0  0.3  0.04            a few directions have nearly all of a gradient's length
      → U Vᵀ          1    1    1    1               and get, under Adam and SGD, nearly all of the step's

U Vᵀ comes without a singular value decomposition, by products alone: X → a·X + b·(X Xᵀ)X + c·(X Xᵀ)²X leaves U and V as
they are and maps each singular value s to a·s + b·s³ + c·s⁵, which five times over brings [0.003, 1] into [0.68, 1.21].

Of a matrix that is cut over ranks (by fully_shard, or tensor parallelism) no rank can do that with its part. It comes
together on one of them, its owner, which sends the parts of the result back. Each rank owns its share of the work, and
sends each element of other ranks' matrices once, and gets it once:

    rank 0   |A A A A|B B|            owns A   |A A A A|A A|            |A A A A|B B|
    rank 1   |A A|B B B B|     →      owns B   |B B|B B B B|     →      |A A|B B B B|

fully_shard's pieces of tensor parallelism's parts go that way twice, with other ranks each time: pieces become parts,
and parts whole matrices.

Sources: Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks"; Liu et al. 2025, "Muon is
scalable for LLM training" (adjust_lr_fn="match_rms_adamw", sharded state).
"""

import math
import zlib
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..autodiff.writes import wrote
from ..backend import is_whole, module_of, on_host, to_device_of, zeros_like
from .clip import check_pieces
from .means import part_shape
from .optimizer import Optimizer
from .settings import AT_LEAST_0, MORE_THAN_0

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUST = {      # name -> what lr is multiplied by, for a matrix of so many rows and columns
    "original": lambda rows, columns: math.sqrt(max(1.0, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class Muon(Optimizer):
    """The optimizer above, of matrices; torch's settings and defaults.

    params        of shape (out, in), or stacks of n matrices as nn.Experts has them, (n, in, out): ValueError for
                  others. Meant for hidden layers: give embeddings, the output layer, biases and norms to AdamW
    weight_decay  decoupled: p shrinks by lr · weight_decay before the step
    nesterov      False: u = b
    ns_coefficients, ns_steps, eps   of orthogonalized; eps is for this b: torch's is (1 - momentum) times it. Three
                  numbers, or three for each step, as polar_express() gives
    adjust_lr_fn  what lr is multiplied by: None or "original", √max(1, out/in); "match_rms_adamw", 0.2·√max(out, in),
                  with which steps are as long as AdamW's usually are, and its lr and weight decay fit

    Products are made in the parameters' dtype, at least float32 (torch's: in bfloat16). Pieces of a fully_shard model,
    and parts of one that parallelize_module has cut, take the steps that the whole matrices would, by two all-to-alls
    over the ranks that have the others: step() is collective then, and all ranks give the same parameters in the same
    order, with gradients for the same ones (else MismatchError on all of them). ValueError for parts of matrices that
    don't say which ranks have the others, those of annotations; and for groups with state_bits=8.
    """

    state_names = ("momentum_buffer",)
    elementwise = False
    rules = {"lr": AT_LEAST_0, "weight_decay": AT_LEAST_0, "momentum": AT_LEAST_0, "eps": MORE_THAN_0,
             "ns_coefficients": (lambda values, group: all(len(each) == 3 for each in triples(values)),
                                 "three numbers, or three for each step"),
             "ns_steps": (lambda n, group: is_whole(n) and 1 <= n < 100, "a whole number from 1 to 99"),
             "adjust_lr_fn": (lambda name, group: name in (None, *ADJUST), f"None, {' or '.join(ADJUST)}")}
    state_bits = (32,)      # in a step each direction has the same length, that of rounding too

    def __init__(self, params, lr=1e-3, weight_decay=0.1, momentum=0.95, nesterov=True, ns_coefficients=COEFFICIENTS,
                 eps=1e-7, ns_steps=5, adjust_lr_fn=None):
        self.take(params, lr=lr, weight_decay=weight_decay, momentum=momentum, nesterov=nesterov,
                  ns_coefficients=ns_coefficients, eps=eps, ns_steps=ns_steps, adjust_lr_fn=adjust_lr_fn)

    def take(self, params, **settings):
        """Make state for matrices; ValueError for others, and for parts of which nobody knows where the rest is."""
        name, coefficients = type(self).__name__, settings["ns_coefficients"]
        if hasattr(coefficients, "__iter__"):       # what isn't its rule refuses
            settings["ns_coefficients"] = tuple(coefficients)
        super().__init__(params, settings)
        check_pieces([p for group in self.param_groups for p in group["params"]], name)
        for flat, slots in zip(self.flats, self.slots, strict=True):
            for tensor in (slot.segment.tensor for slot in slots):
                shape = tensor.shape if flat.unit is None else flat.unit.cut_of(tensor)[1]
                leaf = tensor.leaf
                if leaf.part is None and leaf.part_of is not None and leaf.part_of[-2:] != shape[-2:]:
                    raise ValueError(f"{name}: a parameter of shape {shape} is a part of one of shape {leaf.part_of}, "
                                     "and doesn't say which ranks have the others; the step is one of the whole "
                                     "matrix: give it to another optimizer, say AdamW, or cut the model by "
                                     "parallelize_module or fully_shard instead")

    def kinds_of_state(self, tensor):
        if tensor.ndim not in (2, 3):
            raise ValueError(f"{type(self).__name__}: a parameter of shape {part_shape(tensor)} is neither a matrix "
                             "nor a stack of them: give it to another optimizer, say AdamW")
        return super().kinds_of_state(tensor)

    def settle_in(self, home):
        if not all(on_host(flat.params) for flat in self.flats):
            raise ValueError(f"{type(self).__name__}'s state can't lie on the host while its parameters are on a GPU: "
                             "the update needs whole matrices beside it")
        super().settle_in(home)

    def update_all(self):
        for *_, piece, o in self.steps():
            piece.step(o)

    def steps(self, chosen=()):
        """[(tensor, its state, Piece, what it is to move along, 1-d)], in the same order on all ranks; momenta move.

        chosen  {id of a tensor: its Lines}, where not all of a matrix makes a step
        """
        cut, chosen = {}, dict(chosen)
        # of cut: (ids of Communicators, dtype) -> (an array like the parts, these Communicators, [(…, Piece)])
        for flat, state, slot in self._places():
            tensor = slot.segment.tensor
            shape, way = way_of(tensor, flat.unit)
            if way:         # ranks without a gradient take part, too
                comms, momentum = [each.comm for each in way], state["momentum_buffer"]
                _, _, pieces = cut.setdefault((*map(id, comms), momentum.dtype), (momentum, comms, []))
            if tensor.grad is None:
                continue
            slot.steps += 1
            part, mine = slice(slot.segment.start, slot.segment.stop), slot.state(state)
            p, exact = flat.params[part], self.exact(flat.params[part], mine)
            u = self.direction(flat.grads[part], exact, mine["momentum_buffer"], slot.group)
            lines = chosen.get(id(tensor))
            piece = Piece(p, exact, u, slot.group, shape, narrowed(way, lines), lines, type(self).__name__)
            if way:
                pieces.append((tensor, mine, piece))
            else:
                yield tensor, mine, piece, piece.orthogonalized(u)
        for like, comms, pieces in cut.values():
            *_, mine = zip(*pieces, strict=True) if pieces else [()]
            steps = brought_together(comms, [piece.way for piece in mine], [piece.u for piece in mine],
                                     lambda k, u, mine=mine: mine[k].orthogonalized(u), like, type(self).__name__)
            yield from ((*each, o) for each, o in zip(pieces, steps, strict=True))

    def direction(self, g, exact, b, group):
        """u, 1-d, of a gradient g and the momentum b, which is written."""
        g = self.divided(g, exact)
        b *= group["momentum"]
        b += g
        return g + group["momentum"] * b if group["nesterov"] else b.copy()


class Piece(NamedTuple):
    """What this rank has of a matrix, or a stack: of the parameter, of what is updated of it, and of its direction; the
    shape of the whole, and the Cuts by which it is made of the ranks' pieces; the Lines that make a step, None: all."""

    p: object
    exact: object
    u: object
    group: dict
    shape: tuple
    way: list
    lines: object
    author: str

    def orthogonalized(self, u):
        """Of all of u, 1-d: 1-d. Lines that make no step come out as zeros."""
        settings = self.group["ns_coefficients"], self.group["ns_steps"], self.group["eps"]
        if self.lines is None:
            return orthogonalized(u.reshape(self.shape), *settings).reshape(-1)
        return self.lines.alone(orthogonalized(self.lines.of(u), *settings)).reshape(-1)

    def step(self, o):
        """Move the parameter along o, 1-d, this rank's part, by a rate for a matrix of its shape."""
        self.move(o, adjusted(self.shape, self.group["adjust_lr_fn"]))

    def move(self, o, times=1.0):
        """Move the parameter by lr · times · o, 1-d, this rank's part."""
        move(self.p, self.exact, o, times, self.group, self.author)


def adjusted(shape, name):
    """What lr is multiplied by, by a name in ADJUST, or None: for a matrix (out, in), or a stack (n, in, out)."""
    rows, columns = shape if len(shape) == 2 else shape[:0:-1]
    return ADJUST[name or "original"](rows, max(columns, 1))


def move(p, exact, o, times, group, author):
    """Let a parameter decay, and move it by lr · times · o; all 1-d, `exact` its master copy, if it has one, or p."""
    exact *= 1 - group["lr"] * group["weight_decay"]
    exact -= group["lr"] * times * o
    if exact is not p:
        p[...] = exact
    wrote(p, f"{author}.step")


def orthogonalized(u, coefficients=COEFFICIENTS, steps=5, eps=1e-7):
    """About U Vᵀ of u = U S Vᵀ: (…, rows, columns), floating, at least 32 bits -> the same. With the defaults singular
    values from 0.003 of u's norm come out between 0.68 and 1.21, smaller ones as at most 485 times their share of it.

    coefficients  (a, b, c), or one such for each step, the last one for all that follow
    eps           the least norm that u is divided by: zeros stay zeros
    """
    each = triples(coefficients)
    arrays, wide = module_of(u), u.shape[-2] <= u.shape[-1]     # of X Xᵀ and XᵀX the smaller
    # Row by row, as products come out: sums of arrays in two orders would take as long as the products.
    x = u if wide else u.swapaxes(-1, -2).copy()
    x = x / arrays.maximum(arrays.sqrt((x * x).sum(axis=(-1, -2), keepdims=True)), eps)
    for k in range(steps):
        a, b, c = each[min(k, len(each) - 1)]
        square = x @ x.swapaxes(-1, -2)
        more = (b * square + c * (square @ square)) @ x
        x *= a
        x += more
    return arrays.ascontiguousarray(x if wide else x.swapaxes(-1, -2))


def triples(coefficients):
    """[(a, b, c)], by step, of one or of several."""
    return list(coefficients) if len(coefficients) and isinstance(coefficients[0], tuple) else [coefficients]


# ---------------------------------------------------------------- matrices that are cut over ranks

class Cut(NamedTuple):
    """How an array is cut over ranks.

    comm    the Communicator of these
    name    of the parameter; for messages, and the same on all ranks
    matrix  the shape of the whole matrix, or stack, that the array is, or is a part of
    shape   the array's
    places  [where in it a rank's part is: an index]
    sizes   [how many elements that are]
    masks   [which of them are meant, a bool array]; None: all. The others aren't sent, and are 0 where they arrive;
            sizes, and matrix, are then of what is
    """

    comm: object
    name: object
    matrix: tuple
    shape: tuple
    places: list
    sizes: list
    masks: list | None = None

    def packed(self, x, rank):
        """Of a rank's part what is sent, 1-d."""
        return x.reshape(-1) if self.masks is None else x.reshape(-1)[self.masks[rank].reshape(-1)]

    def unpacked(self, x, rank, shape):
        """The rank's part, of a shape, of what was sent."""
        if self.masks is None:
            return x.reshape(shape)
        part = zeros_like(x, math.prod(shape))
        part[self.masks[rank].reshape(-1)] = x
        return part.reshape(shape)


def way_of(tensor, unit):
    """(the shape of the whole, [Cut, …]) of a parameter, or of its piece in a unit of fully_shard (else None): by the
    first the ranks' pieces make the next one's parts, by the last the whole. Collective when it is first asked."""
    name, shape, sizes = (None, tensor.shape, None) if unit is None else unit.cut_of(tensor)
    part = tensor.leaf.part
    divided = part is not None and part.axis >= len(shape) - 2     # else it is whole matrices of a stack
    matrix = tensor.leaf.part_of if divided else shape
    way = [] if unit is None else [Cut(unit.comm, name, matrix, (math.prod(shape),),
                                       [slice(*ends) for ends in pairwise(_starts(sizes))], sizes)]
    if divided:
        indices, before = part.of_ranks(), (slice(None),) * part.axis
        sizes = [math.prod((*matrix[:part.axis], len(each), *matrix[part.axis + 1:])) for each in indices]
        way.append(Cut(part.comm, part.number, matrix, matrix,
                       [(*before, to_device_of(each, tensor.data)) for each in indices], sizes))
    return matrix, way


def narrowed(way, lines):
    """The same Cuts of what is in some Lines of the whole alone; of all of it for None."""
    if lines is None or not way:
        return way
    found, mask = [], lines.mask()
    for cut in reversed(way):
        mask = mask.reshape(cut.shape)
        masks = [mask[place] for place in cut.places]
        found.append(cut._replace(matrix=lines.shape, masks=masks, sizes=[int(each.sum()) for each in masks]))
        mask = masks[cut.comm.rank]
    return found[::-1]


def work(shape):
    """Multiplications of one round of orthogonalized, for (…, rows, columns)."""
    small, large = sorted(shape[-2:])
    return math.prod(shape[:-2]) * small * small * (2 * large + small)


def owners(shapes, ranks):
    """[rank] by matrix: the largest pieces of work first, each to the rank that has least to do as yet."""
    load, owner = [0] * ranks, [0] * len(shapes)
    for k in sorted(range(len(shapes)), key=lambda k: -work(shapes[k])):
        owner[k] = load.index(min(load))
        load[owner[k]] += work(shapes[k])
    return owner


def brought_together(comms, ways, parts, make, like, who="Muon"):
    """This rank's parts of make(k, matrix k), 1-d arrays: each matrix is made whole on its owner. Collective.

    ways   by matrix: a Cut over each of the comms, in their order; the same on all ranks: MismatchError otherwise
    parts  by matrix, this rank's elements: 1-d, of like's dtype and device
    make   make(k, u) -> a 1-d array of the same size, for the 1-d u of all elements
    who    for messages
    """
    if not comms:
        return [make(k, u) for k, u in enumerate(parts)]

    def made(mine, wholes):
        return brought_together(comms[1:], [ways[k][1:] for k in mine], wholes, lambda i, u: make(mine[i], u), like,
                                who)
    return exchanged(comms[0], [way[0] for way in ways], parts, made, like, who)


def exchanged(comm, cuts, parts, make, like, who):
    """As brought_together, of one Cut each: make([numbers of those that this rank owns], [their arrays, 1-d]) -> [the
    like]."""
    sizes, ranks = [cut.sizes for cut in cuts], range(comm.size)
    owner = owners([cut.matrix for cut in cuts], comm.size)
    mine = [k for k, rank in enumerate(owner) if rank == comm.rank]
    order = sorted(range(len(cuts)), key=owner.__getitem__)
    there = [sum(sizes[k][comm.rank] for k in order if owner[k] == rank) for rank in ranks]
    here = [sum(sizes[k][rank] for k in mine) for rank in ranks]
    arrays, known = module_of(like), repr([(cut.name, cut.matrix, cut.sizes) for cut in cuts])
    x = arrays.concatenate([like[:0], *(cuts[k].packed(parts[k], comm.rank) for k in order)])
    got = arrays.empty(sum(here), like.dtype)
    comm.all_to_all(got, x, there, here, what=f"{who}'s {len(cuts)} matrices, {zlib.crc32(known.encode()):08x}")
    # What has come lies by ranks, and each rank's by matrices.
    stretches = dict(zip(((rank, k) for rank in ranks for k in mine), pairwise(_starts(
        sizes[k][rank] for rank in ranks for k in mine)), strict=True))
    wholes = []
    for k in mine:
        wholes.append(arrays.empty(cuts[k].shape, like.dtype))
        for rank, place in enumerate(cuts[k].places):
            shape = wholes[-1][place].shape
            wholes[-1][place] = cuts[k].unpacked(got[slice(*stretches[rank, k])], rank, shape)
    for k, made in zip(mine, make(mine, [whole.reshape(-1) for whole in wholes]), strict=True):
        for rank, place in enumerate(cuts[k].places):
            got[slice(*stretches[rank, k])] = cuts[k].packed(made.reshape(cuts[k].shape)[place], rank)
    comm.all_to_all(x, got, here, there, what=f"{who}'s steps")
    ends = dict(zip(order, pairwise(_starts(sizes[k][comm.rank] for k in order)), strict=True))
    return [cuts[k].unpacked(x[slice(*ends[k])], comm.rank, parts[k].shape) for k in range(len(cuts))]


def _starts(sizes):
    """[0, the first, the first two together, …]"""
    return [0, *accumulate(sizes)]
