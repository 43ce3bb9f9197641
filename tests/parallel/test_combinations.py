"""Which forms of parallelism go together, and with what one does besides: a table, each cell of which is run.

    python -m tests.parallel.test_combinations      prints it, as docs/combinations.md has it

A cell of two forms is a training on 2 × 2 ranks. It ends with the parameters of one process, or it is refused on all
ranks, by an error that names both: there is no third. A cell that REFUSED and NOTHING don't name must work.
"""

import functools
import math
import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.checkpoints.index import covers
from tests.crews import crews

from . import combination_cases as cases
from .combination_besides import BESIDES, EVERY, USUAL, adamw
from .combination_cases import FORMS

CASES, USE = "tests.parallel.combination_cases:", "tests.parallel.combination_use_cases:"
SAME, WITHIN, NO, NOT_THERE = "=", "≈", "✗", "·"
DOCUMENT = Path(__file__).parents[2] / "docs" / "combinations.md"

TENSORS, CONTEXTS, PIPELINES = ("tensor", "sequence"), ("ring", "all-to-all"), (
    "1F1B", "interleaved", "ZB-H1", "1F1B, slices")
ZEROS = "ZeRO 1", "ZeRO 2", "ZeRO 3"
LIKE = {        # for which tensor, ring, 1F1B and ZeRO 1 …
    "sequence", "all-to-all", "interleaved", "ZB-H1", "1F1B, slices", "ZeRO 2"}
IN_GROUPS = {       # … are run in these rows
    "NorMuon", "Dion2", "LAMB", "LARS", "Adafactor", "mxfp8", "nvfp4, exact", "mp_policy", "hybrid", "DiLoCo"}
RARER = {       # of which a pair is trained for one step
    "all-to-all", "interleaved", "ZB-H1", "1F1B, slices", "ZeRO 1", "ZeRO 2"}

REFUSED = [     # (forms, with what, a pattern of the error, why)
    (("tensor", "sequence", "experts"), ("annotations",), "shard_parameters.*parallelize_module",
     "annotations are of whole parameters; they are tensor parallelism themselves"),
    (CONTEXTS, ("annotations",), "shard_parameters.*context_parallel",
     "no op can work out the messages; annotate the batch along time"),
    (("annotations",), PIPELINES, "Pipeline.*lies on a mesh.*annotations", "stages send arrays that are whole"),
    (("annotations",), ("DDP",), "DistributedDataParallel.*lies on a mesh", "gradients are summed already"),
    (("annotations",), ZEROS, "fully_shard.*lies on a mesh", "gradients are summed already"),
    (CONTEXTS, ("exact", "nvfp4, exact", "BatchNorm, exact"),
     "exact mode.*divided|context_parallel.*BatchNorm", "the sums over ranks are inside of products"),
    (("annotations",), ("Muon", "NorMuon", "Dion2"), "(Muon|Dion2).*a part of", "the step is one of a whole matrix"),
    ((*TENSORS, "experts", "annotations", *ZEROS), ("Dion, unsummed",),
     "Dion: .*a piece, or a part|unsummed parameters|divided over ranks, and can't be unsummed",
     "the step is one of a whole matrix, of a whole parameter: Muon and Dion2 take pieces and parts"),
    (("annotations",), ("Adafactor",), "Adafactor.*parts of matrices", "the means are over whole rows and columns"),
    (("annotations",), ("float8", "mxfp8"), "Sharded|float8.*mesh", "the parameters are arrays on a mesh"),
    (("annotations",), ("mp_policy", "hybrid"), "fully_shard.*lies on a mesh", "gradients are summed already"),
    (("annotations",), ("DiLoCo",), "DiLoCo.*lies on a mesh", "the parameters are arrays on a mesh"),
    (("annotations",), ("LoRA", "QLoRA"), "lora.add.*lies on a mesh", "the parameters are arrays on a mesh"),
    (CONTEXTS, ("1F1B, slices",), "Pipeline.*has a part of each sequence", "ranks have a part of each sequence"),
    (("experts",), ("1F1B, slices",), "Pipeline.*(capacity_factor|balance)=",
     "who finds a place, and the loss that balances experts, depend on tokens of all slices; without both they go "
     "together"),
    (("1F1B, slices",), ("exact", "nvfp4, exact", "BatchNorm, exact"), "Pipeline.*in exact mode",
     "the sums over slices are inside of products"),
    (("ring",), ("chosen blocks",), "context_parallel.*chooses among", "a ring has a few blocks at a time"),
    (TENSORS, ("QLoRA",), "lora.add.*blocks of 64", "parts would cut the blocks that share a scale"),
    (("sequence", *CONTEXTS), ("BatchNorm", "BatchNorm, exact"), "BatchNorm.*positions",
     "the statistics are over positions that are elsewhere"),
]
NOTHING = [     # (forms, with what, why there is nothing to try)
    (("annotations",), ("exact", "nvfp4, exact", "BatchNorm, exact"), "exact mode is the wrappers'"),
    (("annotations", *ZEROS), ("comm hook",), "hooks are DistributedDataParallel's"),
    (("DDP",), ("mp_policy", "hybrid"), "they are fully_shard's"),
    (("interleaved",), ("DiLoCo",), "a worker's rank has one module there, and several chunks here"),
    (PIPELINES, ("BatchNorm",), "a stage's statistics are those of a micro-batch; in exact mode these are the same "
                                "everywhere"),
]
TRIPLES = [     # forms, the sizes of their axes, and what is done besides
    (("tensor", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "GradScaler"),
    (("tensor", "1F1B"), {"pp": 1, "dp": 2, "tp": 2}, None),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "clip_grad_norm"),
    (("experts", "ZB-H1"), {"pp": 2, "dp": 1, "ep": 2}, "clip_grad_norm"),
    (("tensor", "ring", "ZeRO 3"), {"dp": 1, "cp": 2, "tp": 2}, None),
    (("tensor", "ring", "ZeRO 3"), {"dp": 2, "cp": 1, "tp": 2}, "clip_grad_norm"),
    (("sequence", "ZeRO 2"), {"dp": 2, "tp": 2}, "GradScaler"),
    (("experts", "ZeRO 3"), {"dp": 2, "ep": 2}, "clip_grad_norm"),
    (("ZB-H1", "ZeRO 3"), {"pp": 2, "dp": 2}, "clip_grad_norm"), (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "exact"),
    (("tensor", "experts", "ZeRO 3"), {"ep": 2, "tp": 2}, "clip_grad_norm"),
    (("sequence", "experts", "ZeRO 3"), {"ep": 2, "tp": 2}, "clip_grad_norm"),
    (("sequence", "experts", "1F1B"), {"pp": 2, "ep": 1, "tp": 2}, "recompute"),
    (("experts", "1F1B", "ZeRO 2"), {"pp": 2, "ep": 2}, "clip_grad_norm"),
    (("experts", "ZB-H1", "ZeRO 2"), {"pp": 2, "ep": 2}, "exact"), (("experts", "ZeRO 3"), {"dp": 2, "ep": 2}, "exact"),
    (("sequence", "ZeRO 3"), {"dp": 2, "tp": 2}, "Muon"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "float8"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "prune"),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "LoRA"),
    (("tensor", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "Muon"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "8-bit states"),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "float8"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "LAMB"),
    (("experts", "ZeRO 3"), {"dp": 2, "ep": 2}, "LARS"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "NorMuon"), (("experts", "ZeRO 3"), {"dp": 2, "ep": 2}, "Dion2"),
    (("sequence", "ZeRO 2"), {"dp": 2, "tp": 2}, "Dion2"), (("ring", "1F1B"), {"pp": 2, "cp": 2}, "Dion, unsummed"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "Adafactor"), (("experts", "ZeRO 3"), {"dp": 2, "ep": 2}, "Adafactor"),
    (("tensor", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "Qwen3, recompute"),
    (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "Qwen3, exact"), (("ZeRO 3",), {"dp": 4}, "Qwen3, exact"),
    (("tensor", "ZeRO 3"), {"dp": 2, "tp": 2}, "Qwen3, Muon"),
    (("tensor", "ring"), {"cp": 2, "tp": 2}, "Qwen3, compile"),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "Qwen3, float8"),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "Qwen3, LoRA"),
    (("ring", "ZeRO 3"), {"cp": 2, "dp": 2}, "Qwen3, QLoRA"),
    (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "latents, exact"),
    (("tensor", "ring"), {"cp": 2, "tp": 2}, "latents, compile"),
    (("sequence", "ring"), {"cp": 2, "tp": 2}, "latents, LoRA"),
    (("sequence", "ring", "1F1B"), {"pp": 1, "cp": 2, "tp": 2}, "recompute"),
    (("ring", "experts", "ZeRO 3"), {"dp": 1, "cp": 2, "ep": 2}, "recompute"),
    (("all-to-all", "experts", "1F1B"), {"pp": 1, "cp": 2, "ep": 2}, "GradScaler"),
    (("sequence", "ring", "ZeRO 3"), {"dp": 1, "cp": 2, "tp": 2}, "LoRA"),
    (("sequence", "all-to-all", "ZeRO 2"), {"dp": 1, "cp": 2, "tp": 2}, "GradScaler"),
    (("sequence", "interleaved"), {"pp": 2, "dp": 1, "tp": 2}, "latents, LoRA"),
    (("tensor", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "states, recompute"),
    (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "states, exact"),
    (("sequence", "ring"), {"cp": 2, "tp": 2}, "states, compile"),
    (("tensor", "all-to-all"), {"cp": 2, "tp": 2}, "states, float8"),
    (("ring", "ZB-H1"), {"pp": 2, "dp": 1, "cp": 2}, "states, LoRA"),
    (("tensor", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "delta rule, recompute"),
    (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "delta rule, exact"),
    (("sequence", "ring"), {"cp": 2, "tp": 2}, "delta rule, compile"),
    (("sequence", "1F1B"), {"pp": 2, "dp": 1, "tp": 2}, "chosen blocks, recompute"),
    (("1F1B", "ZeRO 2"), {"pp": 2, "dp": 2}, "chosen blocks, exact"), (("ZeRO 3",), {"dp": 4}, "chosen blocks, exact"),
    (("tensor", "all-to-all"), {"cp": 2, "tp": 2}, "chosen blocks, compile"),
    (("ring", "ZeRO 3"), {"dp": 2, "cp": 2}, "neighbours"), (("ZeRO 3",), {"dp": 4}, "neighbours, 8 bits, exact"),
    (("all-to-all", "ZeRO 3"), {"dp": 2, "cp": 2}, "neighbours"),
]


def entry(table, a, b):
    """What a table says of two names, in either order, without these; None: nothing."""
    return next((rest for rows, columns, *rest in table if a in rows and b in columns or b in rows and a in columns),
                None)


def alternatives(a, b):
    """Whether two names are forms that cut the same: one takes one of them."""
    return a in FORMS and b in FORMS and FORMS[a].axis == FORMS[b].axis


def cell(a, b):
    """What the table says of two names."""
    if alternatives(a, b) or entry(NOTHING, a, b):
        return NOT_THERE
    if entry(REFUSED, a, b):
        return NO
    bits = b in BESIDES and BESIDES[b].tolerance is None and a not in TENSORS
    return SAME if bits else WITHIN


def table(rows, columns):
    """As Markdown."""
    lines = [["", *columns], ["---"] * (1 + len(columns))]
    lines += [[row, *(cell(column, row) for column in columns)] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def reasons(entries):
    """Why, one line each."""
    return "\n".join(f"- {', '.join(rows)} with {', '.join(columns)}: {why}" for rows, columns, *_, why in entries)


def page():
    """All that docs/combinations.md has from here."""
    return "\n\n".join([table(FORMS, FORMS), table(BESIDES, FORMS), "Refused:", reasons(REFUSED),
                        "Nothing to combine:", reasons(NOTHING)]) + "\n"


# ---------------------------------------------------------------- what ranks have, and one process

def assembled(ranks):
    """{name: array} of all ranks' pieces, each of which must be there, with the same bits on all who have it."""
    whole, boxes = {}, {}
    for name, shape, box, values in (piece for pieces in ranks for piece in pieces):
        missing = np.full(shape, np.nan if values.dtype.kind == "f" else 0, values.dtype)
        array = whole.setdefault(name, missing)
        into = (array.reshape(-1) if len(box) == 1 else array)[tuple(slice(*side) for side in box)]
        if box in boxes.setdefault(name, []):
            np.testing.assert_array_equal(into, values, f"{name} {box}: ranks have different values")
        else:
            boxes[name].append(box)
            into[...] = values
    for name, array in whole.items():
        assert covers(boxes[name], array.shape), f"{name}: nobody has all of it"
    return whole


@functools.cache
def one_process(name=None, mixture=False, steps=cases.STEPS):
    """{name: array} that one process has after the same training; in exact mode one with DistributedDataParallel."""
    if name in EVERY and EVERY[name].sharded:
        return assembled([cases.train(("ZeRO 3",), {}, name, mixture, steps)])
    if name in EVERY and EVERY[name].exact:
        (found,), = crews.call(CASES + "outcomes", 1, ([((), {}, name, mixture, steps)],))
        return assembled([found])
    return assembled([cases.train((), {}, name, mixture, steps)])


def compare(found, wanted, tolerance):
    """What is wrong, as a text; empty: nothing."""
    if set(found) != set(wanted):
        return f"names {sorted(set(found) ^ set(wanted))}"
    if tolerance is None:
        return ", ".join(f"{name} has other bits" for name in wanted if not np.array_equal(found[name], wanted[name]))
    off = {name: float(abs(found[name] - wanted[name]).max()) for name in wanted}
    return ", ".join(f"{name} is off by {far:.2g}" for name, far in off.items() if not far <= tolerance)


def judged(job, ranks):
    """What is wrong with the ranks' outcomes of a job that is to work."""
    forms, _, name, *rest = job
    if said := [outcome for outcome in ranks if isinstance(outcome, str)]:
        return said[0]
    beside = EVERY.get(name, USUAL)
    tolerance = 1e-10 if beside.tolerance is None and set(forms) & set(TENSORS) else beside.tolerance
    if set(forms) & {*TENSORS, "annotations"}:
        tolerance = max(tolerance, beside.of_parts)
    try:
        return compare(assembled(ranks), one_process(name, *rest), tolerance)
    except AssertionError as error:
        return str(error)


def refused(pattern, ranks):
    """What is wrong with the ranks' outcomes of a job that must be refused."""
    wrong = [rank for rank, said in enumerate(ranks) if not (
        isinstance(said, str) and re.search(pattern, said, re.DOTALL))]
    return f"ranks {wrong} don't say {pattern!r}: {str(ranks[wrong[0]])[:300]}" if wrong else ""


def run(jobs, ranks=4):
    """By job: each rank's outcome."""
    return zip(*crews.call(CASES + "outcomes", ranks, (jobs,), limit=120), strict=True)


# ---------------------------------------------------------------- the table

def mixture_of(*forms):
    """Of the model: whether it is a mixture; a capacity is one of whole sequences, and is left out where these are
    divided."""
    return "no capacity" if "experts" in forms and {*forms} & {*CONTEXTS} else "experts" in forms


def axes_beside(name):
    """The axes that a job has beside its form's, for what is done besides."""
    if name == "DiLoCo":
        return ["wk"]
    if name == "hybrid":
        return ["rp"]
    return ["dp"] if BESIDES[name].samples or BESIDES[name].sharded else []


def jobs_of(form):
    """{(form, the other's name): job} of a form's row, pairs of forms from their first one only."""
    names, axis, jobs = list(FORMS), FORMS[form].axis, {}
    for other in names[names.index(form) + 1:]:
        if not alternatives(form, other):
            steps = 1 if RARER & {form, other} else cases.STEPS
            sizes = {axis: 2, FORMS[other].axis: 2}
            jobs[form, other] = (form, other), sizes, None, mixture_of(form, other), steps
    for name, beside in BESIDES.items():
        if not (entry(NOTHING, form, name) or form in LIKE and name in IN_GROUPS):
            sizes = dict.fromkeys([axis, *axes_beside(name)], 2)
            forms = (form, "ZeRO 3") if beside.sharded and axis != "dp" else (form,)
            jobs[form, name] = forms, sizes, name, mixture_of(form)
    return jobs


@pytest.mark.filterwarnings("ignore:.*runs uncompiled")
@pytest.mark.parametrize("form", FORMS)
def test_each_pair_is_one_process_or_refused(form):
    wrong = {}
    by_count = {}       # of ranks
    for pair, job in jobs_of(form).items():
        by_count.setdefault(math.prod(job[1].values()), {})[pair] = job
    for count, jobs in by_count.items():
        for (pair, job), ranks in zip(jobs.items(), run(list(jobs.values()), count), strict=True):
            no = entry(REFUSED, *pair)
            if problem := refused(no[0], ranks) if no else judged(job, ranks):
                wrong[pair] = problem
    assert not wrong, "\n".join(f"{' × '.join(pair)}: {problem}" for pair, problem in wrong.items())


@pytest.mark.thorough
def test_three_together():
    jobs = [(forms, sizes, name, mixture_of(*forms)) for forms, sizes, name in TRIPLES]
    wrong = {job[:3:2]: problem for job, ranks in zip(jobs, run(jobs), strict=True) if (problem := judged(job, ranks))}
    assert not wrong, wrong


def test_the_order_in_which_a_model_is_cut_doesnt_matter():
    cutting = [name for name, form in FORMS.items() if form.axis not in ("pp", "dp")]
    pairs = [pair[::-1] for pair in combinations(cutting, 2) if not alternatives(*pair)]
    jobs = [(pair, {FORMS[name].axis: 2 for name in pair}, None, mixture_of(*pair)) for pair in pairs]
    for pair, job, ranks in zip(pairs, jobs, run(jobs), strict=True):
        no = entry(REFUSED, *pair)
        words = "parallelize_module|context_parallel"       # of which the second one speaks now
        assert not (problem := refused(words, ranks) if no else judged(job, ranks)), (pair, problem)


def test_the_training_says_something():
    """Tolerances are small beside what training does, and what is done besides makes a difference."""
    for name, beside in {None: USUAL, **BESIDES}.items():
        if not beside.exact:
            start = {n: p.numpy() for n, p in cases.language_model(beside.dtype, **beside.model).named_parameters()}
            moved = max(float(abs(values - start.get(n, 0.0)).max()) for n, values in one_process(name).items()
                        if n in start or n.endswith("lora_B"))      # which begins with 0
            assert moved > 40 * beside.tolerance, (name, moved)
    usual = one_process()
    for name in ("clip_grad_norm", "Muon", "average (EMA)", "prune", "BatchNorm"):
        assert any(abs(one_process(name)[n] - usual[n]).max() > 1e-4 for n in usual if n in one_process(name)), name


# ---------------------------------------------------------------- further

@pytest.mark.parametrize(("mixture", "names", "beside"), [
    (False, [name for name in FORMS if name != "experts"], None),
    (True, ["experts", "annotations", "1F1B", "sequence", "tensor", "ZeRO 3"], None),
    (False, ["tensor", "annotations", "ZeRO 3", "sequence"], "Qwen3"),
    (False, ["tensor", "annotations", "ZeRO 3", "sequence"], "latents"),
    (False, ["tensor", "annotations", "ZeRO 3", "sequence"], "states"),
    (False, ["tensor", "annotations", "ZeRO 3", "sequence"], "delta rule")])
def test_each_form_goes_on_from_the_checkpoint_of_another(mixture, names, beside, tmp_path):
    whole = cases.build((), {}, EVERY.get(beside, USUAL), mixture)
    optimizer = adamw(list(whole.model.named_parameters()))
    found = crews.call(USE + "one_after_another", 4, (names, mixture, str(tmp_path), beside))
    for name, ranks in zip(names, zip(*found, strict=True), strict=True):
        number = names.index(name)
        cases.steps(whole, optimizer, [pair for pair in cases.batches(whole, number + 1) if pair[0] == number])
        assert not (problem := compare(assembled(ranks), assembled([cases.pieces(whole)]), 1e-10)), (name, problem)


def test_a_model_that_is_wrapped_is_cut_no_more():
    for found in crews.call(USE + "cut_too_late", 4):
        for (wrapper, form), said in found.items():
            words = "already|cut over the ranks|was changed after it was wrapped"
            assert re.search(words, str(said)), (wrapper, form, said)


def test_a_model_is_cut_and_wrapped_once():
    for found in crews.call(USE + "twice", 4):
        for pair, said in found.items():
            assert "already" in said, (pair, said)


def test_who_wants_a_whole_model_says_so():
    works = {("federated", "tensor"): "different models", ("server", "tensor"): "different models",
             ("server", "DDP"): "over 4 ranks", ("server", "ZeRO 3"): "different models|over 4 ranks",
             ("federated", "DDP"): "one already", ("federated", "ZeRO 3"): "one already",
             ("soups", "ZeRO 3"): "cut over the ranks", ("soups", "DDP"): "{'0.weight': array",
             ("soups", "ring"): "{'0.weight': array"}
    for found in crews.call(USE + "whole_models_wanted", 4):
        for pair, said in found.items():
            assert re.search(works.get(pair, "each rank has whole|a part only"), said), (pair, said[:300])


def test_the_share_of_zeros_is_that_of_the_whole_model():
    for found in crews.call(USE + "sparsities", 4):
        assert all(found.values()), found


def test_a_scaler_must_know_all_ranks():
    for found in crews.call(USE + "scalers_without_ranks", 4):
        assert all("GradScaler" in said and "comm=" in said for said in found.values()), found


def test_each_form_writes_what_one_process_does():
    for found in crews.call(USE + "written", 4):
        for form, (text, wanted) in found.items():
            if form == "ring":
                assert "generate: each rank has a part of the sequences" in text
            else:
                assert np.array_equal(text, wanted), (form, text)


def test_the_document_has_this_table():
    assert DOCUMENT.read_text(encoding="utf-8").endswith(page()), "python -m tests.parallel.test_combinations prints it"


def test_names_in_the_tables_are_known():
    for rows, columns, *_ in (*REFUSED, *NOTHING):
        assert set(rows) <= set(FORMS) and set(columns) <= {*FORMS, *BESIDES}, (rows, columns)


if __name__ == "__main__":
    print(page(), end="")
