"""`python -m minitorch_dist kernels`, where nothing is compiled. tests/kernels has the rest."""

import pytest

from minitorch_dist.__main__ import main


@pytest.mark.parametrize("flags", [["--count", "--show", "ptx"], ["--show", "ttir", "--count"]], ids=" ".join)
def test_a_stage_and_counts_are_two_questions(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["kernels", "add", *flags])
    assert ended.value.code == 2 and "not allowed with argument" in capsys.readouterr().err
