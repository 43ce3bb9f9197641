"""Attention to another sequence against plain NumPy, one head and one position at a time; an encoder and a decoder."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.compress import lora
from minitorch_dist.nn.decoding import KeyValueCache, by_position, uncacheable
from minitorch_dist.parallel.context import context_parallel

from .test_transformer import linear, norm, values

random = np.random.default_rng


def look(x, memory, w, heads, kv_heads, seen=None):
    """x (time, dim) and memory (sources, memory_dim) through the weights of a CrossAttention; seen: None, or bool
    (time, sources)."""
    size = x.shape[1] // heads
    q, kv = linear(x, w, "q"), linear(memory, w, "kv")
    out = np.zeros_like(x)
    for head, t in np.ndindex(heads, len(x)):
        group = head // (heads // kv_heads)
        query, keys, found = (a[..., i * size:(i + 1) * size] for a, i in (
            (q[t], head), (kv, group), (kv, kv_heads + group)))
        if "q_norm.weight" in w:
            query, keys = norm(query, w["q_norm.weight"]), norm(keys, w["k_norm.weight"])
        here = np.ones(len(memory), bool) if seen is None else seen[t]
        if here.any():
            p = np.exp(keys[here] @ query / np.sqrt(size))
            out[t, head * size:(head + 1) * size] = p @ found[here] / p.sum()
    return linear(out, w, "out")


def layer(*args, **options):
    mt.manual_seed(1)
    made = nn.CrossAttention(12, *args, dtype=np.float64, std=0.6, **options)
    for name, p in made.named_parameters():
        if len(p.shape) == 1:
            p.data[...] = random(len(name)).uniform(0.5, 1.5, p.shape)
    return made


SIZES = [(4, None, None), (6, 2, 9), (2, 1, 5), (1, 1, 12)]


@pytest.mark.parametrize("heads, kv_heads, memory_dim", SIZES)
@pytest.mark.parametrize("qk_norm", [False, True])
def test_each_position_looks_at_all_of_memory(heads, kv_heads, memory_dim, qk_norm):
    attention = layer(heads, kv_heads, memory_dim, qk_norm=qk_norm)
    x, memory = random(0).standard_normal((3, 7, 12)), random(2).standard_normal((3, 5, memory_dim or 12))
    wanted = [look(*pair, values(attention), heads, kv_heads or heads) for pair in zip(x, memory, strict=True)]
    np.testing.assert_allclose(attention(mt.tensor(x), mt.tensor(memory)).numpy(), wanted, rtol=1e-10, atol=1e-11)
    weights = attention.weights(mt.tensor(x), mt.tensor(memory))
    assert weights.shape == (3, heads, 7, 5)
    np.testing.assert_allclose(weights.sum(-1), 1, rtol=1e-12)


def test_a_mask_says_who_sees_what():
    """A padded memory is what it is without padding; a row of nothing else gives out's bias."""
    attention = layer(4, 2)
    x, memory = random(0).standard_normal((4, 6, 12)), random(2).standard_normal((4, 5, 12))
    lengths = [5, 3, 1, 0]
    there = np.arange(5) < np.array(lengths)[:, None]
    y = attention(mt.tensor(x), mt.tensor(memory), there[:, None, None]).numpy()
    for i, n in enumerate(lengths[:3]):
        alone = attention(mt.tensor(x[i:i + 1]), mt.tensor(memory[i:i + 1, :n])).numpy()
        np.testing.assert_allclose(y[i:i + 1], alone, rtol=1e-10, atol=1e-12)
    np.testing.assert_array_equal(y[3], np.broadcast_to(attention.out.bias.numpy(), (6, 12)))
    some = random(4).random((4, 6, 5)) < 0.5
    wanted = [look(*each[:2], values(attention), 4, 2, each[2]) for each in zip(x, memory, some, strict=True)]
    for mask in (some, np.where(some, 0.0, -np.inf)):
        found = attention(mt.tensor(x), mt.tensor(memory), mask[:, None])
        np.testing.assert_allclose(found.numpy(), wanted, rtol=1e-10, atol=1e-11)


def test_self_attention_takes_a_mask_too():
    """Of bools, beside causal; of floats, whose gradient is a finite difference's."""
    mt.manual_seed(1)
    attention = nn.MultiHeadAttention(8, 2, dtype=np.float64, std=0.6)
    causal = nn.MultiHeadAttention(8, 2, causal=True, dtype=np.float64)
    causal.load_state_dict(attention.state_dict())
    x, tri = mt.tensor(random(0).standard_normal((2, 5, 8))), np.tri(5, dtype=bool)
    np.testing.assert_allclose(attention(x, None, tri).numpy(), causal(x).numpy(), rtol=1e-12, atol=1e-14)
    near = ~np.tri(5, k=-2, dtype=bool)
    np.testing.assert_allclose(causal(x, None, near).numpy(), attention(x, None, near & tri).numpy(), rtol=1e-12,
                               atol=1e-14)
    mt.check_grads(lambda x, bias: attention(x, None, bias), (x.numpy(), random(1).standard_normal((2, 5, 5))))


def block(**options):
    mt.manual_seed(3)
    return nn.TransformerBlock(8, 4, 2, dtype=np.float64, std=0.4, **options)


def test_a_decoders_block_is_its_three_parts():
    made = block(causal=True, cross=True)
    x, memory = (mt.tensor(random(i).standard_normal((2, n, 8))) for i, n in ((0, 5), (1, 7)))
    there = random(2).random((2, 1, 1, 7)) < 0.7
    y = x + made.attention(made.norm1(x))
    w = {name[16:]: p for name, p in values(made).items() if name.startswith("cross_attention.")}
    normed = made.cross_norm(y).numpy()
    y = y.numpy() + [look(*each[:2], w, 4, 2, np.broadcast_to(each[2], (5, 7)))
                     for each in zip(normed, memory.numpy(), there[:, 0], strict=True)]
    y = mt.tensor(y)
    wanted = y + made.mlp(made.norm2(y))
    np.testing.assert_allclose(made(x, None, memory, there).numpy(), wanted.numpy(), rtol=1e-10, atol=1e-12)


def test_a_decoders_block_is_torchs():
    """Its TransformerDecoderLayer, norms first, where torch is installed. There True leaves a key out."""
    torch = pytest.importorskip("torch")
    theirs = torch.nn.TransformerDecoderLayer(
        8, 4, 32, 0.0, lambda x: torch.nn.functional.gelu(x, approximate="tanh"), batch_first=True, norm_first=True,
        dtype=torch.float64)
    mt.manual_seed(3)
    ours = nn.TransformerBlock(8, 4, causal=True, cross=True, dtype=np.float64)
    state = {name: p.detach().numpy() for name, p in theirs.named_parameters()}
    names = {"norm1": "norm1", "cross_norm": "norm2", "norm2": "norm3", "mlp.0": "linear1", "mlp.2": "linear2",
             "attention.out": "self_attn.out_proj", "cross_attention.out": "multihead_attn.out_proj"}
    found = {f"{mine}.{kind}": state[f"{name}.{kind}"] for mine, name in names.items() for kind in ("weight", "bias")}
    for kind in ("weight", "bias"):
        q_and_kv = state[f"multihead_attn.in_proj_{kind}"]
        found |= {f"attention.qkv.{kind}": state[f"self_attn.in_proj_{kind}"],
                  f"cross_attention.q.{kind}": q_and_kv[:8], f"cross_attention.kv.{kind}": q_and_kv[8:]}
    ours.load_state_dict(found)
    x, memory = random(0).standard_normal((2, 5, 8)), random(1).standard_normal((2, 7, 8))
    there = random(2).random((2, 7))
    wanted = theirs(torch.tensor(x), torch.tensor(memory), ~torch.ones(5, 5, dtype=bool).tril(),
                    memory_key_padding_mask=torch.tensor(there < 0.3))
    y = ours(mt.tensor(x), None, mt.tensor(memory), (there >= 0.3)[:, None, None])
    np.testing.assert_allclose(y.numpy(), wanted.detach().numpy(), rtol=1e-10, atol=1e-12)


def test_derivatives_of_a_decoders_block():
    made = block(causal=True, cross=True, qk_norm=True)
    there = np.array([True, True, False, True])
    mt.check_grads(lambda x, memory: made(x, None, memory, there),
                   (random(0).standard_normal((1, 3, 8)), random(1).standard_normal((1, 4, 8))))


class Translator(nn.Module):
    """An encoder of tokens that are padded with 0, and a decoder that looks at what it has made."""

    def __init__(self, vocabulary=11, dim=16, layers=2):
        super().__init__()
        mt.manual_seed(2)
        self.encoder = Encoder(vocabulary, dim, layers)
        self.decoder = Decoder(vocabulary, dim, layers)

    def forward(self, source, target):
        return self.decoder(target, *self.encoder(source))


class Encoder(nn.Module):
    def __init__(self, vocabulary, dim, layers):
        super().__init__()
        self.embed, self.position = (nn.Embedding(n, dim, np.float64, 0.5) for n in (vocabulary, 5))
        self.blocks = nn.Sequential(*(nn.TransformerBlock(dim, 4, dtype=np.float64, std=0.2)
                                      for _ in range(layers)))

    def forward(self, source):
        """(memory, its mask): padding is a document of its own."""
        there = source != 0
        x = self.embed(source) + self.position(slice(source.shape[1]))
        return self.blocks(x, there.astype(int)), there[:, None, None]


class Decoder(nn.Module):
    def __init__(self, vocabulary, dim, layers):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, dim, np.float64, 0.5)
        self.blocks = nn.Sequential(*(
            nn.TransformerBlock(dim, 4, 2, causal=True, rotary=True, dtype=np.float64, std=0.2, cross=True)
            for _ in range(layers)))

    @by_position
    def forward(self, target, memory, mask=None):
        return self.embed.attend(self.blocks(self.embed(target), None, memory, mask))


def pairs(count, seed):
    """Rows of 1 to 5 numbers, padded; the same backwards, between a 1 and a 1."""
    draw = random(seed)
    source, target = np.zeros((count, 5), int), np.zeros((count, 7), int)
    for row, n in enumerate(draw.integers(1, 6, count)):
        source[row, :n] = draw.integers(2, 11, n)
        target[row, :n + 2] = [1, *source[row, :n][::-1], 1]
    return source, target


def trained(model, steps, run=None):
    optimizer = optim.AdamW(model.parameters(), 1e-2)
    for step in range(steps):
        source, target = pairs(64, step)
        optimizer.zero_grad()
        logits = (run or model)(source, target[:, :-1])
        loss = nn.cross_entropy(logits, np.where(target[:, 1:] == 0, -100, target[:, 1:]))
        loss.backward()
        optimizer.step()
    return loss.item()


def write(model, source, cache):
    """The likeliest tokens, one after another."""
    memory, mask = model.encoder(source)
    tokens = np.ones((len(source), 1), int)
    kept = KeyValueCache(model.decoder, 7) if cache else None
    for _ in range(6):
        logits = kept.read(tokens[:, kept.past:], memory, mask) if cache else model.decoder(tokens, memory, mask)
        tokens = np.concatenate([tokens, logits.numpy()[:, -1:].argmax(-1)], 1)
    return tokens


def test_it_learns_to_write_backwards_what_it_reads():
    model = Translator(layers=1)
    assert trained(model, 1) > 1.5 and trained(model, 200) < 0.3
    source, target = pairs(40, 999)
    model.eval()
    with mt.no_grad():
        written = write(model, source, cache=True)
        np.testing.assert_array_equal(written, write(model, source, cache=False))
    ends = target != 0
    assert (written == target)[ends].mean() > 0.9


def test_a_cache_keeps_the_memorys_keys_and_values():
    """Made once, of layers · 2 · batch · kv_heads · sources · size numbers; the logits are those of all at once."""
    model = Translator().decoder.eval()
    memory, tokens = mt.tensor(random(0).standard_normal((3, 5, 16))), random(1).integers(0, 11, (3, 7))
    mask = random(2).random((3, 1, 1, 5)) < 0.8
    with mt.no_grad():
        wanted = model(tokens, memory, mask).numpy()
    cache, made = KeyValueCache(model, 7), []
    for attention in (b.cross_attention for b in model.blocks):
        attention.kv.register_forward_hook(by_position(lambda m, inputs, y: made.append(1)))
    for cuts in ([1] * 7, [4, 2, 1], [7]):
        made.clear()
        cache.past = 0
        found = [cache.read(piece, memory, mask).numpy() for piece in np.split(tokens, np.cumsum(cuts)[:-1], axis=1)]
        np.testing.assert_allclose(np.concatenate(found, 1), wanted, rtol=0, atol=1e-10)
        assert len(made) == 2 and cache.nbytes == 2 * 2 * 3 * 2 * 4 * 8 * (5 + 7)
    cache.past = 3
    with pytest.raises(ValueError, match=r"memory \(3, 4, 16\), where the tokens before have been read with one of 3"):
        cache.read(tokens[:, 3:], memory[:, :4])
    assert uncacheable(Translator()).startswith("the model, of class Translator, is not known")
    assert "later positions" in uncacheable(nn.Sequential(*Translator().encoder.blocks))


def gradients(model, run):
    source, target = pairs(6, 3)
    model.zero_grad()
    run(source, target).sum().backward()
    return {name: p.grad.numpy().copy() for name, p in model.named_parameters()}


def test_compiled_checkpointed_and_adapted():
    model = Translator()
    wanted = gradients(model, model)
    compiled = mt.compile(model)
    found = [gradients(model, compiled)]
    assert not compiled.breaks, compiled.breaks
    for each in (*model.encoder.blocks, *model.decoder.blocks):
        each.forward = mt.checkpoint(type(each).forward.__get__(each))
    found.append(gradients(model, model))
    for grads in found:
        for name, g in wanted.items():
            assert abs(g).max() > 1e-6
            np.testing.assert_allclose(grads[name], g, rtol=1e-9, atol=1e-9, err_msg=name)
    model = Translator()
    lora.add(model, 2)
    assert {"decoder.blocks.0.cross_attention.kv.lora_A", "decoder.blocks.0.cross_attention.q.lora_A"} <= {
        name for name, p in model.named_parameters() if p.requires_grad}


def cut(model):
    return context_parallel(model, mt.comm.world())


@pytest.mark.parametrize("call, words", [
    (lambda: block()(np.ones((1, 2, 8)), None, np.ones((1, 2, 8))), "cross=False, and a memory was given"),
    (lambda: block(cross=True)(np.ones((1, 2, 8))), "cross=True, and no memory was given: a block that is made with"),
    (lambda: layer(4)(np.ones((1, 2, 12)), np.ones((3, 12))), r"CrossAttention: memory \(3, 12\) must be \(batch, sou"),
    (lambda: layer(4)(np.ones((2, 12)), np.ones((1, 3, 12))), r"CrossAttention: x \(2, 12\) must be"),
    (lambda: layer(4)(np.ones((2, 3, 12)), np.ones((1, 3, 12))), "query .2, 4, 3, 3., key .1, 4, 3, 3."),
    (lambda: layer(5), "CrossAttention: 5 heads must divide dim 12"),
    (lambda: layer(4, memory_dim=0), "CrossAttention: memory_dim=0 must be 1 or more"),
    (lambda: cut(block(cross=True)), "cross_attention, of class CrossAttention, looks at another sequence"),
])
def test_what_does_not_fit_is_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()
