"""Mixture of experts: each token goes through the few of many MLPs that a router chooses for it.

    x (tokens, size) ── router ── route ──────────── gates ─────────────┐
                     └─ dispatch ─── (experts, rows, size) ── experts ── combine ── y (tokens, size)

An expert takes as many tokens as its capacity, and what comes later is dropped: y is 0 there, and the residual
connection around the layer carries the token on. So every shape is known beforehand, and messages between ranks that
hold different experts have a fixed size (parallel/experts/moe.py). Or there is no capacity: nothing is dropped,
nothing padded, an expert has as many rows as tokens chose it, and products go expert by expert (ops/grouped.py).

Tokens are routed in groups, each with a capacity of its own and blind to the others: with a sequence as a group the
result doesn't depend on how the ranks share sequences. Which second choices are dropped depends on all first ones,
later tokens' too: a model that must not see the future takes k = 1 with a sequence as a group, or no capacity.

Each expert has a score for each token, and the greatest ones are chosen. GShard and Switch take the softmax for it, and
a loss beside that keeps the experts equally busy. DeepSeek-V3 takes a sigmoid of each logit by itself, and puts an
expert's bias onto its scores while tokens choose: who is busier than the mean gets less of it after each step, and no
gradient pulls at the router that has nothing to do with the task (parallel/experts/expert_bias.py).

Sources: Shazeer et al. 2017, "Outrageously large neural networks"; Lepikhin et al. 2021, "GShard" (k = 2); Fedus et al.
2022, "Switch Transformers" (k = 1); Zoph et al. 2022, "ST-MoE" (z-loss); Dai et al. 2024, "DeepSeekMoE" (shared
experts); Gale et al. 2022, "MegaBlocks" (no capacity); Wang et al. 2024, "Auxiliary-loss-free load balancing strategy
for mixture-of-experts" (bias); DeepSeek-AI 2024, "DeepSeek-V3 technical report", 2.1.2.
"""

import math
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import NamedTuple

from ..autodiff import ops
from ..autodiff.autocast import lowered
from ..autodiff.modes import is_recomputing
from ..autodiff.ops.elementwise import wide
from ..autodiff.primitive import lower
from ..backend import assign, is_whole, module_of, number, to_device_of, whole, wholes, xp, zeros_like
from . import init
from .layers import Linear
from .loss import log_sigmoid
from .module import Module, Parameter, at_least_1


class Routing(NamedTuple):
    """Which token goes where. Its text is a table.

    experts, capacity  how many experts there are, and how many tokens of a group each takes (None: all that come)
    expert   integers (groups, tokens, k): the experts that each token chose, the best first
    slot     integers, the same shape: its place in that expert's queue
    gates    the same shape: what the expert's answer is multiplied by; they have the gradients
    """

    experts: int
    capacity: int | None
    expert: object
    slot: object
    gates: object

    @property
    def kept(self):
        """bool, of expert's shape: whether the choice found a place; the others are dropped."""
        return self.slot >= 0 if self.capacity is None else self.slot < self.capacity

    @property
    def load(self):
        """Integers (experts,): how many of the tokens chose each, before any was dropped."""
        return self._loads.sum(0)

    @property
    def _loads(self):
        """Integers (groups, experts): the same of each group."""
        return (self.expert[..., None] == xp.arange(self.experts, like=self.expert)).sum((1, 2))

    @property
    def counts(self):
        """Of each expert the number of its rows, as Python's integers, where there is no capacity; else None: then all
        have equally many. (On a GPU this waits for it.)"""
        return None if self.capacity is not None else tuple(self.load.tolist())

    @property
    def starts(self):
        """Integers (experts, groups): where each group's rows at each expert begin among all experts' rows."""
        groups = len(self.expert)
        if self.capacity is not None:
            queues = xp.arange(self.experts * groups, like=self.expert)
            return self.capacity * queues.reshape(self.experts, groups)
        loads = self._loads.T
        return loads.reshape(-1).cumsum().reshape(loads.shape) - loads

    @property
    def rows(self):
        """How many rows all experts have together, the empty ones too."""
        return self.expert.size if self.capacity is None else self.experts * len(self.expert) * self.capacity

    def visits(self, nodes):
        """Integers (nodes,): how many of the tokens chose an expert on each node, consecutive ones being on the same:
        the rows that go there if a token goes to a node once, as parallel/experts/once.py lets it.
        ValueError where so many nodes can't share the experts equally."""
        check_choices(1, self.experts, (nodes, 1))
        node = self.expert // (self.experts // nodes)
        return (node[..., None] == xp.arange(nodes, like=node)).any(2).sum((0, 1))

    @property
    def places(self):
        """Integers, of expert's shape: the row of each choice in the experts' (rows, size); one behind the last for
        what is dropped."""
        group = xp.arange(len(self.expert), like=self.expert)[:, None, None]
        row = self.starts[self.expert, group] + self.slot
        return row if self.capacity is None else xp.where(self.kept, row, self.rows)

    @property
    def sources(self):
        """Integers (rows,): the token in each of the experts' rows; one behind the last where there is none."""
        groups, tokens, _ = self.expert.shape
        number = xp.arange(groups * tokens, like=self.expert).reshape(groups, tokens, 1)
        dropped = self.capacity is not None         # all of them go into the last row
        table = module_of(number).full(self.rows + dropped, groups * tokens, number.dtype)
        table[self.places] = number
        return table[:-1] if dropped else table

    def __str__(self):
        capacity = "any number of tokens" if self.capacity is None else f"capacity {self.capacity}"
        lines = [f"{self.experts} experts of {capacity}, {int(self.kept.sum())} of {self.kept.size} choices kept",
                 "group token  expert.slot gate"]
        for (g, s), _ in xp.ndenumerate(xp.empty(self.expert.shape[:2])):
            choices = [f"{int(e):>8}.{int(c):<3} {float(w):.3f}" if ok else f"{int(e):>8} dropped  " for e, c, w, ok in
                       zip(self.expert[g, s], self.slot[g, s], lower(self.gates)[g, s], self.kept[g, s], strict=True)]
            lines.append(f"{g:5} {s:5}{''.join(choices)}".rstrip())
        return "\n".join(lines)


def capacity_of(tokens, experts, k, capacity_factor):
    """How many tokens of a group an expert takes: ⌈k · capacity_factor · tokens / experts⌉, the factor being the
    decimal number that was written (1.1 · 10 is 11); never more than there are tokens. None without a factor."""
    if capacity_factor is None:
        return None
    return min(tokens, math.ceil(Fraction(str(capacity_factor)) * k * tokens / experts))


# How logits become scores: (the scores; their logarithms, or what differs from these by a number per token).
SCORES = {"softmax": (ops.softmax, lambda logits: logits), "sigmoid": (ops.sigmoid, log_sigmoid)}


def route(logits, k, capacity, score="softmax", bias=None, nodes=None, scale=1.0):
    """The Routing of (groups, tokens, experts) logits.

    Each token chooses the k experts with the greatest scores; among equal ones the first. All first choices queue in
    the tokens' order, then all second ones, and so on. Gates are the scores of the chosen ones, divided by their sum,
    so that they add up to 1 before anything is dropped; with k = 1 the one gate is the score itself (Switch).

    score  of SCORES: "softmax", the probability among all experts, or "sigmoid", of each logit by itself
    bias   (experts,): added to the scores for the choice, and not for the gates (Wang)
    nodes  (how many nodes the experts lie on, consecutive ones on the same, how many of these a token may go to): those
           whose ⌈k/that⌉ greatest scores have the greatest sum (DeepSeek-V3)
    scale  of all gates, "routed scaling factor"
    """
    groups, tokens, experts = logits.shape
    check_choices(k, experts, nodes, score)
    scores, logs = SCORES[score]
    if bias is None and nodes is None:      # by the logits: different ones may round to the same score
        chosen, expert = ops.topk(logits, k)
    else:
        wanted = scores(lower(logits))
        wanted = wanted if bias is None else wanted + bias
        _, expert = ops.topk(wanted if nodes is None else within_nodes(wanted, k, *nodes), k)
        chosen = ops.take_along_axis(logits, expert)
    gates = ops.softmax(logs(chosen)) if k > 1 else ops.take_along_axis(scores(logits), expert)
    expert = lower(expert)
    queue = expert.transpose(0, 2, 1).reshape(groups, k * tokens, 1)
    ahead = (queue == xp.arange(experts, like=queue)).cumsum(1)
    slot = xp.take_along_axis(ahead, queue, -1).reshape(groups, k, tokens).transpose(0, 2, 1) - 1
    return Routing(experts, capacity, expert, slot, gates if scale == 1 else gates * scale)


def within_nodes(scores, k, nodes, most):
    """The scores (…, experts), -inf on all nodes but the `most` best ones of each token."""
    parts = scores.reshape(*scores.shape[:-1], nodes, scores.shape[-1] // nodes)
    best, _ = ops.topk(parts, -(-k // most))
    _, taken = ops.topk(best.sum(-1), most)
    there = (taken[..., None] == xp.arange(nodes, like=taken)).any(-2)
    return xp.where(there[..., None], parts, -math.inf).reshape(scores.shape)


def check_choices(k, experts, nodes=None, score="softmax"):
    """ValueError unless a token can choose k of so many experts, on so many nodes, by such a score; see route."""
    if score not in SCORES:
        raise ValueError(f"mixture of experts: score={score!r}; use {' or '.join(map(repr, SCORES))}")
    if not 1 <= k <= experts:
        raise ValueError(f"mixture of experts: each token can't choose k={k} of {experts} experts; k is 1 to {experts}")
    if nodes is None:
        return
    if is_whole(nodes) or len(nodes) != 2:
        raise ValueError(f"mixture of experts: nodes={nodes!r} must be two numbers: how many nodes the experts lie on, "
                         "and how many of these a token may go to")
    count, most = nodes
    if count < 1 or experts % count:
        raise ValueError(f"mixture of experts: nodes={nodes}: {experts} experts can't lie on {count} nodes equally")
    if not 1 <= most <= count:
        raise ValueError(f"mixture of experts: nodes={nodes}: a token goes to 1 to {count} nodes, not to {most}")
    if -(-k // most) > experts // count:
        raise ValueError(f"mixture of experts: nodes={nodes}: {most} nodes have {most * experts // count} of the "
                         f"{experts} experts, too few for the k={k} that each token chooses")


def dispatch(x, routing):
    """Tokens (groups · tokens, size) as the experts' rows (experts, groups · capacity, size), zeros in empty ones; or
    without a capacity (rows, size), `counts` of each expert's, one after the other."""
    if routing.capacity is None:
        return x[routing.sources]
    padded = ops.concatenate([x, zeros_like(lower(x), (1, x.shape[1]))])
    return ops.reshape(padded[routing.sources], (routing.experts, len(routing.gates) * routing.capacity, x.shape[1]))


def combine(y, routing):
    """The experts' answers, of the shape that dispatch gives, as those of the tokens (groups · tokens, size): the sum
    of each one's, weighted by its gates; zeros where all its choices were dropped."""
    size = y.shape[-1]
    if routing.capacity is not None:
        rows = ops.reshape(y, (math.prod(y.shape[:-1]), size))
        y = ops.concatenate([rows, zeros_like(lower(y), (1, size))])
    answers = y[routing.places] * ops.reshape(routing.gates, (*routing.gates.shape, 1))
    return ops.reshape(ops.sum(answers, 2), (math.prod(answers.shape[:2]), size))


def mean_of_tokens(x):
    """The mean along the second axis; of arrays as well."""
    return x.mean(1)


def balance_loss(logits, routing, mean=mean_of_tokens):
    """E · Σ f·P over the E experts, the mean over groups: 1 when all are used alike. f is the share of tokens whose
    first choice an expert is, P its mean probability; the gradient goes through P. Of sigmoid scores `logits` are the
    logarithms, and a probability is a score's share of their sum. mean: of (groups, tokens, E) over all tokens of a
    group, also those that other ranks have. Sources: Lepikhin, Fedus."""
    first = routing.expert[..., :1] == xp.arange(routing.experts, like=routing.expert)
    share = lower(mean(first)).astype(lower(logits).dtype)
    return routing.experts * ops.mean(ops.sum(mean(ops.softmax(logits)) * share, -1))


def sequence_balance_loss(logits, k, mean=mean_of_tokens):
    """The mean over sequences of Σ f·P over the E experts, 1 when all are used alike in each.

    logits (sequences, tokens, E), or logarithms of sigmoid scores. f is E/k times the share of tokens for which an
    expert is among the k best, without bias; P the mean of its share of the scores; the gradient goes through P. mean:
    as balance_loss's. Source: DeepSeek-V3, eq. 17-20.
    """
    experts = logits.shape[-1]
    best = lower(ops.topk(lower(logits), k)[1])
    among = (best[..., None] == xp.arange(experts, like=best)).any(2)
    share = (lower(mean(among)) * (experts / k)).astype(lower(logits).dtype)
    return ops.mean(ops.sum(mean(ops.softmax(logits)) * share, -1))


def z_loss(logits):
    """The mean over tokens of log² Σ exp(logits): it keeps logits small. Source: Zoph et al. 2022, eq. 5."""
    return ops.mean(ops.square(ops.logsumexp(logits, -1)))


MLPS = "gelu", "swiglu"


def answers(experts, x, product, of=lambda matrix: matrix):
    """What experts make of rows x: product(x, w) knows whose they are, of(matrix) is what it gets as w."""
    if experts.mlp == "swiglu":
        inner = ops.swiglu(product(x, of(experts.gate)), product(x, of(experts.up)))
    else:
        inner = ops.gelu(product(x, of(experts.up)), "tanh")
    return product(inner, of(experts.down))


class Experts(Module):
    """MLPs of the same shape, each with rows of its own: (experts, rows, size) -> the same; or, with `counts` of each
    one's rows, (all rows, size) -> the same.

    mlp "gelu":    up (experts, size, hidden), GELU, down (experts, hidden, size)
    mlp "swiglu":  down of silu(x @ gate) · (x @ up), gate being of up's shape; as in nn.GPT (Shazeer 2020)
    No biases: an empty row stays 0.
    """

    def __init__(self, experts, size, hidden, dtype=xp.float32, std=0.02, mlp="gelu"):
        super().__init__()
        if mlp not in MLPS:
            raise ValueError(f"MoE: mlp={mlp!r}; use {' or '.join(map(repr, MLPS))}")
        self.mlp = mlp
        if mlp == "swiglu":
            self.gate = Parameter(init.normal((experts, size, hidden), std, dtype))
        self.up = Parameter(init.normal((experts, size, hidden), std, dtype))
        self.down = Parameter(init.normal((experts, hidden, size), std, dtype))

    def forward(self, x, counts=None):
        return answers(self, x, ops.matmul if counts is None else partial(ops.grouped_matmul, counts=counts))

    def extra_repr(self):
        return ", ".join(map(str, self.up.shape)) + (f", {self.mlp}" if self.mlp != "gelu" else "")


class MoE(Module):
    """(…, size) -> (y (…, size), auxiliary loss): k of so many experts per token, in the place of one MLP.

        logits, aux = model(tokens)
        loss = (nn.cross_entropy(logits, labels, reduction="sum") + labels.size * aux) / (batch.count * time)

    capacity_factor  how many more places the experts have than balanced choices need; None: as many as are chosen, so
                     that nothing is dropped
    group            which tokens are routed together: None, all of a call; "sequence", those along x's last axis but
                     one; or how many, consecutive ones (ValueError where that doesn't divide their number)
    balance, z, sequence_balance  weights of balance_loss, z_loss and sequence_balance_loss (of the sequences along x's
                     last axis but one, whatever the group) in the auxiliary loss
    mlp              "gelu" or "swiglu": what an expert is; see Experts
    shared           so many experts beside, which every token goes through: one MLP of shared · hidden features, whose
                     answer is added
    score, route_scale, nodes  how experts are chosen, and what the gates are; see route, and its `scale`
    expert_bias      True: a bias per expert, a buffer of float32, is added to its scores for the choice. The choices of
                     training are counted in `load`, and parallel/experts/expert_bias.py's update(model), called after
                     each optimizer step, moves the biases by them. With it balance=0 is usual

    Of DeepSeek-V3, but for its sizes:

        MoE(size, hidden, experts=256, k=8, capacity_factor=None, balance=0, mlp="swiglu", shared=1, score="sigmoid",
            route_scale=2.5, nodes=(8, 4), expert_bias=True, sequence_balance=1e-4)

    The auxiliary loss is a mean over the call's tokens: times their number, and over that of the global batch, it adds
    up over micro-batches and ranks as the loss does. It is a result like any other, so that checkpoint, compile and
    DistributedDataParallel treat it as one.
    """

    keeps_dtypes = True         # biases of 16 bits would stand still as soon as a step is below their rounding
    positions = None        # who has other positions of the same sequences (parallel/positions.py)

    def __init__(self, size, hidden, experts, k=2, capacity_factor=1.25, group=None, balance=0.01, z=0.0,
                 dtype=xp.float32, std=0.02, mlp="gelu", shared=0, score="softmax", route_scale=1.0, nodes=None,
                 expert_bias=False, sequence_balance=0.0):
        super().__init__()
        size, hidden, experts = at_least_1("MoE", size=size, hidden=hidden, experts=experts)
        k, shared = whole("k", k), whole("shared", shared)
        nodes = nodes if nodes is None or is_whole(nodes) else wholes("nodes", nodes)
        check_choices(k, experts, nodes, score)
        if shared < 0:
            raise ValueError(f"MoE: shared={shared} experts: 0 or more")
        if capacity_factor is not None and not (isinstance(capacity_factor, Real) and 0 < capacity_factor < math.inf):
            raise ValueError(f"MoE: capacity_factor={capacity_factor!r} must be a number above 0, or None: no capacity")
        group = whole("group", group) if is_whole(group) else group
        if group not in (None, "sequence") and not (is_whole(group) and group > 0):
            raise ValueError(f"MoE: group={group!r} must be a number of tokens, 'sequence', or None for all of a call")
        self.k, self.capacity_factor, self.group, self.balance, self.z = k, capacity_factor, group, *map(
            number, (balance, z))
        self.router = Linear(size, experts, bias=False, dtype=dtype,
                             weight_init=lambda shape, dtype: init.normal(shape, std, dtype))
        self.experts = Experts(experts, size, hidden, dtype, std, mlp)
        self.shared = Experts(1, size, shared * hidden, dtype, std, mlp) if shared else None
        self.score, self.nodes = score, nodes
        self.route_scale, self.sequence_balance = number(route_scale), number(sequence_balance)
        self.expert_bias = self.load = None
        if expert_bias:
            self.register_buffer("expert_bias", xp.zeros(experts, xp.float32))
            self.load = xp.zeros(experts, xp.int64)

    @property
    def ends(self):
        """The parameters that make what is added to the residual connection."""
        return [part.down for part in (self.experts, self.shared) if part is not None]

    def routing(self, x):
        """(logits (groups, tokens, experts), Routing) of (…, size)."""
        return self._routing(x, x.shape)

    def _routing(self, rows, shape):
        count, experts = math.prod(shape[:-1]), self.router.weight.shape[0]
        tokens = (shape[-2] if self.group == "sequence" else self.group or count) or 1
        if count % tokens:
            raise ValueError(f"MoE: the {count} tokens of an input {list(shape)} can't be routed in groups of "
                             f"{tokens}: cut or pad them to a multiple")
        told = {"shape": shape} if getattr(self.router, "by_sequence", False) else {}
        logits = ops.reshape(self.router(rows, **told), (count // tokens, tokens, experts))
        capacity = capacity_of(tokens, experts, self.k, self.capacity_factor)
        return logits, route(logits, self.k, capacity, self.score, self.expert_bias, self.nodes, self.route_scale)

    def forward(self, x):
        # The router takes rows, as shared experts do: one array is kept for both, also where x is no such array.
        rows = ops.reshape(x, (math.prod(x.shape[:-1]), x.shape[-1]))
        logits, routing = self._routing(rows, x.shape)
        if self.expert_bias is not None and self.training and not is_recomputing():
            self.load = to_device_of(self.load, self.expert_bias)
            assign(self.load, self.load + routing.load)
        if getattr(self.experts, "once", False):        # divided ones, to whose ranks a row goes once
            k = routing.expert.shape[-1]
            y = self.experts(rows, None, routing.expert.reshape(-1, k), ops.reshape(routing.gates, (-1, k)))
        else:
            # In the dtype of products already: that is how rows are kept, and travel to other ranks' experts.
            y = combine(self.experts(lowered(dispatch(rows, routing)), routing.counts), routing)
        if self.shared is not None:
            y = y + self.shared(ops.reshape(rows, (1, *rows.shape)))[0]
        return ops.reshape(y, x.shape), self._auxiliary(logits, routing, x.shape)

    def _auxiliary(self, logits, routing, shape):
        if not math.prod(shape[:-1]):       # a rank without rows in an epoch's last batch: no mean, but a sum
            return ops.sum(logits)
        logs, mean, positions = SCORES[self.score][1](logits), mean_of_tokens, self.positions
        if positions is not None:
            def mean(x):
                return positions.mean(mean_of_tokens(x))
        # What has no weight needs nothing of other ranks.
        aux = self.balance * balance_loss(logs, routing, mean if self.balance else mean_of_tokens)
        if self.z:      # before it is weighted it is beyond float16's range from logits of 256 on
            z = z_loss(wide(logits))
            aux = aux + ops.astype(self.z * (z if positions is None else positions.of_linear(z)), aux.dtype)
        if self.sequence_balance:
            sequences = ops.reshape(logs, (-1, shape[-2], logs.shape[-1]))
            aux = aux + self.sequence_balance * sequence_balance_loss(sequences, self.k, mean)
        return aux

    def extra_repr(self):
        default = {"group": None, "score": "softmax", "route_scale": 1, "nodes": None}
        return ", ".join([f"k={self.k}, capacity_factor={self.capacity_factor}",
                          *(f"{name}={value!r}" for name in default if (value := getattr(self, name)) != default[name]),
                          *["expert_bias=True"] * (self.expert_bias is not None)])
