"""examples/forms.py: each form's curve is data parallelism's, and its row what the papers say of it."""

from pathlib import Path

import pytest

from tests import crews

PROGRAM = Path(__file__).parents[1] / "examples" / "forms.py"
FORMS = "data parallel", "ZeRO 1", "ZeRO 3", "tensor", "ring", "pipeline", "+ slices"


@pytest.mark.thorough
def test_the_table_and_the_picture(tmp_path):
    run = crews.launch([PROGRAM, "--forms", ",".join(FORMS), "--out", tmp_path / "new"], 2, limit=120).check()
    *lines, last = run.stdout[0].splitlines()
    path = tmp_path / "new" / "forms.png"
    assert last == f"the picture: {path}" and path.stat().st_size > 10_000
    assert lines[0].split()[4:] == ["parameters", "gradients", "optimizer", "activations", "buffers", "sent", "max",
                                    "|Δloss|"]
    width = max(map(len, FORMS))
    rows = {line[:width].strip(): [float(cell.replace(",", "")) for cell in line[width:].split()] for line in lines[1:]}
    assert tuple(rows) == FORMS
    parameters, gradients, optimizer, activations, buffers, sent = rows["data parallel"]
    assert (gradients, optimizer, buffers) == pytest.approx((parameters, 2 * parameters, 0), abs=1)
    assert sent == pytest.approx(parameters, rel=0.01)      # 2(N - 1)/N, of N = 2
    one, three, tensor, ring, pipeline, slices = (rows[name] for name in FORMS[1:])
    assert all(row.pop() < 1e-12 for row in (one, three, tensor, ring, pipeline, slices))
    # Units are padded to ranks · 4,096 elements.
    assert one == pytest.approx([parameters, gradients, optimizer / 2, activations, 0, sent], rel=0.1)
    assert three == pytest.approx([parameters / 2, three[1], optimizer / 2, activations, three[4], 1.5 * sent], rel=0.1)
    assert three[1] == pytest.approx((1 / 2 + 2 / 8) * parameters, rel=0.12)     # the sums, whole ones of two units
    assert three[4] == pytest.approx(2 * parameters / 8, rel=0.2)       # two gathered units
    # Norms, the positions and a row's biases are whole on each rank; activations are of both ranks' samples, and of 34
    # parts 10 are whole (Korthikanti et al. 2022).
    assert tensor[:3] == pytest.approx([parameters / 2, gradients / 2, optimizer / 2], rel=0.05)
    assert tensor[3] == pytest.approx(2 * (10 + 24 / 2) / 34 * activations, rel=0.05)
    assert ring[:5] == pytest.approx([parameters, gradients, optimizer, activations, 0], rel=0.05)
    assert ring[5] > 1.3 * sent
    assert pipeline[0] == pytest.approx(parameters / 2, rel=0.05) and pipeline[5] < sent / 4
    # Of 2 ranks the first holds 5 slices of 4 micro-batches' 16, the second 4 and the output layer's, in place of 2.
    assert slices[:3] == pytest.approx(pipeline[:3], rel=0.05) and slices[5] == pytest.approx(pipeline[5], rel=0.01)
    assert 5 / 8 * 0.8 * pipeline[3] < slices[3] < 5 / 8 * 1.3 * pipeline[3]


@pytest.mark.parametrize("flags, words", [
    (["--forms", "ZeRO 9"], "--forms ZeRO 9: there are data parallel, ZeRO 1"),
    (["--text", "nowhere.txt"], "nowhere.txt: No such file")], ids=str)
def test_what_does_not_fit_is_said_once(flags, words):
    found = crews.launch([PROGRAM, *flags], 1, limit=30)
    said = [line for text in found.stderr for line in text.splitlines() if line.startswith("forms.py: ")]
    assert found.returncode == 2 and len(said) == 1 and words in said[0], found.report()
