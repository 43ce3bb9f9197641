"""Encodings of updates: unbiased, as far off as closed forms say, in as many bytes as the table says."""

import math

import numpy as np
import pytest

from minitorch_dist.backend import as_dtype
from minitorch_dist.parallel.encodings import (
    E3M0,
    Blocks,
    Channel,
    LowRank,
    RandomMask,
    Sketch,
    Whole,
    from_bits,
    hadamard,
    nbytes,
    to_bits,
)

STRUCTURED = [RandomMask(0.3), RandomMask(0.01), LowRank(1), LowRank(3), LowRank(50)]
SKETCHES = [Sketch(), Sketch(levels=2), Sketch(levels=5, rotate=True), Sketch(rotate=True, keep=0.3),
            Sketch(levels=16, keep=0.4), Sketch(levels=3, rotate=True, keep=0.5), E3M0()]


def values(*shape, seed=0, dtype=np.float64):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def through(encoding, update, key):
    """An update as the server gets it, which draws anew from the key."""
    message = encoding.encode(update, encoding.draw(update.shape, update.dtype, key))
    return encoding.decode(message, update.shape, encoding.draw(update.shape, update.dtype, key))


@pytest.mark.parametrize("shape", [(7, 11), (1, 5), (6, 3, 5), (1, 1)])
@pytest.mark.parametrize("encoding", STRUCTURED, ids=str)
def test_structured_training_stays_in_a_subspace_that_the_message_tells_of_completely(encoding, shape):
    """An orthogonal projection, linear, twice the same as once, symmetric; what is in it comes out as it was."""
    drawn = encoding.draw(shape, np.dtype(np.float64), ("a", 1))
    a, b = values(*shape, seed=1), values(*shape, seed=2)
    project = lambda x: encoding.project(x, drawn)      # noqa: E731
    np.testing.assert_allclose(project(project(a)), project(a), atol=1e-12)
    np.testing.assert_allclose(project(2.5 * a - b), 2.5 * project(a) - project(b), atol=1e-12)
    assert np.vdot(project(a), b) == pytest.approx(np.vdot(a, project(b)), abs=1e-12)
    np.testing.assert_allclose(through(encoding, project(a), ("a", 1)), project(a), atol=1e-12)
    others = [encoding.project(a, encoding.draw(shape, a.dtype, ("a", key))) for key in range(2, 6)]
    full = project(a).shape == a.shape and np.allclose(project(a), a)
    assert full or any(not np.allclose(project(a), other) for other in others)     # other keys, other subspaces


@pytest.mark.parametrize(("encoding", "rank"), [(RandomMask(0.3), 23), (LowRank(3), 3 * 11), (LowRank(9), 7 * 11)],
                         ids=str)
def test_a_structured_message_has_a_number_per_dimension_of_the_subspace(encoding, rank):
    drawn = encoding.draw((7, 11), np.dtype(np.float32), ("k",))
    columns = np.stack([encoding.project(e.reshape(7, 11), drawn).ravel() for e in np.eye(77)])
    assert np.linalg.matrix_rank(columns) == rank
    assert sum(part.nbytes for part in encoding.encode(values(7, 11, dtype=np.float32), drawn)) == 4 * rank


@pytest.mark.parametrize("encoding", SKETCHES, ids=str)
def test_a_sketch_is_right_on_average(encoding):
    """The mean of many decoded updates lies within five standard errors of the update, in every entry."""
    update = values(5, 7, seed=3) + 0.5
    update[2, 3] = 9.0
    found = np.stack([through(encoding, update, ("sketch", key)) for key in range(1500)])
    error = np.abs(found.mean(axis=0) - update)
    assert (error <= 5 * found.std(axis=0) / math.sqrt(len(found)) + 1e-12).all()


@pytest.mark.parametrize("levels", [2, 3, 16])
def test_rounding_errs_by_as_much_as_the_closed_form_says(levels):
    """E‖x̂ - x‖² = Σ (distance to the level below) · (distance to the level above)."""
    update = values(3, 40, seed=4)
    step = (update.max() - update.min()) / (levels - 1)
    below = (update - update.min()) % step
    expected = (below * (step - below)).sum()
    errors = [((through(Sketch(levels=levels), update, ("e", key)) - update) ** 2).sum() for key in range(1000)]
    assert np.mean(errors) == pytest.approx(expected, rel=0.03)


def test_thinning_out_errs_by_as_much_as_the_closed_form_says():
    """E‖x̂ - x‖² = ‖x‖² (d/m - 1) of d entries and m of them sent."""
    update = values(3, 40, seed=5)
    errors = [((through(Sketch(keep=0.25), update, ("e", key)) - update) ** 2).sum() for key in range(1500)]
    assert np.mean(errors) == pytest.approx(3 * (update ** 2).sum(), rel=0.05)


def test_a_rotation_brings_the_error_of_a_spiked_vector_under_its_bound():
    """Suresh et al. 2017, theorems 1 and 3: d/(2n) · ‖x‖² and (2 ln d + 2)/n · ‖x‖² for the mean of n clients, two
    levels; d = 1024, n = 10, a normal vector with one entry of 60, and what Hadamard's matrix makes it of."""
    d, n = 1024, 10
    update = values(1, d, seed=6)
    update[0, 5] = 60.0
    norm = (update ** 2).sum()

    def error(rotate, update=update):
        encoding = Sketch(levels=2, rotate=rotate)
        means = [np.mean([through(encoding, update, ("c", run, client)) for client in range(n)], axis=0)
                 for run in range(12)]
        return np.mean([((mean - update) ** 2).sum() for mean in means])
    plain, rotated = error(False), error(True)
    bound = (2 * math.log(d) + 2) / n * norm
    assert max(rotated, error(True, hadamard(update.ravel()).reshape(1, d))) < bound < plain < d / (2 * n) * norm
    closed = ((update.max() - update) * (update - update.min())).sum() / n
    assert plain == pytest.approx(closed, rel=0.1)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_hadamards_matrix_is_symmetric_orthogonal_and_of_signs(dtype):
    matrix = np.stack([hadamard(e) for e in np.eye(16, dtype=dtype)])
    assert matrix.dtype == dtype and (np.abs(matrix) == 0.25).all()
    assert (matrix == matrix.T).all() and (matrix @ matrix == np.eye(16)).all()
    x = values(1, dtype=dtype).ravel()
    assert hadamard(x) == x


@pytest.mark.parametrize(("levels", "bits"), [(2, 1), (3, 2), (4, 2), (5, 3), (16, 4), (17, 5), (65536, 16)])
def test_bytes_of_a_sketch(levels, bits):
    """Its bits, up to whole bytes, and the two extremes; rotated: of the next power of two; then thinned out."""
    update = values(9, 13, dtype=np.float32)

    def size(**settings):
        encoding = Sketch(levels=levels, **settings)
        message = encoding.encode(update, encoding.draw(update.shape, update.dtype, ("b",)))
        return sum(part.nbytes for part in message)
    assert size() == 8 + -(-117 * bits // 8)
    assert size(rotate=True) == 8 + 128 * bits // 8
    assert size(rotate=True, keep=1 / 16) == 8 + bits
    numbers = np.random.default_rng(0).integers(0, levels, 101)
    assert (from_bits(to_bits(numbers, bits), 101, bits) == numbers).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_e3m0_sends_a_sign_and_an_exponent_in_four_bits(dtype):
    """The greatest magnitude and its halves, six times over, come out as they were; a number between two of them as one
    of these, as far off as the closed form says."""
    levels = np.array([0.0, *(6.0 / 2 ** k for k in range(7))])
    exact = np.concatenate([levels, -levels[1:]]).astype(dtype).reshape(3, 5)
    message = E3M0().encode(exact, E3M0().draw(exact.shape, exact.dtype, ("e",)))
    assert [part.nbytes for part in message] == [exact.itemsize, 8]
    out = through(E3M0(), exact, ("e",))
    assert out.dtype == dtype and (out == exact).all()
    update = values(7, 31, seed=8, dtype=dtype)
    own = np.append(np.abs(update).max() / 2.0 ** np.arange(6, -1, -1), 0)
    below = np.array([own[own <= abs(x)].max() for x in update.ravel()])
    above = np.array([own[own >= abs(x)].min() for x in update.ravel()])
    expected = ((np.abs(update.ravel()) - below) * (above - np.abs(update.ravel()))).sum()
    found = [through(E3M0(), update, ("n", key)) for key in range(300)]
    assert all(np.isin(np.abs(out), own.astype(dtype)).all() and (out * update >= 0).all() for out in found)
    assert np.mean([((out - update) ** 2).sum() for out in found]) == pytest.approx(expected, rel=0.03)
    zeros = np.zeros((2, 3), dtype)
    assert (through(E3M0(), zeros, ("z",)) == zeros).all()


def test_extremes_and_equal_values_come_out_as_they_were():
    update = values(4, 6, dtype=np.float32)
    out = through(Sketch(levels=2), update, ("x",))
    assert out.dtype == np.float32 and set(np.unique(out)) <= {update.min(), update.max()}
    assert (out == update)[update == update.min()].all() and (out == update)[update == update.max()].all()
    for constant in (0.0, -3.5):
        same = np.full((4, 6), constant, np.float32)
        assert (through(Sketch(levels=4), same, ("x",)) == same).all()


def test_a_channel_sends_vectors_whole_and_each_matrix_by_draws_of_its_own():
    updates = {"weight": values(6, 8, dtype=np.float32), "bias": values(6, dtype=np.float32),
               "twin": values(6, 8, dtype=np.float32)}
    shapes = {name: update.shape for name, update in updates.items()}

    def channel(key):
        return Channel(RandomMask(0.5), shapes, np.dtype(np.float32), ("c", key))
    messages = channel(1).encode(updates)
    assert nbytes(messages) == 4 * (24 + 6 + 24)
    got = channel(1).decode(messages)
    assert (got["bias"] == updates["bias"]).all() and channel(1).project("bias", updates["bias"]) is updates["bias"]
    assert ((got["weight"] != 0) != (got["twin"] != 0)).any()
    assert any((channel(k).decode(channel(k).encode(updates))["weight"] != got["weight"]).any() for k in (2, 3))
    whole = Channel(Whole(), shapes, np.dtype(np.float32), ("c", 1))
    assert nbytes(whole.encode(updates)) == 4 * (48 + 6 + 48)


@pytest.mark.parametrize(("make", "words"), [
    (lambda: RandomMask(0.0), "keep is 0.0"), (lambda: Sketch(keep=1.5), "keep is 1.5"),
    (lambda: Sketch(levels=1), "levels is 1"), (lambda: LowRank(0), "rank is 0"),
    (lambda: Sketch(levels=2.5), "levels is 2.5"), (lambda: LowRank(1.5), "rank is 1.5"),
    (lambda: LowRank(float("nan")), "rank is nan")])
def test_settings_that_mean_nothing_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


def test_a_diverged_update_is_refused():
    update = values(3, 3)
    update[1, 1] = np.nan
    for encoding in (Sketch(levels=4), E3M0()):
        with pytest.raises(ValueError, match="diverged"):
            through(encoding, update, ("x",))


# ---------------------------------------------------------------- blocks

@pytest.mark.parametrize("dtype", [np.float32, np.float64, "bfloat16"], ids=str)
@pytest.mark.parametrize("shape", [(7, 11), (3, 85), (1, 1), (4, 96), (0, 3)])
@pytest.mark.parametrize("encoding", [Blocks(8), Blocks(4), Blocks(4, 10), Blocks(8, 64)], ids=str)
def test_blocks_round_each_number_to_the_level_next_to_it(encoding, shape, dtype):
    """Found by looking at all levels of its block, the even ones first; nothing is lost twice; the table's bytes."""
    update = values(*shape, seed=8).astype(as_dtype(dtype) if dtype == "bfloat16" else dtype)
    update.ravel()[-3:] *= 1000
    exact, most = update.astype(np.float64).ravel(), 2 ** (encoding.bits - 1) - 1
    levels = np.array(sorted(range(-most, most + 1), key=lambda k: k % 2))
    got = through(encoding, update, ("nothing", "drawn"))
    assert got.shape == shape and got.dtype == (np.float64 if dtype == np.float64 else np.float32)
    for start in range(0, exact.size, encoding.size):
        block = exact[start:start + encoding.size]
        largest = np.abs(block).max()
        wanted = levels[np.abs((most * block / largest)[:, None] - levels).argmin(axis=1)] * largest / most
        np.testing.assert_allclose(got.ravel()[start:start + encoding.size], wanted, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(through(encoding, got, ()), got, rtol=1e-6)
    blocks = -(-exact.size // encoding.size)
    scales, codes = encoding.encode(update)
    assert (scales.nbytes, codes.nbytes) == (blocks * got.dtype.itemsize, blocks * encoding.size * encoding.bits // 8)


@pytest.mark.parametrize("encoding", [Blocks(8, 4), Blocks(4, 4)], ids=str)
def test_blocks_of_zeros_of_infinities_and_of_the_smallest_numbers(encoding):
    tiny = np.float32(1e-45)
    update = np.array([0, -0.0, 0, 0, 1, np.inf, 2, 3, 1, 2, np.nan, 3, 190 * tiny, -tiny, 7 * tiny, 0, -7, 1, 0, 3.5],
                      np.float32)
    with np.errstate(invalid="raise"):
        got = through(encoding, update, ())
    assert not got[:4].any() and np.isnan(got[4:12]).all() and got[16] == -7
    assert (np.abs(got[12:16]) <= 190 * tiny).all() and got[12] > 0
    if encoding.bits == 4:      # halves go to the even number
        assert got[16:].tolist() == [-7, 1, 0, 4]


def test_what_blocks_are_not():
    for bits, size in ((5, 256), (8, 0), (4, 33)):
        with pytest.raises(ValueError, match=rf"Blocks\({bits}, {size}\): numbers have 8 or 4 bits"):
            Blocks(bits, size)
