"""examples/mesh.py: the curve of one process on every mesh; what it counts beside what plan says; what doesn't fit."""

import functools
import json
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist.testing import ranks
from tests import crews
from tests.crews import threads

PROGRAM = Path(__file__).parents[1] / "examples" / "mesh.py"
SMALL = ["--dim", "16", "--batch-size", "24", "--micro-batches", "3", "--steps", "8", "--warmup", "2", "--dropout",
         "0.1", "--dtype", "float64"]


EXPERTS, WINDOWS = ["--experts", "4"], ["--window", "3,all,5", "--qk-norm", "--gated"]
UNBOUND = ["--no-capacity"]
DROPPED = ["--attention-dropout", "0.2"]
CLIPPED = ["--qk-clip", "0.001"]


def run(n, folder, *flags):
    """(loss of every step, summary)"""
    crews.launch([PROGRAM, *SMALL, *flags, "--out", folder], n, limit=90, env=threads(n)).check()
    history = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [line["loss"] for line in history], json.loads((folder / "summary.json").read_text())


def parameters(folder):
    with np.load(folder / "parameters.npz") as file:
        return dict(file)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A function of flags: what one process gives."""
    @functools.cache
    def trained(*flags):
        folder = tmp_path_factory.mktemp("whole")
        return *run(1, folder, *flags), parameters(folder)
    return trained


@pytest.mark.parametrize("n, flags", [
    (4, ["--tp", "2", "--pp", "2", "--sequence-parallel", "--schedule", "zb-v"]),
    (8, ["--cp", "2", "--pp", "2", "--zero", "3", "--schedule", "zb-h1"]),
    (8, ["--tp", "2", "--cp", "2", "--cp-by", "all_to_all", "--zero", "2"]),
    (8, ["--tp", "2", "--cp", "2", "--pp", "2", "--sequence-parallel", "--zero", "3"]),
    (8, [*EXPERTS, "--ep", "2", "--pp", "2", "--zero", "1", "--schedule", "dualpipev", "--micro-batches", "6"]),
    (8, ["--tp", "2", "--pp", "2", "--zero", "1"]),
    (4, ["--tp", "2", "--pp", "2", "--slices", "3"]),
    (4, ["--tp", "2", "--zero", "3", "--compile"]),
    (8, [*EXPERTS, "--ep", "2", "--tp", "2", "--sequence-parallel", "--zero", "3"]),
    (8, [*EXPERTS, "--ep", "2", "--tp", "2", "--pp", "2", "--schedule", "zb-h1"]),
    (4, [*EXPERTS, *UNBOUND, "--cp", "2", "--ep", "2", "--zero", "1"]),
    (4, [*EXPERTS, *UNBOUND, "--ep", "2", "--tp", "2", "--sequence-parallel", "--experts-over", "tp", "--zero",
         "3"]),
    (8, [*EXPERTS, *UNBOUND, "--ep", "2", "--tp", "2", "--pp", "2", "--sequence-parallel", "--experts-over",
         "tp"]),
    (8, [*EXPERTS, *UNBOUND, "--cp", "2", "--tp", "2", "--pp", "2", "--sequence-parallel", "--experts-over", "cp",
         "tp"]),
    (4, [*EXPERTS, *UNBOUND, "--cp", "2", "--ep", "2", "--zero", "3", "--experts-over", "cp"]),
    (8, [*DROPPED, "--cp", "2", "--cp-by", "all_to_all", "--tp", "2", "--zero", "3"]),
    pytest.param(8, [*EXPERTS, *UNBOUND, "--dispatch-once", "--ep", "4", "--tp", "2", "--zero", "1"],
                 marks=pytest.mark.thorough),
    (8, [*CLIPPED, "--cp", "2", "--pp", "2", "--tp", "2", "--zero", "3", "--schedule", "zb-v"]),
    (2, [*CLIPPED, "--pp", "2", "--compile"]),
    (8, [*WINDOWS, "--cp", "2", "--pp", "2", "--tp", "2", "--schedule", "zb-v"])], ids=str)
def test_one_curve(whole, tmp_path, n, flags):
    losses, summary = run(n, tmp_path, *flags)
    wanted, summary_of_one, wanted_parameters = whole(*(
        flag for kind in (EXPERTS, UNBOUND, WINDOWS, DROPPED, CLIPPED) if kind[0] in flags for flag in kind))
    np.testing.assert_allclose(losses, wanted, rtol=1e-10)
    assert summary["unseen_sums_right"] == summary_of_one["unseen_sums_right"]
    assert np.prod([*summary["mesh"].values()]) == n
    for name, value in parameters(tmp_path).items():
        np.testing.assert_allclose(value, wanted_parameters[name], rtol=1e-10, atol=1e-10, err_msg=name)


@pytest.mark.parametrize(("experts", "meshes"), [
    ([], ["--pp 2 --zero 2", "--pp 4 --schedule zb-h1"]),
    pytest.param(EXPERTS, ["--ep 2 --zero 3", "--ep 2 --pp 2 --schedule dualpipev"], marks=pytest.mark.thorough)],
    ids=["dense", "experts"])
def test_exact_mode_has_the_bits_of_one_process(experts, meshes, tmp_path):
    """Float32, and the output layer tied to the embedding, which the first stage and the last one have."""
    small = [flag for i, flag in enumerate(SMALL) if "--micro-batches" not in SMALL[max(i - 1, 0):i + 1]] + experts
    found = []
    for n, flags in (1, ""), *((4, mesh) for mesh in meshes):
        folder = tmp_path / f"{n}{flags[-1:]}"
        crews.launch([PROGRAM, *small, "--dtype", "float32", "--exact", *flags.split(), "--out", folder], n, limit=90,
                     env=threads(n)).check()
        found.append([(folder / name).read_text() for name in ("history.jsonl", "summary.json")])
    (history, summary), *others = [([json.loads(line)["loss"] for line in lines.splitlines()], json.loads(text))
                                   for lines, text in found]
    assert len(history) == 8
    for losses, theirs in others:
        assert losses == history and theirs["parameters_sha256"] == summary["parameters_sha256"]


def test_one_block_that_is_compiled_has_the_bits_of_one_process_in_stage_3(tmp_path):
    small, found = ["--dim", "16", "--layers", "1", "--batch-size", "16", "--steps", "3", "--compile", "--exact"], []
    for n, flags in (1, []), (2, ["--zero", "3"]):
        folder = tmp_path / str(n)
        done = crews.launch([PROGRAM, *small, *flags, "--out", folder], n, limit=90, env=threads(n)).check()
        assert "uncompiled" not in done.report()
        found.append(json.loads((folder / "summary.json").read_text())["parameters_sha256"])
    assert found[0] == found[1]


@pytest.mark.thorough
def test_it_goes_on_on_another_mesh(whole, tmp_path):
    killed = ranks.launch([PROGRAM, *SMALL, "--pp", "2", "--zero", "2", "--save-every", "3", "--out", tmp_path], 4,
                          limit=90, env={"MINITORCH_FAULT": "kill rank=1 step=5"})
    assert killed.returncode != 0 and not (tmp_path / "summary.json").exists()
    losses, summary = run(4, tmp_path, "--tp", "2", "--cp", "2", "--resume")
    np.testing.assert_allclose(losses, whole()[0], rtol=1e-10)
    assert summary["resumed_at"] == 3


def test_a_run_of_rows_in_few_bits_goes_on_so(tmp_path):
    flags = [PROGRAM, *SMALL, *EXPERTS, "--ep", "2", "--save-every", "3", "--out", tmp_path]
    crews.launch([*flags, "--dispatch-bits", "8"], 2, limit=60).check()
    found = crews.launch([*flags, "--resume"], 2, limit=60)
    assert found.returncode == 2 and "of a run with dispatch_bits 8 (now None)" in found.stderr[0], found.report()


def rows(lines):
    """[{column: kB}] of the table."""
    heads = [head.strip() for head in lines[0].split("  ") if head.strip()]
    return [dict(zip(heads[1:], (float(cell.replace(",", "")) for cell in line.split()[-len(heads) + 1:]), strict=True))
            for line in lines[1:]]


@pytest.mark.parametrize("n, flags", [(8, ["--tp", "2", "--pp", "2", "--zero", "3"]), (4, ["--cp", "2", "--pp", "2"]),
                                      (4, ["--tp", "2", "--pp", "2", "--slices", "3", "--family", "llama"]),
                                      (4, ["--cp", "2", "--tp", "2", "--window", "5"]),
                                      (8, ["--cp", "2", "--tp", "2", "--pp", "2", "--window", "3,all", "--qk-norm",
                                           "--schedule", "zb-h1", "--sequence-parallel"]),
                                      (4, ["--cp", "2", "--tp", "2", "--window", "1,6,all", "--qk-norm", "--gated",
                                           "--family", "llama", "--layers", "3"]),
                                      (4, ["--cp", "2", "--tp", "2", "--window", "linear,all"]),
                                      (4, ["--tp", "2", "--zero", "3", "--layers", "1"]),
                                      (8, [*EXPERTS, "--ep", "2", "--tp", "2", "--pp", "2", "--schedule", "zb-h1"])],
                         ids=str)
def test_what_is_counted_is_on_paper(tmp_path, n, flags, text):
    """Of a text, each of whose tokens is a target. Rounding is by 0.1; 64 bytes of alignment may be there as well."""
    _, summary = run(n, tmp_path, *flags, "--dtype", "float32", "--text", text, "--length", "16",
                     *["--layers", "2"] * ("--layers" not in flags))
    *lines, note = summary["table"]
    assert note.startswith("counted: with norms for clipping")
    found = rows(lines)
    assert len(found) == 2 * summary["mesh"]["pp"]
    for counted, paper in zip(found[::2], found[1::2], strict=True):
        for name in ("parameters", "gradients", "optimizer"):
            assert abs(counted[name] - paper[name]) < 0.2 and paper[name] > 1, name
        assert 0 <= counted["activations"] - paper["activations"] < 2 * 8 * 24 * 16 / 1e3 + 0.2     # tokens and labels
        for axis in [name for name in paper if name.startswith("sent, ")]:
            more = 0.2 if axis[-2:] in ("tp", "cp", "ep") else 3    # norms of 4,096 elements, small agreements
            # Of two matrices of experts, which ranks share inside of 4,096 elements, 256 sums of squares each.
            norms = 2 * 256 * 8 / 1e3 * axis.endswith("ep")
            assert -0.2 < counted[axis] - norms - paper[axis] < more and paper[axis] > 1, axis


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "letters.txt"
    path.write_text("".join(chr(97 + i * i % 23) for i in range(3000)))
    return path


@pytest.mark.parametrize("n, flags, words", [
    (2, ["--pp", "3"], "--pp 3 --cp 1 --ep 1 --tp 1: 3 ranks, or a multiple, and here are 2"),
    (1, ["--tp", "2"], "2 ranks, or a multiple, and here is 1"),
    (2, ["--pp", "2", "--layers", "3"], "--layers 3: 2 stages, 1 on each of 2 ranks, want equally many blocks each"),
    (2, ["--batch-size", "7"], "a batch of 7 samples on dp = 2 ranks in 3 micro-batches"),
    (2, ["--tp", "2", "--heads", "1"], "tp=2 must divide the 1 heads: take another --tp"),
    (2, ["--length", "9"], "--length 9: a sum has 8 characters to be seen"),
    (2, ["--cp", "2", *EXPERTS], "cp=2 of a mixture of experts"),
    (2, ["--ep", "2"], "ep=2 ranks can't share 0 experts equally: give --experts"),
    (1, ["--exact"], "--micro-batches 3 --exact: exact mode has 8 over all ranks"),
    (2, ["--ep", "2", "--experts", "3"], "ep=2 ranks can't share 3 experts equally"),
    (1, ["--no-capacity"], "--no-capacity without --experts: say how many there are"),
    (2, ["--ep", "2", *EXPERTS, "--dispatch-once"], "--dispatch-once without divided experts that take all"),
    (1, [*EXPERTS, "--no-capacity", "--experts-over", "cp"], "--experts-over cp without ranks that share sequences"),
    (1, ["--schedule", "zb-v"], "--schedule zb-v is for --pp 2 or more"),
    (2, ["--pp", "2", "--chunks", "3"], "--chunks 3: is for --schedule interleaved alone"),
    (2, ["--pp", "2", "--qk-clip", "9", "--window", "linear"], "--qk-clip 9: no block has attention that makes scores"),
    (1, ["--text", "nowhere.txt"], "nowhere.txt: No such file or directory"),
    (1, ["--window", "3,0"], "--window '3,0': one sees 1 position or more, itself"),
    (1, ["--window", "3,all", "--family", "deepseek"],
     "window=3,all of a deepseek: multi-head latent attention has none"),
    (1, ["--dropout", "2"], "--dropout 2"), (1, ["--zero", "4"], "--zero: invalid choice")], ids=str)
def test_what_does_not_fit_is_said_once(tmp_path, n, flags, words):
    found = crews.launch([PROGRAM, *SMALL, *flags, "--out", tmp_path / "run"], n, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("mesh.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
    assert not (tmp_path / "run" / "summary.json").exists()
