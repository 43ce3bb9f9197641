"""Models as a plan knows them: a number of parameters, or nn.GPT's sizes.

FLOPs are those of matrix products, two per multiply-add, as nn.summary counts them; a training step has three times
those of its forward pass. Sources: Kaplan et al. 2020 (6·N·D); Narayanan et al. 2021 (with attention and the output
layer). Of experts it is the rows that are multiplied, empty ones too.
"""

from dataclasses import dataclass
from fractions import Fraction
from math import inf, prod

from ..autodiff.ops.attention import ALL, band_of, part_of_band, pieces
from ..nn.latent import sizes_of
from ..nn.linear_attention import OF_STATES
from ..nn.moe import capacity_of
from ..nn.transformer import FAMILIES
from ..nn.windows import STATES, as_text, blocks_of, window_of, windows_of
from . import states

LATENT = ("nope_size", "rope_size", "value_size", "kv_rank", "q_rank")      # sizes of multi-head latent attention


@dataclass(frozen=True)
class Parameters:
    """A model of which only the number of parameters is known: it can be cut by ZeRO, and by nothing else."""

    count: float

    layers = None
    experts = 0

    def step_flops(self, tokens, checkpointing=False, adapters=None):
        """6·N·D; with checkpointing forward runs twice: 8·N·D. adapters: so many parameters are trained beside it, and
        a frozen one has one product less: 4·N·D."""
        again = 2 if checkpointing else 0
        if adapters is None:
            return (6 + again) * self.count * tokens
        return ((4 + again) * self.count + (6 + again) * adapters) * tokens

    def __str__(self):
        return f"{self.count:,.0f} parameters"


@dataclass(frozen=True)
class GPT:
    """nn.GPT of these sizes.

    tied      the output layer is the embedding's weight
    dropout   whether there is any: its masks are kept for backward
    kv_heads  key and value heads (None: as many as heads)
    hidden    features within the feed-forward (None: 4 · width, as in this library)
    family    "gpt": learned positions, layer norms, biases, GELU; or "llama": rotary positions, RMS norms, no biases,
              SwiGLU, whose gate and up are one matrix, as queries, keys and values are; or "deepseek": a llama with
              multi-head latent attention, whose sizes are nope_size … q_rank (nn/latent.py)
    experts   of every block's mixture, in the place of the feed-forward (0: none); top_k for each token
    capacity_factor  of these, as nn.MoE's; None: no capacity, and then experts count as if all were used alike
    group     which tokens are routed together, as nn.MoE's: None, those of a micro-batch, or "sequence"
    window, qk_norm  nn.GPT's: positions that one sees at most, "linear" or "delta", in every block or by block; norms
              of queries and keys
    attention_dropout  whether attention's weights are dropped, as in the paper, which has it wherever there is dropout;
              this library then makes all scores, whatever the window, and keeps 16 bytes for each
    sinks     whether each head has one, as nn.GPT's: all scores are made then, too
    gated     whether what heads find is gated, as nn.GPT's, by as many features more
    predict   tokens that training predicts from each position: all but the first by a depth of nn.MultiTokenPrediction
    shared_experts  beside them, which every token goes through: one MLP of so many times the features, whole on each
                     rank
    """

    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int
    tied: bool = True
    dropout: bool = True
    kv_heads: int | None = None
    hidden: int | None = None
    family: str = "gpt"
    experts: int = 0
    top_k: int = 2
    capacity_factor: float | None = 1.25
    group: str | None = None
    shared_experts: int = 0
    nope_size: int | None = None
    rope_size: int | None = None
    value_size: int | None = None
    kv_rank: int | None = None
    q_rank: int | None = None
    predict: int = 1
    window: object = None
    qk_norm: bool = False
    attention_dropout: bool = False
    sinks: bool = False
    gated: bool = False

    def __post_init__(self):
        for name in ("layers", "width", "heads", "vocabulary", "context", "kv_heads", "hidden", "predict"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if lost := [window for window in self._windows if isinstance(window, int) and window < 1]:
            raise ValueError(f"window is {lost[0]}; it must be at least 1")
        if self.family not in FAMILIES:
            raise ValueError(f"family {self.family!r}: take one of {', '.join(FAMILIES)}")
        self._check_attention()
        if self.experts < 0 or self.experts and not 1 <= self.top_k <= self.experts:
            raise ValueError(f"{self.top_k} of {self.experts} experts per token: --experts is 1 or more, --top-k no "
                             "more than these")
        if self.shared_experts < 0 or self.shared_experts and not self.experts:
            raise ValueError(f"{self.shared_experts} shared experts beside {self.experts} others: 0 or more, beside "
                             "--experts")
        if self.group not in (None, "sequence"):
            raise ValueError(f"experts of group={self.group!r}: --group sequence, or none for all of a micro-batch")
        if self.capacity_factor is not None and not 0 < self.capacity_factor < inf:
            raise ValueError(f"capacity factor {self.capacity_factor}: must be a number above 0")

    def _check_attention(self):
        others = any(isinstance(window, str) for window in windows_of(self.window))
        if self.attention_dropout and others:
            raise ValueError(f"window={as_text(windows_of(self.window))} with attention_dropout: states have no "
                             "weights to be dropped, and of chosen blocks none are: leave --attention-dropout out")
        if self.sinks and (self.latent is not None or others):
            raise ValueError(f"sinks of a {self.family}, window={as_text(windows_of(self.window))}: they are of "
                             "attention with scores of all keys, not of latents, states or chosen blocks: leave "
                             "--sinks out")
        if self.latent is not None:
            if self.gated:
                raise ValueError(f"gated={self.gated} of a {self.family}: multi-head latent attention has no gates: "
                                 "leave --gated out")
            if any(self._windows):
                raise ValueError(f"window={as_text(windows_of(self.window))} of a {self.family}: multi-head latent "
                                 "attention has none: leave --window out")
            if self.qk_norm:
                raise ValueError(f"qk_norm={self.qk_norm} of a {self.family}: latents have norms of their own: leave "
                                 "--qk-norm out")
            if self.kv_heads is not None:
                raise ValueError(f"kv_heads={self.kv_heads} of a {self.family}: latents have keys for each head: leave "
                                 "--kv-heads out")
            return
        if given := [f"--{name.replace('_', '-')}" for name in LATENT if getattr(self, name) is not None]:
            raise ValueError(f"{', '.join(given)} of a {self.family}, which has no multi-head latent attention: take "
                             "--family deepseek")
        if self.width % self.heads:
            raise ValueError(f"{self.heads} heads must divide the width {self.width}: take another --heads or --width")
        if self.heads % (self.kv_heads or self.heads):
            raise ValueError(f"{self.kv_heads} kv_heads must divide the {self.heads} heads: take another --kv-heads")
        if self.family == "llama" and self.width // self.heads % 2:
            raise ValueError(f"rotary positions turn pairs of features, but of {self.heads} heads of width "
                             f"{self.width} each has {self.width // self.heads}: take another --heads or --width")

    def window_of(self, block):
        """Positions that one sees at most in a block, of this number; None: all; "4x64": of 4 blocks of 64; "linear",
        "delta": all, by states."""
        return window_of(self.window, block)

    @property
    def _windows(self):
        """Of the blocks with keys."""
        return [window for window in windows_of(self.window) if window not in STATES]

    @property
    def latent(self):
        """The Sizes of multi-head latent attention, or None."""
        if "latent" not in FAMILIES[self.family]:
            return None
        return sizes_of(self.width, self.heads, *(getattr(self, name) for name in LATENT))

    @property
    def features(self):
        """{what attention is made of: features of all heads together}."""
        if (sizes := self.latent) is not None:
            keys, values = (self.heads * size for size in (sizes.nope_size + sizes.rope_size, sizes.value_size))
            return {"query": keys, "key": keys, "value": values, "result": values}
        keys = self.width // self.heads * (self.kv_heads or self.heads)
        return {"query": self.width, "key": keys, "value": keys, "result": self.width}

    @property
    def inner(self):
        """Features within the feed-forward, or within each expert."""
        return self.hidden or 4 * self.width

    @property
    def count(self):
        """Parameters of the whole model."""
        return sum(prod(shape) for _, shape in self.whole)

    @property
    def whole(self):
        """[(name, shape)] of all parameters, in the order of the model; names are those within a block."""
        blocks = [pair for i in range(self.layers) for pair in self.block(1, window=self.window_of(i))]
        ahead = [pair for k in range(1, self.predict) for pair in self.further(k, 1)]
        return self.embedding(1) + blocks + self.output(1) + ahead

    @property
    def active(self):
        """Parameters that a token meets: all but the experts that it didn't choose."""
        chosen = Fraction(self.experts - self.top_k, self.experts) if self.experts else 0
        of_experts = sum(prod(shape) for _, shape in self._experts("experts", self.experts, self.inner))
        return int(self.count - chosen * (self.layers + self.predict - 1) * of_experts)

    def embedding(self, tp):
        """[(name, shape)] of what stands before the blocks, on the tensor-parallel rank that has most of it."""
        found = [("embed.weight", (-(-self.vocabulary // tp), self.width))]
        return found + ([("position.weight", (self.context, self.width))] if self.family == "gpt" else [])

    def block(self, tp, ep=1, window=None):
        """[(name, shape)] of a block with such a window: heads and the feed-forward's inner features are divided by tp
        (parallel/tensor/tensor_parallel.py), experts by ep (parallel/experts/moe.py)."""
        return [*self._norm("norm1"), *self._attention(tp, window), *self._norm("norm2"),
                *(self.mixture(ep) if self.experts else self._feed_forward(self.inner // tp))]

    def _attention(self, tp, window):
        h, count, sizes = self.width, self.features, self.latent
        norms = [(f"attention.{name}.weight", (h // self.heads,)) for name in ("q_norm", "k_norm")[:2 * self.qk_norm]]
        if window in STATES:
            projected = 4 * h + OF_STATES[window].numbers * self.heads
            return [*self._linear("attention.project", (projected // tp, h)), *norms,
                    ("attention.decay.bias", (self.heads // tp,)), ("attention.norm.weight", (h // self.heads,)),
                    *self._linear("attention.out", (h, h // tp))]
        out = [*self._linear("attention.out", (h, count["result"] // tp)),
               *([("attention.sinks.score", (self.heads // tp,))] if self.sinks else [])]
        if sizes is None:
            made = count["query"] + count["key"] + count["value"] + count["result"] * self.gated
            return [*self._linear("attention.qkv", (made // tp, h)), *norms, *out]
        of_queries = [("attention.q_norm.weight", (sizes.q_rank,))] if sizes.q_rank else []
        ups = self.heads // tp * (sizes.nope_size + sizes.value_size)
        return [("attention.down.weight", (sizes.down, h)), *of_queries,
                ("attention.q.weight", (count["query"] // tp, sizes.q_rank or h)),
                ("attention.kv_norm.weight", (sizes.kv_rank,)), ("attention.kv.weight", (ups, sizes.kv_rank)), *out]

    @property
    def gates(self):
        """How many times the inner features the first matrix makes: with SwiGLU a gate as well."""
        return 1 if self.family == "gpt" else 2

    def _feed_forward(self, inner):
        h = self.width
        return self._linear("mlp.0", (self.gates * inner, h)) + self._linear("mlp.2", (h, inner))

    def mixture(self, ep):
        """[(name, shape)] of a block's router, of its experts, which so many ranks divide, and of shared ones."""
        shared = self._experts("shared", 1, self.shared_experts * self.inner) if self.shared_experts else []
        return [("mlp.router.weight", (self.experts, self.width)),
                *self._experts("experts", self.experts // ep, self.inner), *shared]

    def _experts(self, name, count, inner):
        gate = [(f"mlp.{name}.gate", (count, self.width, inner))] if self.gates > 1 else []
        return [*gate, (f"mlp.{name}.up", (count, self.width, inner)), (f"mlp.{name}.down", (count, inner, self.width))]

    def _norm(self, name):
        return [(f"{name}.{kind}", (self.width,)) for kind in ("weight", "bias")[:2 if self.family == "gpt" else 1]]

    def _linear(self, name, shape):
        bias = [(f"{name}.bias", shape[:1])] if self.family == "gpt" else []
        return [(f"{name}.weight", shape), *bias]

    def output(self, tp, copied=False):
        """[(name, shape)] of what stands behind the blocks; copied: a tied embedding's copy, too."""
        return self._norm("norm") + ([] if self.tied and not copied else [
            ("head.weight", (-(-self.vocabulary // tp), self.width))])

    def further(self, k, tp, ep=1):
        """[(name, shape)] of what the k-th token more takes: a block, and what puts its input together."""
        norms = [it for name in ("norm_hidden", "norm_token", "norm") for it in self._norm(name)]
        block = self.block(tp, ep, self.window_of(self.layers + k - 1))
        return [*norms, ("join.weight", (self.width, 2 * self.width)), *block]

    def rows(self, tokens, time):
        """Rows of all experts together, of so many tokens in one call, in sequences of `time`: the empty ones too."""
        if self.capacity_factor is None:
            return tokens * self.top_k
        together = tokens if self.group is None else time
        return tokens // together * self.experts * capacity_of(together, self.experts, self.top_k, self.capacity_factor)

    def takes(self, window=None):
        """{product of a block with such a window: the products that its inputs are made of}, in their order, None for
        the block's own input. Attention's own take two: queries and keys; what is made of them, and values."""
        keys = "attention.qkv" if self.latent is None else "attention.kv"
        more = {"attention.scores": (keys, keys), "attention.values": ("attention.scores", keys)}
        if window in STATES:
            more = states.takes(window)
        elif self.latent is not None:
            more |= {"attention.q": ("attention.down" if self.latent.q_rank else None,),
                     "attention.kv": ("attention.down",), "attention.scores": ("attention.q", keys)}
        names = list(self.block_flops(1, 1, window))
        return {name: more.get(name, (before,)) for before, name in zip([None, *names], names, strict=False)}

    def scores(self, time, window, end=None):
        """(how many scores a head makes of so many positions of a sequence, how many it keeps of each position); end:
        where they end, if others are before them."""
        end = time if end is None else end
        if count := self.chosen(end, window):
            seen = count * blocks_of(window)[1]
            return time * seen, seen
        band = band_of(True, None if isinstance(window, str) else window)
        here, there = slice(end - time, end), slice(0 if band[0] is None else max(0, end - time - band[0]), end)
        sources = there.stop - there.start
        cut = [] if self.attention_dropout or self.sinks else pieces(
            time, sources, part_of_band(band, here, there) or ALL)
        widths = [(rows.stop - rows.start, columns.stop - columns.start) for rows, columns, _ in cut]
        widths = widths or [(time, sources)]
        return sum(map(prod, widths)), max(width for _, width in widths)

    @staticmethod
    def chosen(time, window):
        """How many blocks a position chooses of a sequence of so many; 0: there are no more than it would, or its
        window is another one."""
        count, size = blocks_of(window) or (0, 1)
        return count if count < -(-time // size) else 0

    def block_flops(self, tokens, time, window=None, cp=1, end=None):
        """{product: FLOPs} of a block with such a window, forward, of tokens in one call, which experts' empty rows
        depend on; of sequences of `time` positions, of which each of cp ranks has a part; end: as scores takes it.
        "attention.scores": of queries with keys; "attention.values": of what is made of them with values."""
        h, found = self.width, {}
        for name, shape in self._attention(1, window):
            if name == "attention.out.weight":
                found |= states.flops(self, window, tokens, time, cp) if window in STATES else \
                    self._scores_flops(tokens, time, window, end)
            if len(shape) == 2:
                found[name.removesuffix(".weight")] = tokens * 2 * prod(shape)
        if self.experts:
            each = 2 * (self.gates + 1) * h * self.inner
            found |= {"mlp.router": tokens * 2 * self.experts * h, "mlp.experts": self.rows(tokens, time) * each}
            return found | ({"mlp.shared": tokens * self.shared_experts * each} if self.shared_experts else {})
        each = tokens * 2 * h * self.inner
        return found | {"mlp.0": self.gates * each, "mlp.2": each}

    def _scores_flops(self, tokens, time, window, end):
        end = time if end is None else end
        scores = tokens * self.scores(time, window, end)[0] // time
        choice = tokens * (end // blocks_of(window)[1]) if self.chosen(end, window) else 0
        return {"attention.scores": 2 * (scores + choice) * self.features["query"],
                "attention.values": 2 * scores * self.features["result"]}

    @property
    def join_flops(self):
        """Of what puts a further depth's input together, forward, per token; the same on tensor-parallel ranks."""
        return 4 * self.width ** 2

    def output_flops(self, tokens):
        """Of the output layer, forward."""
        return tokens * 2 * self.width * self.vocabulary

    def __str__(self):
        what = {"gpt": "GPT", "llama": "Llama", "deepseek": "DeepSeek"}[self.family]
        keys = f" ({self.kv_heads} of keys)" if self.kv_heads else ""
        sizes = [f"width {self.width:,}", f"{self.heads} heads{keys}",
                 *([f"windows of {as_text(windows)}"] if any(windows := windows_of(self.window)) else []),
                 *(["norms of queries and keys"] if self.qk_norm else []),
                 *(["weights dropped"] if self.attention_dropout else []), *(["sinks"] if self.sinks else []),
                 *(["gated"] if self.gated else []),
                 *([] if self.latent is None else [f"latents of {self.latent.kv_rank}"]),
                 *([f"hidden {self.hidden:,}"] if self.hidden else []), f"vocabulary {self.vocabulary:,}",
                 *([f"{self.experts} experts, {self.top_k} per token"] if self.experts else []),
                 *([f"routed by {self.group}"] if self.experts and self.group else []),
                 *(["without a capacity"] if self.experts and self.capacity_factor is None else []),
                 *([f"{self.shared_experts} shared"] if self.shared_experts else []),
                 *([] if self.tied else ["untied"]),
                 *([f"predicting {self.predict} tokens"] if self.predict > 1 else [])]
        active = f", {self.active:,} of them active" if self.experts else ""
        return f"{what} of {self.layers} layers, {', '.join(sizes)}: {self.count:,} parameters{active}"
