"""How experts are chosen and what stands beside them: scores, biases, nodes, gated and shared experts; against loops in
plain Python and finite differences."""

import copy
import itertools
import math

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn
from minitorch_dist.nn import moe
from minitorch_dist.nn.loss import log_sigmoid

random = np.random.default_rng


def layer(size=5, hidden=7, experts=6, dtype=np.float64, **arguments):
    mt.manual_seed(3)
    return nn.MoE(size, hidden, experts, dtype=dtype, std=0.5, **{"balance": 0} | arguments)


# ---------------------------------------------------------------- the choice

def scores_of(row, score):
    if score == "sigmoid":
        return [1 / (1 + math.exp(-z)) for z in row]
    p = [math.exp(z - max(row)) for z in row]
    return [each / sum(p) for each in p]


def best(numbers, k):
    return sorted(range(len(numbers)), key=lambda i: (-numbers[i], i))[:k]


def chosen(row, k, score, bias, nodes, scale):
    """[(expert, gate)] of one token, the best first."""
    scores = scores_of(row, score)
    wanted = [s + b for s, b in zip(scores, bias, strict=True)]
    allowed = range(len(row))
    if nodes is not None:
        count, most = nodes
        size = len(row) // count
        each = math.ceil(k / most)
        sums = [sum(sorted(wanted[n * size:(n + 1) * size])[::-1][:each]) for n in range(count)]
        allowed = [e for e in allowed if e // size in best(sums, most)]
    experts = [allowed[i] for i in best([wanted[e] for e in allowed], k)]
    whole = sum(scores[e] for e in experts) if k > 1 else 1
    return [(e, scale * scores[e] / whole) for e in experts]


def cases():
    for i, (score, k, nodes, biased) in enumerate(itertools.product(
            ("softmax", "sigmoid"), (1, 2, 3), (None, (3, 2), (2, 1), (6, 3), (1, 1)), (False, True))):
        random_ = random([7, i])
        logits = random_.standard_normal((2, 5, 6)) * 3
        if i % 3 == 0:
            logits = np.round(logits)       # with ties
        bias = (np.round(random_.standard_normal(6) * 8) / 16).astype(np.float32) if biased else None
        yield logits, k, score, bias, nodes, (1.0, 2.5)[i % 2]


def test_routing_is_that_of_a_slow_loop():
    moved, bounded = 0, 0
    for logits, k, score, bias, nodes, scale in cases():
        found = moe.route(logits, k, 3, score, bias, nodes, scale)
        taken = np.zeros((2, 6), int)
        wanted = [[chosen(row, k, score, [0.0] * 6 if bias is None else bias.tolist(), nodes, scale) for row in group]
                  for group in logits.tolist()]
        for choice, g, s in itertools.product(range(k), range(2), range(5)):
            expert, gate = wanted[g][s][choice]
            assert (found.expert[g, s, choice], found.slot[g, s, choice]) == (expert, taken[g, expert])
            assert abs(found.gates[g, s, choice] - gate) < 1e-14
            taken[g, expert] += 1
        assert found.load.tolist() == taken.sum(0).tolist()
        plain = moe.route(logits, k, 3, score).expert
        moved += bias is not None and nodes is None and (plain != found.expert).any()
        bounded += bias is None and nodes is not None and (plain != found.expert).any()
    assert moved == bounded == 6       # where a token may go to fewer nodes than it has choices


def test_sigmoid_scores_neither_overflow_nor_underflow():
    logits = np.array([[[-800.0, -801, -802, 900], [800, 801, 0, -900], [-900, -900, -900, -900]]])
    assert np.array_equal(moe.route(logits, 2, 3, "sigmoid").expert, [[[3, 0], [1, 0], [0, 1]]])
    gates = moe.route(logits[..., :3], 2, 3, "sigmoid").gates
    np.testing.assert_allclose(gates, [[[1 / (1 + 1 / math.e), 1 / (1 + math.e)], [0.5, 0.5], [0.5, 0.5]]], rtol=1e-12)


def test_a_bias_changes_the_choice_and_nothing_else():
    model, x = layer(expert_bias=True, score="sigmoid", capacity_factor=3), random(1).standard_normal((4, 5))
    before = model.routing(x)[1]
    model.expert_bias[...] = [9, 0, 0, 0, 0, 0]
    y, _ = model(mt.tensor(x))
    after = model.routing(x)[1]
    assert (after.expert[..., 0] == 0).all() and not (before.expert == 0).any(-1).all()
    assert (after.expert[..., 1] == np.where(before.expert[..., 0] == 0, before.expert[..., 1], before.expert[..., 0])
            ).all()
    scores = 1 / (1 + np.exp(-(x @ model.router.weight.numpy().T)))
    picked = np.take_along_axis(scores[None], after.expert, -1)
    np.testing.assert_allclose(after.gates.numpy(), picked / picked.sum(-1, keepdims=True), rtol=1e-12)
    mt.sum(y * y).backward()
    assert "expert_bias" not in dict(model.named_parameters()) and model.router.weight.grad.numpy().any()


@pytest.mark.parametrize(("nodes", "k"), [((3, 1), 2), ((3, 2), 2), ((2, 1), 3), ((6, 2), 2)])
def test_a_token_visits_no_more_nodes_than_it_may(nodes, k):
    """The rows that go to the nodes, counted token by token; without a limit there are more."""
    logits = random(2).standard_normal((3, 20, 6))
    count, most = nodes
    found = {}
    for limit in (nodes, None):
        routing = moe.route(logits, k, 20, "sigmoid", None, limit)
        visited = [{int(e) * count // 6 for e in routing.expert[g, s]} for g in range(3) for s in range(20)]
        assert routing.visits(count).tolist() == [sum(n in each for each in visited) for n in range(count)]
        found[limit] = max(map(len, visited)), int(routing.visits(count).sum())
    assert found[nodes][0] == most and found[nodes][1] <= most * 60
    assert most >= k or found[None][1] > most * 60


# ---------------------------------------------------------------- the layer

def by_loops(model, x):
    """Each token (tokens, size) by itself through the experts that it chose, and the shared one, in float64."""
    w = {name: p.numpy().astype(np.float64) for name, p in model.named_parameters()}

    def expert(path, e, row):
        up = row @ w[f"{path}.up"][e]
        if f"{path}.gate" in w:
            gate = row @ w[f"{path}.gate"][e]
            return gate / (1 + np.exp(-gate)) * up @ w[f"{path}.down"][e]
        return 0.5 * up * (1 + np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up ** 3))) @ w[f"{path}.down"][e]
    bias = [0.0] * 6 if model.expert_bias is None else model.expert_bias.tolist()
    rows = []
    for row in x:
        pairs = chosen((w["router.weight"] @ row).tolist(), model.k, model.score, bias, model.nodes, model.route_scale)
        rows.append(sum(gate * expert("experts", e, row) for e, gate in pairs)
                    + (expert("shared", 0, row) if model.shared else 0))
    return np.array(rows)


@pytest.mark.parametrize("arguments", [
    {"mlp": "swiglu"}, {"shared": 2}, {"shared": 1, "mlp": "swiglu", "score": "sigmoid", "k": 3, "route_scale": 2.5},
    {"score": "sigmoid", "k": 1, "nodes": (3, 1), "expert_bias": True}], ids=lambda arguments: ", ".join(arguments))
def test_a_layer_is_what_each_token_does_by_itself(arguments):
    model = layer(capacity_factor=6 / arguments.get("k", 2), **arguments)
    if model.expert_bias is not None:
        model.expert_bias[...] = random(4).standard_normal(6) / 4
    x = random(3).standard_normal((2, 4, 5))
    np.testing.assert_allclose(model(x)[0].numpy().reshape(8, 5), by_loops(model, x.reshape(8, 5)), rtol=1e-11)


def test_parameters_of_gated_and_shared_experts():
    model = layer(mlp="swiglu", shared=3)
    assert {name: p.shape for name, p in model.named_parameters()} == {
        "router.weight": (6, 5), "experts.gate": (6, 5, 7), "experts.up": (6, 5, 7), "experts.down": (6, 7, 5),
        "shared.gate": (1, 5, 21), "shared.up": (1, 5, 21), "shared.down": (1, 21, 5)}
    mt.manual_seed(3)
    gpt = nn.GPT(11, 8, layers=2, heads=2, dim=32, mlp="swiglu", hidden=40, moe={"experts": 4, "shared": 1})
    for block in gpt.blocks:
        spread = {name: p.numpy().std() for name, p in block.mlp.named_parameters()}
        assert block.mlp.experts.gate.shape == (4, 32, 40)
        for part in ("experts", "shared"):
            assert abs(spread[f"{part}.up"] / 0.02 - 1) < 0.1 and abs(spread[f"{part}.down"] / 0.01 - 1) < 0.1


@pytest.mark.parametrize(("k", "score"), [(1, "softmax"), (2, "sigmoid")])
def test_derivatives_equal_finite_differences_to_second_order(k, score):
    """By tokens, router, gated and shared experts; of the answer and of each loss. Some choices are dropped."""
    model = layer(size=3, hidden=2, experts=4, k=k, mlp="swiglu", shared=1)
    names, weights = zip(*[(name, p.numpy()) for name, p in model.named_parameters()], strict=True)
    x, bias = random(5).standard_normal((6, 3)), np.array([0.2, 0.0, -0.1, 0.05])
    dropped = []

    def f(x, *weights):
        w = dict(zip(names, weights, strict=True))
        logits = mt.reshape(x @ w["router.weight"].T, (1, 6, 4))
        routing = moe.route(logits, k, 2 * k - 1, score, bias, (2, 1), 1.5)
        dropped.append(not routing.kept.all())

        def mlp(part, h):
            return mt.swiglu(h @ w[f"{part}.gate"], h @ w[f"{part}.up"]) @ w[f"{part}.down"]
        y = moe.combine(mlp("experts", moe.dispatch(x, routing)), routing) + mlp("shared", mt.reshape(x, (1, 6, 3)))[0]
        logs = moe.SCORES[score][1](logits)
        return y, moe.balance_loss(logs, routing), moe.sequence_balance_loss(mt.reshape(logs, (2, 3, 4)), k)
    mt.check_grads(f, [x, *weights])
    assert all(dropped)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_sequence_balance_is_its_definition(score):
    """Whatever is routed together, and however biases have moved the choice."""
    x = random(6).standard_normal((3, 4, 5)) * 2
    model = layer(score=score, sequence_balance=0.5, expert_bias=True, k=3, z=0.25)
    model.expert_bias[...] = [3, 0, 0, 0, 0, 0]
    z = x @ model.router.weight.numpy().T
    wanted = 0.25 * (np.log(np.exp(z).sum(-1)) ** 2).mean()
    for sequence in z.tolist():
        s = [scores_of(row, score) for row in sequence]
        for e in range(6):
            f = 6 / (3 * 4) * sum(e in best(row, 3) for row in s)
            p = sum(row[e] / sum(row) for row in s) / 4
            wanted += 0.5 * f * p / 3
    assert abs(model(x)[1].item() - wanted) < 1e-13
    rolled = np.array([[np.roll([2.0, 1, -1, 0.5, 0, -3], i) for i in range(6)]])
    assert abs(moe.sequence_balance_loss(moe.SCORES[score][1](rolled), 3) - 1) < 1e-14


# ---------------------------------------------------------------- what is counted

def test_only_training_is_counted_and_a_checkpoint_once():
    model, x = layer(expert_bias=True), mt.tensor(random(8).standard_normal((2, 6, 5)), requires_grad=True)
    load = model.routing(x)[1].load
    assert load.sum() == 24 and not model.load.any()        # looking at a routing counts nothing
    y, _ = mt.checkpoint(lambda x: model(x))(x)
    mt.sum(y).backward()
    assert (model.load == load).all()
    model(x)
    other = copy.deepcopy(model)
    other(x)
    assert (model.load == 2 * load).all() and (other.load == 3 * load).all()
    model.eval()
    model(x)
    assert (model.load == 2 * load).all()
    with pytest.warns(UserWarning, match="runs uncompiled"):
        mt.compile(other)(x)
    assert (other.load == 4 * load).all()
    assert "load" not in model.state_dict() and "expert_bias" not in layer().state_dict()


def test_biases_keep_their_dtype():
    model = layer(expert_bias=True)
    model.expert_bias[...] = np.arange(6) + np.float32(0.001)
    before = model.expert_bias.copy()
    model.to(mt.bfloat16)
    assert model.router.weight.dtype == mt.bfloat16
    assert model.expert_bias.dtype == np.float32 and (model.expert_bias == before).all()
    y, _ = model(random(1).standard_normal((4, 5)).astype(mt.bfloat16))
    assert y.dtype == mt.bfloat16 and model.load.sum() == 8


def test_it_says_what_it_is():
    model = layer(score="sigmoid", route_scale=2.5, nodes=(3, 2), expert_bias=True, shared=1, mlp="swiglu")
    assert repr(model) == """\
MoE(k=2, capacity_factor=1.25, score='sigmoid', route_scale=2.5, nodes=(3, 2), expert_bias=True
  (router): Linear(5, 6, bias=False)
  (experts): Experts(6, 5, 7, swiglu)
  (shared): Experts(1, 5, 7, swiglu)
)"""


@pytest.mark.parametrize(("arguments", "said"), [
    ({"mlp": "relu"}, "mlp='relu'; use 'gelu' or 'swiglu'"), ({"score": "tanh"}, "score='tanh'; use 'softmax' or"),
    ({"nodes": 3}, "nodes=3 must be two numbers"), ({"nodes": (3, 2, 1)}, "must be two numbers"),
    ({"shared": -1}, "shared=-1"), ({"nodes": (4, 1)}, "6 experts can't lie on 4 nodes equally"),
    ({"nodes": (0, 1)}, "on 0 nodes"), ({"nodes": (3, 4)}, "a token goes to 1 to 3 nodes, not to 4"),
    ({"nodes": (3, 0)}, "not to 0"), ({"nodes": (6, 1)}, "1 nodes have 1 of the 6 experts, too few for the k=2")])
def test_errors_say_what_to_do(arguments, said):
    with pytest.raises(ValueError, match=said):
        layer(**arguments)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_a_loss_of_weight_0_says_nothing_where_it_overflows(score):
    """In float16 log² Σ exp is inf from logits of 256 on, and 0 · inf would be NaN."""
    model = layer(score=score, dtype=np.float16)
    model.router.weight.data[...] = 100
    y, aux = model(mt.tensor(np.full((3, 5), 2, np.float16)))
    assert np.isfinite(y.numpy()).all() and aux.item() == 0


def test_a_z_loss_in_float16_is_weighted_before_it_is_rounded():
    """6 experts have logits of 1,000: log² of the sum is 1,003,587, of which a thousandth is a float16."""
    model = layer(dtype=np.float16, z=1e-3)
    model.router.weight.data[...] = 100
    aux = model(mt.tensor(np.full((3, 5), 2, np.float16)))[1]
    aux.backward()
    assert aux.dtype == np.float16 and abs(aux.item() - 1e-3 * (1000 + np.log(6)) ** 2) < 1
    np.testing.assert_allclose(model.router.weight.grad.numpy(), 2e-3 * (1000 + np.log(6)) * 2 / 6, rtol=2e-3)


def test_the_logarithm_of_a_sigmoid_has_its_derivatives_at_0():
    """Where a router of zeros, and a token of zeros, is. The second is -s · (1 - s)."""
    x = mt.tensor(np.array([0.0, -0.0, 0.7, -0.7, -900]))
    first = mt.grad(lambda x: mt.sum(log_sigmoid(x)))
    s = 1 / (1 + np.exp(-np.maximum(x.numpy(), -700)))
    np.testing.assert_allclose(first(x).numpy(), 1 - s, rtol=1e-14)
    np.testing.assert_allclose(mt.grad(lambda x: mt.sum(first(x)))(x).numpy(), -s * (1 - s), rtol=1e-14, atol=1e-300)
    np.testing.assert_allclose(log_sigmoid(x).numpy(), [*[-math.log(2)] * 2, *np.log(s[2:4]), -900], rtol=1e-14)


@pytest.mark.parametrize("nodes", [4, 5, 7, 0, -1])
def test_visits_of_nodes_that_cannot_share_the_experts(nodes):
    with pytest.raises(ValueError, match=f"6 experts can't lie on {nodes} nodes equally"):
        moe.route(random(9).standard_normal((2, 5, 6)), 2, 3).visits(nodes)


@pytest.mark.parametrize("weight", ["balance", "z", "sequence_balance"])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "float64"])
def test_auxiliary_losses_have_the_dtype_of_x(dtype, weight):
    """Else a pipeline's stages, between which the loss is a feature of x, would give another one than one process."""
    x = random(4).standard_normal((2, 3, 5)).astype(backend.as_dtype(dtype))
    y, aux = layer(dtype=x.dtype, **{weight: 0.1})(x)
    assert y.dtype == aux.dtype == x.dtype


def test_routing_by_an_unknown_score():
    with pytest.raises(ValueError, match="score='tanh'; use 'softmax' or 'sigmoid'"):
        moe.route(np.zeros((1, 2, 3)), 1, 2, "tanh")
