"""A job that is started again: what comes after a failure, what it has cost, and the curve, to the last bit."""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from minitorch_dist import faults
from minitorch_dist.__main__ import main
from tests import crews

ROOT = Path(__file__).parents[1]
TRAIN = [str(ROOT / "mnist_demo" / "train.py"), "--data", "digits", "--hidden", "16", "--steps", "60", "--exact"]


# ---------------------------------------------------------------- jobs

def supervise(*arguments):
    return main(["supervise", "--backoff", "0.05", *map(str, arguments)])


def events(capsys):
    """The lines that the supervisor has written, without their times."""
    return re.findall(r"^supervise \S+ +\S+ s  (.*)", capsys.readouterr().out, re.M)


def end(folder):
    """(the parameters' digest, the whole curve)"""
    return (json.loads((folder / "summary.json").read_text())["parameters_sha256"],
            (folder / "history.jsonl").read_text())


def test_two_kills_and_the_bits_of_an_undisturbed_run(tmp_path, monkeypatch, capsys):
    """kill -9 of a rank, twice: on 4 ranks, on 4 again, and on 2 to the end."""
    crews.launch([*TRAIN, "--out", str(tmp_path / "whole")], 1).check()
    monkeypatch.setenv(faults.VARIABLE, "kill rank=1 step=30 restart=0; kill rank=3 step=50 restart=1")
    assert supervise("-n", "4,2,1", "--", *TRAIN, "--save-every", "20", "--out", tmp_path / "on") == 0
    assert end(tmp_path / "on") == end(tmp_path / "whole")
    told = events(capsys)
    assert [re.sub(" by status .*", "", line) for line in told if not line.startswith(("starts", "goodput"))] == [
        "start 1: 4 ranks", "ended in step 30",
        "start 2: 4 ranks", "goes on from step 20: 9 steps are done again", "ended in step 50",
        "start 3: 2 ranks", "goes on from step 40: 9 steps are done again", "done: 60 steps"]
    assert any("by status" in line and "signal 9" in line and "Killed" in line for line in told)    # in MPI's own words
    counted, wall = map(float, re.search(r"goodput .*: (\S+) s of (\S+) s in steps that count; 18 steps were lost .*; "
                                         r"ranks 4 → 4 → 2$", told[-1]).groups())
    assert counted < wall


def test_a_processor_that_computes_wrongly_is_found_and_undone(tmp_path, monkeypatch, capfd):
    """One bit of one rank's sums turns over: the replicas' check ends the job before it is saved, and the job goes on
    from the checkpoint before."""
    arguments = [*TRAIN, "--steps", "30"]
    crews.launch([*arguments, "--out", str(tmp_path / "whole")], 1).check()
    monkeypatch.setenv(faults.VARIABLE, "flip-gradient rank=2 step=17 restart=0 parameter=2 element=5")
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(1), "w"))
    checks = ["--save-every", "10", "--check-replicas", "7"]      # at 7, 14 and, before the save, 20
    assert supervise("-n", "4", "--", *arguments, *checks, "--out", tmp_path / "on") == 0
    assert end(tmp_path / "on") == end(tmp_path / "whole")
    said = capfd.readouterr()
    assert "found after step 20:" in said.err and "rank 2 against ranks 0, 1, 3; first in '2.weight'" in said.err
    assert "ended in step 21 by status 1" in said.out and "goes on from step 10: 10 steps are done again" in said.out


def test_a_job_that_has_saved_nothing_begins_anew(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv(faults.VARIABLE, "kill step=8 restart=0")
    assert supervise("--", *TRAIN, "--steps", "9", "--out", tmp_path / "on") == 0
    told = events(capsys)
    assert "begins anew, for nothing was saved: 7 steps are done again" in told and "7 steps were lost" in told[-1]
    assert len((tmp_path / "on" / "history.jsonl").read_text().splitlines()) == 9


def test_a_launcher_that_says_0_in_mid_run_is_not_believed(tmp_path, capsys):
    """As Open MPI's mpirun does where a machine is lost."""
    (tmp_path / "program.py").write_text("""
from minitorch_dist import attempt
log = attempt.StepLog(attempt.restarts())
log.done(0.1)
if attempt.restarts() == 2:
    log.close()
""")
    assert supervise("--", tmp_path / "program.py") == 0
    told = [line for line in events(capsys) if not line.startswith(("start", "goes on", "goodput"))]
    lie = "mpirun has ended with status 0, and the run has not come to its end: it counts as 1"
    assert told == [lie, "ended in step 2 by status 1", lie, "ended in step 3 by status 1", "done: 3 steps"]


def test_a_program_of_ones_own_that_gets_further_is_no_crash_loop(tmp_path, monkeypatch, capsys):
    """It saves by Checkpoints, fails three steps behind each start, and has no Run."""
    (tmp_path / "program.py").write_text("""
from minitorch_dist import nn, optim
from minitorch_dist.checkpoints import Checkpoints
model = nn.Linear(2, 2)
optimizer, saves = optim.SGD(model.parameters(), 0.1), Checkpoints("saves")
first = saves.load(model, optimizer)[0] if saves.steps() else 0
for step in range(first, 12):
    if step == first + 3:
        raise RuntimeError("three steps are done")
    if step % 2 == 1:
        saves.save(step + 1, model, optimizer)
""")
    monkeypatch.chdir(tmp_path)
    assert supervise("--max-restarts", "1", "--", tmp_path / "program.py") == 0
    told = [line for line in events(capsys) if line.startswith(("ended", "done", "goodput"))]
    assert told == [f"ended after the checkpoint of step {step} by status 1" for step in (2, 4, 6, 8, 10)] + [
        "done: 12 steps"]


def test_a_crash_loop_ends(tmp_path, monkeypatch, capfd):
    """The same error at the same step, each time."""
    monkeypatch.setenv(faults.VARIABLE, "fail rank=1 step=12")
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(1), "w"))
    assert supervise("-n", "2", "--max-restarts", "1", "--", *TRAIN, "--save-every", "5", "--out", tmp_path) == 1
    said = capfd.readouterr().out
    assert said.count("ended in step 12 by status 1") == 2
    loop = said.index("a crash loop: 2 failures and no step further, in step 12 (--max-restarts 1); the last words:")
    assert "    [rank 1 of 2] RuntimeError: a fault on purpose, by MINITORCH_FAULT\n" in said[loop:]


def test_what_cannot_run_is_not_started_again(tmp_path, capsys):
    for arguments, words in ((["--lr", "nan?"], "status 2"), ([], "status 2")):
        out = ["--out", tmp_path / "on"] if arguments else []
        assert supervise("--", *TRAIN, *arguments, *out) == 2
        told = events(capsys)
        assert told[0] == "start 1: 1 rank" and words in told[-1] and len(told) == 3
    assert supervise("--", *TRAIN[:3], "--mine", "--out", tmp_path / "on") == 2
    for arguments in (["-n", "2,4", "--", "x.py"], ["-n", "0", "--", "x.py"], ["-n", "2"],
                      ["--mpirun", "", "--", "-c", "pass"], ["--mpirun", "mpirun 'x", "--", "-c", "pass"]):
        with pytest.raises(SystemExit, match="2"):
            supervise(*arguments)
    said = capsys.readouterr()
    assert "ended before a step was noted by status 2" in said.out
    assert supervise("--mpirun", "no-such-mpirun -f hosts", "--", "x.py") == 2
    assert "no-such-mpirun" in capsys.readouterr().err


def signalled(when, number):
    """Send this process a signal as soon as when() holds."""
    def wait():
        while not when():
            time.sleep(0.02)
        os.kill(os.getpid(), number)
    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    return thread


@pytest.mark.parametrize("number, status", [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 143)])
def test_a_signal_ends_the_job_which_saves(tmp_path, capsys, number, status):
    """And no process is left."""
    begun = tmp_path / "checkpoints" / "step-00000010"
    long = [*TRAIN, "--steps", "100000", "--epochs", "100000", "--save-every", "10", "--out", tmp_path]
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)       # under nohup it is ignored, and the job would go on
    try:
        signalled(begun.is_dir, number)
        assert supervise("-n", "2", "--", *long) == status
    finally:
        signal.signal(signal.SIGHUP, before)
    told = events(capsys)
    last = int(re.search(r"ended after step ([\d,]+) by status", " ".join(told))[1].replace(",", ""))
    assert (tmp_path / "checkpoints" / f"step-{last:08d}").is_dir()
    assert "not started again" in told[-2] and "0 steps were lost" in told[-1]
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in cmdline(pid)]


LIKE_OPEN_MPI = """
import signal, subprocess, sys
ranks = subprocess.Popen(sys.argv[1:])
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: ranks.send_signal(signal.SIGTERM))
sys.exit(min(ranks.wait(), 1))
"""


def test_a_launcher_that_ends_with_1_at_a_signal(tmp_path, capsys):
    """As Open MPI's: the job has saved where it stands, and so it was interrupted, and hasn't failed."""
    signalled((tmp_path / "checkpoints" / "step-00000010").is_dir, signal.SIGINT)
    long = [*TRAIN, "--steps", "100000", "--epochs", "100000", "--save-every", "10", "--out", str(tmp_path)]
    assert supervise("--", "-c", LIKE_OPEN_MPI, sys.executable, *long) == 130
    told = events(capsys)
    assert "ended after step" in " ".join(told) and "0 steps were lost" in told[-1]


ABORTED = """
import sys
print("a step", file=sys.stderr)
print("[rank 1 of 2] ValueError: the value is wrong", file=sys.stderr)
for notice in ("MPI_ABORT was invoked on rank 1", "prterun has exited due to process rank 1"):
    print("-" * 74, notice, *["It says more."] * 9, "-" * 74, sep="\\n", file=sys.stderr)
sys.exit(1)
"""


def test_the_last_words_are_the_ranks(tmp_path, capfd, monkeypatch):
    """And not those of Open MPI's launcher, which come last."""
    monkeypatch.setattr(sys, "stdout", os.fdopen(os.dup(1), "w"))
    (tmp_path / "program.py").write_text(ABORTED)
    assert supervise("--max-restarts", "0", "--", tmp_path / "program.py") == 1
    said = capfd.readouterr().out
    assert said.endswith("the last words:\n    a step\n    [rank 1 of 2] ValueError: the value is wrong\n"), said


IMPATIENT = """
import os, signal, subprocess, sys
rank = subprocess.Popen(sys.argv[1:], env=os.environ | {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"})
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, lambda *_: rank.kill())
sys.exit(rank.wait() % 256)
"""


def test_a_launcher_that_kills_at_a_signal_is_not_signalled(tmp_path, capsys):
    """Open MPI's kills its ranks a quarter of a second after SIGTERM, while they save; so ranks are told themselves."""
    signalled((tmp_path / "checkpoints" / "step-00000010").is_dir, signal.SIGTERM)
    long = [*TRAIN, "--steps", "100000", "--epochs", "100000", "--save-every", "10", "--out", str(tmp_path)]
    assert supervise("--", "-c", IMPATIENT, sys.executable, *long) == 143
    assert "0 steps were lost" in events(capsys)[-1] and (tmp_path / "summary.json").is_file()


def cmdline(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
    except OSError:
        return ""


def test_a_terminal_that_closes_under_nohup(monkeypatch, capsys):
    """The job goes on."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert supervise("--", "-c", "import os, signal; os.kill(os.getppid(), signal.SIGHUP)") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert events(capsys) == ["start 1: 1 rank", "done"]


def test_a_signal_in_the_pause(capsys):
    told, begin = [], time.monotonic()

    def pauses():
        told.append(capsys.readouterr().out)
        return "starts again in 20 s" in "".join(told)
    signalled(pauses, signal.SIGTERM)
    assert main(["supervise", "--backoff", "20", "--max-restarts", "1", "--", "-c", "raise SystemExit(3)"]) == 143
    assert "ended by SIGTERM" in capsys.readouterr().out and time.monotonic() - begin < 19


DEAF = """
import signal, sys, time
for number in (signal.SIGINT, signal.SIGTERM): signal.signal(number, signal.SIG_IGN)
open(sys.argv[1], "w").close()
time.sleep(60)
"""


def test_a_job_that_does_not_end_is_killed(tmp_path, capsys):
    """Also where the signal comes again and again: the time runs from the first on."""
    over = threading.Event()

    def insist():
        while not (tmp_path / "here").exists():
            time.sleep(0.02)
        while not over.wait(0.1):
            os.kill(os.getpid(), signal.SIGTERM)
    thread = threading.Thread(target=insist, daemon=True)
    before = signal.signal(signal.SIGTERM, lambda *_: None)     # behind the supervisor's
    try:
        thread.start()
        assert supervise("--grace", "0.3", "--", "-c", DEAF, tmp_path / "here") == 137
    finally:
        over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)
    assert "still there 0.3 s after the signal: killed" in events(capsys)


def kill_the_supervisor(folder, begun, *arguments):
    """SIGKILL `minitorch_dist supervise` with these arguments as soon as there is a file in the folder, which all its
    processes have in their command lines, and wait until they have gone. It leaves nothing for temporary files."""
    def there():
        return [pid for pid in os.listdir("/proc") if pid.isdigit() and str(folder) in cmdline(pid)]
    (folder / "temporary").mkdir()
    process = subprocess.Popen([sys.executable, "-m", "minitorch_dist", "supervise", *map(str, arguments)], cwd=ROOT,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               env={**os.environ, "TMPDIR": str(folder / "temporary")})
    try:
        while not (folder / begun).exists() and process.poll() is None:
            time.sleep(0.02)
        assert len(there()) > 1
    finally:
        process.kill()
        process.wait()
    end = time.monotonic() + 20
    while there():
        assert time.monotonic() < end, there()
        time.sleep(0.02)
    assert not list((folder / "temporary").glob("supervise-*"))


def test_a_supervisor_that_is_killed_takes_its_job_along(tmp_path):
    """The ranks are told to end, and save, as by SIGTERM."""
    kill_the_supervisor(tmp_path, "checkpoints/step-00000010", "-n", "2", "--", *TRAIN, "--steps", "100000", "--epochs",
                        "100000", "--save-every", "10", "--out", tmp_path)
    last = len((tmp_path / "history.jsonl").read_text().splitlines())
    assert (tmp_path / "checkpoints" / f"step-{last:08d}" / "index.json").is_file()


def test_an_impatient_launcher_whose_supervisor_is_killed_is_not_signalled(tmp_path):
    """As Open MPI's: the ranks are told themselves, and save."""
    kill_the_supervisor(tmp_path, "checkpoints/step-00000010", "--", "-c", IMPATIENT, sys.executable, *TRAIN, "--steps",
                        "100000", "--epochs", "100000", "--save-every", "10", "--out", tmp_path)
    assert (tmp_path / "summary.json").is_file()


SPEAKS = """
import signal, sys, time
from pathlib import Path
def end(*_):
    for stream in sys.stdout, sys.stderr:
        print("x" * 200_000, file=stream, flush=True)       # as a pipe holds 64 KB
    (folder / "saved").touch()
    sys.exit(143)
signal.signal(signal.SIGTERM, end)
folder = Path(sys.argv[1])
(folder / "here").touch()
time.sleep(60)
"""


def test_a_job_that_speaks_before_it_saves_when_its_supervisor_is_killed(tmp_path):
    """Nobody reads its words any more; that doesn't end it."""
    kill_the_supervisor(tmp_path, "here", "--", "-c", SPEAKS, tmp_path)
    assert (tmp_path / "saved").exists()


def test_a_job_that_does_not_end_when_its_supervisor_is_killed(tmp_path):
    kill_the_supervisor(tmp_path, "here", "--grace", "0.3", "--", "-c", DEAF, tmp_path / "here")


FAILS_ONCE = """
import os, sys
begun = os.path.exists(sys.argv[1])
open(sys.argv[1], "a").write("again ")
sys.stdout.buffer.write(bytes(range(256)) * 2000)       # hundreds of KB, as a pipe holds 64
sys.stderr.buffer.write(b"x" * 200_000)
sys.exit(0 if begun else 3)
"""


@pytest.mark.parametrize("streams", [">&- 2>&-", "> /dev/full 2> /dev/full", "| true"])
def test_nobody_listens(tmp_path, streams):
    """Standard output that is closed, full or has no reader: the job is started again all the same, to its end."""
    command = [sys.executable, "-m", "minitorch_dist", "supervise", "--backoff", "0", "--", "-c", FAILS_ONCE,
               str(tmp_path / "begun")]
    subprocess.run(["/bin/sh", "-c", f"{shlex.join(command)} {streams}"], cwd=ROOT, timeout=60,
                   stdin=subprocess.DEVNULL)
    assert (tmp_path / "begun").read_text() == "again again "


def test_names_that_are_no_text(tmp_path):
    """Of the folder for temporary files; and of a process, of which Linux keeps 15 bytes, here half of a letter."""
    folder, program = tmp_path / os.fsdecode(b"\xff"), tmp_path / ("ä" * 8)
    folder.mkdir()
    program.write_text("#!/bin/sh\ntouch $1\nsleep 60 & wait")
    program.chmod(0o755)
    script = ("import os, subprocess, sys, time; subprocess.Popen(sys.argv[1:])\n"
              "while not os.path.exists(sys.argv[2]): time.sleep(0.01)")
    run = subprocess.run([sys.executable, "-m", "minitorch_dist", "supervise", "--", "-c", script, str(program),
                          str(tmp_path / "begun")], cwd=ROOT, timeout=60, capture_output=True, text=True,
                         env={**os.environ, "TMPDIR": str(folder)})
    assert not run.returncode and "killed what mpirun had left" in run.stdout and not run.stderr
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(program) in cmdline(pid)]


def test_output_passes_as_it_is():
    """What is no text, and what this terminal's encoding has no letter for."""
    program = "import sys; sys.stdout.buffer.write('é → '.encode() + bytes(range(256)))"
    run = subprocess.run([sys.executable, "-m", "minitorch_dist", "supervise", "--", "-c", program], cwd=ROOT,
                         timeout=60, capture_output=True, check=True, env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert "é → ".encode() + bytes(range(256)) in run.stdout


def test_an_error_of_the_supervisor_leaves_no_job(tmp_path, monkeypatch):
    monkeypatch.setattr("minitorch_dist.supervise.command.read_steps", lambda steps: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        supervise("--", "-c", "import time; time.sleep(60)", tmp_path)
    assert not [pid for pid in os.listdir("/proc") if pid.isdigit() and str(tmp_path) in cmdline(pid)]
