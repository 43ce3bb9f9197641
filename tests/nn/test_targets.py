"""A GPT that is given targets: the losses of its logits, which it doesn't make."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import ledger, nn, optim
from minitorch_dist.backend import tiled_cross_entropy
from minitorch_dist.compress import lora
from minitorch_dist.nn.transformer import FAMILIES, Embedding
from minitorch_dist.parallel.pipelines.gpt_stages import cut_gpt

VOCABULARY = 300        # two tiles, as narrow as they get
GPTS = {"tied": {}, "untied": {"tied": False}, "llama": FAMILIES["llama"] | {"tied": False},
        "deepseek": FAMILIES["deepseek"], "experts": {"moe": {"experts": 2, "k": 1, "capacity_factor": 2.0}}}


@pytest.fixture(autouse=True)
def narrow(monkeypatch):
    monkeypatch.setattr(tiled_cross_entropy, "HOST", 1)


def gpt(**options):
    mt.manual_seed(3)
    return nn.GPT(VOCABULARY, 7, layers=2, heads=2, dim=8, dtype=np.float64, **options)


def batch():
    rng = np.random.default_rng(4)
    tokens, targets = rng.integers(0, VOCABULARY, (2, 3, 7))
    targets[0, 2] = targets[2, 6] = -100
    return tokens, targets, np.sort(rng.integers(0, 3, (3, 7)), 1)


@pytest.mark.parametrize("name", GPTS)
@pytest.mark.parametrize("packed", [False, True])
def test_losses_and_gradients_are_those_of_the_logits(name, packed):
    tokens, targets, documents = batch()
    documents = documents if packed else None
    found = []
    for tiled in (False, True):
        model = gpt(**GPTS[name])
        if name == "untied":
            model.output_multiplier = 0.25
        aux = 0.0
        y = model(tokens, documents, targets) if tiled else model(tokens, documents)
        if name == "experts":
            y, aux = y
        losses = y if tiled else nn.cross_entropy(y, targets, "none")
        assert losses.shape == (3, 7) and losses.numpy()[0, 2] == 0
        (losses.sum() + aux).backward()
        found.append({"losses": losses.numpy()} | {n: p.grad.numpy() for n, p in model.named_parameters()})
    for key, wanted in found[0].items():
        np.testing.assert_allclose(found[1][key], wanted, rtol=1e-10, atol=1e-12, err_msg=key)


def test_numpys_multiplier_makes_no_float64_of_logits_and_losses():
    tokens, targets, _ = batch()
    model = nn.GPT(VOCABULARY, 7, layers=1, heads=2, dim=8)
    model.output_multiplier = np.float64(0.25)
    assert model(tokens).dtype == model(tokens, None, targets).dtype == np.float32


@pytest.mark.parametrize("name", ["tied", "llama", "experts", "multi-token"])
def test_a_z_loss_is_added_to_the_losses_of_tiles(name):
    """weight · log² Σ exp(z), with the logits z of the same model: losses, and gradients of them."""
    tokens, targets, _ = batch()
    found = []
    for tiled in (False, True):
        model = gpt(**GPTS.get(name, {}))
        model = nn.MultiTokenPrediction(model) if name == "multi-token" else model
        y = model(tokens, targets=targets, z_loss=0.3) if tiled else model(tokens)
        y = y[0] if name == "experts" else y
        losses = []
        for depth, part in enumerate(y if isinstance(y, tuple) else (y,)):
            if not tiled:
                at, total = targets[:, depth:], mt.log(mt.exp(part).sum(-1))        # small logits: no overflow
                right = part[(*np.indices(at.shape), np.maximum(at, 0))]
                part = mt.where(at == -100, 0.0, total - right + 0.3 * total ** 2)
            losses.append(part.flatten())
        mt.concatenate(losses).sum().backward()
        found.append({"losses": mt.concatenate(losses).numpy()} | {n: p.grad.numpy() for n, p in
                                                                   model.named_parameters()})
    for key, wanted in found[0].items():
        np.testing.assert_allclose(found[1][key], wanted, rtol=1e-10, atol=1e-12, err_msg=key)


def test_stages_of_a_gpt_add_a_z_loss_as_well():
    tokens, targets, _ = batch()
    first, last = cut_gpt(gpt(tied=False), 2)
    wanted = gpt(tied=False)(tokens, targets=targets, z_loss=0.3)
    np.testing.assert_allclose(last(first(tokens), None, targets, 0.3).numpy(), wanted.numpy(), rtol=1e-12)


def test_a_z_loss_wants_targets():
    model = gpt()
    for each in (model, nn.MultiTokenPrediction(model)):
        with pytest.raises(ValueError, match="z_loss=0.1 of a model without targets"):
            each(batch()[0], z_loss=0.1)


def test_the_logits_are_not_kept():
    tokens, targets, _ = batch()
    kept = []
    for f in (lambda model: model(tokens, targets=targets).sum(),
              lambda model: nn.cross_entropy(model(tokens), targets, "sum")):
        with ledger.record(memory=True) as book:
            loss = f(gpt())
            kept.append(book.live["activation"])
            del loss
    # Of the 19 targets that count: the logits' softmax, 300 float64 each; two numbers instead.
    assert kept[1] - kept[0] >= 19 * (VOCABULARY - 2) * 8


def test_compiled_it_is_the_same():
    tokens, targets, _ = batch()
    plain, compiled = gpt(), gpt()
    wanted = plain(tokens, targets=targets)
    wanted.sum().backward()
    losses = mt.compile(compiled)(tokens, targets=targets)
    losses.sum().backward()
    np.testing.assert_allclose(losses.numpy(), wanted.numpy(), rtol=1e-10)
    for (name, p), q in zip(plain.named_parameters(), compiled.parameters(), strict=True):
        np.testing.assert_allclose(q.grad.numpy(), p.grad.numpy(), rtol=1e-9, atol=1e-12, err_msg=name)


def hooked(model):
    model.head.register_forward_hook(lambda layer, inputs, y: y)
    return model


def biased(model):
    model.head = nn.Linear(8, VOCABULARY, dtype=np.float64)
    return model


def adapted(model):
    lora.add(model, rank=2, targets=["head"])
    return model


def doubled(model):
    model.head = Doubled(8, VOCABULARY, bias=False, dtype=np.float64)
    return model


class Doubled(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


class Shifted(Embedding):
    def attend(self, x):
        return super().attend(x) + 1


@pytest.mark.parametrize("change, words", [
    (hooked, r"not Linear\(8, 300, bias=False\)"), (adapted, "not LoRA"), (biased, "not Linear"),
    (doubled, "not Doubled")])
def test_an_output_layer_that_does_more_is_refused(change, words):
    tokens, targets, _ = batch()
    with pytest.raises(ValueError, match=f"GPT: targets want an output layer.*{words}.*take the loss of the logits"):
        change(gpt(tied=False))(tokens, targets=targets)
    model = gpt()
    model.embed = Shifted(VOCABULARY, 8, np.float64)
    with pytest.raises(ValueError, match="Shifted"):
        model(tokens, targets=targets)
    with pytest.raises(ValueError, match="this one has a bias"):
        nn.Linear(3, 4).losses(mt.tensor(np.ones((2, 3))), [0, 1])


@pytest.mark.parametrize("targets", [np.zeros((3, 6), int), np.zeros(21, int)])
def test_targets_of_another_shape_are_refused(targets):
    tokens, _, _ = batch()
    with pytest.raises(ValueError, match=r"x \(3, 7, 8\), labels .*weight \(300, 8\)"):
        gpt()(tokens, targets=targets)


def test_it_learns():
    tokens, targets, _ = batch()
    model = gpt()
    optimizer, losses = optim.AdamW(model.parameters(), lr=0.03), []
    for _ in range(30):
        loss = model(tokens, targets=targets).sum() / 19
        losses.append(loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert abs(losses[0] - np.log(VOCABULARY)) < 0.2 and losses[-1] < 0.5
