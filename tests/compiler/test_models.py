"""Whole models, trained compiled and not: the same parameters, statistics and masks; and on several ranks one curve."""

import warnings

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn, optim
from minitorch_dist.parallel import full_state_dict, fully_shard
from tests.crews import crews

from . import rank_cases
from .compare import EMITS

CASES = "tests.compiler.rank_cases:"
RANDOM = np.random.default_rng(0)
POINTS, PIXELS = RANDOM.standard_normal((9, 7)), RANDOM.standard_normal((3, 784))
TOKENS = RANDOM.integers(0, 11, (3, 6))


def mlp():
    """No bias where BatchNorm takes it away: Adam makes steps of the rounding that its gradient is."""
    wide = {"dtype": np.float64}
    return nn.Sequential(nn.Linear(7, 6, bias=False, **wide), nn.BatchNorm(6, **wide), nn.ReLU(), nn.Dropout(0.3),
                         nn.Linear(6, 5, **wide), nn.GELU(), nn.BatchNorm(5, **wide), nn.Linear(5, 4, **wide))


def gpt(**options):
    return lambda: nn.GPT(11, 6, **({"layers": 2, "heads": 4, "dim": 16, "dtype": np.float64} | options))


def small_lenet():
    """LeNet's kinds of layers, fewer and narrower."""
    wide = {"dtype": np.float64}
    return nn.Sequential(nn.conv.Reshape(1, 28, 28), nn.Conv2d(1, 3, 5, stride=2, padding=2, **wide), nn.ReLU(),
                         nn.MaxPool2d(2), nn.Conv2d(3, 4, 3, **wide), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(16, 9, **wide), nn.ReLU(), nn.Dropout(0.2), nn.Linear(9, 10, **wide))


MODELS = {      # name -> (model, its inputs, number of classes)
    "mlp": (mlp, POINTS, 4),
    "lenet": (small_lenet, PIXELS, 10),
    "gpt, learned": (gpt(dropout=0.2), TOKENS, 11),
    "gpt, rotary, grouped, rms": (gpt(positions="rotary", kv_heads=2, norm="rms", dropout=0.1), TOKENS, 11),
    "gpt, weights dropped": (gpt(kv_heads=2, window=(3, None), attention_dropout=0.3, sinks=True, gated=True),
                             TOKENS, 11),
    "gpt, stretched": (gpt(positions=nn.Rotary(100, 4, 2)), TOKENS, 11),
    "gpt, linear": (gpt(window=("linear", None), dropout=0.1), TOKENS, 11),
    "gpt, blocks": (gpt(window=("2x2", None), kv_heads=2, dropout=0.1), TOKENS, 11),
    "gpt, delta": (gpt(window=("delta", None), dropout=0.1), TOKENS, 11),
    "gpt, untied": (gpt(tied=False, layers=1), TOKENS, 11),
}
STEPS = 10


def train(name, wrap, whole=False):
    """(losses, parameters, buffers, outputs in evaluation) of 10 steps of Adam, with or without compiling."""
    make, inputs, classes = MODELS[name]
    mt.manual_seed(2)
    model = make()
    forward = wrap(model) if not whole else model

    def loss_of(x, labels):
        logits = forward(x)
        return nn.cross_entropy(mt.reshape(logits, (-1, classes)), labels.reshape(-1))
    loss_function = wrap(loss_of) if whole else loss_of
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    random, losses = np.random.default_rng(1), []
    for step in range(STEPS):
        rows = len(inputs) - step % 2       # batches of two sizes
        x = inputs[:rows]
        words = x.dtype.kind == "i"
        labels = random.integers(0, classes, x.shape if words else rows)
        optimizer.zero_grad()
        with backend.random_scope(7, step, rows, (0, rows), 4):
            loss = loss_function(x if words else mt.tensor(x + 0.1 * random.standard_normal(x.shape)), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    forward.eval()
    outputs = [forward(inputs if words else mt.tensor(inputs)).numpy() for _ in range(2)]
    return losses, *({name: np.array(getattr(v, "data", v)) for name, v in named} for named in (
        model.named_parameters(), model.named_buffers())), outputs


@pytest.fixture(scope="module")
def eager():
    return {name: train(name, lambda f: f) for name in MODELS}


def close(found, expected):
    losses, parameters, buffers, outputs = found
    np.testing.assert_allclose(losses, expected[0], rtol=0, atol=1e-10)
    for ours, theirs in ((parameters, expected[1]), (buffers, expected[2])):
        assert list(ours) == list(theirs)
        for name, value in theirs.items():
            np.testing.assert_allclose(ours[name], value, rtol=0, atol=1e-10, err_msg=name)
    for a, b in zip(outputs, expected[3], strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("emit", ["c", "numpy"])
@pytest.mark.parametrize("name", MODELS)
def test_ten_steps_of_adam(name, emit, eager):
    made = []
    close(train(name, lambda f: made.append(mt.compile(f, emit=emit)) or made[-1]), eager[name])
    assert not made[0].breaks


@pytest.mark.parametrize("name", MODELS)
def test_the_loss_function_as_a_whole(name, eager):
    made = []
    close(train(name, lambda f: made.append(mt.compile(f, emit="numpy")) or made[-1], whole=True), eager[name])
    assert not made[0].breaks and len(made) == 1


def test_training_had_an_effect(eager):
    for name, (losses, _, buffers, _) in eager.items():
        assert len(set(losses)) == STEPS, name
        assert (name == "mlp") == bool(buffers)


def test_lenet_of_the_library_in_float32():
    results = []
    for wrap in (mt.compile, lambda f: f):
        mt.manual_seed(0)
        model = wrap(nn.models.lenet())
        y = model(mt.tensor(PIXELS.astype(np.float32)))
        nn.cross_entropy(y, np.array([1, 2, 3])).backward()
        assert y.dtype == np.float32
        results.append([y.numpy(), *(p.grad.numpy() for p in model.parameters())])
    for a, b in zip(*results, strict=True):
        assert a.dtype == b.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=0, atol=2e-5 * max(1, np.abs(b).max()))


def of_maxima(x):
    """What backward makes again it compares with maxima that forward has rounded."""
    y = mt.tanh(x * 0.3) * x + x * 0.3
    return mt.max(y, 3), mt.max_pool2d(y, 2)


@pytest.mark.parametrize("emit", EMITS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("several", [False, True])
def test_gradients_of_16_bits_are_the_functions(emit, dtype, several):
    f = of_maxima if several else lambda x: of_maxima(x)[1]
    found = []
    for function in (mt.compile(f, emit), f):
        x = mt.tensor(PIXELS.reshape(3, 1, 28, 28)).to(dtype)
        x.requires_grad = True
        made = function(x)
        sum(map(mt.sum, made) if several else [mt.sum(made)]).backward()
        assert x.grad.dtype == x.dtype
        found.append(x.grad.numpy())
    np.testing.assert_array_equal(*found)


def test_names_and_states_are_the_models():
    mt.manual_seed(0)
    model = mlp()
    compiled = mt.compile(model, emit="numpy")
    assert list(compiled.state_dict()) == list(model.state_dict()) and len(compiled.state_dict()) == 13
    assert [name for name, _ in compiled.named_parameters()] == [name for name, _ in model.named_parameters()]
    assert all(a is b for a, b in zip(compiled.parameters(), model.parameters(), strict=True))
    assert [name for name, _ in compiled.named_buffers()] == [name for name, _ in model.named_buffers()]
    other = mt.compile(mlp(), emit="numpy")
    other.load_state_dict(compiled.state_dict())
    compiled.eval()
    other.eval()
    assert not model.training and not model[1].training
    x = mt.tensor(POINTS)
    np.testing.assert_array_equal(other(x).numpy(), compiled(x).numpy())
    compiled.to(np.float32)
    assert all(p.dtype == np.float32 for p in model.parameters())
    assert compiled(mt.tensor(POINTS.astype(np.float32))).dtype == np.float32


def test_statistics_of_batch_norm_to_the_last_bit():
    """In tiles, BatchNorm is the op that eager runs."""
    results = []
    for wrap in (lambda f: mt.compile(f, emit="numpy"), lambda f: f):
        mt.manual_seed(0)
        model = wrap(nn.BatchNorm(7, dtype=np.float64))
        outs = [model(mt.tensor(POINTS * k)).numpy() for k in (1, 2, 3)]
        model.eval()
        results.append([*outs, model(mt.tensor(POINTS)).numpy(), *(np.array(b) for _, b in model.named_buffers())])
        model.train()
        results[-1].append(model(mt.tensor(POINTS)).numpy())
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


# ---------------------------------------------------------------- ranks

@pytest.fixture(scope="module")
def by_ranks():
    return {n: crews.call(CASES + "trainings", n) for n in (1, 2)}


def test_data_parallel_ranks_have_one_process_curve(by_ranks):
    for name, dropout in (("ddp", True), ("ddp in c", False)):
        losses, _, parameters = rank_cases.train(compiled=False, dropout=dropout)
        for rank in by_ranks[2]:
            np.testing.assert_allclose(rank[name][0], losses, rtol=0, atol=1e-10)
            assert rank[name][1] == by_ranks[2][0][name][1]
            for p, value in parameters.items():
                np.testing.assert_allclose(rank[name][2][p], value, rtol=0, atol=1e-10)


def test_exact_mode_gives_the_same_bits_on_one_and_two_ranks(by_ranks):
    digests = {tuple(rank["exact"][1]) for n in (1, 2) for rank in by_ranks[n]}
    assert len(digests) == 1 and len(set(*digests)) == 12


def test_batch_norm_over_ranks():
    expected = crews.call(CASES + "batch_norm", 2, (False,))
    for ours, theirs in zip(crews.call(CASES + "batch_norm", 2), expected, strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert list(a) == list(b)
            for name in a:
                np.testing.assert_allclose(a[name], b[name], rtol=0, atol=1e-10, err_msg=name)


@pytest.mark.parametrize("stage", [1, 3])
def test_a_compiled_fully_sharded_model_trains_its_pieces(stage):
    def trained(compiled):
        mt.manual_seed(3)
        model = fully_shard(nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).to(np.float64), stage=stage)
        made = mt.compile(model, emit="numpy") if compiled else model
        optimizer = optim.Adam(made.parameters(), 0.05)
        for step in range(3):
            optimizer.zero_grad()
            mt.sum(made(np.random.default_rng(step).standard_normal((4, 5))) ** 2).backward()
            optimizer.step()
        with pytest.raises(RuntimeError, match="full_state_dict"):      # as the model itself says
            made.state_dict()
        return full_state_dict(model)
    wanted = trained(False)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        got = trained(True)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12)


class Scaled(nn.Module):
    """s · tanh(x W), where s is a number."""

    def __init__(self, n):
        super().__init__()
        self.linear, self.scale = nn.Linear(n, n), nn.Parameter(np.float32(1.5))

    def forward(self, x):
        return mt.tanh(self.linear(x)) * self.scale


def steps_of(model, count):
    """Train the model by this many steps; yields after each."""
    optimizer = optim.SGD(model.parameters(), 0.05)
    for step in range(count):
        optimizer.zero_grad()
        mt.sum(model(np.random.default_rng(step).standard_normal((4, 5))) ** 2).backward()
        optimizer.step()
        yield step


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("whole", [True, False])
def test_inside_of_fully_shard_a_model_is_captured_once(stage, whole):
    """The pieces that others have stepped are gathered into the same arrays, a number among them."""
    def trained(compiled):
        mt.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), Scaled(7), nn.Linear(7, 2)).to(np.float64)
        if whole and compiled:
            made = model = mt.compile(model, emit="numpy")
        elif compiled:
            made = model._modules["2"] = mt.compile(model[2], emit="numpy")
        model = fully_shard(model, stage=stage)
        for _ in steps_of(model, 3):
            assert not compiled or (made.compiled.captures, len(made.breaks)) == (1, 0)
        return full_state_dict(model)
    ours, theirs = trained(True), trained(False)
    assert list(ours) == list(theirs)
    for name in ours:
        np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("way, n, emit", [
    ("plain", 1, "numpy"), ("plain", 2, None), ("checkpoint", 1, "numpy"), ("checkpoint", 2, "numpy"),
    ("exact", 2, None),     # None: in C where there is a compiler
    ("dropout", 2, "numpy"), ("kept", 2, "numpy"), ("near", 4, "numpy"), ("frozen", 2, "numpy")])
def test_units_of_stage_3_are_compiled(way, n, emit):
    """Captured once (a checkpointed one for either pass), though their values come to other places each time; what is
    sent is what ops one by one send, and what is kept theirs, or less (of a block that runs again 3 % more)."""
    found = crews.call(CASES + "units_of_stage_3", n, args=(way, True, emit))
    for ours, theirs in zip(found, crews.call(CASES + "units_of_stage_3", n, args=(way, False)), strict=True):
        losses, state, calls, sent, kept, captures, breaks = ours
        np.testing.assert_allclose(losses, theirs[0], rtol=1e-12)
        assert state.keys() == theirs[1].keys()
        for name in state:
            np.testing.assert_allclose(state[name], theirs[1][name], rtol=0, atol=1e-11, err_msg=name)
        assert (calls, sent) == theirs[2:4] and kept <= theirs[4] * (1.03 if way == "checkpoint" else 1)
        assert captures == [2 if way == "checkpoint" else 1] * 3 and not breaks


def test_a_capture_of_what_runs_again_sends_nothing():
    """So ranks may capture at different times, where their rows aren't equally many."""
    wanted = crews.call(CASES + "captured_at_different_times", 2, (False,))
    for ours, theirs in zip(crews.call(CASES + "captured_at_different_times", 2), wanted, strict=True):
        assert list(ours) == list(theirs) and len(ours) == 8
        for name in ours:
            np.testing.assert_allclose(ours[name], theirs[name], rtol=0, atol=1e-12, err_msg=name)


def test_units_of_stage_3_that_are_compiled_have_the_same_bits_on_any_ranks():
    states = [crews.call(CASES + "units_of_stage_3", n, args=("exact",))[0][1] for n in (1, 2, 4)]
    assert len(states[0]) > 10
    for other in states[1:]:
        assert all((other[name] == states[0][name]).all() for name in states[0])


def test_what_overwrites_parameters_before_backward_is_seen_in_stage_3():
    model = fully_shard(nn.Sequential(*(mt.compile(nn.Linear(4, 4, dtype=np.float64), "numpy") for _ in range(3))))
    optimizer = optim.SGD(model.parameters(), 0.1)
    x = np.random.default_rng(0).standard_normal((2, 4))
    mt.sum(model(x) ** 2).backward()
    late = mt.sum(model(x) ** 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="as they were in forward, but SGD.step has overwritten them since"):
        late.backward()


def test_around_units_of_stage_3_it_says_what_to_compile():
    made = mt.compile(nn.Sequential(nn.Linear(5, 4, dtype=np.float64), nn.Linear(4, 2, dtype=np.float64)))
    model = fully_shard(made, stage=3)
    with pytest.warns(UserWarning, match="runs uncompiled: a Linear has forward hooks.* stage 3 .*: compile the mod"):
        list(steps_of(model, 1))
    with warnings.catch_warnings():
        warnings.simplefilter("error")      # it is told once
        list(steps_of(model, 1))
    (reason, calls), = made.breaks.items()
    assert calls == 2 and "fully_shard" in reason
    other = mt.compile(Hooked(nn.Linear(5, 2, dtype=np.float64)))
    with pytest.warns(UserWarning, match="runs uncompiled: a Linear has forward hooks$"):
        other(np.ones((3, 5)))


class Hooked(nn.Module):
    """Around a module with a hook of somebody's own."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        inner.register_forward_hook(lambda module, inputs, output: None)

    def forward(self, x):
        return self.inner(x)


@pytest.mark.parametrize("packed", ["rounded", "elsewhere"])
def test_what_a_compiled_function_keeps_goes_through_hooks(packed):
    """As what its ops keep: through float16 and back, or into memory that hooks know."""
    memory = []

    def pack(array):
        memory.append(array.astype(np.float16) if packed == "rounded" else array.copy())
        return len(memory) - 1

    def unpack(place):
        return memory[place].astype(np.float64)

    def gradients(compiled):
        mt.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 5, dtype=np.float64), nn.Tanh())
        made = mt.compile(model, "numpy") if compiled else model
        x = mt.tensor(np.random.default_rng(2).standard_normal((3, 6)), requires_grad=True)
        with mt.saved_tensors_hooks(pack, unpack):
            y = made(x)
        for array in model.parameters():
            array.data[...] = 7.0       # what counts is what was packed
        mt.sum(y * y).backward()
        assert not compiled or (made.compiled.captures, made.breaks) == (1, {})
        return [x.grad.numpy(), *(p.grad.numpy() for p in model.parameters())]
    ours, before = gradients(True), len(memory)
    assert before > 1
    for a, b in zip(ours, gradients(False), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-3 if packed == "rounded" else 1e-14, atol=1e-3 * (packed == "rounded"))
