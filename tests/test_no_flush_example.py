"""examples/no_flush.py: both pipelines on the same digits, at each rate; and what doesn't fit."""

from pathlib import Path

import pytest

from examples import no_flush
from tests import crews
from tests.crews import threads

PROGRAM = Path(no_flush.__file__)
SMALL = ["--epochs", "1", "--hidden", "8", "--batch-size", "500", "--lr", "0.01,0.02"]


def test_it_prints_both_beside_each_other():
    ended = crews.launch([PROGRAM, *SMALL, "--micro-batches", "3"], 2, limit=60, env=threads(2)).check()
    said, _, head, *rows = ended.stdout[0].splitlines()
    assert said == ("2 ranks, 3 micro-batches; on paper ranks wait for 25 % of the time with a flush, "
                    f"{100 / (2 * 3 + 1):.1f} % without")
    assert head.split() == ["lr", "loss", "test", "ms/step"] + ["loss", "test", "ms/step"]
    assert [row.split()[0] for row in rows] == ["0.01", "0.02"] and not any("nan" in row for row in rows)


def test_one_rank_waits_for_nobody(capsys):
    assert no_flush.main(SMALL) == 0
    assert "ranks wait for 0 % of the time with a flush, 0.0 % without" in capsys.readouterr().out


def test_more_ranks_than_layers_is_said_once():
    ended = crews.launch([PROGRAM, *SMALL], 4, limit=60, env=threads(4))
    assert ended.returncode == 2 and ended.stdout == [""] * 4
    assert ended.stderr == ["no_flush.py: 3 layers can't be cut into 4 stages\n", "", "", ""]


def test_fewer_micro_batches_than_ranks_are_said_once():
    ended = crews.launch([PROGRAM, *SMALL, "--micro-batches", "1"], 2, limit=60, env=threads(2))
    assert ended.returncode == 2 and ended.stdout == [""] * 2 and ended.stderr[1] == ""
    assert ended.stderr[0].startswith("no_flush.py: PipeDream2BW: 1 micro-batches on 2 ranks: ")


@pytest.mark.parametrize(("options", "said"), [
    (["--lr", "0.1,x"], "--lr 0.1,x: expected numbers above 0"), (["--lr", "-1"], "--lr -1: expected"),
    (["--micro-batches", "0"], "--micro-batches 0: must be"), (["--hidden", "a"], "--hidden 'a'"),
    (["--batch-size", "1438"], "1437 samples")])
def test_what_does_not_fit_is_a_usage_error(capsys, options, said):
    with pytest.raises(SystemExit) as stopped:
        no_flush.main(options)
    assert stopped.value.code == 2 and said in capsys.readouterr().err
