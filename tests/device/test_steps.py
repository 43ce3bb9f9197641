"""Training on a GPU (the stand-in): the bits of a training on the host, and no copy but the batch, the loss, and what
the step was asked for."""

import json
import runpy
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, checkpoints, comm, ledger, nn, optim, training
from minitorch_dist.data import Loader
from minitorch_dist.nn.multi_token import speculate
from minitorch_dist.parallel import DistributedDataParallel
from minitorch_dist.parallel.experts import expert_bias
from minitorch_dist.parallel.pipelines import Pipeline, schedule_of

from .fake_cupy import installed, launches, transfers

BATCH, STEPS = 6, 3


@pytest.fixture(autouse=True)
def gpu():
    with installed() as cupy:
        yield cupy


def images(classes=10):
    rng = np.random.default_rng(5)
    return rng.standard_normal((BATCH * STEPS, 784)).astype(np.float32), rng.integers(0, classes, BATCH * STEPS)


def text(ignored=0.0):
    tokens = np.random.default_rng(6).integers(0, 11, (BATCH * STEPS, 8))
    labels = np.where(np.random.default_rng(7).random((BATCH * STEPS, 7)) < ignored, -100, tokens[:, 1:])
    return tokens[:, :-1], labels


def residual():
    return nn.Sequential(nn.Reshape(1, 28, 28), nn.AvgPool2d(4), nn.ResidualBlock(1, 3, 2), nn.Flatten(),
                         nn.Linear(48, 10))


class Reader(nn.Module):
    """What looks at its own tokens, those that aren't 0, as at another sequence, and less at those that are far."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.near, self.slopes = nn.MultiHeadAttention(8, 2), nn.Parameter(np.array([[[0.3]], [[0.7]]], np.float32))
        self.block = nn.TransformerBlock(8, 2, causal=True, cross=True, attention_dropout=0.2)

    def forward(self, tokens):
        x, places = self.embed(tokens), backend.xp.arange(tokens.shape[1], like=tokens)
        far = abs(places[:, None] - places).astype("float32")
        memory = self.near(x, None, -self.slopes * far)
        return self.embed.attend(self.block(x, None, memory, (tokens != 0)[:, None, None]))


MODELS = {  # name -> (constructor, data, dropouts per step)
    "mlp": (lambda: nn.mlp((16, 12)), images, 0),
    "mlp with dropout": (lambda: nn.mlp((16, 12), dropout=0.3), images, 2),
    "lenet": (nn.lenet, images, 0),
    "residual": (residual, images, 0),
    "groups": (lambda: nn.Sequential(nn.Reshape(1, 28, 28), nn.AvgPool2d(4), nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6),
                                     nn.ReLU(), nn.Flatten(), nn.Linear(150, 10)), images, 0),
    "image transformer": (lambda: nn.ImageTransformer(layers=1, dim=8, heads=2), images, 0),
    "gpt": (lambda: nn.GPT(11, 7, layers=2, heads=2, dim=8), text, 0),
    "gpt, rotary": (lambda: nn.GPT(11, 7, layers=1, heads=4, kv_heads=2, dim=8, positions="rotary", norm="rms",
                                   tied=False, dropout=0.2), text, 3),
    "gpt, stretched": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, positions=nn.Rotary(100, 3, 4)), text, 0),
    "gpt, weights dropped": (lambda: nn.GPT(11, 7, layers=2, heads=4, kv_heads=2, dim=8, window=(3, None),
                                            attention_dropout=0.3, sinks=True, gated=True), text, 2),
    "reader": (lambda: Reader(), text, 2),
    "gpt, linear": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, window="linear"), text, 0),
    "gpt, delta": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, window="delta"), text, 0),
    "gpt, blocks": (lambda: nn.GPT(11, 7, layers=2, heads=4, kv_heads=2, dim=8, window=("2x2", None)), text,
                    0),
    "gpt, ignored": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8), lambda: text(0.3), 0),
    "gpt of experts": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, moe={"experts": 4, "z": 0.1}), text, 0),
    "gpt of experts without a capacity": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, moe={
        "experts": 4, "capacity_factor": None}), text, 0),
    "gpt of experts with biases": (lambda: nn.GPT(11, 7, layers=1, heads=2, dim=8, mlp="swiglu", moe={
        "experts": 4, "score": "sigmoid", "shared": 1, "nodes": (2, 1), "expert_bias": True, "sequence_balance": 0.1,
        "balance": 0}), text, 0),
}
OPTIMIZERS = {
    "sgd": lambda groups: optim.SGD(groups, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda groups: optim.Adam(groups, lr=0.01),
    "adamw": lambda groups: optim.AdamW(groups, lr=0.01),
    "adagrad": lambda groups: optim.Adagrad(groups, lr=0.01),
    "lion": lambda groups: optim.Lion(groups, lr=0.001),
    "schedule-free": lambda groups: optim.AdamWScheduleFree(groups, lr=0.01, warmup=2),
    "adafactor": lambda groups: optim.Adafactor(groups, lr=0.01),
    "8 bits": lambda groups: optim.AdamW([groups[0], {**groups[1], "state_bits": 32}], lr=0.01, state_bits=8),
    "muon": lambda groups: optim.Combined(optim.Muon(groups[:1], lr=0.01), optim.AdamW(groups[1:], lr=0.01)),
    "normuon": lambda groups: optim.Combined(optim.NorMuon(groups[:1], lr=0.01), optim.AdamW(groups[1:], lr=0.01)),
    "dion": lambda groups: optim.Combined(optim.Dion(groups[:1], lr=0.01), optim.AdamW(groups[1:], lr=0.01)),
    "dion2": lambda groups: optim.Combined(optim.Dion2(groups[:1], lr=0.01), optim.AdamW(groups[1:], lr=0.01)),
}


def loss_sum(model, shard):
    y = model(shard.inputs)
    y, aux = y if isinstance(y, tuple) else (y, 0.0)
    return nn.cross_entropy(y, shard.labels, reduction="sum") + aux


def train(device, model, data, optimizer="adamw", **options):
    """(losses, state of the model, state of the optimizer, copies of the last step)."""
    mt.manual_seed(1)
    exact = options.pop("exact", False)
    world = comm.communicator.world_of_one()
    ddp = DistributedDataParallel(model().to(device), world, exact=exact, micro_shards=2)
    optimizer = OPTIMIZERS[optimizer](training.decay_groups(ddp, 0.1))
    loader = Loader(*data(), BATCH, micro_shards=2 if exact else 1)
    losses = []
    for step, batch in enumerate(loader.epoch(0)):
        transfers.clear()
        losses.append(training.train_step(ddp, optimizer, batch, loss_sum, world, seed=3, step=step, units=2,
                                          micro_shards=2 if exact else 8, **options)[0])
        copies = dict(transfers)
        expert_bias.update(ddp)
    if device == "cuda":
        kinds = {type(p.data) for p in ddp.parameters()} | {type(b) for _, b in ddp.named_buffers()}
        assert kinds == {*backend.DEVICE_ARRAYS}
    return losses, ddp.state_dict(), optimizer.state_dict(), copies


def assert_same(a, b):
    assert a[0] == b[0]
    for x, y in ((a[1], b[1]), *zip(a[2]["state"], b[2]["state"], strict=True)):
        assert list(x) == list(y)
        for name in x:
            np.testing.assert_array_equal(x[name], y[name], err_msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_trains_to_the_same_bits_without_hidden_copies(name):
    model, data, dropouts = MODELS[name]
    here, there = train("cpu", model, data), train("cuda", model, data)
    if "ignored" in name:       # sums over as many zeros, instead of over fewer losses
        np.testing.assert_allclose(here[0], there[0], rtol=1e-6)
    else:
        assert_same(here, there)
    # Up: inputs and labels, and dropout's numbers. Down: the loss, and with it the answers of the checks; and how many
    # rows each expert has, where they have no capacity.
    assert there[3] == {"up": 2 + dropouts, "down": 2 + ("without a capacity" in name) + 2 * ("blocks" in name)}


@pytest.mark.parametrize("window, down", [((3, None), 0), (("linear", "delta"), 0), ("2x2", 16)])
def test_sequences_in_slices_do_so_too(window, down):
    """Up, of each of six pieces: inputs, labels, its places; numbers and places of five dropouts. Down: its loss, and
    the answer of the check; of chosen blocks how many rows each has, there and back, where there are more than two."""
    def trained(device):
        mt.manual_seed(1)
        model = nn.GPT(11, 7, layers=2, heads=4, dim=8, dropout=0.2, window=window).to(device)
        pipeline = Pipeline([model], comm.communicator.world_of_one(), schedule_of("1f1b", 1, 2, slices=3))
        transfers.clear()
        loss = pipeline.run(next(Loader(*text(), BATCH).epoch(0)), lambda y, labels: nn.cross_entropy(
            y, labels, reduction="sum"), seed=3, step=0, units=7)
        copies = dict(transfers)
        return loss, [backend.to(p.grad.data, "cpu") for p in model.parameters()], copies
    here, there = map(trained, ("cpu", "cuda"))
    assert here[0] == there[0]
    for mine, other in zip(here[1], there[1], strict=True):
        np.testing.assert_array_equal(mine, other)
    assert there[2] == {"up": 6 * (3 + 2 * 5), "down": 6 * 2 + down}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("options, down", [({"clip": 0.1}, 3), ({"accumulate": 3}, 6), ({"exact": True}, 4)], ids=str)
def test_every_way_of_stepping(optimizer, options, down):
    model, data, _ = MODELS["mlp"]
    here, there = (train(device, model, data, optimizer, **options) for device in ("cpu", "cuda"))
    assert_same(here, there)
    asked = {"adafactor": 2, "dion": 1}.get(optimizer, 0)   # RMS of parameters and of steps; columns that are lost
    assert there[3]["down"] == down + asked and not there[3].get("implicit")


def test_exact_mode_with_batch_norm():
    here, there = (train(device, residual, images, exact=True) for device in ("cpu", "cuda"))
    assert_same(here, there)


def test_training_goes_on_from_a_state_saved_on_the_other_device():
    model, data, _ = MODELS["residual"]
    _, state, _, _ = train("cuda", model, data)
    mt.manual_seed(9)
    twin = model().to("cpu")
    twin.load_state_dict(state)
    mt.manual_seed(9)
    other = model().to("cuda")
    other.load_state_dict({k: backend.to(v, "cuda") for k, v in state.items()})
    x = images()[0][:2]
    np.testing.assert_array_equal(twin.eval()(x).numpy(), other.eval()(backend.to(x, "cuda")).cpu().numpy())


@pytest.mark.parametrize("async_op", [False, True])
@pytest.mark.parametrize("source, target", [("cuda", "cpu"), ("cpu", "cuda"), ("cuda", "cuda")])
def test_a_checkpoint_travels(tmp_path, source, target, async_op):
    """Written beside the next step, it is that of the save."""
    def begin(device, seed):
        mt.manual_seed(seed)
        model = residual().to(device)
        return model, optim.AdamW(model.parameters(), 0.01)

    def step(model, optimizer, number):
        x, labels = images()[0][number::3], images()[1][number::3]
        optimizer.zero_grad()
        device = next(model.parameters()).device
        loss = nn.cross_entropy(model(backend.to(x, device)), backend.to(labels, device))
        loss.backward()
        optimizer.step()
        return loss.item()
    here, there = begin(source, 1), begin(target, 2)
    for number in (0, 1):
        step(*here, number)
    saving = checkpoints.save(tmp_path / "c", *here, async_op=async_op)
    loss = step(*here, 2)
    if async_op:
        saving.wait()
    checkpoints.load(tmp_path / "c", *there)
    assert step(*there, 2) == loss
    for (name, a), b in zip(here[0].state_dict().items(), there[0].state_dict().values(), strict=True):
        np.testing.assert_array_equal(a, b, err_msg=name)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_s_state_travels(optimizer):
    def setting(device):
        params = [mt.tensor([[1.0, 2.0, 3.0]], requires_grad=True, device=device),
                  mt.ones(2, device=device, requires_grad=True)]
        return params, OPTIMIZERS[optimizer]([{"params": [p]} for p in params])

    def step(params, opt):
        opt.zero_grad()
        sum((p * p * p).sum() for p in params).backward()
        opt.step()
    (here, first), (there, second) = setting("cpu"), setting("cuda")
    step(here, first)
    with mt.no_grad():
        for a, b in zip(here, there, strict=True):
            b[...] = a.numpy()
    second.load_state_dict(first.state_dict())
    step(here, first)
    step(there, second)
    for a, b in zip(here, there, strict=True):
        np.testing.assert_array_equal(a.numpy(), b.cpu().numpy())


@pytest.mark.parametrize("wrap", [float, lambda v: np.float32(v), lambda v: np.array([v], np.float32),
                                  lambda v: np.array(v, np.float32), lambda v: backend.to(np.array([v], "f4"), "cuda")],
                         ids="number scalar one 0-d gpu".split())
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_loss_scaling_takes_numbers_and_arrays_of_one_element(device, wrap):
    p = mt.tensor([1.0, 2.0], device=device, requires_grad=True)
    adam, found = optim.Adam([p], lr=0.5, betas=(0.0, 0.0), eps=1.0), []
    for inf in (0.0, 1.0, 0.0):
        p.grad = mt.tensor([12.0, -4.0], device=device)
        adam.step(grad_scale=wrap(4.0), found_inf=wrap(inf))
        found.append(p.tolist())
    # Without memory a step is lr · g/(|g| + eps), g = 3 and -1.
    expected = [1 - 0.375, 2 + 0.25], [1 - 0.75, 2 + 0.5]
    np.testing.assert_allclose(found, [expected[0], expected[0], expected[1]], rtol=1e-6)
    assert adam.state_dict()["steps"] == [2]


@pytest.mark.parametrize("kind", [{}, {"latent": {}}, {"window": "linear"}, {"window": "delta"},
                                  {"window": "2x2"}], ids=str)
def test_generation_and_attention_weights(kind):
    mt.manual_seed(0)
    net = nn.GPT(11, 8, layers=1, heads=2, dim=8, positions="rotary", **kind)
    tokens, x = text()[0][:2, :3], np.random.default_rng(0).standard_normal((2, 3, 8)).astype(np.float32)
    ways = {"temperature": 0}, {}, {"top_k": 5, "top_p": 0.8}
    expected = [net.generate(tokens, 4, stream=backend.stream("g"), **way) for way in ways]
    expected.append(net.blocks[0].attention.weights(x))
    net.to("cuda")
    found = [net.generate(tokens, 4, stream=backend.stream("g"), **way) for way in ways]
    weights = net.blocks[0].attention.weights(backend.to(x, "cuda"))
    for f, e in zip((*found, weights), expected, strict=True):
        np.testing.assert_array_equal(backend.to(f, "cpu"), e)


def test_several_tokens_are_predicted_and_guessed():
    """Also of depths that come beside a model that is there already, and targets that aren't."""
    tokens, targets = (part[:2] for part in text())
    documents, found = np.array([[0] * 4 + [1] * 3, [0] * 7]), []
    for device, of_targets in (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")):
        mt.manual_seed(0)
        net = nn.GPT(11, 8, layers=1, heads=2, dim=8, positions="rotary", latent={}).to(device)
        net = nn.MultiTokenPrediction(net, 2)
        assert {p.device for p in net.parameters()} == {device if device == "cpu" else "cuda:0"}
        logits = net(backend.to(tokens, device), backend.to(documents, of_targets))
        loss = nn.multi_token_loss(logits, backend.to(targets, of_targets), documents)
        loss.backward()
        written, *counts = speculate(net, tokens[:, :3], 5)
        found.append((loss.cpu().numpy(), backend.to(written, "cpu"), counts,
                      *(p.grad.cpu().numpy() for p in net.parameters())))
    for values in zip(*found, strict=True):
        for value in values[1:]:
            np.testing.assert_array_equal(value, values[0])


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("ignored", [0.0, 0.4])
@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_losses(reduction, ignored, smoothing):
    rng = np.random.default_rng(2)
    logits, (_, labels) = rng.standard_normal((BATCH * STEPS, 7, 11)), text(ignored)
    results = []
    for device, where_labels in (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")):
        z = mt.tensor(logits, requires_grad=True, device=device)
        loss = nn.cross_entropy(z, backend.to(labels, where_labels), reduction, label_smoothing=smoothing)
        loss.sum().backward()
        p, t = mt.tensor(logits, device=device), mt.tensor(logits[::-1], device=device)
        results.append((loss.cpu().numpy(), z.grad.cpu().numpy(), nn.mse_loss(p, t, reduction).cpu().numpy()))
    for found in results[1:]:
        for f, e in zip(found, results[0], strict=True):
            np.testing.assert_allclose(f, e, rtol=1e-13, atol=1e-15)


def test_the_ledger_counts_gpu_memory():
    x = mt.ones(100, device="cuda", requires_grad=True)
    with ledger.record(memory=True) as book:
        y = x.exp() * x
        y.sum().backward()
    assert book.peak["parameter"] == 400 and book.peak["activation"] == 400 and book.live["gradient"] == 400


def test_the_demo_on_a_gpu(tmp_path):
    """The program itself, all ways of it: the parameters' digest is that of the host."""
    program = runpy.run_path(str(Path(backend.__file__).parents[2] / "mnist_demo" / "train.py"))
    for more in (["--model", "mlp", "--hidden", "9", "--dropout", "0.2"], ["--model", "cnn", "--clip", "0.5"]):
        summaries = []
        for device in ("cpu", "cuda"):
            out = tmp_path / device
            flags = ["--data", "digits", "--steps", "2", "--device", device, *more, "--out", str(out)]
            assert program["main"](flags) == 0
            summaries.append(json.loads((out / "summary.json").read_text()))
        for key in ("parameters_sha256", "test_accuracy", "final_loss"):
            assert summaries[0][key] == summaries[1][key], key
        assert [s["device"] for s in summaries] == ["cpu", "cuda:0"]


def test_the_demo_says_which_device_there_isn_t(tmp_path, capsys):
    program = runpy.run_path(str(Path(backend.__file__).parents[2] / "mnist_demo" / "train.py"))
    with pytest.raises(SystemExit, match="2"):
        program["main"](["--data", "digits", "--device", "cuda:7", "--out", str(tmp_path)])
    assert "device cuda:7: " in capsys.readouterr().err


def test_clipping_takes_as_many_launches_however_many_parameters_and_elements():
    counts = []
    for sizes in ([10], [100_000], [10, 9, 5000, 7]):
        params = [mt.zeros(size, device="cuda", requires_grad=True) for size in sizes]
        for p in params:
            p.grad = mt.ones(p.shape, device="cuda")
        optim.clip_grad_norm_(params, 1e9)      # the buffer is made, and looked at
        launches.clear()
        assert optim.clip_grad_norm_(params, 0.5) == pytest.approx(sum(sizes) ** 0.5)
        counts.append(launches.total())
    assert counts[0] == counts[1] == counts[2]
