"""Kernels as Triton functions: text, written without Triton.

A program works on tiles of ROWS rows · BLOCK columns, powers of two; what is beyond the kernel's own is masked. All
values are blocks with two axes, of extent 1 where they don't vary:

    FULL (ROWS, BLOCK)     ROW (ROWS, 1)     an input that all rows share (1, BLOCK)     a number (1, 1)

    rows fit into a tile      one tile per program; a row's sum is there at once, and the row still in registers
    longer rows               a loop over the columns for each round of sums; what an earlier loop has computed is
                              computed again (see loops.py)
    no sums over rows         columns are cut among programs too
    sums over all rows        each program goes over a stripe of tiles and keeps its shares in registers until the end;
                              column_sums.py adds up the programs' shares, in a fixed order. In longer rows the summands
                              are stored, and added up by it

Shapes and strides stand in the text as numbers, so that Triton sees what is divisible by what. Additions, products,
quotients and roots are rounded as IEEE asks, and nothing is contracted (fp_fusion is off); exp and its like are those
of CUDA's library.
"""

import math

import numpy as np

from ..kernels.launch import cdiv, next_power_of_2
from .expressions import ARITHMETIC, COMPARISONS, LOGIC, REDUCTIONS
from .fusion import COLUMN, FULL, ROW, SCALAR, shape_of
from .ir import Value
from .loops import Walk, place

WIDEST = 8192       # float32 columns of a tile that holds whole rows: more don't fit into a program's registers
STEP = 4096         # columns of a tile in a loop over longer rows
TILE = 1024         # elements of a tile of short rows
PROGRAMS = 528      # that share the rows where there are sums over them: four for each of an H200's multiprocessors
TOGETHER = 4        # sums that one launch finishes (column_sums.MOST, which would bring Triton)
PER_THREAD = 8      # elements of a tile, which decide on the number of warps

TYPES = {"float32": "tl.float32", "float64": "tl.float64", "bool": "tl.int1", "int32": "tl.int32", "int64": "tl.int64"}

# Where C says it otherwise. {0}, {1}, {2}: operands, {t}: the type in which is computed, {one}: 1 of that type.
DIVIDE = {"float32": "tl.div_rn({0}, {1})", "float64": "{0} / {1}"}
ROOT = {"float32": "tl.sqrt_rn({0})", "float64": "lib.sqrt({0})"}
TRITON = ARITHMETIC | COMPARISONS | LOGIC | {
    "neg": "{0} * -1",      # Triton's -x is 0 - x, which has no negative zero
    "maximum": "tl.where(({0} > {1}) | ({0} != {0}), {0}, {1})",
    "minimum": "tl.where(({0} < {1}) | ({0} != {0}), {0}, {1})",
    "abs": "tl.abs({0})", "floor": "tl.floor({0})", "ceil": "tl.ceil({0})", "where": "tl.where({0}, {1}, {2})",
    "sign": "tl.where({0} != {0}, {0}, ({0} > 0).to({t}) - ({0} < 0).to({t}))",
    "relu": "tl.where(({0} > 0) | ({0} != {0}), {0}, {one} - {one})",
    "isfinite": "({0} - {0}) == 0", "logical_and": "{0} & {1}", "logical_or": "{0} | {1}", "logical_xor": "{0} ^ {1}",
    "logical_not": "{0} == 0"} | {
    name: f"lib.{name}({{0}})" for name in ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf")} | {
    "power": "lib.pow({0}, {1})"}
SMALL = "lib.exp(-tl.abs({0}))"     # at most 1, so that nothing overflows in a sigmoid
SIGMOID = "tl.where({0} >= 0, {one}, {1})", "({one} + {1})"     # quotient of these; {1} is SMALL
REMAINDER = "lib.fmod({0}, {1})"    # with the sign of the first operand; Python's has the second's
MOD = ("tl.where({2} == 0, tl.where({1} < 0, tl.abs({2}) * -1, tl.abs({2})), "
       "tl.where(({2} < 0) != ({1} < 0), {2} + {1}, {2}))")     # {2} is REMAINDER


class Writer(Walk):
    """Writes one kernel for inputs with certain strides: `text`, and what its launch must know.

    parameters  [(name, shape, dtype)] of what it writes
    ends        {output: (the parameter whose columns are to be summed for it, first column, columns)}; up to
                four outputs alike share a parameter, and the launch that sums it
    grid        number of programs; warps: of 32 threads, per program
    """

    def __init__(self, kernel, strides, name="kernel"):
        super().__init__(kernel, strides)
        rows, columns = kernel.rows, kernel.columns
        by_row = ROW in self.roles.values()
        size = max((v.dtype.itemsize for v in (*self.inputs, *self.nodes) if v.dtype.kind == "f"), default=4)
        self.long = by_row and columns > WIDEST * 4 // size
        self.block = STEP if self.long else next_power_of_2(columns if by_row else min(columns, TILE))
        self.high = min(max(1, TILE // self.block), next_power_of_2(rows))
        self.across = 1 if by_row else cdiv(columns, self.block)     # programs side by side
        self.summed = [v for v, role in self.roles.items() if role in (COLUMN, SCALAR)]
        self.kept = [v for v in self.summed if self.roles[v] == SCALAR or not self.long]    # in registers
        tiles = cdiv(rows, self.high)
        self.stripe = max(1, cdiv(tiles, max(1, PROGRAMS // self.across))) if self.kept else 1
        self.programs, self.tiles = cdiv(tiles, self.stripe), tiles
        self.grid = self.programs * self.across
        self.warps = min(16, max(1, self.high * self.block // (32 * PER_THREAD)))
        self.tile = f"[{self.high}, {self.block}]"
        self.parameters, self.ends = [], {}
        for v in kernel.outputs:
            if self._in_shares(v):
                self._share_out(v)
            else:
                self.parameters.append((f"out{kernel.outputs.index(v)}", v.shape, v.dtype))
        self.wide = self._farthest() >= 2 ** 31     # whether places need 64 bits
        self.lines, self.depth, self.known = [], 1, {}
        self._write()
        names = [f"in{i}" for i in range(len(self.inputs))] + [name for name, *_ in self.parameters]
        self.text = "\n".join(["@triton.jit", f"def {name}({', '.join(names)}):", *self.lines, ""])

    def _farthest(self):
        """The farthest element from an array's first one."""
        spans = [sum(abs(step) * (extent - 1) for extent, step in zip(v.shape, self.strides[v], strict=True))
                 for v in self.inputs]
        beyond = (cdiv(self.kernel.rows, self.high) * self.high, self.across * self.block)     # where it is masked
        return max(math.prod(beyond), *(math.prod(shape) for _, shape, _ in self.parameters), *spans, 0)

    def _in_shares(self, v):
        """Whether an output is a sum that several programs have shares of."""
        if self.roles[v] == COLUMN:
            return v not in self.kept or self.programs > 1
        return self.roles[v] == SCALAR and self.grid > 1

    def _share_out(self, v):
        """Enter an output into a parameter of shares: one that has room for another, or a new one."""
        columns = self.kernel.columns if self.roles[v] == COLUMN else 1
        rows = self.grid if self.roles[v] == SCALAR else self.programs if v in self.kept else self.kernel.rows
        alike = {name for name, _, each in self.ends.values() if each == columns}
        for i, (name, shape, dtype) in enumerate(self.parameters):
            if name in alike and (shape[0], dtype) == (rows, v.dtype) and shape[1] < TOGETHER * columns:
                self.parameters[i] = name, (rows, shape[1] + columns), dtype
                self.ends[v] = name, shape[1], columns
                return
        name = f"shares{self.kernel.outputs.index(v)}"
        self.parameters.append((name, (rows, columns), v.dtype))
        self.ends[v] = name, 0, columns

    def _at(self, v, row, column):
        """(the parameter that an output is written to, where in it)"""
        if v not in self.ends:
            at = {FULL: f"{row} * {self.kernel.columns} + {column}", ROW: row, COLUMN: column, SCALAR: "zero"}
            return f"out{self.kernel.outputs.index(v)}", at[self.roles[v]]
        name, first, _ = self.ends[v]
        width = next(shape[1] for other, shape, _ in self.parameters if other == name)
        return name, f"{row} * {width} + {column}" + f" + {first}" * bool(first)

    # ------------------------------------------------------------ lines

    def _line(self, text):
        self.lines.append("    " * self.depth + text)

    def _index(self, name, text):
        self._line(f"{name} = ({text}).to(tl.int64)" if self.wide else f"{name} = {text}")

    def _masked(self, row, column):
        """`, mask=…` for what varies over the rows and the columns, where tiles stick out."""
        parts = [f"(row < {self.kernel.rows})"] * (row and self.kernel.rows % self.high > 0)
        parts += [f"(column < {self.kernel.columns})"] * (column and self.kernel.columns % self.block > 0)
        return " & ".join(parts)

    def _write(self):
        kernel, across = self.kernel, self.across
        self._line(f"# {kernel.rows} rows · {kernel.columns} columns: {kernel.name}")
        self._line("zero = tl.zeros([1, 1], tl.int32)")
        self._line("program = tl.program_id(0)" + ".to(tl.int64)" * self.wide)
        start = f"program % {across} * {self.block} + " if across > 1 else ""
        if not self.long:
            self._index("column", f"{start}tl.arange(0, {self.block})[None, :]")
        self._line(f"stripe = program // {across}" if across > 1 else "stripe = program")
        for v in self.kept:
            self._line(f"sum_{self.names[v]} = tl.zeros({self.tile}, {ttype(v)})")
        tile = "stripe"
        if self.stripe > 1:
            for pair in self.pairs:
                if not self.long and not place("row", self.dims(*pair)[0]):
                    self._load(*pair)       # the same for all rows
            self._line(f"for tile in range(stripe * {self.stripe}, tl.minimum((stripe + 1) * {self.stripe}, "
                       f"{self.tiles})):")
            self.depth, tile = 2, "tile"
        self._index("row", f"{tile} * {self.high} + tl.arange(0, {self.high})[:, None]")
        self._long_rows() if self.long else self._tile()
        self.depth = 1
        for v in self.kept:
            self._share(v)

    def _share(self, v):
        """Store what a program has found of a sum over all rows."""
        found = f"tl.sum(sum_{self.names[v]}, axis=0)[None, :]"
        if self.roles[v] == COLUMN:
            self._store(v, "stripe", "column", found, self._masked(False, True))
        else:
            self._store(v, "program", "zero", f"tl.sum({found}, axis=1)[:, None]", "")

    def _store(self, v, row, column, what, mask):
        where, at = self._at(v, row, column)
        self._line(f"tl.store({where} + ({at}), {what}{', mask=' * bool(mask)}{mask})")

    # ------------------------------------------------------------ whole rows in a tile

    def _tile(self):
        for v, node in self.nodes.items():
            role = self.roles[v]
            if role in (COLUMN, SCALAR):
                self._add(v, node)
            elif node.name in REDUCTIONS:
                x = self._over_columns(node, {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}[node.name])
                self._line(f"{self.names[v]} = {self._reduced(node.name, x)}")
            else:
                self._statement(node, [self._operand(node, x) for x in node.args])
            self._output(v)

    def _operand(self, node, x):
        """An argument of an op: a name, or what isn't a Value as it is."""
        if not isinstance(x, Value):
            return x
        return self.names[x] if x in self.roles else self._load(x, shape_of(node))

    def _output(self, v):
        """Store a value that others need."""
        if v in self.kernel.outputs and self.roles[v] == FULL:
            self._store(v, "row", "column", f"tl.broadcast_to({self.names[v]}, {self.tile})", self._masked(True, True))
        elif v in self.kernel.outputs and self.roles[v] == ROW:
            self._store(v, "row", "", f"tl.broadcast_to({self.names[v]}, [{self.high}, 1])", self._masked(True, False))

    def _add(self, v, node):
        """Add the tile's elements to a sum over all rows."""
        x = node.inputs[0]
        column = self.roles.get(x) != ROW
        word = f"tl.broadcast_to({self._operand(node, x)}, [{self.high}, {self.block if column else 1}])"
        if mask := self._masked(True, column and self.roles[v] == SCALAR):
            word = f"tl.where({mask}, {word}, 0.0)"
        if not column:      # one number per row: it stands in the first column
            word = f"tl.where(tl.arange(0, {self.block})[None, :] == 0, {word}, 0.0)"
        self._line(f"sum_{self.names[v]} += {word}")

    def _over_columns(self, node, rest):
        """An op's operand over the whole tile, with `rest` beyond the columns."""
        word = f"tl.broadcast_to({self._operand(node, node.inputs[0])}, {self.tile})"
        mask = self._masked(False, True)
        return f"tl.where({mask}, {word}, {rest})" if mask else word

    def _reduced(self, name, x):
        return {"sum": "tl.sum({}, axis=1)[:, None]", "max": "largest({})", "min": "smallest({})"}[name].format(x)

    def _load(self, v, shape):
        """The name of an input's elements in the tile."""
        row, column = (place(name, dims, "//") for name, dims in zip(
            ("row", "column"), self.dims(v, shape), strict=True))
        at, mask = " + ".join(filter(None, (row, column))) or "zero", self._masked(bool(row), bool(column))
        load = f"tl.load(in{self.inputs.index(v)} + ({at}){', mask=' * bool(mask)}{mask})"
        if load not in self.known:
            self.known[load] = f"a{self.pairs.index((v, shape))}"
            self._line(f"{self.known[load]} = {load}")
        return self.known[load]

    # ------------------------------------------------------------ longer rows

    def _long_rows(self):
        starts = {"sum": "0.0", "max": 'float("-inf")', "min": 'float("inf")'}
        depth = self.depth
        for number in range(self.loops + 1):
            self.known = {}
            self._numbers_of_row(number)
            if number == self.loops:
                break
            found = self.reduced_in(number)
            outputs = [v for v in self.kernel.outputs if self.roles[v] == FULL and self.loop_of[v] == number]
            if not found and not outputs:
                continue
            for v, node in found:
                if self.roles[v] == ROW:
                    self._line(f"lanes_{self.names[v]} = tl.full({self.tile}, {starts[node.name]}, {ttype(v)})")
            # (A literal beyond 2³¹ would be a uint32.)
            ends = [f"tl.cast({n}, tl.int64)" if self.wide else str(n) for n in (0, self.kernel.columns)]
            self._line(f"for start in range({', '.join(ends)}, {self.block}):")
            self.depth, self.done = depth + 1, set()
            self._index("column", f"start + tl.arange(0, {self.block})[None, :]")
            for v in outputs:
                self._again(v, number)
                self._output(v)
            for v, node in found:
                self._again(node.inputs[0], number)
                self._lanes(v, node, starts)
            self.depth, self.known = depth, {}
            for v, node in found:
                if self.roles[v] == ROW:
                    self._line(f"{self.names[v]} = {self._reduced(node.name, 'lanes_' + self.names[v])}")

    def _numbers_of_row(self, number):
        """The ROW values that are known behind `number` loops."""
        for v, node in self.nodes.items():
            role = self.roles[v]
            if role == ROW and self.after[v] == number:
                if node.name not in REDUCTIONS:
                    self._statement(node, [self._operand(node, x) for x in node.args])
                self._output(v)
            elif role == SCALAR and self.roles.get(node.inputs[0]) == ROW and self.time(node) == number:
                self._add(v, node)

    def _again(self, v, number):
        """Compute a value, and what it needs, inside of a loop."""
        if v in self.done or self.roles.get(v) != FULL:
            return
        self.done.add(v)
        node = self.nodes[v]
        for x in node.inputs:
            self._again(x, number)
        self._statement(node, [self._operand(node, x) for x in node.args])

    def _lanes(self, v, node, starts):
        """What a loop does for a sum or maximum."""
        if self.roles[v] == ROW:
            lanes, x = f"lanes_{self.names[v]}", self._over_columns(node, starts[node.name])
            self._line(f"{lanes} = {lanes} + {x}" if node.name == "sum" else
                       f"{lanes} = " + TRITON[node.name + "imum"].format(lanes, f"({x})"))
        elif self.roles[v] == SCALAR:
            self._add(v, node)
        else:
            self._store(v, "row", "column", self._over_columns(node, "0.0"), self._masked(True, True))

    # ------------------------------------------------------------ one op

    def _statement(self, node, operands):
        """`v3 = v1 + v2`"""
        v, name = node.result, node.name
        if name in ("reshape", "broadcast_to"):
            self._line(f"{self.names[v]} = {operands[0]}")
            return
        if name == "astype":
            self._line(f"{self.names[v]} = " + (f"{operands[0]} != 0" if v.dtype.kind == "b" else
                                                f"{operands[0]}.to({ttype(v)})"))
            return
        dtype = v.dtype if name in ARITHMETIC else np.result_type(
            *(x.dtype if isinstance(x, Value) else x for x in node.args)) if name in COMPARISONS else np.dtype(bool)
        dtypes = [np.dtype(bool) if name == "where" and i == 0 else dtype for i in range(len(operands))]
        words = [cast(x, d, a) for x, d, a in zip(operands, dtypes, node.args, strict=True)]
        self._line(f"{self.names[v]} = {expression(name, words, dtype)}")


def expression(name, words, dtype):
    """An op on operands of a dtype."""
    one = f"tl.full([1, 1], 1, {TYPES[dtype.name]})"

    def write(text, *words):
        return text.format(*words, t=TYPES[dtype.name], one=one)
    if name == "div":
        return write(DIVIDE[dtype.name], *words)
    if name == "sqrt":
        return write(ROOT[dtype.name], *words)
    if name == "rsqrt":
        return write(DIVIDE[dtype.name], one, write(ROOT[dtype.name], *words))
    if name == "sigmoid":
        small = write(SMALL, *words)
        return write(DIVIDE[dtype.name], *(write(part, *words, small) for part in SIGMOID))
    if name == "mod":
        return write(MOD, *words, write(REMAINDER, *words))
    return write(TRITON[name], *words)


def ttype(value):
    """The Triton type of a value's elements."""
    return TYPES[value.dtype.name]


def cast(word, dtype, argument):
    """An operand in the dtype in which an op computes."""
    if not isinstance(argument, Value):
        return literal(argument, dtype)
    if argument.dtype == dtype:
        return word
    return f"({word} != 0)" if dtype.kind == "b" else f"{word}.to({TYPES[dtype.name]})"


def literal(number, dtype):
    """A number as a block (1, 1)."""
    number = dtype.type(number)
    if dtype.kind == "f" and number == 0 and np.signbit(number):
        return f"(tl.full([1, 1], 0.0, {TYPES[dtype.name]}) * -1)"      # Triton's own -0.0 is 0.0
    word = f'float("{number}")' if dtype.kind == "f" and not np.isfinite(number) else repr(number.item())
    return f"tl.full([1, 1], {word}, {TYPES[dtype.name]})"
