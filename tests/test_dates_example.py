"""examples/dates.py: what is read and written, one hash on any number of ranks; and what doesn't fit."""

import datetime
import json
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from examples import dates
from tests import crews
from tests.crews import threads

PROGRAM = Path(dates.__file__)
SMALL = ["--rows", "90", "--epochs", "1", "--batch-size", "32", "--dim", "16", "--heads", "2", "--dropout", "0.1"]
FORMATS = {"numbers": "%d.%m.%Y", "day first": "%d %B %Y", "month first": "%B %d, %Y", "short": "%b %d, %Y",
           "spoken": "the %d of %B %Y"}


def test_each_form_says_the_date():
    """To Python's own parser of dates."""
    assert set(FORMATS) == set(dates.FORMS)
    ends = {1: "st", 2: "nd", 3: "rd", 11: "th", 12: "th", 13: "th", 21: "st", 22: "nd", 23: "rd", 30: "th", 31: "st"}
    for days in range(0, dates.DAYS, 61):
        date = datetime.date.fromordinal(dates.FROM + days)
        for name, form in dates.FORMS.items():
            line = form(date)
            assert len(line) <= dates.SOURCES and dates.decoded(dates.encoded(line, dates.SOURCES)) == line
            if name == "spoken":
                end = line.split()[1][-2:]
                assert end == ends.get(date.day, "th")
                line = line.replace(f"{end} of", " of", 1)
            assert datetime.datetime.strptime(line, FORMATS[name]).date() == date


def test_rows_are_those_dates():
    days = np.array([0, 46_353, dates.DAYS - 1])
    lines, written = dates.rows_of(days, np.random.default_rng(0))
    assert lines.shape == (3, dates.SOURCES) and [*map(dates.decoded, written)] == [
        "1900-01-01", "2026-11-29", "2099-11-12"]
    assert dates.before(written)[:, 0].tolist() == [0, 0, 0]
    np.testing.assert_array_equal(dates.before(written)[:, 1:], written[:, :-1])


def test_one_hash_on_any_number_of_ranks(tmp_path):
    found = []
    for n in (1, 2):
        folder = tmp_path / str(n)
        ended = crews.launch([PROGRAM, *SMALL, "--exact", "--out", folder], n, limit=60, env=threads(n)).check()
        history = [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]
        summary = json.loads((folder / "summary.json").read_text())
        found.append((history, summary["parameters_sha256"], summary["test_accuracy"]))
        assert (folder / "alignment.png").read_bytes().startswith(b"\x89PNG")
        assert "\n".join(ended.stdout).count("→") == 10
    assert found[0] == found[1] and len(found[0][0]) == 3


def test_it_writes_what_it_finds_likeliest_and_says_where_it_looks():
    """A character at a time with what is kept, as all at once; weights of the line's own characters."""
    mt.manual_seed(3)
    model = dates.Rewriter(16, 2).eval()
    lines, _ = dates.rows_of(np.arange(0, 70_000, 9_999), np.random.default_rng(1))
    with mt.no_grad():
        written = model.write(lines)
        likeliest = model(lines, dates.before(written)).numpy().argmax(2)
        looks = model.looks(lines[2], written[2])
    np.testing.assert_array_equal(likeliest, written)
    assert looks.shape == (2, dates.WRITTEN, len(dates.decoded(lines[2])))
    np.testing.assert_allclose(looks.sum(2), 1, rtol=1e-5)


@pytest.mark.parametrize("flags", [["--rows", "0"], ["--rows", "72601"], ["--dim", "64", "--heads", "5"],
                                   ["--dropout", "1.5"], ["--lr", "nan"]], ids=str)
def test_what_does_not_fit(flags, tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        dates.main([*flags, "--out", str(tmp_path / "run")])
    said = capsys.readouterr().err
    assert said.startswith("dates.py: ") or ": error: " in said or flags[-1] in said
    assert not (tmp_path / "run").exists()
