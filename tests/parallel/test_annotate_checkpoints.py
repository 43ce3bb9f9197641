"""Checkpoints of annotated models: each rank writes its own parts, and any other annotation goes on from them."""

import numpy as np
import pytest

from minitorch_dist import checkpoints, optim
from tests.checkpoints import cases
from tests.crews import crews

CASES = "tests.parallel.annotate_checkpoint_cases:"
MIDDLE, END = 1, 2
WRITERS = [("gpt", "one", 1), ("gpt", "megatron", 2), ("gpt", "parts of parts", 4),
           ("mlp", "one", 1), ("mlp", "rows", 3), ("mlp", "rows twice", 4)]


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{(model, way, ranks): (path, the whole state of each rank)} of checkpoints at step MIDDLE."""
    folder, found = tmp_path_factory.mktemp("written"), {}
    for name, way, n in WRITERS:
        path = str(folder / f"{name}, {way}")
        found[name, way, n] = path, crews.call(CASES + "begin", n, args=(name, way, MIDDLE, path))
    return found


@pytest.fixture(scope="module")
def never(tmp_path_factory):
    """{model: the whole state at step END} of a run of one process that is never broken off."""
    return {name: crews.call(CASES + "begin", 1, args=(name, "one", END, str(tmp_path_factory.mktemp(name) / "end")))[0]
            for name in cases.MODELS}


@pytest.mark.parametrize(("name", "way", "n"), WRITERS)
def test_what_ranks_have_written_is_each_part_once(written, name, way, n):
    """Read into a model that isn't annotated: what the ranks gathered from each other, to the bit."""
    (path, states), model = written[name, way, n], cases.gpt(layers=1) if name == "gpt" else cases.mlp()
    optimizer = optim.AdamW([p for p in model.parameters() if p.requires_grad])
    checkpoints.load(path, model, optimizer)
    found = {f"model.{key}": array for key, array in model.state_dict().items()}
    at = {id(p): key for key, p in model.named_parameters()}
    for p, state in zip(optimizer.param_groups[0]["params"], optimizer.state_dict()["state"], strict=True):
        found |= {f"optimizer.{kind}.{at[id(p)]}": array for kind, array in state.items()}
    for whole in states:
        assert list(whole) == list(found) and all(whole[key].tobytes() == found[key].tobytes() for key in found)
    index, sizes = checkpoints.Index.read(path), {}
    for array in index.arrays.values():
        for piece in array["pieces"]:
            nbytes = np.dtype(array["dtype"]).itemsize * int(np.prod([hi - lo for lo, hi in piece["box"]]))
            sizes.setdefault(piece["file"], []).append(nbytes)
    whole = sum(array.nbytes for array in states[0].values())
    assert len(sizes) == n and sum(map(sum, sizes.values())) == whole
    if n > 1:       # the largest of all pieces is one rank's part of an array, and nobody has the whole of a large one
        largest = max(array.nbytes for array in states[0].values())
        assert max(map(max, sizes.values())) <= -(-largest // n) * 1.1
        assert max(map(sum, sizes.values())) < 1.35 * whole / n


@pytest.mark.parametrize(("name", "way", "n"), WRITERS)
def test_any_annotation_goes_on_from_what_any_has_written(written, never, name, way, n):
    """To the bit after loading; and after more steps as the run of one process that was never broken off."""
    ring = [cut for cut in WRITERS if cut[0] == name]       # each goes on from what the two before it have written
    at = ring.index((name, way, n))
    sources = {cut: written[cut] for cut in (ring[at - 1], ring[at - 2])}
    paths = [path for path, _ in sources.values()]
    for found in crews.call(CASES + "go_on", n, args=(name, way, paths, END)):
        for (cut, (_, states)), (loaded, end) in zip(sources.items(), found, strict=True):
            assert all(loaded[key].tobytes() == array.tobytes() for key, array in states[0].items()), cut
            for key, array in never[name].items():
                np.testing.assert_allclose(end[key], array, rtol=1e-10, atol=1e-10, err_msg=f"{cut}: {key}")
