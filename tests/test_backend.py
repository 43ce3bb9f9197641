"""Random streams are functions of their key; a batch's random numbers don't depend on who holds which rows."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend
from minitorch_dist.backend import byte_range, random_rows, random_scope, random_state, stream
from minitorch_dist.backend.orders import counted_order

KEYS = [("shuffle", 0, 1), ("shuffle", 1, 0), ("shuffle", 10), ("shuffle", "0", 1), ("shuffle",), ("shuffl", "e", 0, 1),
        ("shuffle, 0", 1), (0, 1), (0, 1, 0), (-1,), (1,), (2 ** 70,), ("é", 3), ()]


@pytest.fixture(autouse=True)
def own_random_state():
    before = random_state.seed, random_state.draws, random_state.scope, random_state.path
    yield
    random_state.seed, random_state.draws, random_state.scope, random_state.path = before


# ---------------------------------------------------------------- streams

def test_a_key_gives_the_same_numbers_in_another_process():
    program = ("from minitorch_dist.backend import stream\n"
               f"for key in {KEYS!r}: print(stream(*key).random(5).tobytes().hex())")
    root = str(Path(backend.__file__).parents[2])
    there = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=root,
                           env={**os.environ, "PYTHONHASHSEED": "12345"}).stdout.split()
    assert there == [stream(*key).random(5).tobytes().hex() for key in KEYS]


def test_different_keys_give_different_and_uncorrelated_numbers():
    numbers = np.array([stream(*key).random(4000) for key in KEYS])
    correlations = np.corrcoef(numbers)[np.triu_indices(len(KEYS), 1)]
    assert np.abs(correlations).max() < 6 / np.sqrt(4000)      # six standard deviations


def test_streams_do_not_depend_on_what_was_drawn_before():
    first = stream("a", 1).random(7)
    stream("b", 2).random(1000)
    assert (stream("a", 1).random(7) == first).all()


@pytest.mark.parametrize("number", [np.int64(3), np.int32(3), np.uint8(3)])
def test_a_numpy_integer_is_the_same_key_as_the_integer(number):
    assert (stream("x", number).random(4) == stream("x", 3).random(4)).all()


@pytest.mark.parametrize("part", [0.5, None, (1, 2)])
def test_what_has_no_one_way_to_be_written_is_no_key(part):
    with pytest.raises(TypeError):
        stream("x", part)


def test_manual_seed_starts_the_default_stream_anew():
    backend.manual_seed(5)
    a, b = backend.next_stream().random(3), backend.next_stream().random(3)
    backend.manual_seed(np.int64(5))
    assert (backend.next_stream().random(3) == a).all() and (backend.next_stream().random(3) == b).all()
    assert (a != b).all()
    backend.manual_seed(6)
    assert (backend.next_stream().random(3) != a).all()


# ---------------------------------------------------------------- rows of a global batch

def cuts(count, ranks):
    """The same cut as the loader's, written down again."""
    edges = [count * r // ranks for r in range(ranks + 1)]
    return list(zip(edges, edges[1:], strict=False))


def draw(count, rows, shape, path=("net", "drop"), seed=3, step=11, micro_shards=8, calls=1):
    random_state.path = path
    with random_scope(seed, step, count, rows, micro_shards):
        return [random_rows(shape) for _ in range(calls)][-1]


@pytest.mark.parametrize("positions", [1, 5], ids=["one row a sample", "5 positions a sample"])
@pytest.mark.parametrize("count", [13, 29, 3])
@pytest.mark.parametrize("micro_shards", [1, 4, 8])
def test_the_union_over_ranks_is_what_one_rank_draws(count, positions, micro_shards):
    whole = draw(count, (0, count), (count * positions, 6), micro_shards=micro_shards)
    assert whole.dtype == np.float32 and whole.min() >= 0 and whole.max() < 1
    assert len(np.unique(whole)) > 0.99 * whole.size
    for ranks in (1, 2, 3, 4):
        parts = [draw(count, (lo, hi), ((hi - lo) * positions, 6), micro_shards=micro_shards)
                 for lo, hi in cuts(count, ranks) if hi > lo]
        assert (np.concatenate(parts) == whole).all(), ranks


@pytest.mark.parametrize("make", [mt.rand, mt.randn, lambda *shape: mt.dropout(mt.ones(*shape), 0.5)])
def test_what_a_model_draws_belongs_to_the_samples(make):
    def drawn(count, rows, *shape):
        random_state.path = ("net",)
        with random_scope(3, 11, count, rows):
            return make(*shape).numpy()
    whole = drawn(13, (0, 13), 13, 6)
    assert len(np.unique(whole)) == 2 or len(np.unique(whole)) == whole.size
    for ranks in (2, 3, 4):
        parts = [drawn(13, (lo, hi), hi - lo, 6) for lo, hi in cuts(13, ranks)]
        assert (np.concatenate(parts) == whole).all(), ranks
    assert (drawn(13, (0, 7), 4, 5) == drawn(13, (7, 13), 4, 5)).all()      # of no samples: the same on all ranks


def test_normal_numbers_are_normal_and_those_of_numpy():
    draw(13, (0, 13), (13,))        # sets the path
    with random_scope(0, 0, 8, (0, 8)):
        many = mt.randn(8, 50_000).numpy().astype(float)
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert abs((many ** power).mean() - moment) < 0.05
    mt.manual_seed(4)
    found = mt.randn(3, 5).numpy()
    mt.manual_seed(4)
    np.testing.assert_array_equal(found, backend.next_stream().standard_normal((3, 5), np.float32))


def test_micro_shards_one_at_a_time_are_what_one_rank_draws():
    whole = draw(13, (0, 13), (13, 4, 2), calls=2)
    assert (np.concatenate([draw(13, rows, (rows[1] - rows[0], 4, 2), calls=2) for rows in cuts(13, 8)]) == whole).all()


def test_rows_differ_with_seed_step_path_and_call():
    same = {"count": 13, "rows": (0, 13), "shape": (13, 7)}
    draws = [draw(**same), draw(**same, seed=4), draw(**same, step=12), draw(**same, path=("net",)),
             draw(**same, path=("net", "drop", "0")), draw(**same, calls=2), draw(**same, micro_shards=4)]
    assert (draws[0] == draw(**same)).all()
    for i, one in enumerate(draws):
        for other in draws[i + 1:]:
            assert (one != other).mean() > 0.5      # micro-shard 0 begins alike for 4 and 8 of them


def test_numbers_that_are_numpy_integers_name_the_same_draw():
    assert (draw(13, (0, 13), (13, 3), seed=np.int64(3), step=np.int64(11)) == draw(13, (0, 13), (13, 3))).all()


def test_an_empty_shard_draws_nothing_and_disturbs_nobody():
    for lo, hi in [(lo, hi) for lo, hi in cuts(3, 8) if lo == hi]:
        assert draw(3, (lo, hi), (0, 6)).shape == (0, 6)
    assert draw(0, (0, 0), (0,)).shape == (0,)


def test_without_rows_every_rank_draws_the_same():
    wide = draw(13, (0, 7), (4, 5)), draw(13, (7, 13), (4, 5))      # 4 is no multiple of 7 or 6: not one per sample
    assert (wide[0] == wide[1]).all()
    assert draw(13, (0, 7), ()) == draw(13, (7, 13), ())


@pytest.mark.parametrize("rows", [(8, 14), (-1, 3), (5, 4)])
def test_rows_outside_the_batch_raise(rows):
    with pytest.raises(ValueError, match="13"):
        draw(13, rows, (rows[1] - rows[0], 2))


def test_a_batch_has_one_micro_shard_or_more():
    with pytest.raises(ValueError, match="micro_shards is 0; it must be at least 1"):
        draw(13, (0, 13), (13, 2), micro_shards=0)


def test_scopes_nest_and_end_with_an_exception():
    backend.manual_seed(1)
    outside = random_rows((3,))
    with random_scope(0, 0, 4, (0, 4)):
        outer = random_state.scope
        with pytest.raises(KeyError), random_scope(0, 1, 4, (0, 4)):
            raise KeyError
        assert random_state.scope is outer
    backend.manual_seed(1)
    assert (random_rows((3,)) == outside).all()


# ---------------------------------------------------------------- addresses

def every_address(a):
    """The addresses of all elements, one by one."""
    return [a.__array_interface__["data"][0] + int(np.dot(index, a.strides)) for index in np.ndindex(a.shape)]


BASE = np.zeros((5, 7, 3), np.float32)


@pytest.mark.parametrize("a", [BASE, BASE[1:4, ::2], BASE[::-1, :, 1], BASE.T[:, 2:5], BASE[2, 3], BASE[2, 3, 1:2],
                               BASE[..., ::-2], np.broadcast_to(BASE[0], (4, 7, 3)), np.array(3.0)],
                         ids=lambda a: f"{a.shape} {a.strides}")
def test_byte_range_spans_every_element(a):
    addresses = every_address(a)
    assert byte_range(a) == (min(addresses), max(addresses) + a.itemsize)


@pytest.mark.parametrize("nothing", [BASE[:0], np.float32(3), 2.0, 7, None], ids=repr)
def test_scalars_and_empty_arrays_have_no_bytes(nothing):
    assert byte_range(nothing) is None


def test_zeros_like():
    z = backend.zeros_like(BASE)
    assert z.shape == BASE.shape and z.dtype == np.float32
    assert backend.zeros_like(BASE, (2, 4), np.int64).dtype == np.int64
    assert backend.zeros_like(BASE, ()).shape == ()


# ---------------------------------------------------------------- orders

@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 0), (4, 5), (3, 2, 6)], ids=str)
def test_a_counted_order_is_numpys(shape):
    """Ties in the order in which they stand, -0 and 0 alike, NaN last."""
    rng = np.random.default_rng(0)
    few = rng.integers(-1, 2, shape)
    arrays = [rng.standard_normal(shape), few, few > 0, np.where(few > 0, np.nan, rng.integers(-1, 2, shape)),
              np.where(few > 0, -0.0, 0.0).astype(np.float16)]
    for x in arrays:
        for axis in range(-max(1, x.ndim), x.ndim):
            got, wanted = counted_order(x, axis), np.argsort(x, axis, kind="stable")
            assert got.dtype == wanted.dtype and np.array_equal(got, wanted)


MANY = [(dtype, False) for dtype in ("float16", "float32", "float64", "int8", "int32", "int64", "uint64")] + [
    (dtype, True) for dtype in ("float16", "float32", "float64")]


def many(dtype, odd):
    """(53, 211) numbers, a lot of them more than once; `odd`: some of them NaN, infinite or -0."""
    draw = np.random.default_rng(3)
    x = draw.standard_normal((53, 211)) * 10.0 ** draw.integers(0, 3, (53, 1))
    x = np.round(np.abs(x) if dtype == "uint64" else x, 1).astype(dtype)
    if odd:
        x[draw.random(x.shape) < 0.1] = -0.0
        x[1, :200], x[2, 3], x[3, 4:6] = np.nan, np.inf, -np.inf
    return x


@pytest.mark.parametrize(("dtype", "odd"), MANY)
def test_an_order_of_many_is_numpys_stable_one(dtype, odd):
    """Along each axis, also of views, of one line, and of lines whose numbers are all equal."""
    x = many(dtype, odd)
    for case in (x, x.T, x[::-1, ::2], x.reshape(-1), np.zeros_like(x)):
        for axis in range(case.ndim):
            np.testing.assert_array_equal(backend.argsort(case, axis), np.argsort(case, axis, kind="stable"))


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize(("dtype", "odd"), MANY)
def test_the_best_of_many_are_those_of_their_order(dtype, odd, largest):
    """Beside Python's sort of each line: NaN is the largest, and of equal ones the first is the best."""
    x = many(dtype, odd)[:, :163]
    for axis, k in ((0, 0), (0, 1), (0, 13), (1, 7), (1, 40), (1, 41)):
        values, places = (a.numpy() for a in mt.topk(mt.tensor(x), k, axis, largest))
        lines = np.moveaxis(x, axis, -1)
        keys = [[(v != v, 0 if v != v else v) for v in line] for line in lines.tolist()]
        wanted = [sorted(range(len(key)), reverse=largest, key=key.__getitem__) for key in keys]
        np.testing.assert_array_equal(np.moveaxis(places, axis, -1), np.array(wanted)[:, :k])
        np.testing.assert_array_equal(values, np.take_along_axis(x, places, axis))
    if not odd:
        assert backend.candidates(x, 40, 1, largest) is not None and backend.candidates(x, 41, 1, largest) is None
