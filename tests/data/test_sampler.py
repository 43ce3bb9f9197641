"""The global order: complete, disjoint, and a function of seed and epoch alone."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch_dist.data import Loader, Sampler

sizes = st.integers(1, 300)
ORDER = [6, 9, 8, 1, 2, 7, 3, 0, 4, 5]   # of 10 samples, seed 1, epoch 2


@settings(deadline=None)
@given(n=sizes, batch_size=st.integers(1, 80), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000))
def test_every_sample_once_an_epoch(n, batch_size, seed, epoch):
    sampler = Sampler(n, batch_size, seed)
    batches = list(sampler.epoch(epoch))
    assert len(batches) == len(sampler)
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    assert 1 <= len(batches[-1]) <= batch_size
    np.testing.assert_array_equal(np.sort(np.concatenate(batches)), np.arange(n))


@settings(deadline=None)
@given(n=sizes, seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), b1=st.integers(1, 80), b2=st.integers(1, 80))
def test_the_order_depends_on_seed_and_epoch_only(n, seed, epoch, b1, b2):
    one, other = Sampler(n, b1, seed), Sampler(n, b2, np.int64(seed))
    list(one.epoch(epoch + 1))   # what was drawn before plays no part
    np.testing.assert_array_equal(np.concatenate(list(one.epoch(epoch))),
                                  np.concatenate(list(other.epoch(np.int64(epoch)))))


def test_other_seeds_and_other_epochs_give_other_orders():
    orders = {tuple(Sampler(50, 7, seed).order(epoch)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_the_order_of_record():
    assert Sampler(10, 3, seed=1).order(2).tolist() == ORDER


def test_numpys_global_generator_is_left_alone():
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    list(Sampler(20, 3).epoch(0))
    np.testing.assert_array_equal(np.random.get_state()[1], before)


@settings(deadline=None)
@given(n=sizes, batch_size=st.integers(1, 80), data=st.data())
def test_start_continues_an_epoch(n, batch_size, data):
    sampler = Sampler(n, batch_size, seed=3)
    start = data.draw(st.integers(0, len(sampler)))
    whole, rest = list(sampler.epoch(4)), list(sampler.epoch(4, start))
    assert len(rest) == len(whole) - start
    for a, b in zip(whole[start:], rest, strict=True):
        np.testing.assert_array_equal(a, b)


def test_drop_last_and_no_shuffle():
    kept = list(Sampler(10, 4, drop_last=True, shuffle=False).epoch(9))
    assert [b.tolist() for b in kept] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert len(Sampler(10, 4, drop_last=True)) == 2 and len(Sampler(10, 4)) == 3 and len(Sampler(8, 4)) == 2


@settings(deadline=None)
@given(n=sizes, phases=st.dictionaries(st.integers(1, 12), st.integers(1, 40), max_size=3), first=st.integers(1, 40),
       drop_last=st.booleans(), data=st.data())
def test_batches_that_grow(n, phases, first, drop_last, data):
    """Against a loop that takes from a list."""
    phases = {**phases, 0: first}
    left, wanted = list(range(n)), []
    while left:
        size = phases[max(step for step in phases if step <= len(wanted))]
        wanted.append(left[:size])
        left = left[size:]
    if drop_last and len(wanted[-1]) < size:
        wanted.pop()
    if not wanted:
        with pytest.raises(ValueError, match="drop_last leaves no batch"):
            Sampler(n, phases, shuffle=False, drop_last=drop_last)
        return
    sampler = Sampler(n, phases, shuffle=False, drop_last=drop_last)
    assert len(sampler) == len(wanted)
    start = data.draw(st.integers(0, len(wanted)))
    assert [batch.tolist() for batch in sampler.epoch(0, start)] == wanted[start:]


def test_ranks_share_batches_that_grow():
    x = np.arange(50)
    loaders = [Loader(x, x, {0: 4, 3: 9}, rank=rank, size=2) for rank in range(2)]
    parts = [[batch.inputs.tolist() for batch in loader.epoch(0)] for loader in loaders]
    assert [len(a) + len(b) for a, b in zip(*parts, strict=True)] == [4, 4, 4, 9, 9, 9, 9, 2]
    assert sorted(i for part in parts for batch in part for i in batch) == x.tolist()
    with pytest.raises(ValueError, match="some rank would never get one"):
        Loader(x, x, {0: 1, 3: 9}, rank=0, size=2)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"n": 5, "batch_size": {1: 4}}, "the first size is that of step 0"),
    ({"n": 5, "batch_size": {0: 4, 2: 0}}, "must be at least 1"),
    ({"n": 5, "batch_size": {}}, "must be at least 1"),
    ({"n": 5, "batch_size": {0: 2, -1: 2}}, "the first size is that of step 0"),
    ({"n": 0, "batch_size": 4}, "n=0"),
    ({"n": 5, "batch_size": 0}, "got 0"),
    ({"n": 5, "batch_size": -3}, "got -3"),
    ({"n": 5, "batch_size": 6, "drop_last": True}, "batch_size=6 is more than the 5 samples"),
])
def test_sizes_that_leave_no_batch(arguments, words):
    with pytest.raises(ValueError, match=words):
        Sampler(**arguments)


@pytest.mark.parametrize("start", [-1, 4])
def test_a_start_outside_the_epoch(start):
    with pytest.raises(ValueError, match=f"start={start} .* 3 batches"):
        Sampler(10, 4).epoch(0, start)


@pytest.mark.parametrize("epoch", ["1", 1.0])
def test_an_epoch_is_a_whole_number(epoch):
    for shuffle in (False, True):
        with pytest.raises(TypeError):
            Sampler(10, 3, shuffle=shuffle).epoch(epoch)


def test_half_a_sample_is_refused():
    with pytest.raises(TypeError):
        Sampler(10, 2.5)
