"""Attention by states: all that was read is one matrix of each head, however much it was. Linear attention adds:

    S_t = a_t S_{t-1} + k_t v_tᵀ        a_t, from 0 to 1: what the head keeps of what it knows, at this position
    y_t = S_tᵀ q_t / √size

With no softmax between queries and keys, those of the past need not be kept: they are added up. T positions cost work
in proportion to T instead of T² (states.py), and one more costs the same at any length. The price: what has been added
up can't be looked at one by one, and size positions fill a state of size² numbers.

Sources: Katharopoulos et al. 2020, "Transformers are RNNs" (no softmax); Sun et al. 2023, "Retentive network" (what is
kept, norm and gate of each head's result); Yang et al. 2023, "Gated linear attention transformers with
hardware-efficient training" (what is kept depends on x); Dao & Gu 2024, "Transformers are SSMs" (one number of each
head); Yang, Kautz, Hatamizadeh 2024, "Gated delta networks" (the delta rule with a_t). Blocks of both kinds in one
model: MiniMax 2025, "MiniMax-01"; Qwen Team 2025, "Qwen3-Next", and Kimi Team 2025, "Kimi Linear" (the delta rule).
"""

from ..autodiff import ops
from ..autodiff.modes import no_grad
from ..autodiff.primitive import lower
from ..backend import xp
from . import init
from .attention import MultiHeadAttention, unit_values
from .decoding import by_position
from .delta_rule import DELTA_RULE
from .layers import Linear
from .loss import log_sigmoid
from .module import Module, Parameter, at_least_1
from .norm import RMSNorm
from .states import LINEAR_ATTENTION
from .windows import DELTA, LINEAR

LONGEST = 8         # log2 of how many positions the head with the longest memory has at first
SHORTEST = 1e-6     # square of a key's root mean square that is brought to unit length


class Decay(Module):
    """The log of what each head keeps from one position to the next: (batch, time, heads) -> (batch, heads, time), all
    below 0, log sigmoid(x + bias).

    bias  (heads,): at first, where x is 0, 1/e of what a head knows is left some 2^(8/heads), …, 2^8 positions later
    """

    def __init__(self, heads, dtype=xp.float32):
        super().__init__()
        heads, = at_least_1("Decay", heads=heads)
        # Of sigmoid(b) = 1 - 1/(1 + e^b) to the e^b-th power 1/e is left.
        lengths = 2.0 ** ((xp.arange(heads) + 1) * (LONGEST / heads))
        self.bias = Parameter(xp.log(lengths).astype(dtype))

    @by_position
    def forward(self, x):
        return ops.transpose(log_sigmoid(x + self.bias), (0, 2, 1))

    def extra_repr(self):
        return f"{self.bias.shape[0]}"


class LinearAttention(MultiHeadAttention):
    """Self-attention by states, causal: (batch, time, dim) -> (batch, time, dim), with MultiHeadAttention's arguments
    of the same names, and its documents, context and scale (None: 1/√(dim/heads)).

        x ── project ── queries, keys, values ── states ── norm ──┬── out
                     ├─ gates ── silu ────────────────────────────┘
                     └─ decay: a number of each head

    The order of positions is told by what is forgotten: it has no rotary positions. Keys and values it has for each
    head. `norm` is of each head's result, with a weight (size,) of all heads'. ValueError unless heads divide dim.
    Sources: above.
    """

    keeps = "state"         # in a KeyValueCache
    recurrence = LINEAR_ATTENTION
    numbers = 1     # of each head and position, besides features: what is kept

    def __init__(self, dim, heads, dtype=xp.float32, std=0.02, bias=True, qk_norm=False):
        Module.__init__(self)
        name = type(self).__name__
        dim, heads = at_least_1(name, dim=dim, heads=heads)
        if dim % heads:
            raise ValueError(f"{name}: {heads} heads must divide dim {dim}")
        self.heads, self.kv_heads, self.size, self.causal, self.rotary = heads, heads, dim // heads, True, None

        def weights(shape, dtype):
            return init.normal(shape, std, dtype)
        self.project = Linear(dim, 4 * dim + self.numbers * heads, bias, dtype, weights)
        if qk_norm:
            self.q_norm, self.k_norm = (RMSNorm(self.size, dtype=dtype) for _ in range(2))
        self.decay, self.norm = Decay(heads, dtype), RMSNorm(self.size, dtype=dtype)
        self.out = Linear(dim, dim, bias, dtype, weights)

    def _parts(self, x):
        """([queries, scaled, keys, values (batch, heads, time, size), logs (batch, heads, time), …], gates (batch,
        time, heads · size)): what the recurrence takes, and what its result is gated by."""
        self._check(x)
        h = self.project(x)     # may bring in positions that x hasn't (parallel/tensor/sequence_parallel.py)
        width = self.heads * self.size
        q, k, v, gates, decays, *more = h.split((*[width] * 4, *[self.heads] * self.numbers), 2)
        q, k, v = (ops.transpose(ops.reshape(part, (*part.shape[:2], self.heads, self.size)), (0, 2, 1, 3))
                   for part in (q, k, v))
        if self.q_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return (q * self._scale(), k, v, self.decay(decays), *more), gates

    def weights(self, x):
        """How much of each position's value is in each position's result, before its norm: (batch, heads, time, time),
        of either sign; to be looked at."""
        self._check_whole("weights")
        with no_grad():
            (q, k, _, *others), _ = self._parts(x)
            return lower(self.recurrence.attention(q, k, unit_values(x, k), *others))

    @by_position
    def forward(self, x, documents=None):
        parts, gates = self._parts(x)
        if self.context is None:
            y = self.recurrence.attention(*parts, documents=documents)
        else:
            y = self.context.states(self.recurrence, parts, documents)
        y = ops.transpose(self.norm(y), (0, 2, 1, 3))
        return self.out(ops.swiglu(gates, ops.reshape(y, gates.shape)))


class DeltaAttention(LinearAttention):
    """LinearAttention whose states follow the delta rule: keys are brought to unit length, and what a head replaces is
    one more number of each position, sigmoid(x). It is Gated DeltaNet's (Sources: above) without the convolutions of
    neighbouring positions; queries need no unit length, for `norm` divides by it."""

    recurrence = DELTA_RULE
    numbers = 2

    def _parts(self, x):
        (q, k, v, logs, rates), gates = super()._parts(x)
        k = ops.rms_norm(k, k.shape[-1:], eps=SHORTEST) * k.shape[-1] ** -0.5
        return (q, k, v, logs, ops.transpose(ops.sigmoid(rates), (0, 2, 1))), gates


OF_STATES = {LINEAR: LinearAttention, DELTA: DeltaAttention}        # by a GPT's window
