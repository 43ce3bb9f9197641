"""What training programs share on their outside: rules of options, lengths, devices, ends and traces."""

import json
import os
import platform
import signal
from types import SimpleNamespace

import pytest

import minitorch_dist as mt
from minitorch_dist import attempt, backend, comm, faults, program
from tests.crews import crews

INF, NAN = float("inf"), float("nan")
RULES = {   # rule -> (what is right, what is wrong)
    program.AT_LEAST_1: ([1, 7], [0, -1]), program.FINITE_1: ([1, 2.5], [0.99, INF, NAN]),
    program.AT_LEAST_0: ([0, 3.0], [-1e-9, INF, NAN]), program.MORE_THAN_0: ([1e-9, INF], [0, -1, NAN]),
    program.POSITIVE: ([1e-9, 4], [0, INF, NAN]), program.SHARE: ([1e-9, 1], [0, 1.001, NAN]),
    program.PROBABILITY: ([0, 0.999], [-0.001, 1, NAN])}


def parser_with(*names, **defaults):
    parser = program.ArgumentParser(prog="x.py")
    for name in names:
        parser.add_argument(f"--{name}", type=float, default=defaults.get(name))
    return parser


@pytest.mark.parametrize("rule", RULES, ids=[rule for rule, _ in RULES])
def test_numbers_have_rules(capsys, rule):
    parser, (right, wrong) = parser_with("some-number"), RULES[rule]
    for value in [None, *right]:
        parser.check_ranges(SimpleNamespace(some_number=value), {rule: ["some_number"]})
    for value in wrong:
        with pytest.raises(SystemExit, match="2"):
            parser.check_ranges(SimpleNamespace(some_number=value), {rule: ["some_number"]})
        assert capsys.readouterr().err.endswith(f"x.py: error: --some-number {value}: must be {rule[0]}\n")


def test_an_option_that_would_change_nothing_is_told(capsys):
    parser = parser_with("top-k", **{"top-k": 2.0})
    for asked, value in ((True, 3.0), (False, 2.0), (True, 2.0)):
        parser.check_needs(SimpleNamespace(top_k=value), {"--experts": (asked, ["top_k"])})
    with pytest.raises(SystemExit):
        parser.check_needs(SimpleNamespace(top_k=3.0), {"--experts": (False, ["top_k"])})
    assert "--top-k 3.0: is for --experts alone, and would change nothing: leave it out" in capsys.readouterr().err


def test_widths(capsys):
    parser = parser_with()
    assert parser.widths("512,7,") == [512, 7] and parser.widths("") == [] and parser.widths("1,2", fewest=2) == [1, 2]
    for text, options, words in (("3", {"fewest": 2}, "'3': there must be at least 2"), ("3,0", {}, "at least 1"),
                                 ("3,x", {"option": "--wide"}, "--wide '3,x': these are whole numbers")):
        with pytest.raises(SystemExit):
            parser.widths(text, **options)
        assert words in capsys.readouterr().err


def test_the_rate_rises_as_asked_or_over_half_of_the_steps_at_most():
    assert [program.warmup(None, 100, steps) for steps in (1, 40, 199, 200, 500)] == [0, 20, 99, 100, 100]
    assert program.warmup(39, 100, 40) == 39 and program.warmup(0, 100, 40) == 0
    with pytest.raises(ValueError, match="--warmup 40: the run has 40 steps, .* take at most 39"):
        program.warmup(40, 100, 40)


def test_how_many_deviations_are_a_spike(capsys):
    parser = parser_with()
    parser.add_spikes()
    assert [parser.parse_args(words.split()).skip_spikes for words in ("", "--skip-spikes", "--skip-spikes 2.5")] == \
        [None, 6.0, 2.5]
    with pytest.raises(SystemExit):
        parser.parse_args(["--skip-spikes", "0"])
    assert "--skip-spikes 0.0: must be more than 0, and finite" in capsys.readouterr().err


def test_what_has_no_name_stays_in_the_usage():
    """However many options there are."""
    parser = parser_with(*(f"option-{i}" for i in range(15)))
    parser.add_argument("what")
    parser.parse_args(["it"])
    assert parser.format_usage().split()[-1] == "what"


# ---------------------------------------------------------------- runs that go on

@pytest.mark.parametrize("supervised, words, resume", [
    (False, "", False), (False, "--resume", True), (False, "--resume auto --out x", "auto"),
    (True, "--out x", "auto"), (True, "--resume", True)])
def test_how_a_run_goes_on(monkeypatch, supervised, words, resume):
    monkeypatch.setattr(attempt, "is_supervised", lambda: supervised)
    parser = parser_with()
    parser.add_checkpoints()
    parser.add_argument("--out")
    found = parser.parse_args(words.split()).resume
    assert (found, type(found)) == (resume, type(resume))


@pytest.mark.parametrize("supervised, words, said", [(False, "--resume auto", "--resume auto: give the run's folder"),
                                                     (True, "", "--resume auto, under a supervisor: give the run's")])
def test_who_may_begin_or_go_on_gives_a_folder(monkeypatch, capsys, supervised, words, said):
    monkeypatch.setattr(attempt, "is_supervised", lambda: supervised)
    parser = parser_with()
    parser.add_checkpoints()
    parser.add_argument("--out")
    with pytest.raises(SystemExit):
        parser.parse_args(words.split())
    assert said in capsys.readouterr().err


def test_a_fault_that_a_program_has_no_place_for_is_told(monkeypatch, capsys):
    monkeypatch.setenv(faults.VARIABLE, "kill step=3")
    parser = parser_with()
    with pytest.raises(SystemExit):
        parser.parse_args([])
    assert f"{faults.VARIABLE} is set, and strikes nothing in this program: unset it" in capsys.readouterr().err
    parser.add_checks()
    assert parser.parse_args([]).check_work is None


def test_where_a_run_was_broken_off_is_said():
    run, interrupt = SimpleNamespace(step=1234), program.Interrupt()
    said = "interrupted after step 1,234 of 5,000: saving what there is"
    assert interrupt.said(run, 5000) == said + "; --resume goes on from there"
    assert interrupt.said(run, 5000, goes_on=False) == said


def wished(who):
    """What a rank hears where one of them, or nobody (None), is asked to end."""
    with program.Interrupt() as interrupt:
        if comm.world().rank == who:
            os.kill(os.getpid(), signal.SIGTERM)
        return interrupt.agreed(comm.world())


@pytest.mark.parametrize("who", [None, 0, 1])
def test_all_ranks_hear_that_one_is_to_end(who):
    assert crews.call("tests.test_program:wished", 2, (who,)) == [who is not None] * 2


# ---------------------------------------------------------------- devices and traces

@pytest.mark.parametrize("rank, gpus, device", [(0, 2, "cuda:0"), (2, 2, "cuda:1"), (3, 2, "cuda:0"), (3, 4, "cuda:2"),
                                                (5, 1, "cuda:0")])
def test_the_ranks_of_a_node_take_its_gpus_in_turn(monkeypatch, rank, gpus, device):
    """Of six ranks the second and the fifth are of another node."""
    here, there = platform.node(), "another"
    nodes = [here, there, here, here, there, here]
    runtime = SimpleNamespace(getDeviceCount=lambda: gpus)
    monkeypatch.setattr(backend, "load_cupy", lambda: SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    monkeypatch.setattr(backend, "use", lambda name: name)
    world = SimpleNamespace(rank=rank, all_gather_object=lambda name: nodes)
    assert program.take_device("cuda", world) == device
    assert program.take_device("cuda") == "cuda" and program.take_device("cuda:1", world) == "cuda:1"


@pytest.mark.parametrize("rank", [0, 1])
def test_a_trace_that_never_began_is_told(tmp_path, capsys, rank):
    world = SimpleNamespace(rank=rank)
    with program.Tracer(world, tmp_path, range(5, 7)) as tracer:
        for step in range(4):
            tracer.at(step)
    with program.Tracer(world, tmp_path, range(0)) as tracer:
        tracer.at(0)
    assert capsys.readouterr().out == "nothing recorded: a trace begins with step 6, and the run has ended before\n" * (
        rank == 0)


def test_a_trace_is_closed_once_behind_its_steps(tmp_path, capsys):
    x = mt.tensor(2.0, requires_grad=True)
    with program.Tracer(comm.world_of_one(), tmp_path, range(1, 3)) as tracer:
        for step in range(9):
            tracer.at(step)
            assert (tracer.open is not None) == (step in (1, 2))
            (x * x).backward()
    out = capsys.readouterr().out
    assert out.count("recorded what each rank did: ") == 1 and "nothing recorded" not in out
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert sum(event["ph"] == "X" for event in events) == 2


def test_an_error_in_mid_trace_is_the_errors_own(tmp_path, capsys):
    """Nothing is gathered of ranks that may never come, and no file is written."""
    with pytest.raises(ZeroDivisionError), program.Tracer(comm.world_of_one(), tmp_path, range(1, 3)) as tracer:
        tracer.at(1)
        _ = 1 // 0
    assert not list(tmp_path.iterdir()) and capsys.readouterr().out == ""


def test_the_last_line_of_a_program():
    summary = {"test_accuracy": 97.125, "samples_per_second": 12345.6, "parameters_sha256": "0123456789abcdef"}
    assert program.closing(summary, "runs/1") == (
        "test accuracy 97.12 %, 12,346 samples/s, parameters 0123456789ab, run written to runs/1")
