"""PTX, NVIDIA's portable assembler, as data: text to Program.

Of the language as much as Triton's compiler writes and that of CUDA C++: kernels, registers, labels, guards, vectors,
addresses, scopes, variables, functions, .loc. A function becomes part of the code where it is called, with registers,
labels and memory of its own. Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7.
"""

import itertools
import math
import re
from dataclasses import dataclass, replace

STATEMENT = re.compile(r"""\s*(?:
    (?P<place>\.loc\s[^\n]*)
  | (?P<label>[$\w.]+):(?!:)
  | (?P<open>\{)
  | (?P<close>\})
  | (?P<code>[^;{}]+ (?:\{[^{}]*\}[^;{}]*)*) ;
)""", re.X)
ENTRY = re.compile(r"\.entry\s+([$\w]+)\s*\((.*?)\)", re.S)
FUNCTION = re.compile(r"\.func\s+(?:\(([^()]*)\)\s*)?([$\w]+)\s*(?:\(([^()]*)\))?[^;{]*\{")
PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)[^,[]*?([$\w]+)\s*(\[\d+\])?\s*(?:,|$)")
VARIABLE = re.compile(r"""\.(shared|local|global|const|param)\s+ (?:\.align\s+(\d+)\s+)? \.([busf]\d+)\s+ ([$\w]+)\s*
    ((?:\[\d*\]\s*)*) (?:=\s*([^;]*))?""", re.X)
CALL = re.compile(r"call(?:\.uni)?\s+(?:\(([^()]*)\)\s*,\s*)?([$\w]+)\s*(?:,\s*\(([^()]*)\)\s*)?$")
INLINE = re.compile(r"//\s*begin inline asm\n.*?//\s*end inline asm\b", re.S)
PLACE = re.compile(r"\.loc\s+(\d+)\s+(\d+)\s+\d+")
CALLER = re.compile(r"([^\s:]+):(\d+):\d+")    # in the comment behind it: what it was inlined into, the nearest first
CODE = re.compile(r"(?:@(?P<no>!?)(?P<guard>[%$\w]+)\s+)?(?P<opcode>[\w.:]+)\s*(?P<operands>.*)", re.S)
OPERAND = re.compile(r"\{[^{}]*\}|\[[^\]]*\]|[^,\s][^,]*")
NUMBER = re.compile(r"(-?)(0[fFdD][0-9a-fA-F]+|0[xX][0-9a-fA-F]+|\d+)U?$")
ENDS = {"bra", "ret", "exit", "bar", "barrier", "trap"}     # what a block of instructions ends with


@dataclass(frozen=True)
class Address:
    """[base + offset]: a register's, parameter's or symbol's name, or None, and bytes."""

    base: str | None
    offset: int


@dataclass(frozen=True)
class Instruction:
    """One instruction.

    parts     of its name: ("add", "s32")
    operands  in order: names of registers and symbols, ints (of immediate floats the bits), Addresses, tuples of these
    guard     (register, whether it must be false), or None
    bytes     of the register that the result goes to, if it is one
    place     (file, line) of the Python that it comes from
    text      as it is written
    """

    parts: tuple
    operands: tuple
    guard: tuple | None
    bytes: int | None
    place: tuple
    text: str


@dataclass(frozen=True)
class Variable:
    """What a text keeps in memory.

    space   "shared", "local" (a thread's own: what functions get and give, too), "global" or "const"
    size    bytes; 0: memory that each launch gets as much of as it asks for
    data    the bytes that it begins with, or None
    """

    space: str
    align: int
    size: int
    data: bytes | None = None


@dataclass(frozen=True)
class Program:
    """A kernel.

    name          of its .entry
    parameters    {name: type as in "u64", of structures "b8[40]"}, in order
    blocks        ((first, end), …): stretches of instructions that are entered at the first and left at the end alone
    labels        {name: the block that begins there}
    registers     names that are declared, without their numbers
    variables     {name: Variable} that instructions name; offsets: {name: bytes from where its space begins}
    shared, local   bytes of a program's shared memory besides what a launch asks for, and of a thread's own memory
    """

    name: str
    parameters: dict
    instructions: tuple
    blocks: tuple
    labels: dict
    registers: frozenset
    variables: dict
    offsets: dict
    shared: int
    local: int

    def size(self, name):
        """Bytes of a parameter."""
        return size(self.parameters[name])


def size(kind):
    """Bytes of a type: 8 of "u64", 40 of "b8[40]", 1 of "pred"."""
    one, _, many = kind.partition("[")
    each = 1 if one == "pred" else int(re.sub(r"\D", "", one)) // 8
    return each * math.prod(int(n or 0) for n in many[:-1].split("][") if many)


def names(operand):
    """The registers and variables in an operand."""
    if isinstance(operand, tuple):
        return [name for part in operand for name in names(part)]
    if isinstance(operand, Address):
        return names(operand.base)
    return operand.split("|") if isinstance(operand, str) and operand != "_" else []


def operand(text, scope):
    """One operand. scope: {name as written: name} of what is declared in a scope of inline assembler."""
    text = text.strip()
    if text[0] == "{":
        return tuple(operand(part, scope) for part in OPERAND.findall(text[1:-1]))
    if text[0] == "[":
        base, _, offset = text[1:-1].replace(" ", "").partition("+")
        return (Address(None, number(base)) if NUMBER.match(base) else
                Address(scope.get(base, base), number(offset) if offset else 0))
    if NUMBER.match(text):
        return number(text)
    return scope.get(text, text)


def number(text):
    """An immediate: 12 of "12" or "0xc"; the bits of "0f3F800000"."""
    sign, digits = NUMBER.match(text).groups()
    kind = digits[:2].lower()
    value = int(digits[2:], 16) if kind in ("0f", "0d", "0x") else int(digits)
    return -value if sign else value


def stem(name):
    """A register's name without its number: of "%r12@3", in the third scope, "%r@3"."""
    name, at, scope = name.partition("@")
    return name.rstrip("0123456789") + at + scope


def instruction(code, place, scope, widths):
    """An Instruction of its text without the semicolon. widths: {name of registers without its number: bytes}."""
    text = " ".join(code.split())
    found = CODE.match(text)
    guard = found["guard"] and (scope.get(found["guard"], found["guard"]), bool(found["no"]))
    operands = tuple(operand(part, scope) for part in OPERAND.findall(found["operands"]))
    first = operands[0] if operands else None
    first = first[0] if isinstance(first, tuple) else first
    size = widths.get(stem(first)) if isinstance(first, str) else None
    return Instruction(tuple(found["opcode"].split(".")), operands, guard, size, place, text)


def variable(text):
    """(name, Variable) of a declaration; None if it isn't of numbers."""
    if (found := VARIABLE.match(text)) is None:
        return None
    space, align, kind, name, dimensions, values = found.groups()
    dimensions, data = "".join(dimensions.split()), None
    if values:
        numbers = [part for part in re.split(r"[\s{},]+", values) if part]
        if not all(map(NUMBER.match, numbers)):
            return None
        one = size(kind)
        data = b"".join((number(n) % (1 << 8 * one)).to_bytes(one, "little") for n in numbers)
        if dimensions == "[]":
            dimensions = f"[{len(numbers)}]"
    many = size(kind + dimensions)
    space = "local" if space == "param" else space
    return name, Variable(space, int(align or size(kind)), many, data and data.ljust(many, b"\0"))


class Body:
    """The code of a kernel and of the functions that it calls, as it is read.

    functions    {name: (what it gives, what it gets: names, where its text begins)}
    """

    def __init__(self, text, name, functions):
        self.text, self.name, self.functions = text, name, functions
        self.files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
        self.paths = {path.rpartition("/")[2]: path for path in self.files.values()}
        self.code, self.labels, self.widths, self.variables = [], {}, {}, {}
        self.place, self.scopes, self.calls = ("", 0), itertools.count(1), []

    def read(self, at, scope, suffix="", end=None):
        """Read a scope; returns where its text ends.

        scope    {name as written: name} of what is declared around it
        suffix   of the names that it declares
        end      the label that a function's ret goes to
        """
        first, own = len(self.code), {}
        while True:
            found = STATEMENT.match(self.text, at)
            if found is None:
                raise ValueError(f"PTX of {self.name}: {self.text[at:at + 80].strip()!r} can't be read")
            at = found.end()
            if found["place"]:
                self.place = self.placed(found["place"])
            elif found["label"]:
                own[found["label"]] = name = found["label"] + suffix
                self.labels[name] = len(self.code)
            elif found["open"]:
                at = self.read(at, dict(scope), f"@{next(self.scopes)}", end)
            elif found["close"]:
                self.code[first:] = [replace(one, operands=(own.get(one.operands[0], one.operands[0]),))
                                     if one.parts[0] == "bra" else one for one in self.code[first:]]
                return at
            elif found["code"][0] == ".":
                self.declare(found["code"], scope, suffix)
            elif not self.call(found["code"], scope):
                one = instruction(found["code"], self.place, scope, self.widths)
                if end and one.parts[0] == "ret":
                    one = replace(one, parts=("bra",), operands=(end,))
                self.code.append(one)

    def placed(self, text):
        """(file, line) of a .loc."""
        file, line = PLACE.match(text).groups()
        callers = [(self.paths.get(name, ""), line) for name, line in CALLER.findall(text)]
        # What a function of Triton's own does is its caller's doing.
        return next(((file, int(line)) for file, line in [(self.files.get(file, ""), line), *callers]
                     if "triton/language" not in file), ("", 0))

    def declare(self, text, scope, suffix):
        """Registers, or memory of a thread's own: those of a scope are other ones than those around it."""
        space, kind, *rest = text.split(None, 2)
        if space == ".reg":
            for name, _, many in (name.strip().rstrip(">").partition("<") for name in rest[0].split(",")):
                self.widths[stem(name + suffix)] = size(kind[1:])
                if suffix:
                    scope.update({f"{name}{i}": f"{name}{i}{suffix}" for i in (range(int(many)) if many else ("",))})
        elif space in (".local", ".param") and (declared := variable(text)):
            name, found = declared
            scope[name], self.variables[name + suffix] = name + suffix, found

    def call(self, text, scope):
        """Read a function's code where it is called; False where that isn't possible: the instruction is Unknown."""
        found = CALL.match(" ".join(text.split()))
        gives, name, gets = found.groups() if found else (None, None, None)
        if name not in self.functions or name in self.calls:
            return False
        given = [scope.get(word.strip(), word.strip()) for word in [*(gives or "").split(","), *(gets or "").split(",")]
                 if word.strip()]
        formal, at = self.functions[name]
        if len(given) != len(formal) or not set(given) <= set(self.variables):
            return False
        suffix = f"@{next(self.scopes)}"
        end = f"end of {name}{suffix}"
        self.calls.append(name)
        self.read(at, dict(zip(formal, given, strict=True)), suffix, end)
        self.calls.pop()
        self.labels[end] = len(self.code)
        return True


def parse(text, name=None):
    """The Program of a PTX text's .entry of this name, or of the first. ValueError where it has none, or something that
    can't be read."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    # From Triton 3.8 on the lines of inline assembler are counted on from the one in Python that it stands for.
    text = INLINE.sub(lambda found: re.sub(r"\n\s*\.loc\s[^\n]*", "", found[0]), text)
    text = re.sub(r"^(?!\s*\.loc\s)(.*?)//[^\n]*", r"\1", text, flags=re.M)
    headers = {header[1]: header for header in ENTRY.finditer(text)}
    if not headers:
        raise ValueError(f"no PTX with an .entry: {text[:60]!r} …")
    if name is not None and name not in headers:
        raise ValueError(f"the PTX has no .entry {name}, but {', '.join(headers)}")
    header = headers[name] if name else next(iter(headers.values()))
    functions = {found[2]: ([name for part in (found[1], found[3]) for _, name, _ in PARAMETER.findall(part or "")],
                            found.end()) for found in FUNCTION.finditer(text)}
    body = Body(text, header[1], functions)
    body.read(text.index("{", header.end()) + 1, {})
    code, widths = body.code, body.widths
    code.append(instruction("ret", body.place, {}, widths))         # what the closing brace says
    leaders = sorted({0, *body.labels.values(), *(i + 1 for i, one in enumerate(code) if one.parts[0] in ENDS)} -
                     {len(code)})
    begins = {first: block for block, first in enumerate(leaders)}
    blocks = tuple(zip(leaders, [*leaders[1:], len(code)], strict=True))
    used = {name for one in code for name in names(one.operands)}
    everywhere = filter(None, (variable(found[0]) for found in VARIABLE.finditer(text)
                               if found[1] in ("shared", "global", "const")))
    variables = {name: one for name, one in [*everywhere, *body.variables.items()] if name in used}
    offsets = {}
    shared, local = (laid_out(variables, space, offsets) for space in ("shared", "local"))
    return Program(header[1], {name: kind + many for kind, name, many in PARAMETER.findall(header[2])}, tuple(code),
                   blocks, {name: begins[first] for name, first in body.labels.items()}, frozenset(widths), variables,
                   offsets, shared, local)


def laid_out(variables, space, offsets):
    """Put the variables of a space one behind the other, those without an end last, at one place; returns the bytes
    before these."""
    end, ours = 0, {name: one for name, one in variables.items() if one.space == space}
    for name, one in ours.items():
        if one.size:
            offsets[name] = -(-end // one.align) * one.align
            end = offsets[name] + one.size
    if endless := {name: one.align for name, one in ours.items() if not one.size}:
        end = -(-end // max(endless.values())) * max(endless.values())
        offsets |= dict.fromkeys(endless, end)
    return end
