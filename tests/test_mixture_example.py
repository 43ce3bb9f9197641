"""examples/mixture.py: shares as asked, one hash on any number of ranks and after a stop; and what doesn't fit."""

import json
from pathlib import Path

import numpy as np
import pytest

from examples import mixture
from tests import crews
from tests.crews import threads

PROGRAM = Path(mixture.__file__)
SMALL = ["--steps", "6", "--batch-size", "8", "--length", "16", "--layers", "1", "--heads", "2", "--dim", "16",
         "--shares", "b=1,a=3", "--last-shares", "b=1", "--last", "0.33"]


@pytest.fixture
def texts(tmp_path):
    """Options that name two sources."""
    for name, letters in (("a", "abcde "), ("b", "01é ")):
        (tmp_path / name).mkdir()
        for i in range(12):
            text = "".join(np.random.default_rng(i).choice(list(letters), 90 + i))
            (tmp_path / name / f"{i}.txt").write_text(text, encoding="utf-8")
    return [option for name in "ab" for option in ("--source", f"{name}={tmp_path / name}/*.txt")]


def ran(folder, n, *options):
    """What came of it: (losses, hash, bits per byte), and its summary."""
    crews.launch([PROGRAM, *SMALL, "--exact", "--out", folder, *options], n, limit=60, env=threads(n)).check()
    history = [json.loads(line)["loss"] for line in (folder / "history.jsonl").read_text().splitlines()]
    summary = json.loads((folder / "summary.json").read_text())
    assert (folder / "mixture.png").read_bytes().startswith(b"\x89PNG")
    return (history, summary["parameters_sha256"], summary["validation_of"]), summary


def test_one_hash_on_any_number_of_ranks_each_of_which_reads_its_rows(tmp_path, texts):
    alone, summary = ran(tmp_path / "1", 1, *texts)
    both, half = ran(tmp_path / "2", 2, *texts)
    assert alone == both and len(alone[0]) == 6
    assert 2 * half["read_bytes"] == summary["read_bytes"] == 6 * 8 * 17 * 2      # 16 bits a token


def test_a_run_that_has_stopped_goes_on_with_what_comes_next(tmp_path, texts, monkeypatch, capsys):
    whole, _ = ran(tmp_path / "whole", 1, *texts)
    options = [*SMALL, "--exact", "--out", str(tmp_path / "parts"), *texts]
    step = mixture.training.train_step

    def stops(*args, **more):
        loss, stop = step(*args, **more)
        return loss, stop or more["step"] == 2
    monkeypatch.setattr(mixture.training, "train_step", stops)
    mixture.main(options)
    parts, summary = ran(tmp_path / "parts", 2, *texts, "--resume")
    assert parts[:2] == whole[:2] and summary["read_bytes"] == 3 * 4 * 17 * 2
    np.save(tmp_path / "parts/tokens/a/00000.npy", np.zeros(900, np.uint16))
    with pytest.raises(SystemExit) as ended:
        mixture.main([*options, "--resume"])
    assert ended.value.code == 2 and "are others than those of the checkpoint" in capsys.readouterr().err


def test_tokens_are_the_texts(tmp_path, texts):
    sources = dict(option.split("=") for option in texts[1::2])
    mixture.write_tokens(tmp_path / "tokens", sources)
    parts = [np.concatenate([np.load(path) for path in sorted((tmp_path / "tokens" / f"b{end}").glob("*"))])
             for end in ("", "-held-back")]
    documents = {text for part in parts for text in "".join(chr(c) if c > 255 else bytes([c]).decode("latin1")
                                                            for c in part).split(chr(256))}
    expected = {path.read_bytes().decode("latin1") for path in (tmp_path / "b").glob("*")}
    assert documents == {*expected, ""} and [int((part == 256).sum()) for part in parts] == [10, 2]


def test_a_run_that_has_ended_keeps_its_files_until_the_next_begins(tmp_path, texts, capsys):
    folder = tmp_path / "run"
    whole, _ = ran(folder, 1, *texts, "--save-every", "3")
    goes_on, _ = ran(folder, 2, *texts, "--save-every", "3", "--resume")     # from its last step: there is none more
    assert goes_on == whole
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    for wrong, said in ((["--heads", "3"], "3 heads must divide"), (["--shares", "z=1"], "a weight for 'z'"),
                        (["--batch-size", "0"], "--batch-size 0"), (["--source", "c=/nowhere/*"], "0 files match")):
        with pytest.raises(SystemExit, match="2"):
            mixture.main([*SMALL, *texts, "--out", str(folder), *wrong])
        assert said in capsys.readouterr().err
        assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    for path in (folder / "tokens/b").iterdir():
        np.save(path, np.load(path)[::-1])
    with pytest.raises(SystemExit, match="2"):
        mixture.main([*SMALL, *texts, "--exact", "--out", str(folder), "--resume"])
    assert all((folder / name).exists() for name in ("summary.json", "parameters.npz"))


def test_two_runs_do_not_write_tokens_into_one_folder(tmp_path, texts, monkeypatch, capsys):
    """The second begins while the first writes its tokens, and leaves them alone."""
    write, options = mixture.write_tokens, [*SMALL, *texts, "--out", str(tmp_path / "run")]

    def meanwhile(folder, sources):
        write(folder, sources)
        before = sorted(folder.rglob("*"))
        monkeypatch.setattr(mixture, "write_tokens", write)
        with pytest.raises(SystemExit, match="2"):
            mixture.main([*options, "--shares", "a=1,b=1", "--last-shares", "b=1"])
        assert "another run is writing into" in capsys.readouterr().err and sorted(folder.rglob("*")) == before
    monkeypatch.setattr(mixture, "write_tokens", meanwhile)
    assert mixture.main(options) == 0


@pytest.mark.parametrize(("options", "said"), [
    (["--shares", "prose"], "shares 'prose': expected NAME=WHOLE NUMBER"),
    (["--shares", "prose=1.5"], "shares 'prose=1.5'"),
    (["--shares", "x=1"], "a weight for 'x'; the sources are 'prose', 'code'"),
    (["--source", "x=/nowhere/*.txt"], "source 'x': 0 files match '/nowhere/*.txt'"),
    (["--source", "x"], "--source x: expected NAME=PATTERN"),
    (["--source", "x=a", "--source", "x=b"], "each name once"),
    (["--last", "1.2"], "--last 1.2: must be"),
])
def test_what_does_not_fit_is_a_usage_error(tmp_path, capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        mixture.main([*options, "--out", str(tmp_path / "out")])
    assert stopped.value.code == 2 and said in capsys.readouterr().err
