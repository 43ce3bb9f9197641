"""mt.compile(optimizer): loops in C whose parameters and state have the bits of NumPy's tiles."""

import copy
import pickle

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, nn, optim
from minitorch_dist.compiler import cc, updates
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from tests.crews import crews

pytestmark = pytest.mark.skipif(cc.compiler() is None, reason="there is no C compiler")
SHAPES = (40, 7), (17_000,), (), (3, 5, 2), (0, 4), (33,)      # of which one is longer than a tile
KINDS = [("SGD", {"lr": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
         ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}), ("Adam", {"weight_decay": 0.1}),
         ("Adam", {"amsgrad": True, "maximize": True}), ("AdamW", {"lr": 0.01, "betas": (0.0, 0.5)}),
         ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.01}), ("LAMB", {}), ("LARS", {"lr": 0.1}),
         ("AdamWScheduleFree", {"warmup": 2, "weight_decay": 0.1}), ("Lion", {"lr": 0.01, "weight_decay": 0.1})]


@pytest.fixture(autouse=True)
def short_ones_too(monkeypatch):
    """Loops for all lengths."""
    monkeypatch.setattr(updates, "SHORT", 0)


def params_of(dtype):
    rng = np.random.default_rng(0)
    return [mt.tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True) for shape in SHAPES]


def both(kind, options, dtype="float32"):
    """[(parameters, optimizer)], the second one compiled."""
    found = []
    for _ in range(2):
        params = params_of(dtype)
        groups = [{"params": params[:2]}, {"params": params[2:], "lr": 0.03}]
        found.append((params, getattr(optim, kind)(groups, **options)))
    assert mt.compile(found[1][1]) is found[1][1]
    return found


def give_gradients(params, step, resting=()):
    rng = np.random.default_rng(step)
    for i, p in enumerate(params):
        g = rng.standard_normal(p.shape).astype(p.dtype)
        if step == 1 and p.size > 20:
            g.reshape(-1)[:4] = 0.0, -0.0, 1e-7, 3e4     # the least and the greatest of float16
        p.grad = None if i in resting else mt.tensor(g)


def assert_same_bits(found):
    (params, plain), (others, compiled) = found
    for p, q in zip(params, others, strict=True):
        assert p.data.tobytes() == q.data.tobytes()
    for a, b in zip(plain.state_dict()["state"], compiled.state_dict()["state"], strict=True):
        for key in a:
            assert a[key].tobytes() == b[key].tobytes(), key


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("kind, options", KINDS, ids=str)
def test_parameters_and_state_have_the_bits_of_tiles(kind, options, dtype):
    found = both(kind, options, dtype)
    for step in range(5):
        for params, optimizer in found:
            give_gradients(params, step, resting=[(), (1,), (0, 3)][step % 3])
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + step)
            optimizer.step(grad_scale=4.0 if step == 2 else None, found_inf=float(step == 3))
    assert_same_bits(found)
    made = found[1][1].loops.functions
    assert 0 < len(made) <= 3       # of rates and steps no others: a decayed group is one, and a scaled step


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_go_the_same_way(value):
    found = both("Adam", {"amsgrad": True, "weight_decay": 0.1})
    for step in range(3):
        for params, optimizer in found:
            give_gradients(params, step)
            params[1].grad.data[5 + step] = value
            with np.errstate(all="ignore"):
                optimizer.step()
    assert_same_bits(found)
    assert np.isnan(found[1][0][1].data).any()


@pytest.mark.parametrize("dtype, options", [("float16", {}), ("float32", {"state_bits": 8})])
def test_what_it_cannot_loop_over_is_updated_as_before(dtype, options):
    found = both("Adam", options, dtype)
    for step in range(3):
        for params, optimizer in found:
            give_gradients(params, step)
            with np.errstate(all="ignore"):
                optimizer.step()
    assert_same_bits(found)
    assert not found[1][1].loops.functions


def test_of_several_combined_those_that_have_an_update():
    def make():
        params = params_of("float32")
        return params, optim.Combined(optim.Muon(params[:1]), optim.AdamW(params[1:]))
    found = [make(), make()]
    mt.compile(found[1][1])
    for step in (0, 2):
        for params, optimizer in found:
            give_gradients(params, step)
            optimizer.step()
    for p, q in zip(*(params for params, _ in found), strict=True):
        assert p.data.tobytes() == q.data.tobytes()
    muon, adam = found[1][1].optimizers
    assert muon.loops is None and adam.loops.functions


def test_short_ones_are_left_to_numpy(monkeypatch):
    monkeypatch.setattr(updates, "SHORT", 17_000)
    found = both("Adam", {})
    for params, optimizer in found:
        give_gradients(params, 0)
        optimizer.step()
    assert_same_bits(found)
    assert len(found[1][1].loops.functions) == 1    # the first group's, which has one that is long


@pytest.mark.parametrize("kind", ["Muon", "NorMuon", "Dion", "Dion2", "Adafactor"])
def test_steps_of_whole_matrices_are_refused(kind):
    with pytest.raises(TypeError, match=f"{kind} has no update of single elements"):
        mt.compile(getattr(optim, kind)(params_of("float32")[:1]))


def test_emit_is_c_or_nothing(monkeypatch):
    optimizer = optim.SGD(params_of("float32"))
    with pytest.raises(ValueError, match="emit='triton' of an optimizer"):
        mt.compile(optimizer, emit="triton")
    monkeypatch.setattr(cc, "compiler", lambda: None)
    assert mt.compile(optimizer).loops is None      # its tiles, without a compiler
    with pytest.raises(RuntimeError, match="needs a C compiler"):
        mt.compile(optimizer, emit="c")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_copies_and_saved_state_go_on():
    found = both("Adam", {})
    for params, optimizer in found:
        give_gradients(params, 0)
        optimizer.step()
    saved = pickle.loads(pickle.dumps(found[1][1].state_dict()))
    again = params_of("float32"), None
    groups = [{"params": again[0][:2]}, {"params": again[0][2:], "lr": 0.03}]
    again = again[0], mt.compile(optim.Adam(groups))
    again[1].load_state_dict(saved)
    with mt.no_grad():
        for p, q in zip(again[0], found[1][0], strict=True):
            p[...] = q.data
    assert isinstance(copy.deepcopy(found[1][1].loops), updates.Loops)
    for params, optimizer in (*found, again):
        give_gradients(params, 1)
        optimizer.step()
    assert_same_bits(found)
    assert_same_bits([found[0], again])


class Own(optim.SGD):
    """A user's, with an update of its own."""

    def __init__(self, params, step):
        super().__init__(params)
        self.own = step

    def update(self, p, g, state, group, step):
        self.own(self, p, g)


def test_an_optimizer_of_ones_own_is_compiled_too():
    def signs(self, p, g):      # of g, by what there is: g / |g|
        t = self.scratch(p)
        np.absolute(g, out=t)
        t += 1e-30
        np.divide(g, t, out=t)
        p -= 0.01 * t
    found = [(params := params_of("float32"), Own(params, signs)) for _ in range(2)]
    mt.compile(found[1][1])
    for params, optimizer in found:
        give_gradients(params, 0)
        optimizer.step()
    assert_same_bits(found)
    assert found[1][1].loops.functions


@pytest.mark.parametrize("step, said", [
    (lambda self, p, g: np.exp(g, out=p), "asks for np.exp, which is no part of a loop"),
    (lambda self, p, g: np.add.reduce(g), "asks for np.add"),
    (lambda self, p, g: np.multiply(g, np.ones(3), out=p), "works with a ndarray"),
    (lambda self, p, g: np.multiply(g, np.float64(2), out=p), "works with a float64"),
    (lambda self, p, g: p.__setitem__(slice(3), g), "writes into a part of an array"),
])
def test_what_is_no_part_of_a_loop_is_named(step, said):
    params = params_of("float32")
    optimizer = mt.compile(Own(params, step))
    give_gradients(params, 0)
    with pytest.raises(TypeError, match=said):
        optimizer.step()


def test_a_working_array_is_written_first():
    def reads(self, p, g):
        p += self.scratch(p)
    params = params_of("float32")
    optimizer = mt.compile(Own(params, reads))
    give_gradients(params, 0)
    with pytest.raises(ValueError, match="reads a scratch array before it has written it"):
        optimizer.step()


def on_ranks(stage):
    """Whether a model divided over the ranks has the bits of the same one, compiled or not."""
    found, updates.SHORT = [], 0
    for compiled in (False, True):
        mt.manual_seed(1)
        model = nn.mlp((9, 13))
        model = fully_shard(model, comm.world(), stage) if stage else DistributedDataParallel(model, comm.world())
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        optimizer = mt.compile(optimizer) if compiled else optimizer
        rng = np.random.default_rng(comm.world().rank)
        for _ in range(3):
            model.zero_grad()
            (model(rng.standard_normal((4, 784)).astype(np.float32)) ** 2).sum().backward()
            optimizer.step()
        found.append([np.array(p.data) for p in model.parameters()])
    return all(np.array_equal(a, b) for a, b in zip(*found, strict=True)), len(optimizer.loops.functions)


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_pieces_of_a_divided_model_too(stage):
    for same, loops in crews.call("tests.compiler.test_updates:on_ranks", 2, args=(stage,)):
        assert same and loops


def test_the_loop_of_sgd():
    asked = updates.Asked(np.dtype("float32"))
    p, g = (updates.Element(asked, value) for value in asked.inputs(2))
    t = asked.scratch(0)
    np.multiply(g, 0.1, out=t)
    p -= t
    assert updates.source(asked.dtype, 2, asked.steps, ((0, p.value),)) == """\
void update(long n, const double *s, float *restrict a0, float *restrict a1) {
  const float s0 = s[0];
  for (long i = 0; i < n; i++) {
    const float v0 = a0[i];
    const float v1 = a1[i];
    const float v2 = v1 * s0;
    const float v3 = v0 - v2;
    a0[i] = v3;
  }
}
"""
