"""ZeRO 1, 2, 3 and FSDP: the curve of one process, in exact mode its bits; bytes, memory and order are counted."""

import re

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist.autodiff.writes import WriteLog
from minitorch_dist.flat import BLOCK, round_up
from minitorch_dist.parallel.fsdp.grouping import default_units, group
from minitorch_dist.parallel.fsdp.zero import SENT, held
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import sharded_cases as cases
from . import sharded_misuse_cases as misuse
from . import sharded_use_cases as use

CASES, MISUSE, USE = (f"tests.parallel.sharded_{name}:" for name in ("cases", "misuse_cases", "use_cases"))


def close(got, wanted, tolerance=1e-10):
    assert set(got) == set(wanted)
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=tolerance, atol=tolerance, err_msg=name)


# ---------------------------------------------------------------- one curve

@pytest.fixture(scope="module")
def one_process():
    """{name: (losses, norms, state dict)} of CURVES, by a process that knows nothing of ranks."""
    return {name: cases.one_process(model, optimizer, cases.STEPS, clip, batch)
            for name, (model, optimizer, clip, _, batch) in cases.CURVES.items()}


@pytest.mark.parametrize("n", [1, 2, 3, 4])
def test_one_curve_in_every_stage(one_process, n):
    """Adam, AdamW with groups, SGD; dropout, clipping, accumulation, uneven batches: parameters within 1e-10."""
    for rank, seen in enumerate(crews.call(CASES + "curves", n)):
        for (name, way), (losses, norms, state, dims, unused) in seen.items():
            wanted_losses, wanted_norms, wanted = one_process[name]
            np.testing.assert_allclose(losses, wanted_losses, rtol=1e-10, err_msg=f"{name}, stage {way}")
            np.testing.assert_allclose(norms, wanted_norms, rtol=1e-10)
            if rank == 0:
                close(state, wanted)
                assert list(state) == list(wanted)
            else:
                assert state == {}
            model = cases.MODELS[cases.CURVES[name][0]](np.dtype("f8"))
            assert {path: max(ndim, 1) for path, ndim in dims.items()} == \
                {path: max(p.ndim, 1) for path, p in model.named_parameters()}
            assert unused == (["unused.weight", "unused.bias"] if name == "odd" else [])


def test_the_curves_can_tell(one_process):
    """Uneven batches, clipping that clips, and parameters that move."""
    for name, (_, _, clip, _, batch) in cases.CURVES.items():
        losses, norms, state = one_process[name]
        assert batch % 2 or batch % 3 == 0 and len(set(losses)) == cases.STEPS
        assert not clip or sum(norm > clip for norm in norms) >= 2
        before = cases.MODELS[cases.CURVES[name][0]](np.dtype("f8")).state_dict()
        still = {key for key in state if np.array_equal(state[key], before[key])}
        assert still == ({"first.bias", "unused.weight", "unused.bias"} if name == "odd" else set())


# ---------------------------------------------------------------- exact mode

@pytest.fixture(scope="module")
def exact_alone():
    return crews.call(CASES + "exact_curves", 1, (["ddp", "3"],))[0]


@pytest.mark.parametrize("n", [2, 4])
def test_exact_mode_has_one_set_of_bits(exact_alone, n):
    """Of one process, DistributedDataParallel and every stage; norms too, whatever blocks of them the ranks share."""
    everyone = crews.call(CASES + "exact_curves", n, (["ddp", "1", "2", "3"],))
    for name in cases.EXACT:
        losses, norms, digests = exact_alone[name, "ddp"]
        assert len(set(digests)) == cases.EXACT_STEPS and exact_alone[name, "3"] == exact_alone[name, "ddp"]
        for rank, seen in enumerate(everyone):
            for way in ("ddp", "1", "2", "3"):
                got = seen[name, way]
                assert got[0] == losses and got[1] == norms, f"{name}, {way}, rank {rank}"
                if rank == 0 or way == "ddp":
                    assert got[2] == digests, f"{name}, {way}"
    assert min(crews.call(CASES + "across_blocks", n)) >= n - 1


@pytest.mark.parametrize("n", [2, 3])
def test_a_norm_has_one_set_of_bits(n):
    """float64's, and the sums that it is made of: of blocks that ranks share behind other parameters' blocks too."""
    (wanted, _), = crews.call(CASES + "sums_of_given", 1)
    for found, shared in crews.call(CASES + "sums_of_given", n):
        assert found == wanted and any(shared[1:])


@pytest.mark.parametrize("n", [1, 2, 4])
def test_exact_shares_are_those_of_an_exact_all_reduce(n):
    for seen in crews.call(CASES + "exact_shares", n):
        assert seen.pop("order matters") == (n == 4)
        for same, sent in seen.values():
            assert same and sent == (n - 1) * 5000 * 4


def test_exact_shares_across_nodes():
    for seen in crews.call(CASES + "exact_shares", 4, env={"MINITORCH_NODES": "2"}):
        assert seen.pop("order matters") and all(same for same, _ in seen.values())


def test_three_ranks_have_no_tree():
    for model, call in crews.call(CASES + "on_three_ranks", 3):
        assert "not on 3" in model and "this communicator has 3" in call


def test_the_bits_on_a_gpu():
    for seen in ranks.call(CASES + "on_a_gpu", 2):       # the GPU that is played there stays with its process
        assert len(seen) == 3 and all(seen.values()), seen


# ---------------------------------------------------------------- counted

def elements(units, n):
    """(of all units with their padding, of the largest)."""
    sizes = [size for _, size, _ in units]
    assert sizes == [n * round_up(-(-size // n), BLOCK) for size in sizes]
    return sum(sizes), max(sizes)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("model", ["mlp", "gpt"])
@pytest.mark.parametrize("way", list(cases.WAYS))
def test_what_a_step_sends_and_a_rank_holds(n, model, way):
    stage, kept = cases.WAYS[way][0], way == "3, kept"
    for seen in crews.call(CASES + "counted", n, (model, way)):
        units = seen["units"]
        psi, largest = elements(units, n)
        gathers = 1 if kept or stage < 3 else 2
        assert seen["calls"]["all_gather"] == gathers * len(units)
        assert seen["calls"]["reduce_scatter"] == len(units)
        assert seen["calls"]["all_reduce"] == 2         # who has used what; train_step's losses
        assert seen["sent"]["all_gather"] == gathers * psi * 4 * (n - 1) // n
        assert seen["sent"]["reduce_scatter"] == psi * 4 * (n - 1) // n
        together = seen["sent"]["all_gather"] + seen["sent"]["reduce_scatter"]
        assert together == (2 if kept else SENT[stage]) * psi * 4 * (n - 1) // n
        assert set(seen["calls"]) == {"all_gather", "reduce_scatter", "all_reduce"}
        # what is held when the step is through; padding included
        paper = held(stage, psi, n)
        assert {kind: seen["live"][kind] for kind in paper} == paper
        assert seen["live"]["buffer"] == 0
        # at any time: the units that are alive, and the gradients of two, and of a parameter, on their way
        sizes = sorted((size for _, size, _ in units), reverse=True)
        own = 4 * (sum(sizes[:3 if model == "gpt" else 2]) + sizes[0])
        alive = sum(sizes) if kept else sum(sizes[:2])
        assert seen["peak"]["buffer"] <= (alive * 4 if stage == 3 else 0)
        assert seen["peak"]["parameter"] == paper["parameter"]
        assert seen["peak"]["gradient"] <= paper["gradient"] + (own if stage > 1 else 4 * largest)
        if stage == 3:
            check_order(seen["events"], [name for name, _, _ in units], kept)


def check_order(events, names, kept):
    """Each unit once in forward and once in backward, there one ahead; two alive at most; reduced when its backward is
    over."""
    alive, most, gathered, posted = set(), 0, [], []
    for kind, name in events:
        if kind == "gather":
            assert name not in alive
            alive.add(name)
            gathered.append(name)
        elif kind == "free":
            alive.remove(name)
        else:
            posted.append((name, len(gathered)))
        most = max(most, len(alive))
    assert not alive and most == (len(names) if kept else 2)
    assert sorted(gathered) == sorted(names * (1 if kept else 2))
    assert [name for name, _ in posted] == gathered[:len(names)][::-1]
    if not kept:    # when the first one's backward is over the next one has been gathered, and no other
        assert posted[0][1] == len(names) + (3 if "the rest" in names else 2)


def test_the_paper_on_paper():
    """Table 1 of the ZeRO paper has 2 + 2 + 12 bytes; in float32 these are 4 + 4 + 8."""
    assert [sum(held(stage, 1000, 8).values()) for stage in (0, 1, 2, 3)] == [16000, 9000, 5500, 2000]


# ---------------------------------------------------------------- units

def test_units_by_default_and_shared_parameters():
    def names(model, units=None):
        return {name: [path for path, _ in named]
                for _, name, named in group(model, default_units(model) if units is None else units)}
    assert list(names(cases.mlp(np.dtype("f4")))) == ["0", "3", "5"]
    assert list(names(mt.nn.Sequential(mt.nn.ModuleList(cases.mlp(np.dtype("f4")))))) == ["0.0", "0.3", "0.5"]
    gpt = names(cases.gpt(np.dtype("f4")))
    assert list(gpt) == ["the rest", "blocks.0", "blocks.1"] and len(gpt["blocks.1"]) == 12
    assert gpt["the rest"] == ["embed.weight", "position.weight", "norm.weight", "norm.bias"]
    odd = cases.Odd(np.dtype("f4"))
    found = names(odd, odd.units())
    assert found["the rest"] == ["scale", "first.weight", "blocks.0.0.weight", "norm.weight", "norm.bias",
                                 "last.weight", "last.bias"]
    assert found["outer"] == ["0.weight", "0.bias"] or found["outer"] == ["outer.0.weight", "outer.0.bias"]
    assert found["outer.1"] == ["outer.1.weight", "outer.1.bias"] and found["blocks.2"] == ["blocks.2.0.bias"]
    mixed = mt.nn.Sequential(mt.nn.Linear(2, 2), mt.nn.LayerNorm(2, dtype="f8"))
    assert list(names(mixed, [])) == ["the rest (float32)", "the rest (float64)"]


def test_gathered_values_have_no_history():
    """They are unpacked after the nodes that need them were made, into memory that somebody may have written before."""
    log, memory = WriteLog(), np.zeros(10)
    log.add(memory, "somebody")
    log.forget(memory[2:5])
    assert log.since(memory[2:5], 0) is None
    assert log.since(memory[:3], 0)[1] == log.since(memory[4:], 0)[1] == "somebody"
    log.add(memory[4:6], "another")
    assert log.since(memory[2:5], 0)[1] == "another" and log.since(memory[2:4], 0) is None


# ---------------------------------------------------------------- states

@pytest.mark.parametrize("way, other", [("1", "3"), ("3", "2")])
def test_states_are_those_of_one_process(way, other):
    """Saved in one stage, loaded in another, and by a process without ranks: the curve goes on."""
    found = crews.call(CASES + "states", 2, (way, other))[0]
    *_, wanted = cases.one_process("odd", "adamw", 6)
    for state in found.values():
        close(state, wanted)


# ---------------------------------------------------------------- what goes wrong

ELSEWHERE = "0.weight is cut over the ranks"


@pytest.mark.parametrize("n", [1, 2])
def test_what_is_refused(n):
    per_stage = dict.fromkeys(("an op", "matmul", "numpy", "index", "print", "asarray", "module",
                               "module state", "optimizer", "copy", "pickle", "copy of its array"),
                              f"Error: {ELSEWHERE}") | {
        "optimizer copied": "full_optimizer_state_dict", "optimizer pickled": "full_optimizer_state_dict",
        "state": "full_state_dict", "deepcopy all": "full_state_dict", "ddp": "already", "twice": "already",
        "ddp inside": "belongs to one already", "to": "lives in the flat buffer"}
    expected = {
        "optimizer before": "ValueError.*0.weight.*optimizer's flat buffer", "stage": "stage=4",
        "stranger": "fully_shard: units.*Linear is none",
        "never called": "fully_shard: units.*0 is only there to hold others",
        "nothing to train": "no parameter that requires grad",
        "half": "weight .float16.*can't be summed", "no_sync": "no_sync in exact mode",
        "stages differ": "fully_shard: the ranks have wrapped different models.*stage=1" if n > 1 else "nothing",
        "dtypes differ": "the ranks have wrapped different models.*float16" if n > 1 else "nothing",
        "changed": "the model was changed.*3 is new", "thawed": "first.bias: frozen when", "names": "KeyError.*2.bias",
        "lists": "TypeError: load_state_dict: 0.weight is a list, and must be an array",
        "no names": "TypeError: load_state_dict: takes {name: array}, got a list",
        "optimizer state of lists": "ValueError: Adam: 'list' object has no attribute 'shape'",
        "optimizer state": r"groups of \[2\] parameters, this \w+ of \[4\]",
        "mt.grad around it": "inside .with model.gathered.*which mt.grad",
        "mt.grad inside gathered": "nothing",
        "state of copies": "TypeError: full_state_dict: a DistributedDataParallel is not what fully_shard gives",
        "optimizer state of copies": "TypeError: full_optimizer_state_dict: a Distr",
        "optimizer state into copies": "TypeError: load_full_optimizer_state_dict: a Distr"}
    expected |= {(stage, name): words for stage in (1, 2, 3) for name, words in per_stage.items()}
    for how in ("copied", "pickled"):
        expected |= {(how, name): f"{name.partition(',')[0]}.*copies of this rank's pieces of 0.weight"
                     for name in ("clip", "LAMB", "LAMB, laid out", "LARS", "Muon", "Adafactor", "GradScaler")}
        expected[how, "SGD"] = "nothing"
    expected[3, "module"] = "nothing"       # whose units gather their values themselves
    for found in crews.call(MISUSE + "refused", n):
        assert set(found) == set(expected)
        for name, words in expected.items():
            assert re.search(words, found[name], re.DOTALL), f"{name}: {found[name]}"


@pytest.mark.parametrize("n", [1, 2])
def test_what_looks_odd_and_is_right(n):
    usual = misuse.alone(cases.net(), lambda m, x, rank: m(x), range(n))
    found = crews.call(MISUSE + "in_use", n)[0]
    assert "part.table is cut over the ranks" in found["itself"] and found["copy"] == "nothing"
    assert "the forward of part returns a view of one of its parameters" in found["view"]
    close(*found["step after a forward"])
    assert found["held by the tape"][0] == 0 < found["held by the tape"][1]
    for stage in (1, 2, 3):
        for name in ("usual", "and then", "backward twice", "two forwards", "hooks around"):
            close(found[stage, name], usual)
        for name in ("checkpointed unit", "checkpointed all"):
            close(found[stage, name], {f"layers.{k}": g for k, g in usual.items()})
        close(found[stage, "doubled"], {k: g * (2 if k == "2.weight" else 1) for k, g in usual.items()})
        assert "call zero_grad() before it" in found[stage, "summed twice"]
        assert "SGD.step has overwritten" in found[stage, "stale"]
        assert ("nothing" if stage == 3 else "right after backward") in found[stage, "step after evaluation"]
        assert "can't be differentiated again" in found[stage, "create_graph"]
        values, inside = found[stage, "gathered"]
        close(values, cases.net().state_dict())
        assert inside == "nothing" and "load_state_dict" in found[stage, "gathered and written"]


@pytest.mark.parametrize("n", [1, 2])
def test_values_are_those_after_the_last_step(n):
    """Whatever has gathered them before it, and has not come to its end."""
    found = crews.call(USE + "current_values", n)[0]
    assert found.pop("alive") == []
    for kept in (False, True):
        assert ELSEWHERE in found.pop(("closed", kept))
        assert "step has written to this rank's part of 0 inside gathered" in found.pop(("stepped inside", kept))
    for seen, wanted in found.values():
        close(seen, wanted)


@pytest.mark.parametrize("n", [1, 2])
def test_what_users_do_to_pieces(n):
    def wanted(module):
        return misuse.alone(module, lambda m, x, rank: m(x), range(n))
    usual = wanted(cases.net())
    found = crews.call(USE + "pieces_in_use", n)[0]
    for stage in (1, 2, 3):
        close(found[stage, "checkpoints"], wanted(use.Checkpoints(lambda f: f)))
        assert found[stage, "held"] == 0
        assert n > 1 or "step has overwritten" in found[stage, "checkpoints of old values"]
        got, seen, frozen = found[stage, "hooked"]
        close(got, usual | {"0.bias": 3 * usual["0.bias"], "0.weight": 0 * usual["0.weight"]})     # not even summed
        assert seen == [[False, True, True, True]] and frozen
        assert "summed over the ranks already" in found[stage, "no_sync"]
        assert "added up of 2.weight, 2.bias" in found[stage, "zeroed in part"] and found[stage, "summary"]
        assert "added up of 0.weight, 0.bias" in found[stage, "zeroed by one of two"]
        close(found[stage, "zeroed by both"], usual)


@pytest.mark.parametrize("stage", [1, 2])
def test_ranks_without_a_piece_are_told_too(stage):
    sizes = []
    for told, held_here in crews.call(USE + "a_step_too_late", 2, (stage,)):
        assert [kind in text and "right after backward" in text
                for kind, text in zip(("SGD", "AdamW", "Muon"), told, strict=True)] == [True] * 3
        sizes.append(held_here)
    assert sizes == [[15], [0]]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_step_that_has_nothing_to_update_has_written_nothing(stage):
    got, wanted = crews.call(USE + "a_step_of_nothing", 2, (stage,))[0]
    for name, value in wanted.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-12, err_msg=name)


@pytest.mark.parametrize("n", [1, 2])
def test_after_an_exception_the_next_step_is_right(n):
    wanted = misuse.alone(cases.net(), lambda m, x, rank: m(x), range(n), steps=(0, 3))
    for (stage, where), (errors, got, alive) in crews.call(MISUSE + "raising", n)[0].items():
        assert errors[0] == "ZeroDivisionError: refused", (stage, where, errors)
        assert not where.endswith("no_sync") or where.startswith("forward") or "begin the step anew" in errors[1]
        assert alive == []
        close(got, wanted)


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_in_exact_mode_that_is_left_half_way(n):
    def wanted(first):
        return misuse.alone(cases.net(), lambda m, x, rank: m(x), range(n), steps=range(first, first + 4))
    for error, after, forgotten, raised, again in crews.call(MISUSE + "half_a_step", n)[0]:
        assert "ZeroDivisionError" in raised
        assert "after 2 of the 4 backward passes" in error and "forget_step()" in error
        close(after, wanted(10))
        close(forgotten, wanted(20))
        close(again, wanted(30))


@pytest.mark.parametrize("stage", [1, 2])
def test_parameters_that_some_ranks_use(stage):
    everyone = crews.call(MISUSE + "used_by_some", 2, (stage,))
    wanted = misuse.alone(misuse.Maybe(), lambda m, x, rank: m(x, rank == 0), range(2))
    close(everyone[0][0], wanted)
    assert everyone[0][1] == everyone[1][1] == []
    unused = ["layers.1.weight", "layers.1.bias"]
    assert everyone[0][2] == everyone[1][2] == [(unused, unused)] * 2


def test_ranks_that_go_through_other_units_end_the_job():
    """Units of one shape: without their names in the check, one's values would become the other's."""
    calls = r"(?s)all_gather\([^()]*, layers.1, posted\).*all_gather\([^()]*, layers.2, posted\)"
    with pytest.raises(AssertionError, match=calls):
        ranks.call(MISUSE + "used_by_some", 2, (3,), limit=20)


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_penalty_on_parameters_beside_a_loss(n, stage):
    """In one backward or in two: gradients that come to the pieces by themselves are added to the sums."""
    found, whole, stale, hooked = crews.call(USE + "penalised", n, (stage,))[0]
    for way, state in found.items():
        for name, value in whole.items():
            np.testing.assert_allclose(state[name], value, rtol=0, atol=1e-15, err_msg=f"{way} {name}")
    assert "comes upon gradients of 2.weight, 2.bias that are summed over the ranks already: call zero_grad()" in stale
    for said in hooked:
        assert "a hook on one of parameters(), which stands in the loss by itself too" in said
