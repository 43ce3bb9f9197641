"""Kernels as C.

A value of one loop (see loops.py) that a later loop needs is computed again where that is cheap, read again where it is
an output, and otherwise kept in a scratch row. Additions, products, quotients and roots are NumPy's to the last bit
(nothing is contracted or reassociated); sums run in another order, and exp and its like are the C library's.
"""

import numpy as np

from . import cc
from .expressions import ARITHMETIC, COMPARISONS, HELPERS, LOGIC, REDUCTIONS, TYPES
from .fusion import COLUMN, FULL, ROW, SCALAR, shape_of
from .ir import Value
from .loops import Walk, place
from .partition import CHEAP

BLOCK = 4096        # elements of one float sum; the sums of blocks are added in double

# Functions that the C library has for whole vectors (glibc ≥ 2.35, libmvec).
VECTOR_FUNCTIONS = ("exp", "expm1", "log", "log1p", "sin", "cos", "tanh", "erf")

PRELUDE = "\n".join([
    *(f"SIMD_FUNCTION {t} {name}{f}({t});" for name in VECTOR_FUNCTIONS for t, f in (("float", "f"), ("double", ""))),
    *(f"SIMD_FUNCTION {t} pow{f}({t}, {t}); {t} fmod{f}({t}, {t});" for t, f in (("float", "f"), ("double", ""))),
    *(f"#pragma omp declare reduction({name}_{t}: {t}: omp_out = (omp_in {sign} omp_out || omp_in != omp_in) ? omp_in "
      f": omp_out) initializer(omp_priv = {start})"
      for t in ("float", "double") for name, sign, start in (("max", ">", "-__builtin_inf()"),
                                                             ("min", "<", "__builtin_inf()"))), ""])
SIMD = '#define SIMD_FUNCTION _Pragma("omp declare simd notinbranch")\n'
PLAIN = "#define SIMD_FUNCTION\n"


def write(kernel, strides, name):
    """The C function of a kernel for inputs with these strides (in elements), one tuple per input."""
    return Writer(kernel, strides).function(name)


class Writer(Walk):
    """Writes one kernel."""

    def __init__(self, kernel, strides):
        super().__init__(kernel, strides)
        self.scratch = []

    # ------------------------------------------------------------ the function

    def function(self, name):
        kernel = self.kernel
        loops = [self._loop(i) for i in reversed(range(self.loops))][::-1]
        lines = [f"void {name}(char **p) {{"]
        for i, v in enumerate(kernel.inputs):
            lines.append(f"  const {ctype(v)} *restrict in{i} = (const {ctype(v)} *)p[{i}];")
        for i, v in enumerate(kernel.outputs):
            lines.append(f"  {ctype(v)} *restrict out{i} = ({ctype(v)} *)p[{len(kernel.inputs) + i}];")
        lines += [f"  {ctype(v)} *restrict {self._kept(v)} = __builtin_malloc({kernel.columns}L * sizeof({ctype(v)}));"
                  for v in self.scratch]
        for v, role in self.roles.items():
            if role == COLUMN:
                lines.append(f"  for (long c = 0; c < {kernel.columns}; c++) {self._out(v)}[c] = 0;")
            elif role == SCALAR:
                lines.append(f"  double {self.names[v]} = 0;")
        lines.append(f"  for (long r = 0; r < {kernel.rows}; r++) {{")
        for i, (v, shape) in enumerate(self.pairs):
            offset = place("r", self.dims(v, shape)[0], suffix="L") or "0"
            lines.append(f"    const {ctype(v)} *restrict x{i} = in{self.inputs.index(v)} + {offset};")
        for i, v in enumerate(kernel.outputs):
            step = {FULL: kernel.columns, ROW: 1}.get(self.roles[v])
            if step is not None:
                lines.append(f"    {ctype(v)} *restrict y{i} = out{i} + r * {step}L;")
        for number in range(len(loops) + 1):
            lines += ["    " + line for line in self._row(number)]
            if number < len(loops):
                lines += ["    " + line for line in loops[number]]
        lines.append("  }")
        lines += [f"  *{self._out(v)} = {self.names[v]};" for v, role in self.roles.items() if role == SCALAR]
        lines += [f"  __builtin_free({self._kept(v)});" for v in self.scratch]
        return "\n".join([*lines, "}"])

    def _out(self, v):
        return f"out{self.kernel.outputs.index(v)}"

    def _kept(self, v):
        return "kept_" + self.names[v]

    # ------------------------------------------------------------ numbers of a row

    def _row(self, number):
        """The ROW values that are known behind `number` loops; sums are made in the loops."""
        lines = []
        for v, node in self.nodes.items():
            if self.roles[v] == ROW and self.after[v] == number:
                if node.name not in REDUCTIONS:
                    lines += self._statement(node, [self._row_operand(node, x) for x in node.args])
                if v in self.kernel.outputs:
                    lines.append(f"*y{self.kernel.outputs.index(v)} = {self.names[v]};")
            if self.roles[v] == SCALAR and self.roles.get(node.inputs[0]) == ROW and self.time(node) == number:
                lines.append(f"{self.names[v]} += {self.names[node.inputs[0]]};")
        return lines

    def _row_operand(self, node, x):
        if isinstance(x, Value) and x not in self.roles:
            return f"x{self.pairs.index((x, shape_of(node)))}[0]"
        return self.names[x] if isinstance(x, Value) else x

    # ------------------------------------------------------------ a loop over the columns

    def _loop(self, number):
        kernel, body, known = self.kernel, [], {}

        def operand(node, x):
            if not isinstance(x, Value):
                return x
            if self.roles.get(x) == ROW:
                return self.names[x]
            return full(x) if x in self.roles else load(x, shape_of(node))

        def load(x, shape):
            if (x, shape) not in known:
                i = self.pairs.index((x, shape))
                known[x, shape] = f"a{i}"
                offset = place("c", self.dims(x, shape)[1], suffix="L") or "0"
                body.append(f"const {ctype(x)} a{i} = x{i}[{offset}];")
            return known[x, shape]

        def full(v):
            if v in known:
                return known[v]
            node = self.nodes[v]
            known[v] = self.names[v]
            if self.loop_of[v] < number and v in kernel.outputs:
                body.append(f"const {ctype(v)} {self.names[v]} = y{kernel.outputs.index(v)}[c];")
            elif self.loop_of[v] < number and not self._again(v):
                if v not in self.scratch:
                    self.scratch.append(v)
                body.append(f"const {ctype(v)} {self.names[v]} = {self._kept(v)}[c];")
            else:
                body.extend(self._statement(node, [operand(node, x) for x in node.args]))
            return known[v]

        for v in kernel.outputs:
            if self.roles[v] == FULL and self.loop_of[v] == number:
                body.append(f"y{kernel.outputs.index(v)}[c] = {full(v)};")
        sums = []
        for v, node in self.reduced_in(number):
            x = operand(node, node.inputs[0])
            if self.roles[v] == COLUMN:
                body.append(f"{self._out(v)}[c] += {x};")
            else:
                sums.append((v, node.name, x))
        for v in list(self.scratch):
            if self.loop_of[v] == number:
                body.append(f"{self._kept(v)}[c] = {full(v)};")
        return self._around(body, sums) if body else []

    def _again(self, v, depth=3):
        """Whether a value is computed again in a later loop rather than kept."""
        node = self.nodes[v]
        return depth > 0 and node.name in CHEAP and all(
            x not in self.loop_of or x in self.kernel.outputs or self._again(x, depth - 1) for x in node.inputs)

    def _around(self, body, sums):
        """The loop with its sums; long ones in blocks."""
        columns = self.kernel.columns
        declared, clauses, steps, closing = [], [], [], []
        for v, name, x in sums:
            t, s = ctype(v), f"s_{self.names[v]}"
            scalar = self.roles[v] == SCALAR
            if name == "sum":
                clauses.append(f"reduction(+:{s})")
                steps.append(f"{s} += {x};")
                declared.append(f"{t} {s} = 0;")
                closing.append(f"{self.names[v] if scalar else 't_' + self.names[v]} += {s};")
            else:
                clauses.append(f"reduction({name}_{t}:{s})")
                sign, start = (">", "-__builtin_inf()") if name == "max" else ("<", "__builtin_inf()")
                steps.append(f"{s} = ({x} {sign} {s} || {x} != {x}) ? {x} : {s};")
                declared.append(f"{t} {s} = {start};")
                t_ = "t_" + self.names[v]
                closing.append(f"{t_} = ({s} {sign} {t_} || {s} != {s}) ? {s} : {t_};")
        outer = [f"{'double' if name == 'sum' else ctype(v)} t_{self.names[v]} = "
                 f"{'0' if name == 'sum' else '-__builtin_inf()' if name == 'max' else '__builtin_inf()'};"
                 for v, name, _ in sums if self.roles[v] == ROW]
        after = [f"const {ctype(v)} {self.names[v]} = t_{self.names[v]};" for v, _, _ in sums if self.roles[v] == ROW]
        if columns > BLOCK and sums:
            opening = f"for (long b = 0; b < {columns}; b += {BLOCK}) {{"
            head = f"for (long c = b; c < (b + {BLOCK} < {columns} ? b + {BLOCK} : {columns}); c++) {{"
        else:
            opening, head = "{", f"for (long c = 0; c < {columns}; c++) {{"
        inside = [*declared, " ".join(["#pragma omp simd", *clauses]), head,
                  *("  " + line for line in (*body, *steps)), "}", *closing]
        return [*outer, opening, *("  " + line for line in inside), "}", *after]

    # ------------------------------------------------------------ one op

    def _statement(self, node, operands):
        """`const float v3 = v1 + v2;`"""
        v, name = node.result, node.name
        # (A byte beside numbers of 32 bits would be packed and unpacked, which takes longer than all else.)
        t = "int" if v.dtype == bool else ctype(v)
        if name in ("reshape", "broadcast_to"):
            return [f"const {t} {self.names[v]} = {operands[0]};"]
        if name == "astype":
            test = " != 0" if v.dtype.kind == "b" else ""
            return [f"const {t} {self.names[v]} = ({t})({operands[0]}{test});"]
        dtype = v.dtype if name in ARITHMETIC else np.result_type(
            *(x.dtype if isinstance(x, Value) else x for x in node.args)) if name in COMPARISONS else np.dtype(bool)
        if name == "where":
            words = [cast(operands[0], np.dtype(bool), node.args[0]),
                     *(cast(x, dtype, a) for x, a in zip(operands[1:], node.args[1:], strict=True))]
        else:
            words = [cast(x, dtype, a) for x, a in zip(operands, node.args, strict=True)]
        f = "f" if dtype == np.float32 else ""
        lines, more = [], {}
        if name in HELPERS:
            short, text = HELPERS[name]
            more[short] = f"{self.names[v]}_{short}"
            lines.append(f"const {TYPES[dtype.name]} {more[short]} = {text.format(*words, f=f)};")
        text = (ARITHMETIC.get(name) or COMPARISONS.get(name) or LOGIC[name]).format(*words, f=f, **more)
        return [*lines, f"const {t} {self.names[v]} = {text};"]


def load(functions, names):
    """The C functions, compiled and loaded, by these names."""
    if not functions:
        return []
    library = cc.build((SIMD if cc.vector_functions() else PLAIN) + PRELUDE + "\n".join(functions))
    return [getattr(library, name) for name in names]


def ctype(value):
    """The C type of a value's elements."""
    return TYPES[value.dtype.name]


def cast(word, dtype, argument):
    """An operand in the dtype in which an op computes."""
    if isinstance(argument, Value):
        return word if argument.dtype == dtype or dtype.kind == "b" else f"(({TYPES[dtype.name]}){word})"
    return literal(argument, dtype)


def literal(number, dtype):
    """A number as C writes it."""
    number = dtype.type(number)
    if dtype.kind != "f":
        return f"({int(number)}{'LL' if dtype.itemsize == 8 else ''})"
    if not np.isfinite(number):
        return "__builtin_nan(\"\")" if np.isnan(number) else f"({'-' if number < 0 else ''}__builtin_inf())"
    return f"({float(number)!r}{'f' if dtype == np.float32 else ''})"
