"""Plans find Megatron's annotations where they are the best, never more bytes than the best there are, and foretell
what the ledger counts. As in test_annotate.py only the ranks import minitorch_dist.parallel.sharding.annotate."""

import pytest

from tests.crews import crews

CASES = "tests.parallel.annotate_plan_cases:"


@pytest.mark.parametrize("n", [2, 4])
def test_megatrons_cut_is_found_and_sends_its_closed_form(n):
    (mlp, mlps, mlp_bytes, x), (block, blocks, block_bytes, y) = crews.call(CASES + "megatrons", 1, args=(n,))[0]
    assert mlp == mlps and mlp_bytes == (2 * x * (n - 1) / n, 2 * x * (n - 1) / n)
    assert block == blocks and block_bytes == (4 * y * (n - 1) / n, 4 * y * (n - 1) / n)


def test_no_other_annotations_send_less():
    found = crews.call(CASES + "exhaustive", 1, args=(2,))[0]
    for planned, least, _ in found:
        assert planned == least
    assert len({planned for planned, _, _ in found}) > 2 and max(ways for _, _, ways in found) > 8


def test_what_is_foretold_is_what_the_ledger_counts():
    for rank, found in enumerate(crews.call(CASES + "foretold", 4, args=({"dp": 2, "tp": 2},))):
        foretold, counted, text, difference = found
        assert counted == (foretold if rank == 0 else pytest.approx(foretold, abs=4))    # ranks' shares of one number
        assert min(counted) > 9000 and abs(difference) < 1e-10
        assert f"{foretold[0]:14,.0f}{foretold[1]:14,.0f}" in text.splitlines()[-1]


def test_what_is_foretold_of_each_way_to_run_is_what_is_sent_on_paper():
    found, known = crews.call(CASES + "counted", 1, args=({"dp": 2, "tp": 2},))[0]
    for name, (foretold, sent) in found.items():
        assert foretold == sent and (sent[1] > 0) == (name != "no gradients"), name
    assert sum(found["beside"][1]) <= sum(known)


def test_paper_sends_what_ranks_send():
    for paper, real in crews.call(CASES + "on_paper", 2, args=(2,)):
        assert paper == real and "all_gather" in paper


def test_what_cannot_be_planned_is_refused():
    expected = {"real": ("ValueError", "it takes one of the axes of a paper_mesh"),
                "axis": ("ValueError", "axis 'pp' of a mesh of dp, tp"),
                "mesh": ("TypeError", "plan: got a PaperCommunicator where it takes a DeviceMesh"),
                "annotated": ("ValueError", "0.bias is annotated on axis 'tp'"),
                "detached": ("ValueError", "f meets Sharded((dp, ·), shape=(4, 6)"),
                "full": ("ValueError", "f brings Sharded((dp, ·), shape=(4, 10), dtype=float64) together"),
                "item": ("ValueError", "f brings Sharded(() + Σdp, shape=(), dtype=float64) together"),
                "nothing": ("ValueError", "f returns nothing: it takes what backward is to start at"),
                "parameter": ("ValueError", "f returns 0.weight, which none of its ops has met"),
                "nobody": ("ValueError", "paper_mesh: sizes {'tp': -1}"),
                "other mesh": ("ValueError", "lie on axes")}
    found = crews.call(CASES + "errors", 1)[0]
    assert set(found) == set(expected)
    for name, (kind, words) in expected.items():
        assert found[name] is not None and found[name][0] == kind and words in found[name][1], (name, found[name])
