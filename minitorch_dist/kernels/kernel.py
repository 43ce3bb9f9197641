"""Kernel: a Triton function and, as data, what it takes to compile and to start it."""

from dataclasses import dataclass

import numpy as np

from .launch import NUMBERS, launch

BELOW_80 = "below 8.0"


@dataclass(frozen=True, eq=False)
class Kernel:
    """A Triton function with the facts that a compiler needs.

    name         as the ledger counts it and `python -m minitorch_dist kernels` lists it
    fn           the @triton.jit function
    signature    {parameter: type} of all its parameters but the constexprs, in order. "*": a pointer to whatever dtype
                 the array has, or None; "*fp32": to that alone; behind them "i32", "i64", "fp32": a number
    constexprs   {constexpr: value} where a call doesn't say otherwise
    divisible    numbers whose divisibility by 16 the code is compiled for, when it holds; pointers always are.
                 The length of an array belongs here: without it there are no 128-bit loads
    strided      pointers whose array may be of any strides, because the call passes them
    num_warps    of 32 threads each, per program
    num_stages   how many loads a loop has under way
    fp_fusion    whether a·b + c may be one fused instruction
    examples     what tests compile and `--show` prints, the first by default: {"*": dtype of all "*" pointers,
                 a pointer's name: its dtype or None, a constexpr's name: its value, "num_warps": …, BELOW_80: {what is
                 another for compute capabilities below 8.0}}
    configs      what the autotuner chooses from: ({constexpr or num_warps or num_stages: value}, …)
    """

    name: str
    fn: object
    signature: dict
    constexprs: dict
    divisible: tuple = ()
    strided: tuple = ()
    num_warps: int = 4
    num_stages: int = 3
    fp_fusion: bool = True
    examples: tuple = ({"*": "fp32"},)
    configs: tuple = ()

    def __post_init__(self):
        names = list(self.fn.arg_names)
        ours = [*self.signature, *self.constexprs]
        if sorted(names) != sorted(ours) or [n for n in names if n in self.signature] != list(self.signature):
            raise TypeError(f"kernel {self.name}: its function takes {names}, its record says {ours}")
        if unknown := {*self.divisible, *self.strided} - set(self.signature):
            raise TypeError(f"kernel {self.name}: {sorted(unknown)} are not in its signature {list(self.signature)}")
        kinds = [kind[0] == "*" for kind in self.signature.values()]
        if kinds != sorted(kinds, reverse=True):
            raise TypeError(f"kernel {self.name}: its pointers must come before its numbers: {self.signature}")
        # For the launch: of each pointer (name, strided), and behind them of each number (its type, divisible).
        count = sum(kinds)
        object.__setattr__(self, "pointers", tuple((name, name in self.strided) for name in ours[:count]))
        object.__setattr__(self, "numbers", tuple(
            (NUMBERS[kind], name in self.divisible) for name, kind in list(self.signature.items())[count:]))
        object.__setattr__(self, "floats", tuple(
            i for i, (kind, _) in enumerate(self.numbers) if issubclass(kind, np.floating)))

    def __call__(self, grid, *args, **options):
        """Start one program per point of `grid`, a tuple of up to three numbers; an empty grid starts nothing.

        args     arrays, numbers, or None for a pointer left out, in the order of the signature
        options  constexprs, num_warps and num_stages where they differ from the record's

        CuPy arrays: on the current stream of the device they are on. NumPy arrays: in Triton's interpreter.
        Raises TypeError or ValueError on arguments that don't fit, naming the parameter.
        """
        launch(self, grid, args, options)

    def settings(self, options):
        """(constexprs, num_warps, num_stages) of one call."""
        options = dict(options)
        warps, stages = options.pop("num_warps", self.num_warps), options.pop("num_stages", self.num_stages)
        if unknown := set(options) - set(self.constexprs):
            raise TypeError(f"kernel {self.name}: no constexprs {sorted(unknown)}; it has {list(self.constexprs)}")
        return {**self.constexprs, **options}, warps, stages

    def example(self, given, capability=90):
        """(types, options) of one of `examples`: {parameter: type or None}, and the keywords of a call on a GPU of this
        compute capability."""
        given = dict(given)
        older = given.pop(BELOW_80, {})
        given |= older if capability < 80 else {}
        every = given.pop("*", None)
        types = {}
        for name, kind in self.signature.items():
            if kind[0] == "*":
                own = given.pop(name, every if kind == "*" else kind[1:])
                kind = own and f"*{own}"
            types[name] = kind
        return types, given
