"""What fully_shard's ranks hold and send in 16 bits, beside float32 values and float32 state.

    model = fully_shard(nn.GPT(vocabulary=65, length=64), world, stage=1,
                        mp_policy=MixedPrecisionPolicy("bfloat16", "bfloat16", output_dtype="float32"))

    this rank's piece, float32 ──round──┐                                   ┌── sum over ranks, float32 ── optimizer
                              all-gather, 16 bits                  reduce-scatter, 16 bits
                                        └── forward, backward ── gradients ─┘

    bytes of ψ float32 parameters             held: parameters   gradients    optimizer       sent per step, · (N-1)/N
    without a policy, stage 1                 4ψ                 4ψ           8ψ/N            4ψ + 4ψ
    param_dtype, stage 1                      2ψ                 4ψ           4ψ/N + 8ψ/N     2ψ + 4ψ
    param_dtype and reduce_dtype, stage 1     2ψ                 2ψ           12ψ/N           2ψ + 2ψ

The last is ZeRO's 2ψ + 2ψ + 12ψ/N: the pieces are what the paper calls the optimizer's copy of the parameters. (Sums of
gradients are float32 here, 4ψ/N more, and go so to the copies of hybrid sharding.) Names and meaning are those of
torch's fully_shard. Sources: Rajbhandari et al. 2020, "ZeRO", 3.1; Micikevicius et al. 2018, "Mixed precision training"
(float32 copies).
"""

from dataclasses import dataclass

from ...autodiff.ops.elementwise import astype
from ...autodiff.tree import flatten
from ...backend import as_dtype, is_floating, is_short, module_of, xp, zeros_like
from ...flat import BLOCK
from ...ledger import keep, open_ledgers
from ..encodings import Blocks


@dataclass(frozen=True)
class MixedPrecisionPolicy:
    """The dtypes of a fully_shard model, and in how many bits it travels; None, or "float32": as it is. "float16" and
    "bfloat16" can be had. (A reduce_dtype of None is float32, where torch's is param_dtype.)

    param_dtype          of parameters while the model runs, and as they travel. In 16 bits they are rounded anew from
                         the float32 pieces; ops between them are then made in 16 bits, as torch's are. (Under
                         mt.autocast("bfloat16") the products of Linears have the same bits with and without.) Frozen
                         parameters and buffers stay what they are, and in float32 make what they meet float32: nobody
                         steps them, so they need no float32 pieces, and can be of 16 bits before wrapping. Inside
                         gathered() values are in it, too; full_state_dict has the pieces'
    reduce_dtype         of gradients until they are summed: of a backward without sum (no_sync) they are added up in
                         it, over the ranks in float32
    output_dtype         of the model's floating outputs: "float32" for a loss of many terms
    cast_forward_inputs  whether the model's floating inputs come in param_dtype. (In a Pipeline inputs are the first
                         stage's and outputs the last one's)
    param_encoding       encodings.Blocks, say Blocks(8), stage 3: how values travel from the float32 pieces. The model
                         runs on what they are rounded to, of each by at most 1/254 of the largest in its block (4 bits:
                         1/14). That is the same on any number of ranks: exact mode has one set of bits, though not the
                         one without. (Blocks begin where units do: stages of a pipeline and divided experts are units
                         of their own, and round in other blocks than one process.) Frozen parameters travel as they are
    reduce_encoding      Blocks, say Blocks(4): how gradients travel to be summed in float32 (few_bits.py). They are
                         rounded once on each rank, and once more between groups of reshard_after_forward's: the sum is
                         off by what all these are together, which depends on the ranks; so not in exact mode. To the
                         copies of hybrid sharding they go as float32. What is not finite makes its block NaN

    In float16 gradients want a GradScaler.
    """

    param_dtype: str | None = None
    reduce_dtype: str | None = None
    output_dtype: str | None = None
    cast_forward_inputs: bool = True
    param_encoding: Blocks | None = None
    reduce_encoding: Blocks | None = None

    def __post_init__(self):
        for name in ("param_dtype", "reduce_dtype", "output_dtype"):
            given = getattr(self, name)
            if given is None:
                continue
            try:
                dtype = as_dtype(given)
            except TypeError:       # NumPy knows none of that name
                dtype = xp.dtype(bool)
            if name != "output_dtype" and dtype == xp.float32:      # what it is without
                object.__setattr__(self, name, None)
            elif not is_floating(dtype) or name != "output_dtype" and not is_short(dtype):
                more = "another floating dtype, or None" if name == "output_dtype" else "None or float32"
                raise ValueError(f"MixedPrecisionPolicy: {name}={given!r}; it may be float16 or bfloat16, or {more}: "
                                 "as it is")
        for name in ("param_encoding", "reduce_encoding"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, Blocks) and BLOCK % given.size == 0):
                raise ValueError(f"MixedPrecisionPolicy: {name}={given!r}; it may be Blocks(8) or Blocks(4), of a size "
                                 f"that divides the {BLOCK:,} elements by which shares are cut, or None: as it is")

    @property
    def rounds(self):
        """Whether parameters or gradients are other than float32 anywhere."""
        return any((self.param_dtype, self.reduce_dtype, self.param_encoding, self.reduce_encoding))

    def check(self, module, stage, exact):
        """ValueError unless what the module trains is float32, of which fewer bits are made, and where the stage, or
        exact mode, can't have what is asked for."""
        if exact and (kind := self.reduce_encoding or self.reduce_dtype):
            raise ValueError(f"fully_shard: exact mode adds gradients up in their own precision, not in {kind}, in "
                             "which the sum would depend on how many ranks there are: leave reduce_dtype and "
                             "reduce_encoding, or exact, out")
        if self.param_encoding and stage < 3:
            raise ValueError(f"fully_shard: stage={stage}, param_encoding={self.param_encoding}: values that are "
                             "rounded for each gather are stage 3's: take stage=3, or leave it out")
        if self.rounds and (others := [
                f"{name} ({p.dtype})" for name, p in module.named_parameters()
                if p.requires_grad and p.dtype != xp.float32]):
            raise ValueError(f"{self}: {', '.join(others[:4])} would stay as they are beside what has 16 bits or less: "
                             "train in float32, or leave the policy out")

    def values(self, dtype):
        """The dtype of a parameter's values, where its piece is of `dtype`."""
        return as_dtype(self.param_dtype) if self.param_dtype else dtype

    def gradients(self, dtype):
        """The dtype of its gradients until they are summed."""
        return as_dtype(self.reduce_dtype) if self.reduce_dtype else dtype

    def inputs(self, tree):
        """The model's inputs as it is to see them."""
        return cast(tree, self.param_dtype if self.cast_forward_inputs else None)

    def outputs(self, tree):
        """The model's outputs as the caller is to see them."""
        return cast(tree, self.output_dtype)


AS_IT_IS = MixedPrecisionPolicy()


def cast(tree, dtype):
    """A tree of inputs or outputs, its floating arrays and tensors in another dtype (None: as they are)."""
    if dtype is None:
        return tree
    leaves, rebuild = flatten(tree, order=list)
    return rebuild([astype(v, as_dtype(dtype)) if hasattr(v, "dtype") and is_floating(v.dtype) else v for v in leaves])


class SumOfShort:
    """The sum over all ranks of `grads` (ranks · n,), of 16 bits, made in float32: begins to put this rank's part of it
    into `out` (n,), float32. wait() until it is there. What is not finite stays so, for a GradScaler to see.

    Each part travels to its rank as it is, and is added up there in the ranks' order: a reduce-scatter's bytes.
    """

    def __init__(self, comm, out, grads, what):
        self.out, self.parts = out, zeros_like(grads)
        if open_ledgers:
            keep(self.parts, "buffer")
        self.work = comm.all_to_all(self.parts, grads, async_op=True, what=what)

    def wait(self):
        self.work.wait()
        module_of(self.parts).sum(self.parts.reshape(-1, self.out.size), 0, dtype=xp.float32, out=self.out)
