"""examples/recall.py: what is asked, and who answers it."""

import numpy as np
import pytest

from examples import recall


def test_who_is_asked_wants_the_last_value():
    args = recall.parse("--keys 3 --values 5 --length 40".split())
    tokens, targets = recall.sequences(args, np.random.default_rng(0), 20)
    asked = 0
    for row, answers in zip(tokens, targets, strict=True):
        memory = {}
        for token, answer in zip(row, answers, strict=True):
            if token < 15:
                assert answer == recall.NOTHING_ASKED
                memory[token // 5] = token % 5
            else:
                asked += 1
                assert answer == memory[token - 15]
    assert 0.4 < asked / tokens.size < 0.5 and tokens.max() == 17


@pytest.mark.thorough
def test_the_delta_rule_recalls_what_linear_attention_does_not(capsys):
    """Values that are replaced again and again: hardly a wrong answer, where the other has three of a hundred and more,
    with as many numbers kept."""
    assert recall.main("--keys 4 --length 32 --steps 200".split()) == 0
    heading, steps, *lines = capsys.readouterr().out.splitlines()
    assert heading.startswith("4 keys, 4 values, 32 tokens") and steps.split() == "step 50 100 150 200 kept".split()
    table = {name: (float(right.strip("%")), kept) for name, *_, right, kept in map(str.split, lines)}
    assert {name: kept for name, (_, kept) in table.items()} == {"all": "2,048", "linear": "512", "delta": "512"}
    assert table["linear"][0] < 98 < 99 < table["delta"][0]


@pytest.mark.parametrize("steps, looks", [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (7, [1, 3, 5, 7])])
def test_a_short_training_has_a_column_for_each_look(steps, looks, capsys):
    assert recall.main(f"--keys 2 --length 9 --steps {steps}".split()) == 0
    _, head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head == ["step", *map(str, looks), "kept"] and {len(row) for row in rows} == {len(head)}


@pytest.mark.parametrize("flags", ["--keys 0", "--values 0", "--length 0", "--steps 0", "--seed -1"])
def test_what_does_not_fit(flags, capsys):
    with pytest.raises(SystemExit, match="2"):
        recall.main(flags.split())
    assert f"{flags}: must be" in capsys.readouterr().err


def test_few_tokens_ask_little(capsys):
    """One can't ask at all; of two, one in so many batches does."""
    with pytest.raises(SystemExit, match="2"):
        recall.main("--length 1".split())
    assert "--keys 8 --length 1: in 200 sequences no key comes twice" in capsys.readouterr().err
    args = recall.parse("--length 2 --keys 60 --steps 4".split())
    rng = np.random.default_rng(args.seed)
    asking = [(recall.sequences(args, rng, recall.ROWS)[1] != recall.NOTHING_ASKED).any() for _ in range(args.steps)]
    assert 0 < sum(asking) < len(asking)
    assert recall.main("--length 2 --keys 60 --steps 4".split()) == 0
    assert "nan" not in capsys.readouterr().out
