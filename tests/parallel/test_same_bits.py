"""Replicas that part by a bit are found, with the rank, the place and the distance; what can't be found isn't."""

import re

import numpy as np
import pytest

from minitorch_dist.parallel.same_bits import _differences, crc32, minority
from tests.crews import crews

CASES = "tests.parallel.same_bits_cases:"


def test_who_is_the_minority():
    assert minority([5, 5, 7, 5]) == (0, [2])
    assert minority([7, 5, 5]) == (1, [0])
    assert minority([1, 2, 3, 1, 1]) == (0, [1, 2])
    for tie in ([1, 2], [1, 1, 2, 2], [1, 2, 3], [1, 1, 2, 3]):
        assert minority(tie) == (None, list(range(len(tie))))


def parting(n, *arguments):
    """(what was said, the same on all ranks; the values on the ranks that were spoiled), of a run that began well."""
    everyone = crews.call(CASES + "parting", n, arguments)
    assert all(before is None for before, *_ in everyone)
    (said,), (later,) = {after for _, after, _, _ in everyone}, {later for _, _, later, _ in everyone}
    return said, later, [values for *_, values in everyone]


@pytest.mark.parametrize("way, held", [("ddp", "'2.weight', float32[3, 5]"),
                                       ((3, 4), "'2.weight, a piece', float32[1, 15]")])
def test_a_bit_that_turns_over_is_found(way, held):
    said, later, values = parting(4, way, [2], "2.weight", 8, 22)
    new, old = (values[2][name] for name in ("new", "old"))
    assert "after step 3:" in said and f"rank 2 against ranks 0, 1, 3; first in {held}" in said
    place = "[1, 3]" if way == "ddp" else "[0, 8]"
    found = re.search(rf"rank 2 against rank 0: 1 of 15 elements, the first at {re.escape(place)}; the greatest "
                      rf"difference is (\S+), at {re.escape(place)}: (\S+) instead of (\S+)", said)
    np.testing.assert_allclose([float(x) for x in found.groups()], [abs(new - old), new, old], rtol=5e-3)
    assert later is not None      # it never heals


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_neighbouring_numbers_are_told_apart(dtype):
    value = np.array(0.3, dtype)
    mine = np.nextafter(value, dtype(1))
    new, old = re.search(r": (\S+) instead of (\S+)$", _differences(mine, value)).groups()
    assert dtype(new) == mine and dtype(old) == value


def test_one_copy_of_a_part_is_found():
    """Of two copies, each cut over two ranks: rank 2's last weight, and rank 0's. Ranks 1 and 3 are told."""
    said, _, values = parting(4, (3, 2), [2], "2.weight", 0, 20)
    assert values[2]
    assert "ranks 0, 2 hold different bits, and there is no majority to tell which are right" in said
    assert "rank 2 against rank 0: 1 of 15 elements" in said and said.count(" hold ") == 1


def test_without_a_majority_all_are_named():
    said, _, _ = parting(2, "ddp", [0], "0.bias", 4, 0)
    assert "ranks 0, 1 hold different bits, and there is no majority" in said and "'0.bias', float32[5]" in said


def test_the_first_parameter_in_which_they_differ():
    """A gradient's bit after the sum: one parameter of four has another value by then."""
    said, _, _ = parting(4, "ddp", [1], "0.bias", 2, 24, "gradient")
    assert "rank 1 against ranks 0, 2, 3; first in '0.bias'" in said and "the first at [2]" in said


def test_wrong_work_before_the_sum_is_not_seen():
    """All get the same wrong sum: what this check can't do."""
    assert parting(4, "ddp", [1], "0.bias", 0, 0, "work")[:2] == (None, None)


@pytest.mark.parametrize("dropout, count, shards, recomputed", [
    (0.0, 13, ("0 to 3", "3 to 6"), False), (0.3, 13, ("0 to 3", "3 to 6"), False),
    (0.3, 13, ("0 to 3", "3 to 6"), True), (0.0, 2, ("0 to 1", "1 to 2"), False)])
def test_wrong_work_is_seen_by_working_it_out_again(dropout, count, shards, recomputed):
    """Whose shard it is makes no difference, not even the wrong rank's own; the model and its gradients stay. Of 2 rows
    4 ranks share, the first and the third have none."""
    for said in crews.call(CASES + "checked_work", 4, (dropout, count, recomputed)):
        assert said[0] is None
        for rows, text in zip(shards, said[1:], strict=True):
            assert text.startswith(f"the ranks work out different gradients of the rows {rows} of step 6:\n")
            assert "rank 1 against ranks 0, 2, 3; first in 'the gradient of 0.weight', float32[5, 7]" in text


def test_bytes_are_counted():
    """4 to each other rank that holds the same; of copies, a byte for all ranks to agree by, reduced."""
    assert crews.call(CASES + "bytes_sent", 4, ("ddp",)) == [{"all_gather": (1, 3 * 4)}] * 4
    for found in crews.call(CASES + "bytes_sent", 4, ((2, 2),)):
        assert set(found) == {"all_gather", "all_reduce"} and found["all_gather"] == (1, 4)
        assert found["all_reduce"][0] == 1 and found["all_reduce"][1] <= 2 * 3


def test_pieces_without_a_copy_are_refused():
    assert all("every rank holds pieces of its own" in said for said in crews.call(CASES + "no_copy", 2))


def test_the_sum_is_the_standard_crc32():
    class Values:
        def __init__(self, text):
            self.array = np.frombuffer(text, np.uint8)

        def cpu(self):
            return self

        def numpy(self):
            return self.array
    assert crc32([Values(b"1234"), Values(b"56789")]) == 0xCBF43926      # the check value of the catalogues


@pytest.mark.parametrize(("n", "wrap"), [(2, False), (2, True), (4, True)])
def test_what_is_whole_is_alike_where_matrices_are_shared(n, wrap):
    """A gate that opens later, whose gradient is of a rank's part alone: the check finds it, by name."""
    for before, after in crews.call(CASES + "parted_beside_matrices", n, args=(wrap,)):
        assert before is None
        assert "found after step 4" in after and "first in '2.temp', float32[1]" in after
        assert "parallelize_module says what may lie between a 'column' and a 'row'" in after
