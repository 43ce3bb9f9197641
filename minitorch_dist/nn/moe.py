"""Mixture of experts: each token goes through the few of many MLPs that a router chooses for it.

    x (tokens, size) ── router ── route ──────────── gates ─────────────┐
                     └─ dispatch ─── (experts, rows, size) ── experts ── combine ── y (tokens, size)

An expert takes as many tokens as its capacity, and what comes later is dropped: y is 0 there, and the residual
connection around the layer carries the token on. So every shape is known beforehand, and messages between ranks that
hold different experts have a fixed size (parallel/moe.py). Tokens are routed in groups, each with a capacity of its own
and blind to the others: with a sequence as a group the result doesn't depend on how the ranks share sequences. Which
second choices are dropped depends on all first ones, later tokens' too: a model that must not see the future takes
k = 1 with a sequence as a group, or a capacity_factor of experts/k, which drops nothing.

Sources: Shazeer et al. 2017, "Outrageously large neural networks"; Lepikhin et al. 2021, "GShard" (k = 2); Fedus et al.
2022, "Switch Transformers" (k = 1); Zoph et al. 2022, "ST-MoE" (z-loss).
"""

import math
from fractions import Fraction
from typing import NamedTuple

from ..autodiff import ops
from ..autodiff.primitive import lower
from ..backend import module_of, xp, zeros_like
from . import init
from .layers import Linear
from .module import Module, Parameter


class Routing(NamedTuple):
    """Which token goes where. Its text is a table.

    experts, capacity  how many experts there are, and how many tokens of a group each takes
    expert   integers (groups, tokens, k): the experts that each token chose, the likeliest first
    slot     integers, the same shape: its place in that expert's queue
    gates    the same shape: what the expert's answer is multiplied by; they have the gradients
    """

    experts: int
    capacity: int
    expert: object
    slot: object
    gates: object

    @property
    def kept(self):
        """bool, of expert's shape: whether the choice found a place; the others are dropped."""
        return self.slot < self.capacity

    @property
    def places(self):
        """Integers, of expert's shape: the row of each choice in the experts' (experts · groups · capacity, size); one
        behind the last for what is dropped."""
        groups = len(self.expert)
        group = xp.arange(groups, like=self.expert)[:, None, None]
        row = (self.expert * groups + group) * self.capacity + self.slot
        return xp.where(self.kept, row, self.experts * groups * self.capacity)

    @property
    def sources(self):
        """Integers (experts · groups · capacity,): the token in each of the experts' rows; one behind the last where
        there is none."""
        groups, tokens, _ = self.expert.shape
        number = xp.arange(groups * tokens, like=self.expert).reshape(groups, tokens, 1)
        table = module_of(number).full(self.experts * groups * self.capacity + 1, groups * tokens, number.dtype)
        table[self.places] = number
        return table[:-1]

    def __str__(self):
        lines = [f"{self.experts} experts of capacity {self.capacity}, {int(self.kept.sum())} of {self.kept.size} "
                 "choices kept", "group token  expert.slot gate"]
        for (g, s), _ in xp.ndenumerate(xp.empty(self.expert.shape[:2])):
            choices = [f"{int(e):>8}.{int(c):<3} {float(w):.3f}" if ok else f"{int(e):>8} dropped  " for e, c, w, ok in
                       zip(self.expert[g, s], self.slot[g, s], lower(self.gates)[g, s], self.kept[g, s], strict=True)]
            lines.append(f"{g:5} {s:5}{''.join(choices)}".rstrip())
        return "\n".join(lines)


def capacity_of(tokens, experts, k, capacity_factor):
    """How many tokens of a group an expert takes: ⌈k · capacity_factor · tokens / experts⌉, the factor being the
    decimal number that was written (1.1 · 10 is 11); never more than there are tokens."""
    return min(tokens, math.ceil(Fraction(str(capacity_factor)) * k * tokens / experts))


def route(logits, k, capacity):
    """The Routing of (groups, tokens, experts) logits.

    Each token chooses the k experts with the greatest logits; among equal ones the first. All first choices queue in
    the tokens' order, then all second ones, and so on. Gates are the softmax over the chosen ones, so that they add up
    to 1 before anything is dropped; with k = 1 the one gate is its probability among all experts (Switch).
    """
    groups, tokens, experts = logits.shape
    check_choices(k, experts)
    chosen, expert = ops.topk(logits, k)
    gates = ops.softmax(chosen) if k > 1 else ops.take_along_axis(ops.softmax(logits), expert)
    expert = lower(expert)
    queue = expert.transpose(0, 2, 1).reshape(groups, k * tokens, 1)
    ahead = (queue == xp.arange(experts, like=queue)).cumsum(1)
    slot = xp.take_along_axis(ahead, queue, -1).reshape(groups, k, tokens).transpose(0, 2, 1) - 1
    return Routing(experts, capacity, expert, slot, gates)


def check_choices(k, experts):
    """ValueError unless a token can choose k of so many experts."""
    if not 1 <= k <= experts:
        raise ValueError(f"mixture of experts: each token can't choose k={k} of {experts} experts; k is 1 to {experts}")


def dispatch(x, routing):
    """Tokens (groups · tokens, size) as the experts' rows (experts, groups · capacity, size), zeros in empty ones."""
    padded = ops.concatenate([x, zeros_like(lower(x), (1, x.shape[1]))])
    return ops.reshape(padded[routing.sources], (routing.experts, -1, x.shape[1]))


def combine(y, routing):
    """The experts' answers (experts, groups · capacity, size) as those of the tokens (groups · tokens, size): the sum
    of each one's, weighted by its gates; zeros where all its choices were dropped."""
    size = y.shape[-1]
    padded = ops.concatenate([ops.reshape(y, (-1, size)), zeros_like(lower(y), (1, size))])
    answers = padded[routing.places] * ops.reshape(routing.gates, (*routing.gates.shape, 1))
    return ops.reshape(ops.sum(answers, 2), (-1, size))


def balance_loss(logits, routing):
    """E · Σ f·P over the E experts, the mean over groups: 1 when all are used alike. f is the share of tokens whose
    first choice an expert is, P its mean probability; the gradient goes through P. Sources: Lepikhin, Fedus."""
    first = routing.expert[..., :1] == xp.arange(routing.experts, like=routing.expert)
    share = first.mean(1).astype(lower(logits).dtype)
    return routing.experts * ops.mean(ops.sum(ops.mean(ops.softmax(logits), 1) * share, -1))


def z_loss(logits):
    """The mean over tokens of log² Σ exp(logits): it keeps logits small. Source: Zoph et al. 2022, eq. 5."""
    return ops.mean(ops.square(ops.logsumexp(logits, -1)))


class Experts(Module):
    """MLPs of the same shape, each with rows of its own: (experts, rows, size) -> the same.

    up (experts, size, hidden), GELU, down (experts, hidden, size). No biases: an empty row stays 0.
    """

    def __init__(self, experts, size, hidden, dtype=xp.float32, std=0.02):
        super().__init__()
        self.up = Parameter(init.normal((experts, size, hidden), std, dtype))
        self.down = Parameter(init.normal((experts, hidden, size), std, dtype))

    def forward(self, x):
        return ops.gelu(x @ self.up, "tanh") @ self.down

    def extra_repr(self):
        return ", ".join(map(str, self.up.shape))


class MoE(Module):
    """(…, size) -> (y (…, size), auxiliary loss): k of so many experts per token, in the place of one MLP.

        logits, aux = model(tokens)
        loss = (nn.cross_entropy(logits, labels, reduction="sum") + labels.size * aux) / (batch.count * time)

    capacity_factor  how many more places the experts have than balanced choices need; experts/k drops nothing
    group            which tokens are routed together: None, all of a call; "sequence", those along x's last axis but
                     one; or how many, consecutive ones (ValueError where that doesn't divide their number)
    balance, z       weights of balance_loss and z_loss in the auxiliary loss

    The auxiliary loss is a mean over the call's tokens: times their number, and over that of the global batch, it adds
    up over micro-batches and ranks as the loss does. It is a result like any other, so that checkpoint, compile and
    DistributedDataParallel treat it as one.
    """

    def __init__(self, size, hidden, experts, k=2, capacity_factor=1.25, group=None, balance=0.01, z=0.0,
                 dtype=xp.float32, std=0.02):
        super().__init__()
        check_choices(k, experts)
        if not 0 < capacity_factor < math.inf:
            raise ValueError(f"MoE: capacity_factor={capacity_factor} must be a number above 0")
        if group not in (None, "sequence") and not (isinstance(group, int) and group > 0):
            raise ValueError(f"MoE: group={group!r} must be a number of tokens, 'sequence', or None for all of a call")
        self.k, self.capacity_factor, self.group, self.balance, self.z = k, capacity_factor, group, balance, z
        self.router = Linear(size, experts, bias=False, dtype=dtype,
                             weight_init=lambda shape, dtype: init.normal(shape, std, dtype))
        self.experts = Experts(experts, size, hidden, dtype, std)

    def routing(self, x):
        """(logits (groups, tokens, experts), Routing) of (…, size)."""
        count, experts = math.prod(x.shape[:-1]), self.router.weight.shape[0]
        tokens = x.shape[-2] if self.group == "sequence" else self.group or count
        if not count or count % tokens:
            raise ValueError(f"MoE: the {count} tokens of an input {list(x.shape)} can't be routed in groups of "
                             f"{tokens}: cut or pad them to a multiple")
        logits = ops.reshape(self.router(x), (count // tokens, tokens, experts))
        return logits, route(logits, self.k, capacity_of(tokens, experts, self.k, self.capacity_factor))

    def forward(self, x):
        logits, routing = self.routing(x)
        y = combine(self.experts(dispatch(ops.reshape(x, (-1, x.shape[-1])), routing)), routing)
        aux = self.balance * balance_loss(logits, routing) + self.z * z_loss(logits)
        return ops.reshape(y, x.shape), aux

    def extra_repr(self):
        return f"k={self.k}, capacity_factor={self.capacity_factor}" + \
            (f", group={self.group!r}" if self.group else "")
