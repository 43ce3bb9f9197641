"""Chapter 25's answers, put together, are the library's data: the same rows in the same order."""

import importlib.util

import numpy as np
import pytest

from exercises.frame.course import Course
from minitorch_dist.data import Mixture, Permutation, StoredTokens, TokenWriter
from minitorch_dist.data.mixture import turns

FOLDER = Course().solutions / "25_data"
LENGTH, END, SEED = 8, 255, 3


def solution(name):
    spec = importlib.util.spec_from_file_location(f"solution_{name}", FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("n", [1, 2, 3, 12, 1000, 10**12, 2**62])
def test_the_order_is_the_librarys(n):
    p = Permutation(n, "x", 3)
    places = np.random.default_rng(0).integers(0, n, 50)
    np.testing.assert_array_equal(solution("order").order(places, n, p.keys), p(places))


def test_a_mixture_of_stored_tokens_is_the_four_answers_together(tmp_path):
    rng, rows, order, place = np.random.default_rng(1), *map(solution, ("rows", "order", "place"))
    phases, files = [(70, {"a": 3, "b": 1}), (45, {"a": 1, "b": 2})], {}
    for name, documents in (("a", 30), ("b", 9)):
        with TokenWriter(tmp_path / name, shard=90) as writer:
            for _ in range(documents):
                writer.add(rng.integers(0, END, rng.integers(1, 25)), end=END)
        files[name] = [np.load(path) for path in sorted((tmp_path / name).glob("*.npy"))]
    stored = {name: StoredTokens(tmp_path / name, LENGTH, end=END) for name in files}
    mixture, names = Mixture(stored, phases, SEED), list(stored)
    patterns = [(count, turns([weights[name] for name in names])) for count, weights in phases]
    sizes = [int(rows.row_bounds([len(file) for file in files[name]], LENGTH)[-1]) for name in names]
    assert sizes == [len(source) for source in stored.values()] and all(len(each) > 1 for each in files.values())
    passes = set()
    for sample in np.concatenate([place.part(0, len(mixture), rank, 3) for rank in range(3)]):
        source, number, at = place.where(int(sample), patterns, sizes)
        keys = Permutation(sizes[source], "mixture", SEED, names[source], number).keys
        row = order.order(np.array([at]), sizes[source], keys)
        inputs, targets, documents = rows.read(files[names[source]], LENGTH, row, END)
        wanted_inputs, wanted_targets = mixture.read([sample])
        np.testing.assert_array_equal(np.stack([inputs, documents], 2), wanted_inputs)
        np.testing.assert_array_equal(targets, wanted_targets)
        passes.add((source, number))
    assert len(passes) > 3
