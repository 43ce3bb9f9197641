"""Exact mode: the same bits on 1, 2, 4 and 8 ranks."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn
from minitorch_dist.parallel import BinaryCounter, DistributedDataParallel, fully_shard
from minitorch_dist.parallel.exact import check_shape
from tests.crews import crews, threads

from . import cases, plain

CASES = "tests.parallel.cases:"
MPICH_RING = {   # sums in an order that isn't the tree's; MPICH's usual one happens to be. Other MPIs don't look at it
    "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring", "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM": "tsp_ring",
    "MPIR_CVAR_DEVICE_COLLECTIVES": "none"}


@pytest.fixture(scope="module")
def seen():
    """{number of ranks: [what each rank saw]}."""
    return {n: crews.call(CASES + "exact_curves", n, limit=120, env=MPICH_RING | threads(n)) for n in (1, 2, 4, 8)}


def test_parameters_are_equal_to_the_last_bit_on_any_number_of_ranks(seen):
    alone, = seen[1]
    assert alone["outside the window"] == alone["momentum"]
    for name in (*cases.EXACT, "outside the window", "another seed", "last batch of 3 rows"):
        assert len(set(alone[name])) == cases.EXACT_STEPS
        for n, everyone in seen.items():
            for rank, of_rank in enumerate(everyone):
                same = [a == b for a, b in zip(of_rank[name], alone[name], strict=True)]
                assert all(same), f"{name}: rank {rank} of {n} leaves the curve in step {same.index(False) + 1}"


def test_batches_were_uneven_and_smaller_than_the_micro_shards():
    assert plain.SAMPLES % cases.EXACT_BATCH == 8 and cases.EXACT_STEPS > 2 * (plain.SAMPLES // cases.EXACT_BATCH + 1)
    assert plain.SAMPLES % 10 == 3 and cases.EXACT_STEPS > -(-plain.SAMPLES // 10)


def test_other_settings_give_other_bits(seen):
    """Equal hashes mean something only if what should change them does."""
    alone, = seen[1]
    ends = [alone[name][-1] for name in (*cases.EXACT, "another seed", "last batch of 3 rows")]
    assert len(set(ends)) == len(ends)


def test_the_equal_bits_are_those_of_the_right_gradient(seen):
    x, labels = plain.dataset()
    _, wanted = plain.loss_and_gradient(plain.initial(), x[:13], labels[:13], 13)
    for n, everyone in seen.items():
        for of_rank in everyone:
            for repeat in range(2):
                for got, want in zip(of_rank["gradient", repeat], wanted, strict=True):
                    np.testing.assert_allclose(got, want, rtol=0, atol=1e-15)
                calls = [of_rank["calls", repeat, v] for v in range(8 // n)]
                assert calls == [0] * (8 // n - 1) + [1]        # the last micro-shard's backward sums, once


def test_three_ranks_and_other_misuse_raise():
    for said in crews.call(CASES + "exact_misuse", 3):
        assert "not on 3" in said["8 micro-shards"] and "power of two; got 6" in said["6 micro-shards"]
    for said in crews.call(CASES + "exact_misuse", 2):
        assert said["8 micro-shards"] == "" and "got 6" in said["6 micro-shards"]
        assert "not on 2" in said["1 micro-shard"]
        assert "micro-shards by itself" in said["no_sync"]
        assert "zero_grad" in said["summed twice"]


@pytest.mark.parametrize(("micro_shards", "size", "fits"), [
    (8, 1, True), (8, 2, True), (8, 8, True), (1, 1, True), (16, 4, True),
    (8, 16, False), (8, 3, False), (6, 2, False), (6, 3, False), (0, 1, False), (-2, 1, False), (12, 4, False)])
def test_which_shapes_fit(micro_shards, size, fits):
    if fits:
        check_shape(micro_shards, size)
    else:
        with pytest.raises(ValueError, match="power of two"):
            check_shape(micro_shards, size)


# ---------------------------------------------------------------- the tree

def balanced(parts):
    if len(parts) == 1:
        return parts[0]
    return balanced(parts[:len(parts) // 2]) + balanced(parts[len(parts) // 2:])


def leaves(n, dtype, size=1001, seed=0):
    """Values of widely different magnitudes, so that the order of additions shows."""
    random = np.random.default_rng([n, seed])
    return list((random.standard_normal((n, size)) * 10.0 ** random.integers(-4, 5, (n, size))).astype(dtype))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("n", [1, 2, 4, 8, 64])
def test_the_counter_is_the_recursive_tree(n, dtype):
    arrays = leaves(n, dtype)
    total, kept = cases.counter_sum(arrays)
    assert total.dtype == dtype and total.tobytes() == balanced(arrays).tobytes()
    assert kept <= n.bit_length()       # log2(n) + 1 buffers
    if n >= 4:
        assert total.tobytes() != sum(arrays[1:], arrays[0]).tobytes()      # the data can tell the tree from a row
        for r in (2, 4):    # subtrees on r ranks, then the tree over the ranks
            parts = [cases.counter_sum(arrays[k * n // r:(k + 1) * n // r])[0] for k in range(r)]
            assert cases.counter_sum(parts)[0].tobytes() == total.tobytes()


def test_the_counter_starts_again_and_keeps_its_sums_apart_from_its_inputs():
    counter = BinaryCounter()
    for seed in range(3):
        arrays = leaves(8, np.float32, seed=seed)
        for a in arrays:
            scratch = a.copy()
            counter.add(scratch)
            scratch[...] = np.nan       # the caller's array is the caller's again
        assert counter.total().tobytes() == balanced(arrays).tobytes()


@pytest.mark.parametrize("n", [0, 3, 6, 7])
def test_a_number_that_leaves_no_tree_raises(n):
    with pytest.raises(RuntimeError, match=f"^{n} arrays"):
        cases.counter_sum(leaves(n, np.float32, size=4))


class Drawing(nn.Module):
    """draw(a layer's output)."""

    def __init__(self, draw):
        super().__init__()
        self.layer, self.draw = nn.Linear(4, 3), draw

    def forward(self, x):
        return self.draw(self.layer(x))


@pytest.mark.parametrize("wrap", [DistributedDataParallel, fully_shard])
def test_random_numbers_that_would_depend_on_the_ranks_are_refused(wrap):
    """Ranks that draw from the default stream draw the same numbers for other samples."""
    x = np.ones((6, 4))
    for draw in (lambda h: mt.dropout(h, 0.5), lambda h: h + mt.randn(*h.shape)):
        model = wrap(Drawing(draw), exact=True, micro_shards=1)
        with pytest.raises(RuntimeError, match="exact mode: these random numbers .*random_scope"):
            model(x)
        mt.randn(2)             # no more refused
        model.eval()            # as for samples from a model
        model(x)
        wrap(Drawing(draw))(x)
    with pytest.raises(RuntimeError, match="random_scope"), backend.random_scope(0, 0, 6, (0, 6)):
        wrap(Drawing(lambda h: h + backend.next_stream().standard_normal(h.shape)), exact=True,
             micro_shards=1)(x)     # which no scope keys
    model = wrap(Drawing(lambda h: mt.dropout(h, 0.5)), exact=True, micro_shards=1)
    with backend.random_scope(0, 0, 6, (0, 6)):
        whole = model(x).numpy()
    with backend.random_scope(0, 0, 6, (2, 6)):
        assert np.array_equal(model(x[2:]).numpy(), whole[2:]) and 0 < (whole == 0).sum() < whole.size


def test_what_drops_nothing_draws_nothing():
    model = DistributedDataParallel(Drawing(lambda h: mt.dropout(h, 0.0)), exact=True, micro_shards=1)
    drawn = backend.random_state.draws
    x = np.ones((6, 4))
    np.testing.assert_array_equal(model(x).numpy(), model.module.layer(x).numpy())
    assert backend.random_state.draws == drawn


def test_a_compiled_wrapper_refuses_them_as_well():
    """The wrapper is in the graph, and isn't called again; a compiled model inside of it may be called without it."""
    x = mt.tensor(np.ones((6, 4)))
    model = DistributedDataParallel(Drawing(lambda h: mt.dropout(h, 0.5)), exact=True, micro_shards=1)
    compiled = mt.compile(model)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="exact mode: these random numbers .*random_scope"):
            compiled(x)
        with backend.random_scope(0, 0, 6, (0, 6)):
            found = compiled(x).numpy()
        with backend.random_scope(0, 0, 6, (0, 6)):
            assert np.array_equal(found, model(x).numpy())
    layer = mt.compile(Drawing(lambda h: mt.dropout(h, 0.5)))
    model = DistributedDataParallel(layer, exact=True, micro_shards=1)
    with backend.random_scope(0, 0, 6, (0, 6)):
        model(x)
    with pytest.raises(RuntimeError, match="random_scope"):
        model(x)
    layer(x)
