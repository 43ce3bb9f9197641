"""PTX, NVIDIA's portable assembler, as data: text to Program.

Of the language as much as Triton's compiler writes: one .entry per text, registers, labels, guards, vectors, addresses,
scopes of inline assembler, .loc. Source: NVIDIA, "Parallel Thread Execution ISA", version 8.7.
"""

import re
from dataclasses import dataclass, replace

STATEMENT = re.compile(r"""\s*(?:
    (?P<place>\.loc\s[^\n]*)
  | (?P<label>[$\w.]+):(?!:)
  | (?P<open>\{)
  | (?P<close>\})
  | (?P<code>[^;{}]+ (?:\{[^{}]*\}[^;{}]*)*) ;
)""", re.X)
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
class Program:
    """A kernel.

    name          of its .entry
    parameters    {name: type as in "u64"}, in order
    blocks        ((first, end), …): stretches of instructions that are entered at the first and left at the end alone
    labels        {name: the block that begins there}
    names         of what is declared: registers, without their numbers, the symbol where shared memory begins, and
                  those of a thread's own memory; not of constants
    """

    name: str
    parameters: dict
    instructions: tuple
    blocks: tuple
    labels: dict
    names: frozenset


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
    """A register's name without its number, and without the scope where it is declared."""
    return name.partition("@")[0].rstrip("0123456789")


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


def parse(text):
    """The Program of a PTX text. ValueError where it has no .entry, or something that can't be read."""
    text = re.sub(r"/\*.*?\*/", " ", text, flags=re.S)
    text = re.sub(r"^(?!\s*\.loc\s)(.*?)//[^\n]*", r"\1", text, flags=re.M)
    header = re.search(r"\.entry\s+([$\w]+)\s*\((.*?)\)", text, re.S)
    if header is None:
        raise ValueError(f"no PTX with an .entry: {text[:60]!r} …")
    parameters = {name: kind for kind, name in re.findall(r"\.param\s+\.(\w+)[^,]*?([$\w]+)\s*(?:,|$)", header[2])}
    files = dict(re.findall(r'\.file\s+(\d+)\s+"([^"]*)"', text))
    paths = {path.rpartition("/")[2]: path for path in files.values()}
    at = text.index("{", header.end()) + 1
    code, labels, scopes, place, widths = [], {}, [{}], ("", 0), {}
    inner = [(0, {})]       # per scope its first instruction, and {label: the name that it has here}
    while scopes:
        found = STATEMENT.match(text, at)
        if found is None:
            raise ValueError(f"PTX of {header[1]}: {text[at:at + 80].strip()!r} can't be read")
        at = found.end()
        if found["place"]:
            file, line = PLACE.match(found["place"]).groups()
            callers = [(paths.get(name, ""), line) for name, line in CALLER.findall(found["place"])]
            # What a function of Triton's own does is its caller's doing.
            place = next(((file, int(line)) for file, line in [(files.get(file, ""), line), *callers]
                          if "triton/language" not in file), ("", 0))
        elif found["label"]:
            inner[-1][1][found["label"]] = name = found["label"] + (f"@{at}" if len(scopes) > 1 else "")
            labels[name] = len(code)
        elif found["open"]:
            scopes.append(dict(scopes[-1]))
            inner.append((len(code), {}))
        elif found["close"]:
            scopes.pop()
            begin, own = inner.pop()
            code[begin:] = [replace(one, operands=(own.get(one.operands[0], one.operands[0]),))
                            if one.parts[0] == "bra" else one for one in code[begin:]]
        elif (one := found["code"].split(None, 2))[0] == ".reg":
            size = 1 if one[1] == ".pred" else int(re.sub(r"\D", "", one[1])) // 8
            names = [name.strip() for name in one[2].split(",")]
            widths.update({stem(name.partition("<")[0]): size for name in names})
            if len(scopes) > 1:
                for name, _, many in (name.rstrip(">").partition("<") for name in names):
                    scopes[-1].update({f"{name}{i}": f"{name}{i}@{at}" for i in (range(int(many)) if many else ("",))})
        elif one[0][0] != ".":
            code.append(instruction(found["code"], place, scopes[-1], widths))
    code.append(instruction("ret", place, {}, widths))      # what the closing brace says
    shared, local = (set(re.findall(rf"\.{space}\s(?:\s*\.align\s+\d+)?\s*\.\w+\s+([$\w]+)\s*[\[;]", text))
                     for space in ("shared", "local"))
    leaders = sorted({0, *labels.values(), *(i + 1 for i, one in enumerate(code) if one.parts[0] in ENDS)} -
                     {len(code)})
    begins = {first: block for block, first in enumerate(leaders)}
    blocks = tuple(zip(leaders, [*leaders[1:], len(code)], strict=True))
    return Program(header[1], parameters, tuple(code), blocks, {name: begins[first] for name, first in labels.items()},
                   frozenset([*widths, *(shared if len(shared) == 1 else []), *local]))
