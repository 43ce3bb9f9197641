"""Several tokens from each position, against the paper's equations position by position in plain NumPy."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.data.packing import apart, pack
from minitorch_dist.nn.decoding import by_position
from minitorch_dist.nn.multi_token import speculate, targets_at
from minitorch_dist.nn.transformer import FAMILIES

from .test_documents import texts
from .test_transformer import block, norm, values

random = np.random.default_rng
LLAMA = FAMILIES["llama"] | {"tied": False, "hidden": 5}


def model_of(depth, options=LLAMA, layers=2):
    mt.manual_seed(3)
    model = nn.MultiTokenPrediction(nn.GPT(11, 12, layers, 2, 8, dtype=np.float64, **options), depth)
    with mt.no_grad():
        for i, p in enumerate(model.parameters()):
            p[...] = random(60 + i).standard_normal(p.shape) * 0.6
    return model


def below(w, name):
    return {k[len(name) + 1:]: v for k, v in w.items() if k.startswith(name + ".")}


def of_one_document(w, tokens, targets, depth, weight, z_loss=0.0):
    """Equations 21 to 25 of DeepSeek-V3: the sum of losses over one document; with a z-loss, at each depth."""
    table, head = w["model.embed.weight"], w["model.head.weight"]

    def loss(x, scale, labels):
        z = norm(x, scale) @ head.T
        return sum(np.log(np.exp(row).sum()) - row[label] + z_loss * np.log(np.exp(row).sum()) ** 2
                   for row, label in zip(z, labels, strict=True))
    h = table[tokens]
    for i in range(2):
        h = block(h, below(w, f"model.blocks.{i}"), 2, 2, True, True)
    total = loss(h, w["model.norm.weight"], targets)
    for k in range(1, min(depth, len(tokens) - 1) + 1):
        own, joined = below(w, f"further.{k - 1}"), []
        for i in range(len(tokens) - k):
            both = np.concatenate([norm(h[i], own["norm_hidden.weight"]),
                                   norm(table[tokens[i + k]], own["norm_token.weight"])])
            joined.append(own["join.weight"] @ both)
        h = block(np.array(joined), below(own, "block"), 2, 2, True, True)
        total += weight / depth * loss(h, own["norm.weight"], targets[k:])
    return total


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_the_loss_is_the_papers(depth):
    model, tokens = model_of(depth), random(0).integers(0, 11, (3, 8))
    logits = model(tokens[:, :-1])
    assert [x.shape for x in logits] == [(3, 7 - k, 11) for k in range(1 + depth)]
    found = nn.multi_token_loss(logits, tokens[:, 1:], weight=0.7).item()
    wanted = sum(of_one_document(values(model), row[:-1], row[1:], depth, 0.7) for row in tokens)
    assert found == pytest.approx(wanted, rel=1e-12)
    found = nn.multi_token_loss(logits, tokens[:, 1:], weight=0.7, z_loss=0.2).item()
    wanted_z = sum(of_one_document(values(model), row[:-1], row[1:], depth, 0.7, 0.2) for row in tokens)
    assert found == pytest.approx(wanted_z, rel=1e-12)
    losses = model(tokens[:, :-1], targets=tokens[:, 1:])
    with pytest.raises(ValueError, match="z_loss=0.2 of losses that the model has made"):
        nn.multi_token_loss(losses, z_loss=0.2)
    assert [x.shape for x in losses] == [(3, 7 - k) for k in range(1 + depth)]
    assert nn.multi_token_loss(losses, weight=0.7).item() == pytest.approx(wanted, rel=1e-12)
    assert model.eval()(tokens[:, :-1], targets=tokens[:, 1:]).shape == (3, 7)


def test_of_packed_rows_it_is_the_sum_over_their_documents():
    """The last positions of a document are told nothing of the next one, and learn nothing from it."""
    model, packed = model_of(2), pack(texts(), 12)
    tokens, documents = apart(packed.rows)
    stretches = [(r, documents[r] == d) for r in range(len(tokens)) for d in np.unique(documents[r]) if d >= 0]
    wanted = sum(of_one_document(values(model), tokens[at], packed.targets[at], 2, 0.3) for at in stretches)
    logits = model(tokens, documents)
    assert nn.multi_token_loss(logits, packed.targets, documents).item() == pytest.approx(wanted, rel=1e-12)
    losses = model(tokens, documents, packed.targets)
    assert nn.multi_token_loss(losses).item() == pytest.approx(wanted, rel=1e-12)
    assert abs(nn.multi_token_loss(logits, packed.targets).item() - wanted) > 0.1
    again = np.array([[0, 0, 0, 1, 1, 0, 0]])        # a number's second stretch is another document
    for dtype in (int, np.uint8):
        assert targets_at(2, np.arange(7, dtype=dtype)[None], again).tolist() == [[2, -100, -100, -100, -100]]


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize("depth, options", [(2, {}), (1, FAMILIES["deepseek"] | {"hidden": 5, "moe": {
    "experts": 3, "k": 3, "group": "sequence"}})], ids=["gpt", "latents and experts"])
def test_gradients_along_random_directions(depth, options, tiled):
    """Of every parameter, beside central differences; checkpointed the same."""
    model, tokens = model_of(depth, options, layers=1), random(0).integers(0, 11, (2, 7))
    documents = np.array([[0] * 4 + [1] * 2, [0] * 6])

    def loss():
        found, aux = model(tokens[:, :-1], documents, tokens[:, 1:] if tiled else None), 0.0
        if "moe" in options:
            found, aux = found
        return (nn.multi_token_loss(found) if tiled else nn.multi_token_loss(found, tokens[:, 1:], documents)) + aux
    loss().backward()
    grads = [p.grad.numpy().copy() for p in model.parameters()]
    for i, (name, p) in enumerate(model.named_parameters()):
        way, start, sides = random(90 + i).standard_normal(p.shape), p.numpy().copy(), []
        for h in (1e-5, -1e-5):
            with mt.no_grad():
                p[...] = start + h * way
                sides.append(loss().item())
                p[...] = start
        slope = (grads[i] * way).sum()
        assert abs(slope) > 1e-4 and slope == pytest.approx((sides[0] - sides[1]) / 2e-5, rel=2e-5, abs=1e-7), name
    model.zero_grad()
    for further in model.further:
        further.block.forward = mt.checkpoint(type(further.block).forward.__get__(further.block))
    loss().backward()
    for grad, p in zip(grads, model.parameters(), strict=True):
        np.testing.assert_allclose(p.grad.numpy(), grad, rtol=1e-12, atol=1e-12)


def test_auxiliary_losses_are_those_of_all_mixtures():
    model, found = model_of(2, FAMILIES["deepseek"] | {"moe": {"experts": 3, "k": 1}}), []
    for m in model.modules():
        if isinstance(m, nn.MoE):
            m.register_forward_hook(lambda m, inputs, output: found.append(output[1].item()))
    aux = model(random(0).integers(0, 11, (2, 6)))[1].item()
    assert len(found) == 4 and min(found) > 0 and aux == pytest.approx(sum(found), rel=1e-12)


def test_a_depth_is_of_the_models_dtype_now():
    model = nn.MultiTokenPrediction(nn.GPT(11, 12, 1, 2, 8, **LLAMA).to(np.float16), 2)
    assert {p.dtype for p in model.parameters()} == {np.dtype(np.float16)}
    assert {x.dtype for x in model(np.zeros((2, 6), int))} == {np.dtype(np.float16)}


def test_afterwards_it_is_the_plain_model():
    """In evaluation, in what it writes, and in its state."""
    model, tokens = model_of(1).eval(), random(1).integers(0, 11, (2, 6))
    plain = nn.GPT(11, 12, 2, 2, 8, dtype=np.float64, **LLAMA).eval()
    plain.load_state_dict(model.model.state_dict())
    np.testing.assert_array_equal(model(tokens).numpy(), plain(tokens).numpy())
    np.testing.assert_array_equal(model.generate(tokens, 4, 0), plain.generate(tokens, 4, 0))
    np.testing.assert_array_equal(model.train()(tokens)[0].numpy(), plain(tokens).numpy())
    own = {name.split(".")[2] for name, _ in model.named_parameters() if name.startswith("further.")}
    assert own == {"norm_hidden", "norm_token", "norm", "join", "block"}        # embedding and head are the model's


def test_its_summary_says_that_depths_are_left_out():
    model, tokens = model_of(1), random(1).integers(0, 11, (2, 6))
    assert "FLOPs (3 × forward, but for the layers not called); by" in str(nn.summary(model, tokens))
    assert "FLOPs (3 × forward); by" in str(nn.summary(model.model, tokens))


def test_compiled_it_is_the_same():
    tokens = random(1).integers(0, 11, (2, 6))
    plain, compiled = model_of(2), mt.compile(model_of(2), "numpy")
    for model in (plain, compiled):
        nn.multi_token_loss(model(tokens[:, :-1]), tokens[:, 1:]).backward()
    assert not compiled.breaks, compiled.breaks
    for a, b in zip(plain.parameters(), compiled.parameters(), strict=True):
        np.testing.assert_allclose(b.grad.numpy(), a.grad.numpy(), rtol=1e-9, atol=1e-11)


def test_it_learns_what_lies_further_ahead():
    """a bb cc dd ee: of position 0 and the coming b depth 1 tells the second b; what comes behind it nobody can."""
    mt.manual_seed(0)
    model = nn.MultiTokenPrediction(nn.GPT(5, 12, 1, 2, 16), 1)
    optimizer, rng = optim.Adam(model.parameters(), 1e-2), random(0)
    for _ in range(60):
        tokens = np.repeat(rng.integers(0, 5, (16, 5)), 2, axis=1)[:, 1:]
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        (nn.multi_token_loss(logits, tokens[:, 1:], weight=1.0) / (16 * 8)).backward()
        optimizer.step()
    ahead = nn.cross_entropy(logits[1], tokens[:, 2:], "none").numpy().mean(0)
    assert ahead[::2].max() < 0.3 and ahead[1::2].min() > 1.2, ahead


def passes(monkeypatch, model, act):
    """What an action gives, and the tokens that the model has read in each pass meanwhile."""
    read, plain = [], type(model.model).features
    with monkeypatch.context() as patch:
        patch.setattr(type(model.model), "features", lambda self, tokens: (read.append(tokens), plain(self, tokens))[1])
        return act(), read


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("family", ["llama", "deepseek"])
def test_with_guesses_it_writes_what_is_likeliest(family, batch, monkeypatch):
    """Of an untrained model, whose guesses are mostly wrong, the same tokens; a right guess saves a pass. The guesses
    are those of the whole text at once."""
    rights = 0
    for seed in range(6):
        model = model_of(1, FAMILIES[family]).eval()
        tokens = random(seed).integers(0, 11, (batch, 3))
        wanted = model.generate(tokens, 9, 0)
        (found, guessed, right), read = passes(monkeypatch, model, lambda m=model, t=tokens: speculate(m, t, 9))
        np.testing.assert_array_equal(found, wanted)
        assert 9 <= 1 + guessed + right <= 10
        ahead, passed = model.train()(wanted[:, :-1])[1].numpy().argmax(2), [tokens]
        known, good = 4, 0
        while known < 12:
            guess = ahead[:, known - 2]
            passed.append(np.stack([wanted[:, known - 1], guess], 1))
            known, good = (known + 2, good + 1) if (guess == wanted[:, known]).all() else (known + 1, good)
        assert len(read) == 1 + guessed and right == good
        for a, b in zip(read, passed, strict=True):
            np.testing.assert_array_equal(a, b)
        rights += right
    assert 0 < rights < 9 or batch > 1


def test_guesses_of_a_trained_model_are_right():
    """Of counting, everything is certain: half of the passes are saved."""
    mt.manual_seed(0)
    model = nn.MultiTokenPrediction(nn.GPT(7, 40, 1, 2, 16, tied=False, **FAMILIES["deepseek"]), 1)
    optimizer, rng = optim.Adam(model.parameters(), 1e-2), random(0)
    for _ in range(40):
        tokens = (rng.integers(0, 7, (8, 1)) + np.arange(17)) % 7
        optimizer.zero_grad()
        (nn.multi_token_loss(model(tokens[:, :-1]), tokens[:, 1:]) / 128).backward()
        optimizer.step()
    start = np.array([[2, 3], [6, 0]])
    modes = set()
    model.further[0].register_forward_pre_hook(by_position(lambda m, inputs: modes.add(m.block.dropout.training)))
    found, guessed, right = speculate(model, start, 21)
    np.testing.assert_array_equal(found, (start[:, :1] + np.arange(23)) % 7)
    assert guessed == right == 10 and model.training and modes == {False}


def test_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="depth=0; 1 or more"):
        model_of(0)
    with pytest.raises(ValueError, match="3 tokens for depth=3: give 4 or more"):
        model_of(3)(np.zeros((2, 3), int))
    logits = model_of(3)(np.zeros((2, 4), int))
    assert logits[0].shape[:2] == (2, 4)
    for weight in (-0.1, np.nan, np.inf):
        with pytest.raises(ValueError, match=f"weight={weight}"):
            nn.multi_token_loss(logits, np.zeros((2, 4), int), weight=weight)
    with pytest.raises(ValueError, match="speculate: 3 tokens and 10 more for a GPT of length 12"):
        speculate(model_of(1), np.zeros((2, 3), int), 10)
    for shape, count in (((2, 0), 4), ((3,), 4), ((2, 3), -1)):
        with pytest.raises(ValueError, match="give .batch, 1 or more., and 0 or more"):
            speculate(model_of(1), np.zeros(shape, int), count)
