"""Whole matrices, of which ranks have pieces and parts: each comes together on one of them for a step.

Of a matrix that is cut over ranks (by fully_shard, or tensor parallelism) no rank can make a step of the whole with its
part. It comes together on one of them, its owner, which sends the parts of the result back. Each rank owns its share of
the work, and sends each element of other ranks' matrices once, and gets it once:

    rank 0   |A A A A|B B|            owns A   |A A A A|A A|            |A A A A|B B|
    rank 1   |A A|B B B B|     →      owns B   |B B|B B B B|     →      |A A|B B B B|

fully_shard's pieces of tensor parallelism's parts go that way twice, with other ranks each time: pieces become parts,
and parts whole matrices.

Source: Liu et al. 2025, "Muon is scalable for LLM training" (sharded state).
"""

import math
import zlib
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..autodiff.writes import wrote
from ..backend import module_of, on_host, to_device_of, xp, zeros_like
from .clip import check_pieces
from .means import part_shape
from .optimizer import Optimizer


class OfMatrices(Optimizer):
    """Base of optimizers whose steps are made of whole matrices. A subclass says what a step is made of, `direction`,
    and `made`, the step along it, of the whole.

    Parameters are of shape (rows, columns), or stacks of n matrices, as nn.Experts has them, (n, in, out): ValueError
    for others. Pieces of a fully_shard model, and parts of one that parallelize_module has cut, take the steps that the
    whole matrices would, by two all-to-alls over the ranks that have the others: step() is collective then, and all
    ranks give the same parameters in the same order, with gradients for the same ones (else MismatchError on all of
    them). ValueError for parts of matrices that don't say which ranks have the others, those of annotations; and for
    groups with state_bits=8.
    """

    elementwise = False
    state_bits = (32,)

    def take(self, params, **settings):
        """Make state for matrices; ValueError for others, and for parts of which nobody knows where the rest is."""
        name = type(self).__name__
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
            self.move(piece, o)

    def steps(self, chosen=()):
        """[(tensor, its state, Piece, what it is to move along, 1-d)], in the same order on all ranks; what their
        direction is made of moves on.

        chosen  {id of a tensor: its Lines}, where not all of a matrix makes a step
        """
        cut, chosen = {}, dict(chosen)
        # of cut: (ids of Communicators, dtype) -> (an array like the parts, these Communicators, [(…, Piece)])
        for flat, state, slot in self._places():
            tensor = slot.segment.tensor
            shape, way = self.way(tensor, flat.unit)
            if way:         # ranks without a gradient take part, too
                comms, like = [each.comm for each in way], zeros_like(
                    flat.params, 0, xp.promote_types(flat.params.dtype, xp.float32))
                _, _, pieces = cut.setdefault((*map(id, comms), like.dtype), (like, comms, []))
            if tensor.grad is None:
                continue
            slot.steps += 1
            part, mine = slice(slot.segment.start, slot.segment.stop), slot.state(state)
            p, exact = flat.params[part], self.exact(flat.params[part], mine)
            u = self.direction(self.divided(flat.grads[part], exact), mine, slot.group)
            lines = chosen.get(id(tensor))
            piece = Piece(p, exact, u, slot.group, slot.steps, shape, narrowed(way, lines), lines)
            if way:
                pieces.append((tensor, mine, piece))
            else:
                yield tensor, mine, piece, self.made(piece, mine, piece.u)
        for like, comms, pieces in cut.values():
            _, states, mine = zip(*pieces, strict=True) if pieces else [()] * 3
            steps = brought_together(comms, [piece.way for piece in mine], [piece.u for piece in mine],
                                     lambda k, u, mine=mine, states=states: self.made(mine[k], states[k], u), like,
                                     type(self).__name__)
            yield from ((*each, o) for each, o in zip(pieces, steps, strict=True))

    def way(self, tensor, unit):
        """way_of."""
        return way_of(tensor, unit)

    def direction(self, g, state, group):
        """u, 1-d, what a step is made of, of this rank's part: of a gradient g, which may be the parameters' own, and
        the state, which may be written."""
        raise NotImplementedError

    def made(self, piece, state, u):
        """The step, 1-d, of all of a matrix, of whose pieces this rank has `piece` and `state`, along u, 1-d."""
        raise NotImplementedError

    def move(self, piece, o):
        """Move a Piece's parameter along o, 1-d."""
        piece.move(o, 1.0, type(self).__name__)


class Piece(NamedTuple):
    """What this rank has of a matrix, or a stack: of the parameter, of what is updated of it, and of its direction; its
    group; how many steps it has made, with this one; the shape of the whole, and the Cuts by which it is made of the
    ranks' pieces; the Lines that make a step, None: all."""

    p: object
    exact: object
    u: object
    group: dict
    count: int
    shape: tuple
    way: list
    lines: object

    def move(self, o, times, author):
        """Move the parameter by lr · times · o, 1-d, this rank's part."""
        move(self.p, self.exact, o, times, self.group, author)


def move(p, exact, o, times, group, author):
    """Let a parameter decay, and move it by lr · times · o; all 1-d, `exact` its master copy, if it has one, or p."""
    exact *= 1 - group["lr"] * group["weight_decay"]
    exact -= group["lr"] * times * o
    if exact is not p:
        p[...] = exact
    wrote(p, f"{author}.step")


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
