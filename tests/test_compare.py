"""viz's verdict and picture, and compare.py: whether runs are one curve."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import viz
from minitorch_dist.viz.curves import _number, binned
from tests.parallel.test_offload import file_size_limit

ROOT = Path(__file__).parents[1]
LOSSES = [2.5, 1.25, 0.75, 0.5, 0.375]
TOLERANCE = 2.0**-10    # exact in binary, so that the boundary is the boundary


@pytest.fixture(scope="module")
def compare():
    spec = importlib.util.spec_from_file_location("compare", ROOT / "mnist_demo" / "compare.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def write(tmp_path):
    """write(name, losses, first step, **summary) makes a run's folder, as train.py does."""
    def write(name, losses, start=1, **summary):
        folder = tmp_path / name
        folder.mkdir()
        records = [{"step": start + i, "epoch": 0, "loss": loss, "samples": 64} for i, loss in enumerate(losses)]
        (folder / "history.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        facts = {"ranks": 1, "data": "digits", "seed": 0, "test_accuracy": 91.25, "parameters_sha256": "a",
                 "samples_per_second": 11234.0, "bytes_sent_per_rank": 3_100_000, "peak_memory_bytes": 312_000_000}
        (folder / "summary.json").write_text(json.dumps(facts | summary))
        return folder
    return write


def judge(tolerance, *folders):
    return viz.verdict([viz.read_run(folder) for folder in folders], tolerance)


def changed(index, loss):
    return [*LOSSES[:index], loss, *LOSSES[index + 1:]]


# ---------------------------------------------------------------- the verdict

def test_equal_losses_and_equal_parameters_are_identical(write):
    verdict = judge(TOLERANCE, write("a", LOSSES), write("b", LOSSES, ranks=2))
    assert verdict == viz.Verdict("identical", 0.0, None, "IDENTICAL TO THE BIT: max |Δloss| = 0, "
                                  "parameters sha256 equal over 5 steps")


@pytest.mark.parametrize("summary, words", [({"parameters_sha256": "b"}, "sha256 differ"),
                                            ({"parameters_sha256": None}, "sha256 missing")])
def test_equal_losses_alone_are_not_identical(write, summary, words):
    verdict = judge(TOLERANCE, write("a", LOSSES), write("b", LOSSES, **summary))
    assert (verdict.kind, verdict.max_delta) == ("within", 0.0)
    assert words in verdict.text
    assert "IDENTICAL" not in judge(TOLERANCE, *[write(name, LOSSES, parameters_sha256=None) for name in "cd"]).text


def test_equal_parameters_alone_are_not_identical(write):
    assert judge(TOLERANCE, write("a", LOSSES), write("b", changed(2, np.nextafter(0.75, 1)))).kind == "within"


def test_the_tolerance_itself_is_within(write):
    verdict = judge(TOLERANCE, write("a", LOSSES), write("b", changed(2, 0.75 + TOLERANCE)))
    assert (verdict.kind, verdict.max_delta, verdict.first_step) == ("within", TOLERANCE, None)
    assert verdict.text == "WITHIN TOLERANCE: max |Δloss| = 9.8e-04 over 5 steps, tolerance 9.8e-04"


def test_a_hair_more_than_the_tolerance_is_different(write):
    more = 0.75 + TOLERANCE + 2.0**-50
    verdict = judge(TOLERANCE, write("a", LOSSES), write("b", [*LOSSES[:2], more, 0.5, 0.0]))
    assert (verdict.kind, verdict.max_delta, verdict.first_step) == ("different", 0.375, 3)
    assert verdict.text.startswith("DIFFERENT from step 3: max |Δloss| = 0.38 between ")


def test_nan_in_one_run_is_different(write):
    folders = write("a", LOSSES), write("b", changed(3, float("nan")))
    for pair, where in ((folders, "b"), (folders[::-1], "b")):
        verdict = judge(1e9, *pair)
        assert (verdict.kind, verdict.max_delta, verdict.first_step) == ("different", np.inf, 4)
        assert f"the loss of {folders['ab'.index(where)]} is nan" in verdict.text


def test_nan_in_both_runs_is_equal_but_said(write):
    verdict = judge(TOLERANCE, write("a", changed(3, float("nan"))), write("b", changed(3, float("nan"))))
    assert (verdict.kind, verdict.max_delta) == ("identical", 0.0)
    assert "NaN from step 4" in verdict.text


def test_equal_infinities_are_equal(write):
    assert judge(TOLERANCE, write("a", changed(1, np.inf)), write("b", changed(1, np.inf))).kind == "identical"
    assert judge(TOLERANCE, write("c", changed(1, np.inf)), write("d", changed(1, -np.inf))).first_step == 2


def test_a_shorter_run_is_different_from_its_first_missing_step(write):
    folders = write("a", LOSSES), write("b", LOSSES[:3])
    for pair in (folders, folders[::-1]):
        verdict = judge(TOLERANCE, *pair)
        assert (verdict.kind, verdict.max_delta, verdict.first_step) == ("different", 0.0, 4)
        assert f"{folders[1]} ends at 3" in verdict.text


def test_steps_are_compared_by_number_not_by_place(write):
    verdict = judge(TOLERANCE, write("a", LOSSES), write("b", LOSSES[2:], start=3))
    assert (verdict.kind, verdict.max_delta, verdict.first_step) == ("different", 0.0, 1)


def test_the_earliest_of_steps_that_differ_and_steps_that_are_missing_counts(write):
    whole, late = write("a", LOSSES), write("b", changed(3, 9.0)[1:], start=2)      # without step 1
    verdict = judge(TOLERANCE, whole, late)
    assert verdict.first_step == 1 and f"{late} has not; max |Δloss| = 8.5 where both have one" in verdict.text
    hole = write("c", LOSSES)
    lines = (hole / "history.jsonl").read_text().splitlines(keepends=True)
    (hole / "history.jsonl").write_text("".join(lines[:2] + lines[3:]))
    assert f"DIFFERENT from step 3: {whole} has this step, {hole} has not; " in judge(TOLERANCE, whole, hole).text


def test_one_run_of_other_parameters_is_enough(write):
    """Whichever comes first, though no loss differs."""
    same, equal, other = write("a", LOSSES), write("b", LOSSES), write("c", LOSSES, parameters_sha256="b")
    assert [judge(TOLERANCE, same, *two).kind for two in ((equal, other), (other, equal), (equal, equal))] == \
        ["within", "within", "identical"]


def test_the_worst_of_several_runs_counts(write):
    same, near = write("a", LOSSES), write("b", changed(1, 1.25 + TOLERANCE / 2))
    late, early = write("c", changed(4, 9.0)), write("d", changed(1, 1.5))
    nearer = write("e", changed(1, 1.25 + TOLERANCE / 4))
    assert judge(TOLERANCE, same, same, nearer, near).max_delta == TOLERANCE / 2
    assert judge(TOLERANCE, same, late, near, early).first_step == 2


def test_settings_that_differ_are_named(write):
    verdict = judge(TOLERANCE, write("a", LOSSES, lr=0.1, epochs=2), write("b", changed(0, 3.0), lr=0.2, epochs=2))
    assert verdict.text.endswith("The runs were set differently: lr 0.1 / 0.2")
    for pair in ("cd", "ef"):       # what one doesn't tell isn't different
        told, untold = write(pair[0], LOSSES, lr=0.1), write(pair[1], changed(0, 3.0))
        assert "differently" not in judge(TOLERANCE, *((told, untold) if pair == "cd" else (untold, told))).text


def test_exact_runs_that_are_not_identical_are_named(write):
    near = changed(0, 2.5 + TOLERANCE / 2)
    assert "--exact" in judge(TOLERANCE, write("a", LOSSES, exact=True), write("b", near, exact=True)).text
    here, there = (write(name, losses, exact=True, device=device) for name, losses, device in (
        ("c", LOSSES, "cpu"), ("d", near, "cuda:0")))
    assert "--exact" not in judge(TOLERANCE, here, there).text      # a GPU has an exp and an order of its own
    ours, alike, unlike = (write(name, losses, exact=True, products_made_by=code) for name, losses, code in (
        ("e", LOSSES, "blas for A"), ("f", near, "blas for A"), ("g", near, "blas for B")))
    assert "should be identical" in judge(TOLERANCE, ours, alike).text
    assert "--exact, but products came of blas for A, and of blas for B" in judge(TOLERANCE, ours, unlike).text
    unsaid = write("h", LOSSES, exact=True)
    assert "should be identical" in judge(TOLERANCE, unsaid, unlike).text


@pytest.mark.parametrize("key, value", [("data", "mnist"), ("seed", 1)])
def test_runs_of_another_job_are_refused(write, key, value):
    with pytest.raises(viz.RunError, match=f"not the same job: {key}"):
        judge(TOLERANCE, write("a", LOSSES), write("b", LOSSES, **{key: value}))


@pytest.mark.parametrize("value, text", [(0, "0"), (8.6e-7, "8.6e-07"), (1e-4, "1e-04"), (0.43, "0.43"), (0.01, "0.01"),
                                         (0.05, "0.05"), (0.0099, "9.9e-03")])
def test_numbers_are_short(value, text):
    assert _number(value) == text


# ---------------------------------------------------------------- reading

def test_a_truncated_history_is_named_with_its_line(write):
    history = write("a", LOSSES) / "history.jsonl"
    history.write_text(history.read_text()[:-20])
    with pytest.raises(viz.RunError, match=r"history.jsonl, line 5 is damaged or cut off"):
        viz.read_run(history.parent)


@pytest.mark.parametrize("text, words", [("", "is empty"), ('{"step": 1}\n', "line 1"), ("[1, 2]\n", "line 1"),
                                         ('{"step": 2, "loss": 1}\n{"step": 2, "loss": 1}\n', "line 2: step 2 comes")])
def test_an_unsound_history_is_refused(write, text, words):
    folder = write("a", LOSSES)
    (folder / "history.jsonl").write_text(text)
    with pytest.raises(viz.RunError, match=words):
        viz.read_run(folder)


def test_a_missing_or_truncated_summary_is_refused(write):
    summary = write("a", LOSSES) / "summary.json"
    summary.write_text('{"ranks": ')
    with pytest.raises(viz.RunError, match="damaged or cut off"):
        viz.read_run(summary.parent)
    summary.write_text("[1, 2]")
    with pytest.raises(viz.RunError, match="summary.json holds list instead of an object"):
        viz.read_run(summary.parent)
    summary.unlink()
    with pytest.raises(viz.RunError, match="not a finished run.*train.py --out"):
        viz.read_run(summary.parent)


# ---------------------------------------------------------------- the program

@pytest.mark.parametrize("last, status, headline", [(0.375, 0, "IDENTICAL TO THE BIT"),
                                                    (0.37501, 0, "WITHIN TOLERANCE"),
                                                    (0.38, 1, "DIFFERENT from step 5")])
def test_exit_status_words_and_picture(compare, write, tmp_path, capsys, last, status, headline):
    picture = tmp_path / "new folder" / "curves.png"
    runs = [write("a", LOSSES), write("b", changed(4, last), ranks=2)]
    assert compare.main([*map(str, runs), "-o", str(picture)]) == status
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["run", "ranks", "data", "test", "accuracy", "samples/s", "MB", "sent", "per", "rank",
                                "peak", "memory"]
    assert lines[2].split()[1:] == ["2", "digits", "91.25", "%", "11,234", "3.1", "312", "MB"]
    assert lines[-2].startswith(headline)
    assert lines[-1] == str(picture)
    assert picture.read_bytes().startswith(b"\x89PNG") and picture.stat().st_size > 10_000


def test_tolerance_is_taken_from_the_command_line(compare, write, tmp_path):
    runs = [str(write("a", LOSSES)), str(write("b", changed(4, 0.38)))]
    assert compare.main([*runs, "-o", str(tmp_path / "c.png"), "--tolerance", "0.1"]) == 0


def test_bad_input_is_status_2_and_one_message(compare, write, tmp_path, capsys):
    run = str(write("a", LOSSES))
    for runs, words in (([run], "two or more"), ([run, str(tmp_path / "none")], "not a finished run")):
        assert compare.main([*runs, "-o", str(tmp_path / "c.png")]) == 2
        assert words in capsys.readouterr().err
    with pytest.raises(SystemExit) as exit_:
        compare.main([run, run, "--tolerance", "-1"])
    assert exit_.value.code == 2


@pytest.mark.parametrize("losses", [[2.5], [0.0, 0.0], [float("nan")] * 3, list(np.linspace(3, 1, 20_000))],
                         ids=["one step", "loss 0", "only NaN", "20,000 steps"])
@pytest.mark.parametrize("tolerance", [0.0, 1e-4])
@pytest.mark.filterwarnings("error")
def test_odd_curves_can_be_drawn(write, tmp_path, losses, tolerance):
    runs = [viz.read_run(write(name, losses)) for name in "abc"]
    viz.curves(runs, tmp_path / "c.png", tolerance)
    assert (tmp_path / "c.png").stat().st_size > 5_000


def test_bins_keep_the_mean_and_the_largest_and_lie_alike():
    steps = np.arange(3, 12)                                       # bins of 4: 3 4 | 5 6 7 8 | 9 10 11
    at, means = binned(steps, steps * 1.0, 4, np.add)
    assert at.tolist() == [3, 5, 9] and means.tolist() == [3.5, 6.5, 10.0]
    assert binned(steps, steps * 1.0, 4, np.maximum)[1].tolist() == [4.0, 8.0, 11.0]


def test_a_picture_that_the_disk_has_no_room_for_is_named(compare, write, tmp_path, capsys):
    runs = [str(write(name, LOSSES)) for name in "ab"]
    with file_size_limit(5_000):
        assert compare.main([*runs, "-o", str(tmp_path / "c.png")]) == 2
    assert capsys.readouterr().err == f"{tmp_path / 'c.png'}: File too large\n"


def test_a_title_stands_in_the_place_of_the_verdict(write, tmp_path):
    """Of runs that aren't meant to be one curve. Each text stands in a comment of the SVG beside its glyphs."""
    runs = [viz.read_run(write(name, losses)) for name, losses in (("a", LOSSES), ("b", [2.0] * 5))]
    said = {}
    for title in (None, "late gradients"):
        assert viz.curves(runs, tmp_path / "c.svg", TOLERANCE, title=title).kind == "different"
        text = (tmp_path / "c.svg").read_text()
        said[title] = [words for words in ("DIFFERENT", "tolerance", "step 1", "late gradients")
                       if f"<!-- {words}" in text]
    assert said == {None: ["DIFFERENT", "tolerance", "step 1"], "late gradients": ["late gradients"]}


@pytest.mark.parametrize("arguments", [
    "mnist_demo/compare.py {0} {1} -o {2}/curves.png", "examples/compiler.py --stage kernels --rows 8 --columns 8",
    "examples/sharding.py --plan 2", "mnist_demo/train.py --data digits --steps 1 --out {2}/run",
    "examples/gossip.py --steps 1", "examples/differentiation.py", "-m minitorch_dist kernels add", "-m exercises map"],
    ids=["compare", "compiler", "sharding", "train", "gossip", "differentiation", "kernels",
         "exercises"])
def test_a_reader_may_leave(write, tmp_path, arguments):
    """As `| head -1`: no traceback."""
    command = arguments.format(write("a", LOSSES), write("b", LOSSES), tmp_path).split()
    with subprocess.Popen([sys.executable, *command], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                          text=True, env=os.environ | {"TRITON_INTERPRET": "0"}) as program:
        program.stdout.close()
        assert program.stderr.read() == "" and program.wait(timeout=60) == 1


def test_nobody_may_read(tmp_path):
    """As by `>&-`: there is no standard output."""
    command = f"exec {sys.executable} mnist_demo/train.py --data digits --steps 1 --out {tmp_path}/run >&-"
    run = subprocess.run(["/bin/sh", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0 and "Traceback" not in run.stderr, run.stderr


@pytest.mark.parametrize("arguments", [
    "mnist_demo/compare.py {0} {1} -o {2}/curves.png", "examples/sharding.py --plan 2",
    "-m minitorch_dist plan --parameters 1e9 --devices 2",
    "mnist_demo/train.py --data digits --steps 1 --out {2}/run"], ids=["compare", "sharding", "plan", "train"])
def test_a_terminal_without_some_letters_shows_the_others(write, tmp_path, arguments):
    command = arguments.format(write("a", LOSSES), write("b", LOSSES), tmp_path).split()
    for encoding in ("ascii", "utf-8"):
        run = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, timeout=100,
                             env={**os.environ, "PYTHONIOENCODING": encoding})
        assert b"Traceback" not in run.stderr and run.returncode in (0, 1), run.stderr
        assert (b"?" in run.stdout) == (encoding == "ascii")
