"""Collectives on GPU arrays: by pinned memory, by NCCL (a stand-in that MPI carries) and by CUDA-aware MPI."""

from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import backend, comm, optim
from minitorch_dist.parallel.turns import in_turns
from minitorch_dist.testing import ranks

from .fake_cupy import installed, ndarray

ROOT = Path(__file__).parents[2]
CASES = "tests.device.cases:"
PATHS = {   # path -> (its environment, what gpu_path says)
    "staged": ({}, "staged: ranks 0, 1 share a GPU, which NCCL refuses"),
    "nccl": ({}, "nccl: every rank owns a GPU"),
    "cuda-aware": ({"MINITORCH_CUDA_AWARE": "1"}, "cuda-aware MPI: MINITORCH_CUDA_AWARE=1"),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_call_gives_what_it_gives_on_the_host(path):
    environment, said = PATHS[path]
    for rank, (found, gpu_path, events) in enumerate(ranks.call(CASES + "every_call", 2, (path,), env=environment)):
        (host, *host_counts), (gpu, *gpu_counts) = found
        assert len(host) == len(gpu) > 140
        for name, arrays in host.items():
            for a, b in zip(arrays, gpu[name], strict=True):
                np.testing.assert_array_equal(a, b, err_msg=f"rank {rank}, {name}")
        assert host_counts == gpu_counts and gpu_path == said
        if path == "nccl":
            for of_one in events:
                check_streams(of_one)


def check_streams(events):
    """NCCL's stream waits for what the program's holds, and the program's for NCCL's result, also where the program
    drops the work: the array's memory may be somebody else's then."""
    (a, program, ready), (b, side, awaited), (c, on), (d, recorded, done), (e, last, result) = events
    assert (a, b, c, d, e) == ("record", "wait", "allReduce", "record", "wait")
    assert program == last != side == on == recorded and ready == awaited and done == result


@pytest.mark.parametrize("path, exact", [("staged", False), ("staged", True), ("nccl", False), ("nccl", True)])
def test_data_parallel_training_is_that_of_the_host(path, exact):
    both = ranks.call(CASES + "trained", 2, (path, exact))
    for (host_losses, host), (gpu_losses, gpu) in both:
        assert host_losses == gpu_losses
        for name in host:
            np.testing.assert_array_equal(host[name], gpu[name], err_msg=name)
            np.testing.assert_array_equal(host[name], both[0][0][1][name], err_msg=name)


def test_sums_that_are_ours_are_added_up_on_the_host():
    """MPI hands a function of ours GPU addresses, and waits for no stream between an exact sum's messages."""
    found = ranks.call(CASES + "copies_of_sums", 2, env={"MINITORCH_CUDA_AWARE": "1"})
    for rank, counts in enumerate(found):
        assert counts == [[0, 2], [0, 1 + (rank == 1)], [0, 2], [2, 2]]


@pytest.mark.parametrize("hook", ["fp16", "PowerSGD", "OneBit", "TopK"])
def test_compressed_gradients_are_those_of_the_host(hook):
    both = ranks.call(CASES + "compressed", 2, ("staged", hook))
    for host, gpu in both:
        for name in host:
            np.testing.assert_array_equal(host[name], gpu[name], err_msg=name)
            np.testing.assert_array_equal(gpu[name], both[0][1][name], err_msg=name)


def test_the_other_one_in_turn_has_the_first_one_s_gpu_and_stream():
    with installed() as cupy, cupy.cuda.Stream(non_blocking=True) as stream:
        seen = []

        def look():
            seen.append((cupy.cuda.Device().id, cupy.cuda.get_current_stream().ptr))
        in_turns(look, look, device="cuda:0")
        assert seen == [(0, stream.ptr)] * 2


def test_passes_in_turns_over_packed_rows_are_those_of_the_host():
    """The second pass of a combined step runs in a thread, which has to know this rank's GPU."""
    for host, gpu in ranks.call(CASES + "in_turns", 2, ("nccl",)):
        for a, b in zip(host, gpu, strict=True):
            np.testing.assert_array_equal(a, b)


def test_an_array_on_a_gpu_and_one_on_the_host_are_no_match():
    for text in ranks.call(CASES + "mismatch", 2):
        assert "sum on a GPU" in text and "rank" in text


CROSSED = """
import numpy as np
from minitorch_dist import backend, comm
from tests.device.fake_cupy import installed
world = comm.world()
groups = [world.split(0, name=name) for name in ("here", "there")]
with installed():
    x = backend.to(np.ones(3, np.float32), "cuda")
    works = [group.all_reduce(x, async_op=ASYNC) for group in (groups[::-1] if world.rank else groups)]
"""


@pytest.mark.parametrize("posted", [False, True])
def test_first_collectives_in_another_order_are_told_by_the_guard(tmp_path, posted):
    """To choose how arrays on GPUs travel the ranks wait for each other, also where a collective is only posted."""
    (tmp_path / "program.py").write_text(CROSSED.replace("ASYNC", str(posted)))
    run = ranks.launch([tmp_path / "program.py"], 2, limit=30,
                       env={"PYTHONPATH": str(ROOT), "MINITORCH_STALL_SECONDS": "1"})
    assert run.returncode == 1 and not run.timed_out, run.report()
    op = "first_on_a_gpu" if posted else "all_reduce"
    for text, name in zip(run.stderr, ("here", "there"), strict=True):
        assert "the stall limit of 1 s" in text and f"waits in {op}(float32[3]) on '{name}'" in text, run.report()


def test_a_communicator_keeps_its_gpu():
    for rank, (x, said) in enumerate(ranks.call(CASES + "of_another_gpu", 2)):
        np.testing.assert_array_equal(x, np.full(3, 4.0))
        assert f"an array on cuda:{1 - rank}, but this communicator has been on cuda:{rank}" in said


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_optimizers_are_where_the_parameters_are(servers):
    """Two workers' Adam is then the one of DistributedDataParallel on their GPUs, to the last bit."""
    ends = ranks.call(CASES + "served", servers + 2, (optim.Adam, servers))
    wanted = ends[servers][0][0]
    for rank, (found, places) in enumerate(ends):
        assert places == ({"cuda:0"} if rank < servers else set())
        for name, value in wanted.items():
            np.testing.assert_array_equal(found[-1][name], value)


def test_a_group_of_one_rank_hands_mpi_nothing():
    for host, gpu in ranks.call(CASES + "groups_of_one", 2):
        np.testing.assert_array_equal(gpu, host)
        assert np.all(host)


def test_differentiable_collectives():
    for host, gpu in ranks.call(CASES + "differentiable", 2):
        for a, b in zip(host, gpu, strict=True):
            np.testing.assert_array_equal(a, b)


def test_a_rank_alone_needs_no_copies():
    world = comm.communicator.world_of_one()
    with installed():
        x = world.empty((3, 2), np.float32, "cuda")
        assert type(x) is ndarray and not x.get().any()
        out = backend.to(np.ones((3, 2), np.float32), "cuda")
        world.all_gather(out, x)
        world.all_reduce(out, "mean")
        assert not out.get().any() and world.gpu_path is None
        with pytest.raises(ValueError, match="out lives on cuda:0 and x on cpu"):
            world.all_gather(out, np.ones((3, 2), np.float32))
        with pytest.raises(TypeError, match="must be a NumPy array"):
            world.all_reduce([1.0])


def test_nothing_of_a_gpu_is_imported_unasked():
    run = ranks.launch(["-c", "import sys, minitorch_dist as mt; from minitorch_dist import comm; comm.world();"
                        "mt.tensor([1.0]).sum().item(); mt.backend.memory_info();"
                        "assert not {'cupy', 'triton'} & {*sys.modules}"], 1)
    run.check()
