"""examples/stretch.py: its ways in closed form, its table on one rank and on two, and what doesn't fit."""

from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

import minitorch_dist as mt
from examples import stretch
from minitorch_dist import comm
from minitorch_dist.data.text import read_text
from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "stretch.py"


def test_a_larger_base_slows_the_slowest_pair_down_and_leaves_the_fastest():
    ways = stretch.ways(64, 4)
    learned, larger, interpolated, yarn = (ways[name].frequencies(stretch.SIZE) for name in (
        "as it is", "a larger base", "interpolated", "YaRN"))
    assert larger[0] == learned[0] and larger[-1] == pytest.approx(learned[-1] / 4, rel=1e-12)
    np.testing.assert_allclose(interpolated, learned / 4, rtol=1e-15)
    assert yarn[0] == learned[0] and yarn[-1] == pytest.approx(learned[-1] / 4, rel=1e-12)
    assert np.all(interpolated <= yarn) and np.all(yarn <= learned)


def test_one_table_on_one_rank_and_on_two(tmp_path):
    text = "".join(np.random.default_rng(0).choice(list("abcde \n"), 3000))
    (tmp_path / "text").write_text(text)
    flags = "--length", 8, "--stretch", 4, "--steps", 6, "--tune", 2, "--batch-size", 8, "--text", tmp_path / "text"
    tables = []
    for n in (1, 2):
        lines = crews.launch([PROGRAM, *flags, "--out", tmp_path / str(n)], n, limit=60).check().stdout[0].splitlines()
        assert lines[0] == "learned with 8 characters, reads 32: nats per character"
        assert lines[2].split() == ["1-8", "9-16", "17-24", "25-32"] * 2 and len(lines) == 8
        tables.append({line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in lines[3:7]})
        assert (tmp_path / str(n) / "stretch.png").stat().st_size > 10_000
    assert list(tables[0]) == list(tables[1]) == ["as it is", "interpolated", "a larger base", "YaRN"]
    for name, losses in tables[0].items():
        assert len(losses) == 8 and all(1.5 < loss < 3 for loss in losses)       # of 7 characters by chance: 1.95
        np.testing.assert_allclose(losses, tables[1][name], atol=0.0011)


def test_who_is_not_tuned_stays_as_it_was(tmp_path, capsys):
    (tmp_path / "text").write_text("to be, or not to be. " * 40)
    flags = ["--length", "4", "--stretch", "2", "--steps", "2", "--batch-size", "4", "--out", str(tmp_path)]
    assert stretch.main([*flags, "--tune", "0", "--text", str(tmp_path / "text")]) == 0
    for line in capsys.readouterr().out.splitlines()[3:7]:
        losses = line[16:].split()
        assert len(losses) == 8 and losses[:4] == losses[4:]


def test_its_legend_lies_on_no_curve(tmp_path, monkeypatch):
    kept, drawn = [], stretch.drawn

    @contextmanager
    def keeping(*args):
        with drawn(*args) as figure:
            yield figure
        kept.append(figure)
    monkeypatch.setattr(stretch, "drawn", keeping)
    args = stretch.parse(["--length", "8", "--stretch", "2"])
    stretch.draw(args, {way: (np.ones(16), np.ones(16)) for way in stretch.ways(8, 2)}, tmp_path / "stretch.png")
    (legend,), axes = kept[0].legends, kept[0].axes
    assert [text.get_text() for text in legend.get_texts()] == list(stretch.ways(8, 2))
    assert all(legend.get_window_extent().y0 > a.get_window_extent().y1 for a in axes)


def test_losses_by_position_are_those_of_the_logits():
    text, losses = read_text(PROGRAM), []
    chosen = np.linspace(0, len(text.validation) - 32 - 1, 64).astype(int)
    tokens = np.stack([text.validation[i:i + 33] for i in chosen])
    for rotary in stretch.ways(8, 4).values():
        mt.manual_seed(0)
        model = stretch.gpt(text, 32, rotary)
        for p in model.parameters():
            p.data *= 4         # so that it looks at positions at all
        losses.append(stretch.by_position(model, text, comm.world(), 32))
        logits = model(tokens[:, :-1]).numpy().astype(np.float64)
        of_target = np.take_along_axis(logits, tokens[:, 1:, None], 2)[..., 0]
        np.testing.assert_allclose(losses[-1], (np.log(np.exp(logits).sum(2)) - of_target).mean(0), rtol=1e-5)
    assert min(abs(a - b).max() for i, a in enumerate(losses) for b in losses[:i]) > 1e-3


@pytest.mark.parametrize("flags, said", [
    (["--stretch", 1], "--stretch 1: 2 or more"), (["--stretch", 3, "--length", 33], "a multiple of 4"),
    (["--batch-size", 6], "--batch-size 6 must be a multiple of --stretch 4"),
    (["--length", 20_000], "has no window of 80000")])
def test_what_does_not_fit_is_said(flags, said):
    run = crews.launch([PROGRAM, *flags], 1)
    assert run.returncode == 2 and said in run.stderr[0], run.report()


def test_too_few_long_windows_for_the_ranks_are_said_before_training(tmp_path):
    run = crews.launch([PROGRAM, "--batch-size", 4, "--out", tmp_path / "runs"], 2, limit=30)
    assert run.returncode == 2 and "makes 1 long windows, too few for 2 ranks: take 8 or more" in "".join(run.stderr)
    assert not (tmp_path / "runs").exists()
