"""What an example or a command is given and can't take: a line that names it, status 2, before anything is trained."""

from pathlib import Path

import pytest

from examples import lora, mixed_precision, stretch
from minitorch_dist import __main__ as commands
from minitorch_dist import program
from tests import crews
from tests.parallel.test_offload import file_size_limit

EXAMPLES = Path(__file__).parents[1] / "examples"
FOLDERS = ("diloco.py", "experts.py", "gossip.py", "lora.py", "mixed_precision.py", "mup.py", "parameter_server.py",
           "schedule_free.py")


@pytest.mark.parametrize(("flags", "words"), [
    (["sharding.py", "--batch", "0"], "--batch 0: must be at least 1"),
    (["sharding.py", "--plan", "1000000007"], "--plan 1000000007: 1 rank or more, and at most 1,000,000"),
    (["offload.py", "--device", "cuda:99"], "offload.py: device cuda:99"),
    (["offload.py", "--folder", "FILE-that-is-none"], "none: offload: no file can be made in this folder (No such"),
    (["parameter_server.py", "--slow", "inf"], "--slow inf: must be at least 1, and finite"),
    *(([name, "--out", "FILE"], "file: is a file, and a folder is needed") for name in FOLDERS)],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "")
def test_an_example_says_what_it_can_not_take(tmp_path, flags, words):
    (tmp_path / "file").write_text("")
    name, *flags = [flag.replace("FILE", str(tmp_path / "file")) for flag in flags]
    more = ["--data", "digits"] if name in ("diloco.py", "mixed_precision.py", "mup.py", "parameter_server.py",
                                              "schedule_free.py") else []
    run = crews.launch([EXAMPLES / name, *flags, *more], n=1, limit=60)
    assert run.returncode == 2 and words in run.stderr[0] and "Traceback" not in run.stderr[0], run.report()


def test_a_batch_that_ranks_can_not_divide_is_told_once():
    run = crews.launch([EXAMPLES / "sharding.py", "--batch", "1"], n=2, limit=60)
    assert run.returncode == 2 and run.stderr[1] == "" == run.stdout[0], run.report()
    assert "--batch 1: it is divided over the 2 ranks, and must be 2 or more" in run.stderr[0]


def test_a_folder_that_can_not_be_made_is_told_to_all_ranks(tmp_path):
    (tmp_path / "file").write_text("")
    run = crews.launch([EXAMPLES / "experts.py", "--out", tmp_path / "file" / "below"], n=2, limit=60)
    assert run.returncode == 2 and run.stderr[1] == "", run.report()
    assert "experts.py: " in run.stderr[0] and "below: no file can be written here: Not a directory" in run.stderr[0]


@pytest.mark.parametrize("module, flags, said, file", [
    (stretch, "--steps 1 --tune 0 --length 4 --stretch 2", "YaRN", "stretch.png"),
    (mixed_precision, "--data digits --epochs 1 --hidden 4 --batch-size 256", "tokens not mixed", "gradients.png"),
    (lora, "--pretrain 1 --steps 1 --ranks 1", "LoRA, r=1", "LoRA-1.npz")], ids=["stretch", "mixed_precision", "lora"])
def test_a_full_disk_loses_no_table_and_leaves_no_part_of_a_file(tmp_path, capsys, module, flags, said, file):
    with file_size_limit(5_000), pytest.raises(OSError, match=f"File too large: '.*{file}'"):
        module.main([*flags.split(), "--out", str(tmp_path)])
    assert said in capsys.readouterr().out and not list(tmp_path.glob("*.npz"))


def test_a_folder_is_made(tmp_path):
    program.make_folder(tmp_path / "a" / "b")
    program.make_folder(None)
    assert list((tmp_path / "a" / "b").iterdir()) == []


@pytest.mark.parametrize(("error", "words"), [
    (MemoryError("Unable to allocate 5.70 TiB"), "x.py: Unable to allocate 5.70 TiB: take smaller sizes\n"),
    (MemoryError(), "x.py: out of memory: take smaller sizes\n")])
def test_sizes_that_no_memory_has_room_for_are_one_line(capsys, error, words):
    with pytest.raises(SystemExit, match="2"), program.usage_errors("x.py"):
        raise error
    assert capsys.readouterr().err == words


SMALL = "--width 8 --heads 2 --vocabulary 10 --context 4"


@pytest.mark.parametrize(("line", "status", "words"), [
    ("pipeline 1f1b --ranks 0", 2, "at least one rank and one micro-batch; got 0 and 8"),
    ("pipeline 1f1b --ranks 1000000000", 2, "(ranks + micro-batches) is 1,000,000,008,000,000,000, and"),
    ("pipeline gpipe --ranks 3 --micro-batches 1000000000", 2, "of 3 ranks with 1 stage each and 1,000,000,000 micro"),
    ("pipeline interleaved --chunks 1000000000", 2, "4 ranks with 1,000,000,000 stages each and 8 micro-batches"),
    (f"plan --devices 1 {SMALL} --layers 1000000000", 2, "1,000,000,000 layers: plan goes through them one by one"),
    (f"plan --devices 1 {SMALL} --layers 2 --micro-batches 1000000000 --batch 1000000000", 2, "at most 50,000"),
    (f"plan --devices 735134400 --meshes --batch 735134400 {SMALL} --layers 2", 2, "are more than 2,000 meshes"),
    ("pipeline 1f1b --out FOLDER", 2, "needs an ending, as in pictures.png"),
    ("pipeline 1f1b --out FILE/x.png", 2, "file: File exists"),
    ("kernels --show ptx", 2, "--show ptx: of which kernel?"),
    ("supervise --mpirun nowhere -- x.py", 2, "supervise: nowhere: No such file or directory")])
def test_a_command_says_what_it_can_not_take(tmp_path, capsys, line, status, words):
    (tmp_path / "file").write_text("")
    (tmp_path / "pictures").mkdir()
    line = line.replace("FILE", str(tmp_path / "file")).replace("FOLDER", str(tmp_path / "pictures"))
    assert commands.main(line.split()) == status
    said = capsys.readouterr()
    assert words in said.err and said.err.count("minitorch-dist ") + said.err.count("kernels: ") == 1


def test_many_options_are_listed_when_asked_for_only():
    parser = program.ArgumentParser(prog="many.py")
    parser.add_argument("--wanted", required=True, metavar="IT")
    parser.section("colours")
    for name in "red green blue white black pink grey".split():
        parser.add_argument(f"--{name}")
    parser.section("numbers")
    for name in "one two three four five".split():
        parser.add_argument(f"--{name}", type=int, default=7)
    usage = "usage: many.py --wanted IT [options]        (--help lists them)\n"
    assert parser.parse_args(["--wanted", "1", "--red", "2"]).red == "2"
    assert parser.format_usage() == usage
    text = parser.format_help()
    assert text.startswith(usage) and text.index("colours:") < text.index("--pink") < text.index("numbers:")
    few = program.ArgumentParser(prog="few.py")
    few.add_argument("--one")
    few.parse_args([])
    assert few.format_usage() == "usage: few.py [-h] [--one ONE]\n"


def test_a_mistake_is_two_lines(capsys):
    with pytest.raises(SystemExit):
        commands.main("plan --devices many".split())
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 2 and said[0].startswith("usage: minitorch-dist plan --devices DEVICES [options] ")
    assert said[1] == "minitorch-dist plan: error: argument --devices: invalid int value: 'many'"
