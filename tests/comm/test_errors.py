"""Wrong arguments are errors that carry the values and say what to do."""

import contextlib
import gc
import weakref

import pytest

from minitorch_dist.comm import Communicator
from minitorch_dist.comm.local import LocalEngine
from minitorch_dist.comm.together import together
from minitorch_dist.testing import ranks
from tests.crews import crews

CASES = "tests.comm.error_cases:"

EXPECTED = {   # what is wrong: (type, words of the message)
    "strided": ("ValueError", "C-contiguous", "(32,)"),
    "list": ("TypeError", "NumPy array", "list"),
    "objects": ("TypeError", "broadcast_object"),
    "op": ("ValueError", "'avg'", "sum, mean, max, min"),
    "op to one": ("ValueError", "reduce: unknown op 'avg'"),
    "op in parts": ("ValueError", "reduce_scatter: unknown op 'avg'"),
    "half": ("TypeError", "float16", "cast"),
    "byte order": ("TypeError", ">f8", "native"),
    "integer mean": ("TypeError", "int64", "float64"),
    "exact max": ("ValueError", "'max'", "sum"),
    "exact max in parts": ("ValueError", "reduce_scatter: exact=True", "'max'"),
    "root": ("ValueError", "src=3", "0 to 2"),
    "root of no number": ("ValueError", "src=1.0", "0 to 2"),
    "reduce to": ("ValueError", "reduce: dst=3"),
    "gather to": ("ValueError", "gather: dst=3"),
    "scatter from": ("ValueError", "scatter: src=3"),
    "object from": ("ValueError", "broadcast_object: src=3"),
    "objects to": ("ValueError", "gather_object: dst=3"),
    "objects from": ("ValueError", "scatter_object: src=3"),
    "objects for all": ("ValueError", "4 objects for 3 ranks"),
    "negative": ("ValueError", "dst=-1", "0 to 2"),
    "self": ("ValueError", "itself"),
    "recv from": ("ValueError", "recv: src=3", "0 to 2"),
    "irecv from self": ("ValueError", "irecv: src=", "itself"),
    "tag": ("ValueError", "32767", "32766"),
    "tag below": ("ValueError", "send: tag=-1"),
    "tag of no number": ("ValueError", "isend: tag=1.0"),
    "gather shape": ("ValueError", "25 elements", "3 × 8 = 24"),
    "gather dtype": ("TypeError", "float32", "float64"),
    "scatter shape": ("ValueError", "8 elements", "3 × 3 = 9"),
    "overlap": ("ValueError", "overlaps", "reshape(3, -1)"),
    "gathered shape": ("ValueError", "gather: out has 25 elements", "3 × 8 = 24"),
    "scattered shape": ("ValueError", "scatter: x has 8 elements", "3 × 3 = 9"),
    "row dtype": ("ValueError", "x is float32[3] and out float64[3]"),
    "no rows": ("ValueError", "x is float64[] and out float64[]"),
    "row shape": ("ValueError", "float64[3, 3]", "all axes but the first"),
    "exchange in place": ("ValueError", "overlap"),
    "rows": ("ValueError", "4 rows", "send_counts"),
    "counts": ("ValueError", "[1, 1, 1]", "sum 4"),
    "counts below": ("ValueError", "[-1, 5, 4]", "3 numbers ≥ 0"),
    "few counts": ("ValueError", "[4, 4]", "3 numbers"),
    "own count": ("ValueError", "sends itself 1", "out's 6 rows 2"),
    "parts": ("TypeError", "parts[0] is float64[3]", "view(np.uint8)"),
    "parts of two axes": ("TypeError", "parts[0] is uint8[2, 3]"),
    "parts to": ("ValueError", "isend_parts: dst=3"),
    "no parts": ("ValueError", "no parts"),
    "wire": ("ValueError", "dst=-1", "0 to 2"),
    "wire strided": ("ValueError", "C-contiguous"),
    "color": ("ValueError", "color=-1"),
    "color of no number": ("ValueError", "color=1.0"),
    "exact on 3": ("ValueError", "has 3", "power of two"),
}
WRITTEN = ("all_reduce", "reduce", "broadcast", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all",
           "recv", "irecv")
READ = ("all_gather of", "reduce_scatter of", "gather of", "scatter of", "all_to_all of", "send", "isend")
EXPECTED |= {f"{op} read-only": ("ValueError", "is read-only", ".copy()") for op in WRITTEN}
EXPECTED |= {f"{op} strided": ("ValueError", "C-contiguous", "(16,)") for op in WRITTEN + READ}


def test_wrong_arguments():
    for messages in crews.call(CASES + "wrong_arguments", 3):
        assert set(messages) == set(EXPECTED)
        for name, (kind, *words) in EXPECTED.items():
            assert messages[name] is not None, f"{name}: accepted"
            assert messages[name][0] == kind, (name, messages[name])
            for word in words:
                assert word in messages[name][1], (name, messages[name])


def test_what_one_ranks_work_raises_all_raise():
    for rank, found in enumerate(crews.call(CASES + "together_by_one", 3)):
        assert found == (dict.fromkeys(("OSError", "ValueError", "MemoryError"), "of one rank"), rank)


def test_an_error_of_work_at_once_holds_nothing_when_it_is_over():
    """No cycle of it and its frames, which would hold what these do until a collection."""
    class Large:
        pass

    def work():
        large = Large()
        held.append(weakref.ref(large))
        raise ValueError("of this rank")
    held, alone = [], Communicator(LocalEngine(), "alone")
    gc.disable()
    try:
        for comm in (None, alone):
            with contextlib.suppress(ValueError):
                together(comm, work)
            assert held[-1]() is None
    finally:
        gc.enable()


def test_a_message_of_another_size():
    _, message = ranks.call(CASES + "short_message", 2)
    assert "40 bytes" in message and "48" in message and "float64[6]" in message


def test_a_message_longer_than_the_array():
    _, messages = ranks.call(CASES + "long_message", 2)
    assert len(messages) == 2
    assert all("more than 24 bytes for an array of 24 (float64[3])" in message for message in messages)


def test_wait_with_a_limit():
    on_rank_0, on_rank_1 = ranks.call(CASES + "timeout_is_error", 2)
    assert len(on_rank_0) == 2 and on_rank_1 == []
    assert all("all_reduce on 'world'" in message and "0.05 s" in message for message in on_rank_0)


ALONE = """
import sys
from minitorch_dist import comm
world = comm.world()
assert (world.rank, world.size, world.name) == (0, 1, "world") and comm.world() is world
print("mpi4py" in sys.modules)
"""


def test_one_process_never_loads_mpi(tmp_path):
    (tmp_path / "alone.py").write_text(ALONE)
    assert ranks.launch([tmp_path / "alone.py"], n=1).check().stdout == ["False\n"]
    assert ranks.launch([tmp_path / "alone.py"], n=1, force=True).check().stdout == ["False\n"]


@pytest.mark.parametrize("environment, words", [
    ({"PMI_SIZE": "", "OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_RANK": "0"},
     ("started 4 ranks", "sees only 1", "another MPI")),
    ({"PMI_SIZE": "2", "PMI_RANK": "0", "MPI4PY_LIBMPI": "/nowhere/libmpi.so"},
     ("started 2 ranks", "can't load", "pip install mpich")),
])
def test_ranks_that_cant_find_each_other_never_train_apart(tmp_path, environment, words):
    (tmp_path / "alone.py").write_text(ALONE)
    run = ranks.launch([tmp_path / "alone.py"], n=1, env=environment)
    assert run.returncode == 1 and not run.timed_out
    assert all(word in run.stderr[0] for word in ("RuntimeError", *words)), run.report()
