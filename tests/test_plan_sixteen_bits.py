"""Plans of activations in 16 bits, which no ledger of this library counts: what each op takes, 2 bytes a number.

For W the inputs of matrices stay, and the cotangents of what they give. Before that it is the inputs of norms and of
GELU or SwiGLU, and attention's queries, keys, values and softmax. What Korthikanti et al. 2022 count: test_plan.py.
"""

from dataclasses import replace

import pytest

from minitorch_dist.nn.windows import DELTA, LINEAR
from minitorch_dist.plan import GPT, Job
from minitorch_dist.plan.activations import activations

# Without dropout, of whose masks the paper tells: 6 samples of 16 positions, 4 heads of 8 features.
BATCH, TIME, HEADS, WIDTH, VOCABULARY = 6, 16, 4, 32, 50
TOKENS, SCORES = BATCH * TIME, BATCH * HEADS * TIME ** 2
MODELS = {
    "gpt": GPT(1, WIDTH, HEADS, VOCABULARY, TIME, dropout=False, hidden=60),
    "llama": GPT(1, WIDTH, HEADS, VOCABULARY, TIME, dropout=False, kv_heads=2, hidden=60, family="llama"),
    "deepseek": GPT(1, WIDTH, HEADS, VOCABULARY, TIME, dropout=False, hidden=60, family="deepseek", nope_size=6,
                    rope_size=4, value_size=5, kv_rank=12, q_rank=14)}
# What stands between a block's matrices: the sum of what attention makes of x, and of what is made of its latents.
MADE = {"gpt": 3 * 32, "llama": 2 * 32, "deepseek": 4 * (2 * 10 + 5)}
BROUGHT_DOWN = {"gpt": 0, "llama": 0, "deepseek": 12 + 14 + 4}


def block(model, **more):
    """What is kept of one block in the middle of a pipeline."""
    job = Job(model, **{"batch": BATCH, "time": model.context} | more)
    return activations(job, (range(1), False, False), job.samples)


def gates(family):
    return 1 if family == "gpt" else 2


def of_matrices(model, features=lambda shape: sum(shape)):
    """Of a token, of all matrices of a block."""
    return sum(features(shape) for name, shape in model.block(1, window=model.window) if len(shape) == 2)


@pytest.mark.parametrize("family", MODELS)
def test_a_block(family):
    """Two norms and four to six matrices, whose inputs the latents are, too."""
    model = MODELS[family]
    kept, late = block(model).until_backward, block(model).late
    inputs = of_matrices(model, lambda shape: shape[1])
    assert kept == 2 * TOKENS * (2 * WIDTH + inputs + BROUGHT_DOWN[family] + MADE[family] + gates(family) * 60) + \
        2 * SCORES
    assert late == 2 * TOKENS * of_matrices(model)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_ring_keeps_a_sum_for_each_row_of_scores(family):
    """Of twice as many positions on two ranks; the result is the projection's input."""
    model = replace(MODELS[family], context=2 * TIME)
    alone, shared = block(MODELS[family]), block(model, cp=2)
    assert alone.until_backward - shared.until_backward == 2 * SCORES - 4 * TOKENS * HEADS
    assert alone.late == shared.late


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("shared", [0, 2])
def test_a_mixture_of_experts(family, shared):
    """Each token's rows by two of four experts, what they answer, to be weighted, and the router's softmax, in 32 bits;
    beside each token's part of the auxiliary loss, which goes along."""
    plain = MODELS[family]
    model = replace(plain, experts=4, top_k=2, capacity_factor=None, shared_experts=shared)
    mlp = (WIDTH + (1 + gates(family)) * 60)        # of a row: its input, between the matrices and behind them
    found, without = block(model), block(plain)
    assert found.until_backward - without.until_backward == 2 * TOKENS * (
        1 + (2 - 1) * mlp + WIDTH + 2 * 4 + 2 * WIDTH + shared * (mlp - WIDTH))
    both = mlp + WIDTH                  # and what comes back
    assert found.late - without.late == 2 * TOKENS * (
        1 + (2 - 1) * both + WIDTH + 4 + (shared > 0) * WIDTH + shared * (both - 2 * WIDTH))


@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("family", ["gpt", "llama"])
@pytest.mark.parametrize("count", [1, 3])
def test_linear_attention(family, count, norms):
    """In stretches of 16 positions. Of each: what it makes of x, and a gate; decays in 32 bits; how much is left from
    each position to each, and of what was before; scores, and what is left of them; of several also keys and queries
    as they are left, a state each, and those before each and behind the last. Then the result, and its norm's."""
    time = 16 * count
    usual = replace(MODELS[family], context=time, kv_heads=None)
    model = replace(usual, window=LINEAR, qk_norm=norms)
    found, plain = block(model), block(usual)
    tokens, stretches = BATCH * time, BATCH * HEADS * count
    several = count > 1
    states = stretches * (16 * 17 + 2 * 16 * 16 + several * 2 * 16 * 8) + several * BATCH * HEADS * 2 * (count + 1) * 64
    assert found.until_backward - plain.until_backward == 2 * (
        tokens * (4 * WIDTH + HEADS + 2 * HEADS + 2 * WIDTH + norms * 2 * WIDTH - 3 * WIDTH) + states
        - BATCH * HEADS * time ** 2)
    assert found.late == 2 * tokens * of_matrices(model)


def test_the_delta_rule():
    """Of one stretch of 2 positions, whose inverse is a matrix of 2 · 2: beside what linear attention keeps, keys
    normalised and of unit length, rates in 32 bits, how each replaces, keys with each other."""
    delta, linear = (replace(MODELS["gpt"], context=2, window=kind) for kind in (DELTA, LINEAR))
    rates = HEADS       # which are projected, too
    heads = BATCH * HEADS
    keys = 3 * WIDTH + 3 * HEADS - 2 * HEADS + rates
    assert block(delta).until_backward - block(linear).until_backward == 2 * (
        BATCH * 2 * keys + heads * (2 * 2 * 8 + 2 * 2 + 2 * 2 + 2 * 8))
    assert block(delta).late == 2 * BATCH * 2 * of_matrices(delta)


@pytest.mark.parametrize("family", MODELS)
def test_the_output_layer_and_a_further_depth(family):
    """Scores in 32 bits; of tiles the greatest of each row and its sum. A depth of one position less puts two norms'
    results together, whose inputs are the embeddings and features that are kept already."""
    job = Job(replace(MODELS[family], tied=False), batch=BATCH, time=TIME)

    def last(job):
        return activations(job, (range(1), False, True), BATCH)
    one, ends = block(job.model), last(job)
    tiles = last(replace(job, tiled_loss=True))
    assert ends.until_backward - one.until_backward == 2 * TOKENS * 2 * WIDTH + 4 * TOKENS * VOCABULARY
    assert ends.late - one.late == 2 * TOKENS * (WIDTH + VOCABULARY)
    assert tiles.until_backward - one.until_backward == TOKENS * (2 * 2 * WIDTH + 8)
    assert tiles.late - one.late == TOKENS * (2 * WIDTH + 8 + 4)
    ahead = last(replace(job, model=replace(job.model, predict=2)))
    shorter = replace(job, time=TIME - 1)
    assert ahead.until_backward - ends.until_backward == last(shorter).until_backward + 2 * BATCH * 15 * 3 * WIDTH
