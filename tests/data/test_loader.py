"""Ranks and micro-shards cut the same global batches into disjoint, complete parts, odd counts included."""

from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch_dist.data import Loader, Sampler
from minitorch_dist.data.loader import Shard, cut

N = 37   # odd and prime: with batches of 10, the last has 7


def samples(n=N):
    """Images whose pixels tell which sample they are; labels likewise."""
    images = np.arange(n, dtype=np.float32)[:, None] * np.ones(3, np.float32)
    return images, np.arange(n, dtype=np.int64)


def check_epoch(size, micro_shards, batch_size, n, epoch=2, seed=5):
    images, labels = samples(n)
    loaders = [Loader(images, labels, batch_size, seed, r, size, micro_shards) for r in range(size)]
    expected = list(Sampler(n, batch_size, seed).epoch(epoch))
    assert {len(loader) for loader in loaders} == {len(expected)}
    for indices, parts in zip(expected, zip(*(loader.epoch(epoch) for loader in loaders), strict=True), strict=True):
        assert {part.count for part in parts} == {len(indices)}
        # one after another the parts are the global batch: disjoint, complete, in order
        np.testing.assert_array_equal(np.concatenate([p.labels for p in parts]), indices)
        assert [p.rows for p in parts] == [(len(indices) * r // size, len(indices) * (r + 1) // size)
                                           for r in range(size)]
        shards = [shard for part in parts for shard in part.shards]
        total = max(micro_shards, size)
        assert [s.index for s in shards] == list(range(total))
        assert [s.rows for s in shards] == [(len(indices) * s // total, len(indices) * (s + 1) // total)
                                            for s in range(total)]
        for piece in [*parts, *shards]:
            np.testing.assert_array_equal(piece.labels, indices[slice(*piece.rows)])
            np.testing.assert_array_equal(piece.inputs, images[piece.labels])
            assert piece.inputs.flags.c_contiguous and piece.inputs.shape == (len(piece.labels), 3)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [10, 4, 37, 50])
def test_ranks_share_each_global_batch(size, batch_size):
    check_epoch(size, 1, batch_size, N)


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize(("batch_size", "n"), [(10, 37), (8, 17), (64, 99)])
def test_micro_shards_are_the_same_for_every_size(size, batch_size, n):
    check_epoch(size, 8, batch_size, n)


@settings(deadline=None)
@given(size=st.integers(1, 6), per_rank=st.integers(0, 5), extra=st.integers(0, 30), n=st.integers(1, 120))
def test_any_numbers(size, per_rank, extra, n):
    check_epoch(size, size * per_rank or 1, size + extra, n)


def test_a_last_batch_smaller_than_the_ranks_leaves_some_empty():
    images, labels = samples(9)
    lasts = [list(Loader(images, labels, 8, rank=r, size=4).epoch(0))[-1] for r in range(4)]
    assert [len(last.labels) for last in lasts] == [0, 0, 0, 1]
    assert all(last.count == 1 for last in lasts)
    assert lasts[0].inputs.shape == (0, 3)


def test_batches_are_copies():
    images, labels = samples()
    batch = next(Loader(images, labels, 10, shuffle=False).epoch(0))
    batch.inputs[:] = -1
    batch.labels[:] = -1
    np.testing.assert_array_equal(images, samples()[0])
    np.testing.assert_array_equal(labels, samples()[1])


@pytest.mark.parametrize("start", [0, 1, 3, 4])
def test_resumed_at_a_step(start):
    loader = Loader(*samples(), 10, seed=2, rank=1, size=2, micro_shards=4)
    whole, rest = list(loader.epoch(6)), list(loader.epoch(6, start=start))
    assert len(rest) == len(whole) - start == 4 - start
    for a, b in zip(whole[start:], rest, strict=True):
        assert (a.count, a.rows) == (b.count, b.rows)
        np.testing.assert_array_equal(a.inputs, b.inputs)


def test_drop_last():
    loader = Loader(*samples(), 10, drop_last=True)
    assert len(loader) == 3 and [b.count for b in loader.epoch(0)] == [10, 10, 10]


@pytest.mark.parametrize(("arguments", "words"), [
    ({"batch_size": 3, "size": 4}, "batch_size=3 .* size=4"),
    ({"batch_size": 0}, "got 0"),
    ({"batch_size": 8, "size": 2, "rank": 2}, "rank=2 .* size=2"),
    ({"batch_size": 8, "size": 2, "rank": -1}, "rank=-1"),
    ({"batch_size": 8, "size": 0}, "size=0"),
    ({"batch_size": 8, "size": 3, "micro_shards": 8}, "micro_shards=8 .* size=3 .*multiple of 3"),
    ({"batch_size": 8, "size": 4, "micro_shards": 2}, "micro_shards=2 .* size=4"),
    ({"batch_size": 8, "micro_shards": 0}, "micro_shards=0"),
])
def test_numbers_that_do_not_fit_together(arguments, words):
    with pytest.raises(ValueError, match=words):
        Loader(*samples(), **arguments)


def test_images_and_labels_that_differ_in_number():
    images, labels = samples()
    with pytest.raises(ValueError, match="37 and 36"):
        Loader(images, labels[:-1], 4)


def test_a_start_outside_the_epoch():
    with pytest.raises(ValueError, match="start=5"):
        Loader(*samples(), 10).epoch(0, start=5)


def uneven(rank, epoch):
    """Batches of 5 and 3 of the samples 0 to 7, the second all on rank 1."""
    order = np.roll(np.arange(8), epoch)
    return [[order[[4, 0, 2]], order[:0]], [order[[1, 3]], order[5:]]][rank]


def test_parts_decide_on_rows():
    images, labels = samples(8)
    loaders = [Loader(images, labels, 5, rank=r, size=2, parts=uneven) for r in range(2)]
    for epoch, labels_of in ((0, [[[4, 0, 2], [1, 3]], [[], [5, 6, 7]]]), (1, [[[3, 7, 1], [0, 2]], [[], [4, 5, 6]]])):
        batches = list(zip(*(loader.epoch(epoch) for loader in loaders), strict=True))
        assert [[part.labels.tolist() for part in parts] for parts in batches] == labels_of
        assert [[part.count for part in parts] for parts in batches] == [[5, 5], [3, 3]]
        assert [[part.rows for part in parts] for parts in batches] == [[(0, 3), (3, 5)], [(0, 0), (0, 3)]]
        for rank, part in enumerate(parts for pair in batches for parts in pair):
            (shard,) = part.shards
            assert (shard.index, shard.rows) == (rank % 2, part.rows)
            np.testing.assert_array_equal(shard.inputs, images[part.labels])
    assert [batch.count for batch in loaders[0].epoch(0, start=1)] == [3]


def test_parts_that_do_not_fit():
    images, labels = samples(8)
    with pytest.raises(ValueError, match="start=3 is no step of an epoch of 2"):
        Loader(images, labels, 5, parts=uneven).epoch(0, start=3)
    with pytest.raises(ValueError, match=r"parts gave the ranks \[1\] batches in epoch 0, and the epoch has 2"):
        list(Loader(images, labels, 5, parts=lambda rank, epoch: [np.arange(8)]).epoch(0))
    with pytest.raises(ValueError, match="without a sample on any rank"):
        list(Loader(images, labels, 5, parts=lambda rank, epoch: [np.arange(5), np.arange(0)]).epoch(0))
    with pytest.raises(ValueError, match="take one of the two"):
        Loader(images, labels, 5, micro_shards=2, parts=uneven)


@dataclass(frozen=True)
class Weighted(Shard):
    """A shard with more of each row."""

    weights: np.ndarray
    older: np.ndarray | None = None


def test_further_arrays_go_with_their_rows(monkeypatch):
    images, labels = samples(7)
    whole = Weighted(3, images, labels, (20, 27), weights=labels * 0.5)
    pieces = cut(whole, 3)
    assert [piece.rows for piece in pieces] == [(20, 22), (22, 24), (24, 27)]
    for piece in pieces:
        assert type(piece) is Weighted and piece.index == 3 and piece.older is None
        mine = np.arange(piece.rows[0] - 20, piece.rows[1] - 20)
        np.testing.assert_array_equal(piece.labels, mine)
        np.testing.assert_array_equal(piece.inputs, images[mine])
        np.testing.assert_array_equal(piece.weights, mine * 0.5)
    monkeypatch.setattr("minitorch_dist.data.loader.to", lambda array, device: (device, array))
    moved = whole.to("cuda:1")
    for found, array in ((moved.inputs, images), (moved.labels, labels), (moved.weights, whole.weights)):
        assert found[0] == "cuda:1" and found[1] is array
    assert moved.older is None and moved.rows == (20, 27) and whole.to("cpu") is whole


def test_a_loop_without_an_epoch_is_told_so():
    with pytest.raises(TypeError, match=r"loader.epoch\(number\)"):
        iter(Loader(*samples(), 10))


@pytest.mark.parametrize(("arguments", "words"), [
    ({"batch_size": 2.5}, "batch_size=2.5: must be a whole number"), ({"batch_size": "4"}, "batch_size='4'"),
    ({"micro_shards": 2.0}, "micro_shards=2.0"), ({"seed": "a"}, "seed='a'"),
    ({"images": [[1.0], [2.0]]}, "images: a Loader cuts arrays .* got list"), ({"labels": 3}, "labels: .* got int")])
def test_an_argument_of_another_kind_is_named(arguments, words):
    with pytest.raises(TypeError, match=words):
        Loader(**{"images": np.ones((2, 3)), "labels": np.arange(2), "batch_size": 2} | arguments)
