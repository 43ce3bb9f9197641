"""examples/offload.py, made small: its figures are those of theory."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest

from minitorch_dist import optim

from ..device.fake_cupy import installed

PROGRAM = Path(__file__).parents[2] / "examples" / "offload.py"
SMALL = ["--layers", "2", "--dim", "64", "--length", "64", "--batch", "16", "--steps", "1", "--stack", "6", "--width",
         "300", "--vocabulary", "700"]


def run(*flags):
    return runpy.run_path(str(PROGRAM))["main"]([*SMALL, *map(str, flags)])


def test_its_tables(tmp_path, capsys):
    assert run("--folder", tmp_path, "--prefetch", 2) == 0
    said = capsys.readouterr().out
    rows = {line[:16].strip(): [float(x) for x in line[16:].split()] for line in said.splitlines()[2:8]}
    size = int(re.search(r"a GPT of ([\d,]+) parameters", said)[1].replace(",", "")) * 4e-6
    plain, again, products, activations, optimizer, both = (rows[w] for w in (
        "as it is", "computed again", "but products", "activations away", "optimizer away", "both away"))
    # parameter, gradient, optimizer, activation, buffer; padding to 4,096 elements
    assert size <= plain[0] < size + 0.02 and plain[1] == plain[0]
    assert plain[2] == pytest.approx(2 * plain[0], abs=0.011)
    assert activations[:3] == again[:3] == products[:3] == plain[:3]
    assert activations[3] < plain[3] / 3 and again[3] < products[3] < plain[3]
    assert optimizer == [*plain[:2], 0, *plain[3:5], optimizer[5]] and both[2:4] == [0, activations[3]]
    assert "the same parameters to the last bit" in said and "the same outputs to the last bit" in said
    unit = 4 * 300 * 301 / 2 ** 20
    whole, none, two = (float(re.search(rf"{name} +(\d+\.\d)", said)[1]) for name in
                        ("in memory", "streamed, 0 ahead", "streamed, 2 ahead"))
    assert 6 * unit - 0.1 < whole < 6 * unit + 0.4 and unit - 0.1 < none < unit + 0.4
    assert 3 * unit - 0.1 < two < 3 * unit + 0.4 and not list(tmp_path.iterdir())
    # 1,024 tokens: 700 logits of each and their softmax, or two numbers; and a label
    kept = [float(re.search(rf"{name} +(\d+\.\d+) ", said)[1]) for name in ("of all logits", "by tiles")]
    assert kept == [round(1024 * (8 * 700 + 8) / 1e6, 2), round(1024 * (8 + 8) / 1e6, 2)]
    assert float(re.search(r"differ by (\S+) of", said)[1]) < 1e-5


@pytest.mark.parametrize("to", ["cpu", "disk"])
def test_beside_a_gpu_whoever_updates_has_bits_of_its_own(monkeypatch, capsys, to):
    """The stand-in's host rounds as its GPU does: here they are told apart by a GPU that makes steps twice as long."""
    def longer(self, p, g, state, group, step):
        return update(self, p, g, state, group if isinstance(p, np.ndarray) else group | {"lr": 2 * group["lr"]}, step)
    update = optim.Adam.update
    monkeypatch.setattr(optim.Adam, "update", longer)
    with installed():
        assert run("--device", "cuda", "--to", to, "--layers", 1, "--dim", 8, "--length", 8, "--batch", 2) == 0
    said = capsys.readouterr().out
    assert "the same parameters, updated on the GPU, to the last bit" in said
    assert "the same parameters, updated on the host, to the last bit" in said and "DIFFERENT" not in said


def test_what_does_not_fit(tmp_path, capsys):
    for flags, words in ((["--to", "cpu"], "--to cpu: from the host's memory"), (["--stack", 0], "--stack 0: must be"),
                         (["--folder", tmp_path / "nowhere"], "No such file or directory")):
        with pytest.raises(SystemExit) as ended:
            run(*flags)
        assert ended.value.code == 2 and words in capsys.readouterr().err
