"""Checkpoints: written in any way of cutting a model, read in any other; nothing lost, nothing damaged unseen."""

import errno
import json
import os
import shutil
import socket
import zlib

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, nn, optim
from minitorch_dist.checkpoints import CheckpointError, Checkpoints, Index
from minitorch_dist.checkpoints.layout import parted, piece_of
from minitorch_dist.checkpoints.saving import merged
from tests.crews import crews

from . import cases

CASES = "tests.checkpoints.cases:"
MIDDLE, END = 3, 6
CUTS = [(name, way, n) for name in cases.MODELS for way in cases.OF[name] for n in cases.WAYS[way]]


def state(run):
    """{name: array} of a whole model and its optimizer, with the counts of updates."""
    names = [name for group in run.optimizer.param_groups for p in group["params"]
             for name, q in run.model.named_parameters() if p is q]
    saved = run.optimizer.state_dict()
    found = {f"model.{name}": array for name, array in run.model.state_dict().items()}
    for name, arrays, steps in zip(names, saved["state"], saved["steps"], strict=True):
        found |= {f"{kind} of {name}": array for kind, array in arrays.items()} | {f"steps of {name}": np.array(steps)}
    return found | {f"lr {i}": np.array(group["lr"]) for i, group in enumerate(saved["groups"])}


def assert_same(found, wanted, tolerance=0.0):
    assert list(found) == list(wanted)
    for name, array in wanted.items():
        np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.fixture(scope="module")
def one_process():
    """{(model, step): state} of training that is never broken off."""
    return {(name, step): state(cases.Training(name, "one").train(0, step)) for name in cases.MODELS
            for step in (MIDDLE, END)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    """{(model, way, ranks): path} of checkpoints at step MIDDLE."""
    folder, found = tmp_path_factory.mktemp("written"), {}
    for name, way, n in CUTS:
        found[name, way, n] = path = folder / f"{name}, {way}, {n}"
        crews.call(CASES + "begin", n, args=(name, way, MIDDLE, str(path)))
    return found


@pytest.mark.parametrize("name, way, n", CUTS)
def test_what_ranks_have_written_is_the_state_of_one_process(one_process, written, name, way, n):
    path, run = written[name, way, n], cases.Training(name, "one", lr=0.5)
    assert checkpoints.load(path, run.model, run.optimizer) == {"step": MIDDLE, "way": way}
    assert_same(state(run), one_process[name, MIDDLE], 0.0 if way == "one" else 1e-10)
    assert sorted(f.name for f in path.iterdir()) == ["index.json", *(f"rank-{r}.safetensors" for r in range(n))]


@pytest.mark.parametrize("name, way, n", CUTS)
def test_any_ranks_go_on_from_what_any_have_written(one_process, written, tmp_path, name, way, n):
    """The end is that of the run that was never broken off. (From whole arrays, from elements, and from boxes: that all
    files say the same the test above has shown.)"""
    sources = {cut: path for cut, path in written.items()
               if cut in ((name, "one", 1), (name, "stage 3", 3), ("gpt", "heads", 2), ("mlp", "layers", 2))
               and cut[0] == name}
    pairs = [(str(path), str(tmp_path / str(i))) for i, path in enumerate(sources.values())]
    for facts in crews.call(CASES + "go_on", n, args=(name, way, pairs, END)):
        assert [f["way"] for f in facts] == [cut[1] for cut in sources]
    for _, target in pairs:
        run = cases.Training(name, "one")
        checkpoints.load(target, run.model, run.optimizer)
        assert_same(state(run), one_process[name, END], 1e-10)


EXACT = [("data", 1), ("data", 2), ("data", 4), ("stage 1", 2), ("stage 3", 4)]


def test_exact_runs_go_on_to_the_last_bit(tmp_path):
    never, found = cases.Training("gpt", "data", exact=True).train(0, END), {}
    for way, n in EXACT:
        crews.call(CASES + "begin", n, args=("gpt", way, MIDDLE, str(tmp_path / f"{way}{n}"), True))
    for i, (way, n) in enumerate(EXACT):
        source, target = tmp_path / "{}{}".format(*EXACT[i - 1]), tmp_path / f"end {i}"
        crews.call(CASES + "go_on", n, args=("gpt", way, [(str(source), str(target))], END, True))
        run = cases.Training("gpt", "one")
        checkpoints.load(target, run.model, run.optimizer)
        found[way, n] = state(run)
    for wanted in found.values():
        assert_same(wanted, state(never))


@pytest.mark.parametrize("name, way, n", CUTS)
def test_each_rank_writes_its_share(written, name, way, n):
    """Nothing twice; nobody more than its share and one piece, for pieces aren't cut."""
    index = Index.read(written[name, way, n])
    sizes = dict.fromkeys(index.files, 0)
    greatest = 0
    for array in index.arrays.values():
        for piece in array["pieces"]:
            nbytes = np.dtype(array["dtype"]).itemsize * int(np.prod([b - a for a, b in piece["box"]]))
            sizes[piece["file"]] += nbytes
            greatest = max(greatest, nbytes)
    total = sum(sizes.values())
    whole = sum(np.dtype(a["dtype"]).itemsize * int(np.prod(a["shape"])) for a in index.arrays.values())
    assert total == whole and len(sizes) == n
    if way in ("data", "heads and data"):
        assert max(sizes.values()) <= total / n + greatest
    for file, facts in index.files.items():
        assert sizes[file] <= facts["bytes"] <= sizes[file] + 16384     # and a header


def test_a_file_of_one_process_is_read_by_other_programs(written):
    from safetensors.numpy import load_file
    run, path = cases.Training("gpt", "one"), written["gpt", "one", 1]
    checkpoints.load(path, run.model, run.optimizer)
    there = load_file(path / "rank-0.safetensors")
    for name, array in run.model.state_dict().items():
        np.testing.assert_array_equal(there[f"model.{name}"], array)


# ---------------------------------------------------------------- damage

def copy_of(path, tmp_path):
    return shutil.copytree(path, tmp_path / "copy")


def truncated(path):
    with open(path / "rank-1.safetensors", "r+b") as file:
        file.truncate(1000)


def flipped(path):
    content = bytearray((path / "rank-0.safetensors").read_bytes())
    content[-100] ^= 1
    (path / "rank-0.safetensors").write_bytes(content)


def changed(path, change, honest=True):
    """An index is. honest: and its CRC-32 as well."""
    found = json.loads((path / "index.json").read_text())
    change(found)
    if honest:
        parts = [found[name] for name in ("facts", "optimizer", "files", "arrays")]
        found["crc32"] = zlib.crc32(json.dumps(parts).encode())
    (path / "index.json").write_text(json.dumps(found))


def retyped(path):
    """All that is float64 in a file is float32, and of that its checksum."""
    from safetensors.numpy import load_file, save_file
    file = path / "rank-0.safetensors"
    save_file({name: a.astype(a.dtype.str.replace("f8", "f4")) for name, a in load_file(file).items()}, file)
    facts = {"bytes": file.stat().st_size, "crc32": zlib.crc32(file.read_bytes())}
    changed(path, lambda found: found["files"].update({file.name: facts}))


DAMAGE = {
    "truncated": (truncated, r"rank-1.safetensors has 1,000 of [\d,]+ bytes: it was cut off"),
    "a bit": (flipped, r"rank-0.safetensors has changed since it was written: its CRC-32 is"),
    "a file is missing": (lambda path: (path / "rank-1.safetensors").unlink(),
                          "rank-1.safetensors can't be read: No such"),
    "no index": (lambda path: (path / "index.json").unlink(), "no checkpoint here: it has no index.json"),
    "a folder for an index": (lambda path: ((path / "index.json").unlink(), (path / "index.json").mkdir()),
                              "index.json can't be read: Is a directory"),
    "half an index": (lambda path: (path / "index.json").write_text('{"version": 1, "fa'), "index.json is damaged"),
    "an index of nothing": (lambda path: (path / "index.json").write_text("[]"), "index.json is damaged"),
    "another version": (lambda path: changed(path, lambda found: found.update(version=9)),
                        "of version 9; this program"),
    "another rate": (lambda path: changed(path, lambda found: found["optimizer"]["groups"][0]["settings"].update(lr=.2),
                                          honest=False), "index.json has changed since it was written: the CRC-32 of"),
    "a checksum in words": (lambda path: changed(path, lambda found: found.update(crc32="no"), honest=False),
                            "index.json is damaged"),
    "no checksum": (lambda path: changed(path, lambda found: found.pop("crc32"), honest=False), "damaged: KeyError"),
    "a missing array": (lambda path: changed(path, lambda found: found["arrays"].pop("model.0.weight")),
                        "has no model.0.weight"),
    "a file elsewhere": (lambda path: changed(path, lambda found: found["files"].update(
        {"../a.safetensors": {"bytes": 0, "crc32": 0}})), "damaged: ValueError: it names '../a.safetensors', which is"),
    "an absolute file": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"]["pieces"][0].update(
        file="/etc/passwd")), "model.0.weight is said to be in '/etc/passwd', which is not among the files"),
    "no piece": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"]["pieces"].clear()),
                 "damaged: ValueError: the pieces of model.0.weight are not each of its elements once"),
    "a smaller piece": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"]["pieces"][0].update(
        box=[[0, 89], [0, 7]])), "the pieces of model.0.weight are not each of its elements once"),
    "no counts": (lambda path: changed(path, lambda found: found["optimizer"]["steps"].clear()),
                  "index.json is damaged: KeyError"),
    "an unknown array": (lambda path: changed(path, lambda found: found["arrays"].update(
        {"model.9.weight": found["arrays"]["model.0.weight"]})), "has model.9.weight, which this model"),
    "another shape": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"].update(
        {"shape": [7, 90], "pieces": [{"file": "rank-0.safetensors", "box": [[0, 7], [0, 90]]}]})),
                      r"model.0.weight is <f8 of shape \[7, 90\], this model's is <f8 of shape \[90, 7\]"),
    "a flat box": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"]["pieces"][0].update(
        box=[[0, 630]])), r"model.0.weight of F64 \[90, 7\], and index.json says F64 \[630\]: one of them is damaged"),
    "a file of another dtype": (retyped, r"of F32 \[.*\], and index.json says F64 \[.*\]: one of them is damaged"),
    "another dtype": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"].update(dtype="<f4")),
                      "model.0.weight is <f4"),
    "no dtype": (lambda path: changed(path, lambda found: found["arrays"]["model.0.weight"].update(dtype=",08")),
                 "damaged: ValueError: model.0.weight is said to be of ',08', which no file of a checkpoint holds"),
    "another optimizer": (lambda path: changed(path, lambda found: found["optimizer"].update({"class": "SGD"})),
                          "is of a SGD, this run has a AdamW"),
    "a setting": (lambda path: changed(path, lambda found: found["optimizer"]["groups"][1]["settings"].update(lr=-1)),
                  "copy: lr is -1; it must be at least 0"),
    "an unknown setting": (lambda path: changed(path, lambda found: found["optimizer"]["groups"][1]["settings"].update(
        rho=1)), "copy: the saved state has the settings rho, which a AdamW hasn't"),
    "a nameless optimizer": (lambda path: changed(path, lambda found: found["optimizer"].pop("class")),
                             "index.json is damaged: KeyError"),
    **{key: (lambda path, key=key: changed(path, lambda found: found["files"]["rank-0.safetensors"].update({key: 1.5})),
             "the bytes and the crc32 of rank-0.safetensors are no whole numbers") for key in ("crc32", "bytes")},
    "an optimizer of no kind": (lambda path: changed(path, lambda found: found["optimizer"].update({"class": None})),
                                "it has state of None, which is no optimizer's name"),
    "a count in words": (lambda path: changed(path, lambda found: found["optimizer"]["steps"].update(
        {"0.weight": "7"})), "how often 0.weight was updated is no number"),
    "no settings": (lambda path: changed(path, lambda found: found["optimizer"]["groups"][1].update(settings=None)),
                    "index.json is damaged: AttributeError"),
    "no facts": (lambda path: changed(path, lambda found: found.update(facts=[])), "is damaged: AttributeError"),
    "no optimizer": (lambda path: changed(path, lambda found: found.update(optimizer=None)),
                     "is of no optimizer, this run has a AdamW"),
    "fewer groups": (lambda path: changed(path, lambda found: found["optimizer"]["groups"].pop()),
                     "an optimizer of 1 groups, this one has 2"),
    "other groups": (lambda path: changed(path, lambda found: found["optimizer"]["groups"].reverse()),
                     "of the optimizer's group 0 is in another one there"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_is_found_and_nothing_written(written, tmp_path, name):
    damage, what = DAMAGE[name]
    path = copy_of(written["mlp", "data", 2], tmp_path)
    damage(path)
    run = cases.Training("mlp", "one")
    before = state(run)
    with pytest.raises(CheckpointError, match=what):
        checkpoints.load(path, run.model, run.optimizer)
    assert_same(state(run), before)


def test_an_index_of_version_1_is_read(written, tmp_path):
    """It had no checksum."""
    path = copy_of(written["mlp", "data", 2], tmp_path)
    changed(path, lambda found: (found.update(version=1), found.pop("crc32")), honest=False)
    run = cases.Training("mlp", "one")
    assert checkpoints.load(path, run.model, run.optimizer)["step"] == MIDDLE


def test_a_damaged_file_that_nobody_verifies_is_found_when_it_cannot_be_read(written, tmp_path):
    path = copy_of(written["mlp", "data", 2], tmp_path)
    truncated(path)
    run = cases.Training("mlp", "one")
    with pytest.raises(CheckpointError, match="rank-1.safetensors can't be read"):
        checkpoints.load(path, run.model, run.optimizer, verify=False)


def test_a_model_alone(written):
    """Without its optimizer; into another dtype it is refused, and into one that has less."""
    run, path = cases.Training("mlp", "one"), written["mlp", "data", 2]
    before = state(run)
    assert checkpoints.load(path, run.model)["step"] == MIDDLE
    after = state(run)
    assert {name for name in after if (after[name] != before[name]).any()} >= {"model.0.weight", "model.5.bias"}
    assert all((after[name] == before[name]).all() for name in after if not name.startswith("model."))
    with pytest.raises(CheckpointError, match="0.weight is <f8 of shape .* this model's is <f4"):
        checkpoints.load(path, cases.mlp("f4"))
    many = len(list(cases.gpt().named_parameters()))
    with pytest.raises(CheckpointError, match=rf"has no model[\w.]+(, model[\w.]+){{3}} and {many - 4} more$"):
        checkpoints.load(path, cases.gpt())
    with pytest.raises(CheckpointError, match="has model.5.bias, model.5.weight, which this model and optimizer don't"):
        checkpoints.load(path, nn.Sequential(*list(cases.mlp())[:-1]))


def test_what_one_rank_cannot_do_no_rank_does(tmp_path, written):
    for rank in (0, 1):
        path = tmp_path / "never"
        for text, kind in crews.call(CASES + "failing", 2, args=(str(path), rank)):
            assert kind == "OSError" and "No space left on device" in text and f"rank-{rank}.safetensors" in text
        assert list(tmp_path.iterdir()) == []
        for text, unwritten in crews.call(CASES + "failing_to_load", 2, args=(str(written["mlp", "data", 2]), rank)):
            assert "this model's is <f8 of shape [4, 4]" in text and unwritten


def test_a_folder_that_not_all_ranks_share_is_refused(tmp_path):
    for text, kind in crews.call(CASES + "elsewhere", 2, args=(str(tmp_path / "mine"),)):
        assert kind == "OSError" and "rank-1.safetensors has None of" in text and "one that all nodes share" in text
    assert [p.name for p in tmp_path.iterdir()] == ["rank-1.safetensors"]


@pytest.mark.parametrize("async_op", [False, True])
def test_a_folder_that_only_one_machine_has_is_refused(tmp_path, async_op):
    """(A training.Run that is to save refuses it before it begins: tests/test_machines.py.)"""
    for said in crews.call(CASES + "on_other_disks", 3, args=(str(tmp_path), async_op)):
        assert said == (f"rank 1 on {socket.gethostname()} doesn't see this folder, which rank 0 has made: all ranks "
                        "write into it, so it must be one that all machines share",
                        str(tmp_path / "1" / "run" / ".step-00000001.partial"))
    assert list(tmp_path.iterdir()) == [tmp_path / "0"] and not any((tmp_path / "0" / "run").iterdir())


def test_loading_into_a_run_that_is_under_way(one_process, written):
    """What stages 1 and 2 had gathered before is not believed; a tape from before the loading says that it is stale."""
    for way, n in (("stage 1", 3), ("stage 2", 2), ("stage 3", 2), ("data", 2)):
        path = str(written["mlp", "one", 1])
        for got, stale in crews.call(CASES + "load_again", n, args=(way, path, END)):
            wanted = {name: one_process["mlp", END][f"model.{name}"] for name in got}
            assert_same(got, wanted, 1e-10)
            assert got or way.startswith("stage")
            assert "loading a checkpoint has overwritten" in stale


def test_settings_come_back_as_they_were(written):
    run = cases.Training("mlp", "one", lr=0.5)
    checkpoints.load(written["mlp", "data", 2], run.model, run.optimizer)
    assert run.optimizer.param_groups[0]["betas"] == (0.9, 0.999) and run.optimizer.param_groups[0]["lr"] == 0.01


def test_optimizers_of_several_ranks_as_one():
    def part(names, steps=2, lr=0.1):
        groups = [{"names": names, "settings": {"lr": lr}}]
        return {"class": "SGD", "steps": dict.fromkeys(names, steps), "groups": groups}
    assert merged([part(["a", "b"]), None, part(["b", "c"])]) == {
        "class": "SGD", "steps": {"a": 2, "b": 2, "c": 2},
        "groups": [{"names": ["a", "b", "c"], "settings": {"lr": 0.1}}]}
    assert merged([None, None]) is None
    with pytest.raises(ValueError, match="b was updated 3 times on rank 1, 2 times on others"):
        merged([part(["a", "b"]), part(["b"], steps=3)])
    with pytest.raises(ValueError, match="rank 1 has a Adam, rank 0 a SGD"):
        merged([part(["a"]), part(["b"]) | {"class": "Adam"}])
    with pytest.raises(ValueError, match="other settings on rank 2 than on rank 1"):
        merged([None, part(["a"]), part(["a"], lr=0.2)])


def test_pieces_that_are_not_the_whole_are_refused():
    whole = ("w", (4, 3), "<f4", [((0, 4), (0, 3))])
    assert Index.planned([[whole], [whole]]).arrays["w"]["pieces"] == [
        {"file": "rank-0.safetensors", "box": [[0, 4], [0, 3]]}]
    for wrong in ([("w", (4, 3), "<f4", [((0, 3), (0, 3))])], [whole, ("w", (4, 3), "<f4", [((0, 1), (0, 3))])],
                  [("w", (4, 3), "<f4", [((0, 2), (0, 3)), ((1, 3), (0, 3))])]):
        with pytest.raises(ValueError, match=r"of w \[4, 3\], which is not each of its elements once"):
            Index.planned([wrong])
    each = [(name, (size,), "<f4", [((0, size),)]) for name, size in zip("abc", (2, 3, 5), strict=True)]
    for first, files in ((), "110"), ("c", "110"), ("ac", "010"):      # the greatest pieces first; those of `first`
        dealt = Index.planned([each, each], first)
        assert [dealt.writer(name, boxes[0]) for name, *_, boxes in each] == [f"rank-{n}.safetensors" for n in files]
    held = Index.planned([[("w", (4,), "<f4", [((0, 4),)])], [("w", (4,), "<f4", [((0, 0),)])]])     # and nothing
    assert held.arrays["w"]["pieces"] == [{"file": "rank-0.safetensors", "box": [[0, 4]]}]
    assert Index.planned([[("w", (0, 3), "<f4", [((0, 0), (0, 3))])]]).arrays["w"]["pieces"] == [
        {"file": "rank-0.safetensors", "box": [[0, 0], [0, 3]]}]
    with pytest.raises(ValueError, match=r"w is <f4 of shape \[4, 3\] on one rank, <f8 of shape \[4, 3\] on rank 1"):
        Index.planned([[whole], [("w", (4, 3), "<f8", [((0, 4), (0, 3))])]])


def test_parts_along_an_axis():
    layout = parted((3, 5), 1, np.array([2, 3, 7, 0, 1]), 9)
    assert layout.shape == (3, 9)
    assert [box for box, _ in layout.pieces] == [((0, 3), (2, 4)), ((0, 3), (7, 8)), ((0, 3), (0, 2))]
    x, whole = np.arange(15).reshape(3, 5), np.full((3, 9), -1)
    for box, place in layout.pieces:
        whole[tuple(slice(*side) for side in box)] = piece_of(x, place)
    np.testing.assert_array_equal(whole[:, [2, 3, 7, 0, 1]], x)


def test_a_foreign_optimizer_is_refused(tmp_path):
    model = cases.mlp()
    other = optim.SGD(nn.Linear(2, 3).parameters(), 0.1)
    with pytest.raises(ValueError, match="updates a tensor that is no parameter of this model"):
        checkpoints.save(tmp_path / "a", model, other)
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- a run's

def test_the_newest_are_kept(tmp_path):
    model = nn.Linear(2, 3)
    kept = Checkpoints(tmp_path / "runs" / "checkpoints", keep=2)
    assert kept.steps() == []
    with pytest.raises(CheckpointError, match="has no checkpoint$"):
        kept.load(model)
    for step in (0, 5, 10, 20):
        model.bias.data[...] = step
        kept.save(step, model, loss=1 / max(step, 1))
        assert kept.steps()[-1] == step
    assert kept.steps() == [10, 20]
    assert sorted(p.name for p in kept.folder.iterdir()) == ["step-00000010", "step-00000020"]
    model.bias.data[...] = 0
    assert kept.load(model) == (20, {"loss": 1 / 20, "step": 20}) and model.bias.tolist() == [20] * 3
    assert kept.load(model, step=10)[0] == 10 and model.bias.tolist() == [10] * 3
    with pytest.raises(CheckpointError, match="has no checkpoint of step 5; there are those of steps 10, 20"):
        kept.load(model, step=5)
    with pytest.raises(OSError, match="there is a checkpoint already"):
        kept.save(20, model)
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints(tmp_path, keep=0)
    with pytest.raises(ValueError, match="step=-1"):     # nothing would ever find it again
        kept.save(-1, model)
    for name in ("step-00000099", "step-last", "step-5"):       # of another program
        (kept.folder / name).mkdir()
    (kept.folder / "step-last" / "index.json").touch()
    (kept.folder / "notes.txt").write_text("mine")
    assert kept.steps() == [10, 20]


def test_a_folder_that_cannot_be_read_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    """A run would begin anew, and delete what is there."""
    kept = Checkpoints(tmp_path / "checkpoints")
    kept.save(5, nn.Linear(2, 3))

    def refused(path, *rest, **options):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    for names in (("listdir", "scandir"), ("stat",)):
        with monkeypatch.context() as patched:
            for name in names:
                patched.setattr(os, name, refused)
            pytest.raises(PermissionError, kept.steps)
    assert kept.steps() == [5]


def test_a_run_that_has_gone_back_overwrites_nothing(tmp_path):
    """Its checkpoints would be deleted as the oldest, and what is loaded would be another run's."""
    model, kept = nn.Linear(2, 3), Checkpoints(tmp_path, keep=1)
    kept.save(20, model)
    with pytest.raises(ValueError, match="has checkpoints of later steps than 15: 20. Are they another run's"):
        kept.save(15, model)
    assert kept.steps() == [20]
    kept.save(123_456_789, model)
    assert kept.load(model)[0] == 123_456_789 and kept.steps() == [123_456_789]


def test_what_was_left_lying_goes(tmp_path):
    """By saves of other steps as well; also where the same step's was being deleted."""
    model, kept = nn.Linear(2, 3), Checkpoints(tmp_path, keep=1)
    for name in (".step-00000005.deleted", ".step-00000007.partial"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "rank-0.safetensors").write_text("")
    for step in (5, 6):
        kept.save(step, model)
        assert [path.name for path in tmp_path.iterdir()] == [f"step-0000000{step}"]


def test_the_index_is_for_people_too(written):
    text = (written["gpt", "heads", 2] / "index.json").read_text()
    assert '"box": [[0, 5], [0, 12]]' in text and '"betas": [0.9, 0.999]' in text
    assert mt.checkpoints.Index.read(written["gpt", "heads", 2]).facts == {"step": MIDDLE, "way": "heads"}
