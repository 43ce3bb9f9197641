"""Adafactor: Adam without a momentum, whose second moments of a matrix are a number per row and one per column.

    r  mean of g² over each row            v = r c / mean(r)       of rows · columns numbers that are kept as
    c  mean of g² over each column                                 rows + columns

             c c c c c
         r   v v v v v                     exact where g² is a product of something of its row and something of its
         r   v v v v v                     column; its row's and column's sums are kept in any case
         r   v v v v v

    u = g / √v                             p -= lr' · u / max(1, RMS(u) / d)     lr' = max(eps₂, RMS(p)) · min(lr, 1/√t)

So a step is in proportion to the parameter (lr is relative, as LAMB's), and never much longer than d of that.

Means and RMS are of whole parameters: of those that fully_shard or tensor parallelism cut, what other ranks have is
added (means.py; clip.py), in an order that no cut changes. r and c are small, and every rank that has a piece of
a matrix, or a part, has all of them.

Source: Shazeer & Stern 2018, "Adafactor: adaptive learning rates with sublinear memory cost", algorithms 4 and 5, with
the eps of torch.optim.Adafactor.
"""

from math import prod, sqrt

from ..autodiff.writes import wrote
from ..backend import module_of, on_host, xp, zeros_like
from ..flat import ALIGN, round_up
from .clip import check_known, squares_by_16, whole_squares
from .means import Matrix, means, part_shape, tile_of, whole_shape
from .optimizer import Optimizer
from .settings import AT_LEAST_0, check_settings


class Adafactor(Optimizer):
    """The optimizer above, with torch's settings and defaults.

    lr            a step's RMS beside the parameter's, 1/√t at most
    beta2_decay   at step t, r += t^beta2_decay · (the new means - r): the first is all of it; at most 0
    eps           (the least √v, None: the dtype's own, float32's at least; the least RMS(p) in lr'). By None even what
                  is rounding alone makes steps, as the gradient of the biases of attention's keys is
    d             at least 1
    weight_decay  decoupled: p shrinks by lr · weight_decay before the step
    maximize      goes up the gradient

    A parameter of two axes at least is a matrix, or a stack of them, of the last two axes: its state is row_var
    (…, rows, 1) and col_var (…, 1, columns), float32 or float64. Others have `variance`, of the parameter's shape, as
    Adam has. (Kernels of a convolution are thus stacks of very small matrices, of which little is saved.)

    Pieces of a fully_shard model, and parts of one that parallelize_module has cut, take the steps that the whole
    parameters would: step() is collective then, and all ranks give the same parameters in the same order, with
    gradients for the same ones (else MismatchError on all of them). A gradient that is inf or NaN makes all of its
    matrix NaN. A GPU is waited for. ValueError for parts of matrices that don't say which ranks have the others, those
    of annotations; for groups with state_bits=8; for an eps whose square is 0 in the dtype of the state.
    """

    elementwise = False
    state_names = ("variance", "row_var", "col_var")
    state_bits = (32,)      # of a matrix there is nearly none
    rules = {"lr": AT_LEAST_0, "weight_decay": AT_LEAST_0,
             "beta2_decay": (lambda value, group: value <= 0, "at most 0"),
             "eps": (lambda eps, group: len(eps) == 2 and (eps[0] is None or eps[0] > 0) and eps[1] >= 0,
                     "a pair: None or more than 0, and at least 0"),
             "d": (lambda value, group: value >= 1, "at least 1")}

    def __init__(self, params, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0, maximize=False):
        super().__init__(params, {"lr": lr, "beta2_decay": beta2_decay, "eps": tuple(eps), "d": d,
                                  "weight_decay": weight_decay, "maximize": maximize})
        params = [p for group in self.param_groups for p in group["params"]]
        check_known(params, "Adafactor")
        if parts := [f"{p.shape} of {p.leaf.part_of}" for p in params
                     if p.ndim > 1 and p.leaf.part is None and p.leaf.part_of is not None]:
            raise ValueError(f"Adafactor: {len(parts)} of these parameters are parts of matrices "
                             f"({', '.join(parts[:3])} …) and don't say which rows and columns the other ranks have; "
                             "the step is made of whole ones: give them to another optimizer, say AdamW, or cut the "
                             "model by parallelize_module or fully_shard instead")
        for group in self.param_groups:
            for exact in {xp.promote_types(p.dtype, xp.float32) for p in group["params"]}:
                check_settings(eps=(group["eps"], exact.type(least_root(group, exact)) ** 2 > 0,
                                    f"more than 0 in {exact}, squared as well"))

    def kinds_of_state(self, tensor):
        if tensor.ndim < 2:
            return ("variance",), {}
        *stack, rows, columns = whole_shape(tensor)
        return (), {"row_var": (*stack, rows, 1), "col_var": (*stack, 1, columns)}

    def settle_in(self, home):
        if not all(on_host(flat.params) for flat in self.flats):
            raise ValueError("Adafactor's state can't lie on the host while its parameters are on a GPU: means are "
                             "made of both")
        super().settle_in(home)

    def update_all(self):
        places = self._places()
        params = [slot.segment.tensor for *_, slot in places]
        updates = [u for u in (Update(self, *place) for p, place in zip(params, places, strict=True)
                               if p.grad is not None) if u.count]
        self.average(updates)
        flats = {id(flat): flat.params for flat in self.flats}
        by_16 = [{key: zeros_like(x, x.size // ALIGN, xp.float64) for key, x in flats.items()} for _ in ("p", "u")]
        for u in updates:
            for tile, step in u.steps():
                place = slice((u.start + tile.start) // ALIGN, round_up(u.start + tile.stop, ALIGN) // ALIGN)
                for squares, x in zip(by_16, (u.exact[tile], step), strict=True):
                    squares[id(u.flat)][place] = squares_by_16(padded(x))
        sums = whole_squares(self.flats, params, *by_16)
        for u in updates:
            self.move(u, *(sqrt(s / u.count) for s in sums[id(u.tensor)]))

    def average(self, updates):
        """Move the second moments towards the squares of this step's gradients."""
        cut = [u for u in updates if u.matrix is not None]
        squares = means([u.matrix for u in cut], lambda k, tile: cut[k].gradient(tile), 2)
        for u, both in zip(cut, squares, strict=True):
            for name, mean in zip(("row_var", "col_var"), both, strict=True):
                lerp(u.state[name].reshape(mean.shape), mean.astype(u.exact.dtype), u.weight)
        for u in updates:
            if u.matrix is None:
                for tile, _ in u.tiles():
                    lerp(u.state["variance"][tile], xp.square(u.gradient(tile)), u.weight)

    def move(self, u, rms_p, rms_u):
        """A parameter's step, by the two RMS."""
        group = u.group
        rate = max(group["eps"][1], rms_p) * min(group["lr"], 1 / sqrt(u.step)) / max(1.0, rms_u / group["d"])
        for tile, step in u.steps():
            exact = u.exact[tile]
            if group["weight_decay"]:
                exact *= 1 - group["lr"] * group["weight_decay"]
            step *= -rate if group["maximize"] else rate
            exact -= step
        if u.exact is not u.low:
            u.low[...] = u.exact
        wrote(u.low, "Adafactor.step")


class Update:
    """A parameter's, in one step: what this rank has of it, 1-d.

    low, exact  the parameter, and what is updated of it: its master copy, if it has one
    state       {name: array}
    step        its number, from 1
    weight      of this step's squares in the average
    count       of elements of the whole parameter
    matrix      its Matrix; None: it is none
    """

    def __init__(self, optimizer, flat, state, slot):
        slot.steps += 1
        segment = slot.segment
        self.optimizer, self.flat, self.tensor = optimizer, flat, segment.tensor
        self.group, self.step, self.start = slot.group, slot.steps, segment.start
        here = slice(segment.start, segment.stop)
        self.state, self.low, self.slopes = slot.state(state), flat.params[here], flat.grads[here]
        self.exact = optimizer.exact(self.low, self.state)
        self.weight = self.step ** self.group["beta2_decay"]
        self.count = prod(self.tensor.leaf.part_of or part_shape(self.tensor))
        self.matrix = Matrix(self.tensor) if self.tensor.ndim > 1 else None

    def gradient(self, tile):
        """Some of it, in the dtype of `exact`."""
        return self.optimizer.divided(self.slopes[tile], self.exact[tile])

    def tiles(self):
        """[(slice, [Box])]; the boxes of a matrix alone."""
        if self.matrix is not None:
            return self.matrix.tiles()
        length = tile_of(self.low)
        return [(slice(at, min(at + length, self.low.size)), ()) for at in range(0, self.low.size, length)]

    def steps(self):
        """[(slice, u = g / √v there)]: each is overwritten by the next."""
        least = least_root(self.group, self.exact.dtype)
        if self.matrix is not None:
            rows, columns = (self.state[name].reshape(self.matrix.vector(side)) for name, side in
                             (("row_var", "rows"), ("col_var", "columns")))
            mean = xp.maximum(rows.mean(axis=1, keepdims=True, dtype=xp.float64), least).astype(rows.dtype)
            rows, columns = self.matrix.of_part("rows", rows / mean), self.matrix.of_part("columns", columns)
        for tile, boxes in self.tiles():
            u = self.optimizer.scratch(self.exact[tile])
            for box in boxes:
                xp.multiply(rows[box.rows], columns[box.columns], out=u[box.elements].reshape(box.shape))
            xp.maximum(u if boxes else self.state["variance"][tile], least * least, out=u)
            xp.sqrt(u, out=u)
            yield tile, xp.divide(self.gradient(tile), u, out=u)


def lerp(average, new, weight):
    """average += weight · (new - average); `new` is overwritten."""
    new -= average
    new *= weight
    average += new


def least_root(group, dtype):
    """The least √v, where parameters are updated in a dtype."""
    return float(xp.finfo(dtype).eps) if group["eps"][0] is None else group["eps"][0]


def padded(x):
    """With zeros up to a multiple of 16 elements."""
    rest = -x.size % ALIGN
    return module_of(x).concatenate([x, zeros_like(x, rest)]) if rest else x
