"""examples/experts.py: its tables. That biases make loads even is tests/parallel/test_expert_bias.py's."""

from pathlib import Path

from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "experts.py"


def test_the_table(tmp_path):
    flags = "--steps", 8, "--batch-size", 32, "--experts", 4, "--out", tmp_path / "runs"
    said = crews.launch([PROGRAM, *flags], 2, limit=60).check().stdout[0]
    lines = said.splitlines()
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].replace("%", "").split()] for line in lines[2:5]}
    assert list(rows) == ["left alone", "loss, 0.01", "biases"]
    assert all(0 < loss < 3 for _, _, loss in rows.values())        # of 12 characters by chance: 2.5
    # the last tenth of 8 steps is one, whose layers are shown: percent of their mean load, the greatest MaxVio above it
    for name in ("left alone", "biases"):
        begin, violations, over = lines.index(f"{name}, the last step:") + 2, [], []
        for line in lines[begin:begin + 2]:
            violation, *loads = map(float, line.split()[1:])
            assert len(loads) == 4 and abs(sum(loads) - 400) <= 2 and abs(max(loads) - 100 * (1 + violation)) < 0.6
            violations.append(violation)
            over.append(sum(max(load - 125, 0) for load in loads) / 4)
        assert abs(rows[name][0] - sum(violations) / 2) < 0.001 and abs(rows[name][1] - sum(over) / 2) < 0.7
    assert len({tuple(row) for row in rows.values()}) == 3
    assert (tmp_path / "runs" / "loads.png").stat().st_size > 10_000


def test_what_does_not_fit_is_said():
    run = crews.launch([PROGRAM, "--experts", 2, "--top-k", 3], 1)
    assert run.returncode == 2 and "can't choose k=3 of 2 experts" in run.stderr[0]
    run = crews.launch([PROGRAM, "--batch-size", 9001], 1)
    assert run.returncode == 2 and "experts.py: drop_last leaves no batch: batch_size=9001" in run.stderr[0]
