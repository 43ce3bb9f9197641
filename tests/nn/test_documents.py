"""Several documents in a row: a model's loss and gradients are the sums over the documents, each run alone."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn
from minitorch_dist.data.packing import PADDING, apart, concatenate, pack
from minitorch_dist.nn import transformer
from minitorch_dist.nn.transformer import FAMILIES

VOCABULARY, LENGTH = 11, 12
OPTIONS = {"gpt": {}, "llama": FAMILIES["llama"] | {"kv_heads": 2, "tied": False, "hidden": 5},
           "hybrid": FAMILIES["llama"] | {"window": ("linear", None)},
           "delta": FAMILIES["llama"] | {"window": ("delta", None)}}


def texts():
    rng = np.random.default_rng(4)
    return [rng.integers(0, VOCABULARY, n) for n in (9, 4, 6, 2, 30, 13, 1, 5)]


def model_of(family, **options):
    mt.manual_seed(3)
    model = nn.GPT(VOCABULARY, LENGTH, layers=2, heads=4, dim=8, dtype=np.float64, **OPTIONS[family], **options)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = np.random.default_rng(60 + i).standard_normal(p.shape) * 0.6
    return model


def trained(model, samples):
    """(sum of the losses, gradients) over samples: (the model's arguments, targets)."""
    model.zero_grad()
    total = 0.0
    for arguments, targets in samples:
        loss = nn.cross_entropy(model(*arguments), targets, reduction="sum")
        loss.backward()
        total += loss.item()
    return [total, *(p.grad.numpy().copy() for p in model.parameters())]


def one_by_one(packed):
    """Each stretch of a document as a sample of its own, without padding."""
    for tokens, documents, targets in zip(packed.inputs, packed.documents, packed.targets, strict=True):
        for number in np.unique(documents[documents != PADDING]):
            here = documents == number
            yield (tokens[None, here],), targets[None, here]


def differ(a, b):
    return max(np.abs(x - y).max() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("way", [pack, concatenate])
@pytest.mark.parametrize("family", OPTIONS)
def test_packed_rows_give_the_sums_over_their_documents(family, way, monkeypatch):
    """And a model that looks into other documents, or counts positions on, does not."""
    model, packed = model_of(family), way(texts(), LENGTH)
    wanted = trained(model, one_by_one(packed))
    assert differ(trained(model, [(apart(packed.rows), packed.targets)]), wanted) < 1e-10
    assert differ(trained(model, [((packed.inputs,), packed.targets)]), wanted) > 0.1
    with monkeypatch.context() as patch:
        patch.setattr(transformer, "places", lambda documents: np.arange(documents.shape[1]) + 0 * documents)
        changed = differ(trained(model, [(apart(packed.rows), packed.targets)]), wanted)
        # Rotary positions matter by their distances alone, which are the same within a document wherever it begins.
        assert changed > 0.1 if family == "gpt" else changed < 1e-10


@pytest.mark.parametrize("family", OPTIONS)
def test_compiled_and_checkpointed_it_is_the_same(family):
    packed = pack(texts(), LENGTH)
    samples = [(apart(packed.rows), packed.targets)]
    wanted = trained(model_of(family), samples)
    model = model_of(family)
    compiled = mt.compile(model)
    assert differ(trained(compiled, samples), wanted) < 1e-10
    assert not compiled.breaks, compiled.breaks
    again = model_of(family)
    for block in again.blocks:
        block.forward = mt.checkpoint(type(block).forward.__get__(block))
    assert differ(trained(again, samples), wanted) == 0


@pytest.mark.parametrize("k", [1, 2])
def test_a_mixture_that_drops_nothing_gives_the_same_sums(k):
    """Whatever stands in the padding; with too little room, documents of a row take it from each other."""
    packed = pack(texts(), LENGTH)
    assert packed.padding > 0

    def trained_with(capacity_factor, samples):
        model = model_of("gpt", moe={"experts": 4, "k": k, "capacity_factor": capacity_factor})
        total = 0.0
        for arguments, targets in samples:
            loss = nn.cross_entropy(model(*arguments)[0], targets, reduction="sum")
            loss.backward()
            total += loss.item()
        return [total, *(p.grad.numpy().copy() for p in model.parameters())]
    tokens, documents = apart(packed.rows)
    tokens = np.where(documents == PADDING, 7, tokens)
    for capacity_factor, same in ((4 / k, True), (1.0, False)):
        wanted = trained_with(capacity_factor, one_by_one(packed))
        distance = differ(trained_with(capacity_factor, [((tokens, documents), packed.targets)]), wanted)
        assert distance < 1e-10 if same else distance > 0.1


def test_a_block_by_itself_takes_documents_as_arrays_and_tensors():
    mt.manual_seed(1)
    block = nn.TransformerBlock(8, 2, causal=True, rotary=True, dtype=np.float64)
    x = np.random.default_rng(0).standard_normal((2, 6, 8))
    documents = np.array([[0, 0, 1, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    alone = [block(x[1:, part]).numpy()[0] for part in (slice(1), slice(1, 6))]
    for given in (documents, mt.Tensor(documents), documents.astype(np.uint8)):
        np.testing.assert_allclose(block(x, given).numpy()[1], np.concatenate(alone), rtol=0, atol=1e-12)


def test_positions_begin_anew_where_the_number_changes():
    documents = np.array([[0, 0, 0, 1, 1, 2, -1, -1], [7, 5, 5, 5, 7, 7, 7, 7]])
    assert transformer.places(documents).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [0, 0, 1, 2, 0, 1, 2, 3]]
    long = np.repeat(np.arange(40), np.random.default_rng(0).integers(1, 60, 40))[None]
    counted = np.concatenate([np.arange((long == n).sum()) for n in range(40)])
    assert (transformer.places(long) == counted).all()
    assert transformer.places(documents[:, :1]).tolist() == [[0], [0]]
    assert transformer.places(documents.astype(np.int32)[:, :0]).shape == (2, 0)


def by_hand(q, k, v, documents, causal):
    """Query by query in NumPy."""
    y = np.zeros((*q.shape[:3], v.shape[3]))
    for b, h, t in np.ndindex(q.shape[:3]):
        seen = documents[b] == documents[b, t]
        seen[t + 1:] &= not causal
        e = np.exp(k[b, h // 2, seen] @ q[b, h, t] / np.sqrt(q.shape[3]))
        y[b, h, t] = e @ v[b, h // 2, seen] / e.sum()
    return y


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
def test_attention_sees_its_own_numbers_wherever_they_stand(causal, dtype):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((2, h, 7, s)) for h, s in ((4, 3), (2, 3), (2, 5)))
    documents = np.array([[0, 0, 1, 1, 1, 2, 2], [3, 9, 3, 3, 9, 1, 3]], dtype)
    wanted = by_hand(q, k, v, documents, causal)
    y = mt.scaled_dot_product_attention(q, k, v, is_causal=causal, documents=documents)
    np.testing.assert_allclose(y, wanted, rtol=0, atol=1e-12)
    mask = rng.random((2, 1, 7, 7)) < 0.5
    both = mask & (documents[:, None, :, None] == documents[:, None, None])
    np.testing.assert_array_equal(
        mt.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, documents=documents),
        mt.scaled_dot_product_attention(q, k, v, both, is_causal=causal))


def test_what_does_not_fit_is_refused():
    x = np.ones((2, 2, 5, 4))
    with pytest.raises(TypeError, match="documents of dtype float64; they must be integers"):
        mt.scaled_dot_product_attention(x, x, x, documents=np.ones((2, 5)))
    with pytest.raises(ValueError, match=r"documents \(2, 4\) must be \(batch, time\), here \(2, 5\)"):
        mt.scaled_dot_product_attention(x, x, x, documents=np.ones((2, 4), int))
    with pytest.raises(ValueError, match="documents of 5 positions, and 3 sources"):
        mt.scaled_dot_product_attention(x, x[:, :, :3], x[:, :, :3], documents=np.ones((2, 5), int))
    model, packed = model_of("gpt"), pack(texts(), LENGTH)
    with pytest.raises(ValueError, match=r"tokens \(\d, 12, 2\) must be \(batch, time\); of packed rows"):
        model(packed.rows)
    with pytest.raises(ValueError, match=r"documents \(1, 12\)"):
        model(packed.inputs, packed.documents[:1])
    with pytest.raises(ValueError, match=r"rows of shape \(\d, 12\); packed ones are \(…, time, 2\)"):
        apart(packed.inputs)
    stage = nn.Sequential(nn.Embedding(VOCABULARY, 8), nn.TransformerBlock(8, 2))       # a Pipeline's
    with pytest.raises(ValueError, match=r"x \(\d, 12, 2, 8\) must be .*packed=True"):
        stage(np.abs(packed.rows))
