"""`python -m minitorch_dist plan`: what it says, all meshes, and mistakes told in one line."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from minitorch_dist import __main__
from minitorch_dist.plan import GPT, Job
from minitorch_dist.plan.meshes import divisors, every

from .plan_cases import SIMPLE, SMALL

GPT3 = ("--layers 96 --width 12288 --heads 96 --vocabulary 51200 --context 2048 --untied --device A100 "
        "--devices 1024 --tp 8 --pp 16 --batch 1536 --micro-batches 192 --checkpointing")


def said(capsys, line):
    status = __main__.main(["plan", *line.split()])
    return status, *capsys.readouterr()


def test_the_command(capsys):
    status, out, err = said(capsys, "--devices 64 --parameters 7.5e9 --device V100 --tokens 2e12")
    assert (status, err) == (0, "")
    for words in ("ZeRO 1 15.00 15.00 1.41 31.41 fits", "120.00 too much", "16.64", "1.88", "of 32", "ZeRO paper",
                  "2e+12 tokens: 9e+22 FLOPs, 200,000 device hours of computing alone"):
        assert words in " ".join(out.split())
    assert "in stage 0" not in out      # as fast as ZeRO 1, but it doesn't fit
    # 6 · 7e9 · 2,048 FLOPs of each; sent are 3 · 15/16 of 1.4e10 bytes
    out = said(capsys, "--devices 16 --parameters 7e9 --flops 1e13 --bandwidth 2.1e10 --memory 6e9 --stage 3 "
                       "--tokens 32768e3")[1].split("\n")
    assert "of 6" in out[4] and "too much" in out[5] and out[8].split()[:5] == ["ZeRO", "3", "39.38", "8.6", "1.88"]
    assert "1,000 steps" in out[10] and "2.9 h, 47 device hours" in out[10]
    out = said(capsys, "--devices 2 --pp 2 --untied --layers 2 --width 8 --heads 2 --vocabulary 9 --context 4")[1]
    assert "a step: 8 samples of 4 tokens" in out and "8 micro-batches, bubble 11.1 %" in out
    status, out, _ = said(capsys, GPT3)
    assert status == 0 and "175,244,992,512 parameters" in out and "bubble 7.2 %" in out and "ZeRO 3" in out
    assert "Korthikanti" in out and "Exact counts" in out and "compute" in out
    assert "exact, what this library's tape keeps" in said(
        capsys, "--devices 2 --precision float32 --layers 2 --width 8 --heads 2 --vocabulary 9 --context 4")[1]


def test_all_meshes(capsys):
    """Each of them once; what fits comes first, the fastest first."""
    model = GPT(layers=3, width=60, heads=6, vocabulary=64, context=32, tied=False)
    plans, impossible = every(Job(model, batch=16, time=32), SIMPLE, 8)
    seen = {(p.job.dp, p.job.tp, p.job.pp, p.job.stage) for p in plans}
    wanted = {(dp, tp, pp, stage) for tp in (1, 2) for pp in (1, 2) for dp in (8 // tp // pp,)
              for stage in range(4)}    # 4 doesn't divide the heads, 3 layers aren't 4 stages
    assert seen == wanted and len(plans) == len(seen)
    all_of_them = sum(4 if 8 // tp // pp > 1 else 1 for tp in (1, 2, 4) for pp in (1, 2, 4, 8) if tp * pp <= 8)
    assert len(impossible) == all_of_them - len(plans)       # tensors across machines of 4 aren't tried
    assert [p.job.micro_batches for p in plans if p.job.pp == 2] == [min(8, 16 // p.job.dp) for p in plans
                                                                     if p.job.pp == 2]
    times = [p.seconds.step for p in plans]
    assert times == sorted(times) and all(p.fits for p in plans)
    memory = sorted(p.fullest.memory for p in plans)[len(plans) // 2]
    plans, _ = every(Job(model, batch=16, time=32), replace(SIMPLE, memory=memory), 8)
    fits = [p.fits for p in plans]
    assert fits == sorted(fits, reverse=True) and 1 < sum(fits) < len(fits)
    for some in ([p for p in plans if p.fits], [p for p in plans if not p.fits]):
        assert [p.seconds.step for p in some] == sorted(p.seconds.step for p in some)
    out = said(capsys, "--devices 16 --batch 64 --meshes --parameters 7e9 --device A100")[1]
    assert "4 ways, of which 3 fit" in out and "dp=16 tp=1 pp=1  ZeRO 3" in out
    assert "40 more can't be. The first: " in out


def test_where_no_mesh_fits_those_come_first_that_hold_least(capsys):
    model = GPT(layers=3, width=60, heads=6, vocabulary=64, context=32, tied=False)
    plans, _ = every(Job(model, batch=16, time=32), replace(SIMPLE, memory=1), 8)
    held = [p.fullest.memory for p in plans]
    assert held == sorted(held) and held[0] < held[-1] and not any(p.fits for p in plans)
    assert plans[0].seconds.step > min(p.seconds.step for p in plans)       # the order would be another one
    out = said(capsys, "--devices 4 --batch 64 --meshes --parameters 7e9 --memory 1e9")[1]
    assert "0 fit; first come those that hold least.\nLess is held with more --micro-batches" in out


def test_flops_of_experts_are_the_ranks(capsys):
    """Each of 8 ranks routes its own 16 tokens to 64 experts, of which each has a place at least: per block and rank
    16·(8·64² + 4·16·64) for attention, 16·2·64·64 for the router, 64·4·64·256 for the experts."""
    block = 16 * (8 * 64 ** 2 + 4 * 16 * 64 + 2 * 64 * 64) + 64 * 4 * 64 * 256
    flops = 8 * 3 * (4 * block + 16 * 2 * 64 * 100)
    out = said(capsys, "--layers 4 --width 64 --heads 4 --vocabulary 100 --context 16 --experts 64 --top-k 1 "
                       "--devices 8 --batch 8 --flops 1e9 --tokens 128e3")[1]
    assert f", {flops:.4g} FLOPs (6·N·D" in out
    assert f"tokens: {flops * 1e3:.4g} FLOPs, {flops * 1e3 / 1e9 / 3600:,.0f} device hours of computing" in out


def test_a_reader_that_has_enough():
    """As `| head -1`: no traceback."""
    with subprocess.Popen([sys.executable, "-m", "minitorch_dist", "pipeline", "1f1b"], stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as program:
        program.stdout.close()
        assert (program.stderr.read(), program.wait()) == (b"", 1)


@pytest.mark.parametrize("n", [1, 2, 36, 97, 360, 1_000_000_007])
def test_divisors(n):
    found = divisors(n)
    assert found == ([1, n] if n == 1_000_000_007 else [d for d in range(1, n + 1) if n % d == 0])


@pytest.mark.parametrize("flags, stages", [
    ("--devices 2 --tp 2", "0"), ("--devices 2 --cp 2", "0123"), ("--devices 2 --dp 2", "0123"),
    ("--devices 2 --cp 2 --shard-over 1", "123"), ("--devices 2 --reduce-bits 8", "123"),
    ("--devices 2 --stage 2", "2"), ("--devices 2 --param-bits 8", "3"),
    ("--devices 4 --reshard-after-forward 2", "3")])
def test_the_stages_that_a_mesh_and_messages_allow(capsys, flags, stages):
    held = said(capsys, f"{flags} {MODEL}")[1].split("\n\n")[1].splitlines()[1:]
    assert [line.split("  ")[0] for line in held] == ["0, DDP" if n == "0" else f"ZeRO {n}" for n in stages]


def test_operations_of_a_step_are_those_of_all_ranks(capsys):
    """In a pipeline as without one; by the rule of thumb of the parameters that a token meets."""
    plain, parted = (said(capsys, f"--devices 4 --batch 16 --untied {flags} {MODEL}")[1].split("FLOPs")[0].split()[-1]
                     for flags in ("--stage 0", "--pp 2 --stage 0"))
    assert plain == parted
    active = GPT(3, 36, 6, 50, 16, experts=6).active
    assert f"(6·N·D: {6 * active * 2 * 16:.4g})" in said(capsys, "--devices 2 " + EXPERTS)[1]


@pytest.mark.parametrize("flags, unit, held, room", [
    ("--parameters 62.5e6", "GB", "1.00", "80"), ("--parameters 62e6", "MB", "992.00", "80,000"),
    ("--parameters 1e11", "GB", "1,600.00", "80"), ("--parameters 1e11 --memory 2e12", "TB", "1.60", "2")])
def test_units_are_no_larger_than_what_is_held_and_what_a_device_has(capsys, flags, unit, held, room):
    head, row = said(capsys, f"--devices 1 {flags}")[1].split("\n\n")[1].splitlines()
    assert head.startswith(f"{unit} held") and head.endswith(f"of {room}") and held in row.split()


def test_speeds_that_are_given_are_the_devices(capsys):
    """FLOP/s of any precision, of 6 · 1e9 · 2,048 FLOPs; links within a machine and between them, of 2 · (1 − 1/n) of
    the gradients' bytes; to the host, of what crosses on the rank that has most."""
    for precision, size in (("mixed", 2), ("float32", 4)):
        for n in (2, 16):
            row = said(capsys, f"--devices {n} --parameters 1e9 --precision {precision} --flops 1e12 --bandwidth 1e8 "
                               "--stage 0")[1].split("\n\n")[2].splitlines()[1].split()
            assert float(row[-4]) == pytest.approx(6 * 2048e9 / 1e12, rel=0.01)
            assert float(row[-3]) == pytest.approx(2 * (n - 1) / n * size * 1e9 / 1e8, rel=0.01)
    line = MODEL.replace("3", "5", 1) + " --untied --devices 2 --pp 2 --offload-optimizer --host-bandwidth 1e6"
    row = said(capsys, line)[1].split("\n\n")[2].splitlines()[1].split()
    blocks = 3 * (12 * 36 ** 2 + 13 * 36)       # of five, and as much as the output layer has, of 6 bytes each
    assert row[-1] == "host" and blocks < float(row[3]) * 1e3 / 6 < 1.1 * blocks


def test_what_is_counted_of_another_precision_is_said(capsys):
    for precision, told in (("mixed", True), ("float32", False)):
        assert ("itself trains several ranks in float32" in said(
            capsys, f"--devices 1 --precision {precision} {MODEL}")[1]) == told


def test_all_meshes_of_new_axes(capsys):
    """At most as many ranks along cp and ep as were asked for."""
    for most, model in (("cp", SMALL), ("ep", replace(SMALL, experts=4))):
        plans, impossible = every(Job(model, batch=8, time=16), SIMPLE, 4, stages=[0], **{most: 2})
        seen = {tuple(getattr(p.job, axis) for axis in ("dp", "tp", "pp", most)) for p in plans}
        assert seen == {(4, 1, 1, 1), (2, 1, 1, 2), (2, 2, 1, 1), (1, 4, 1, 1), (1, 2, 1, 2), (2, 1, 2, 1),
                        (1, 2, 2, 1), (1, 1, 2, 2)}
        assert len(plans) == len(seen) and impossible
    status, out, _ = said(capsys, MODEL + " --experts 4 --devices 4 --batch 8 --meshes --ep 2 --offload-optimizer")
    assert status == 0 and "dp=2 tp=1 pp=1 ep=2" in out and "PCIe" in out


def test_all_meshes_have_the_stages_and_the_sequence_parallelism_that_they_can():
    """What is divided along cp alone is cut, too; ranks that share no matrix don't share what these leave whole."""
    plans, _ = every(Job(SMALL, batch=8, time=16), SIMPLE, 2, sequence_parallel=True, cp=2)
    seen = {(p.job.dp, p.job.tp, p.job.cp, p.job.stage, p.job.sequence_parallel) for p in plans if p.job.pp == 1}
    assert seen == {(1, 2, 1, 0, True), *((2, 1, 1, stage, False) for stage in range(4)),
                    *((1, 1, 2, stage, False) for stage in range(4))}


def test_experts_without_a_capacity_are_said_to_be_a_mean(capsys):
    status, out, _ = said(capsys, "--devices 4 --ep 2 --no-capacity " + EXPERTS)
    assert status == 0 and "2 per token, without a capacity" in out and "as if all were used alike" in out
    _, alone, _ = said(capsys, "--devices 1 --no-capacity " + EXPERTS)
    assert "as if all" not in alone
    written = said(capsys, "--devices 1 --no-capacity --generate 2x8 " + EXPERTS)
    assert written[0] == 0 and "written: 2 sequences" in written[1]


def test_what_the_page_says_of_experts_over_tensors(capsys):
    """Of a mixture that each of four ranks of tp goes through whole, and of one that they share."""
    page = (Path(__file__).parents[1] / "docs" / "parallelism.md").read_text(encoding="utf-8")
    command = page[page.index("plan --family llama --layers 32"):].split("```")[0]
    words = command.replace("\\\n", " ").removeprefix("plan ")
    for flags, held, computed in ((words, "51", "0.34"), (words.replace("--experts-over tp", ""), "165", "1.18")):
        status, out, _ = said(capsys, flags)
        table, times = (next(line for line in part.splitlines() if line.startswith("ZeRO 1")).split()
                        for part in out.split("\n\n")[1:3])
        assert status == 0 and f"{float(table[7]):.0f}" == held and f"{float(times[5]):.2f}" == computed
        assert f"{held} GB" in page and f"{computed} s" in page


def test_the_command_on_experts_sequences_and_zero_bubbles(capsys):
    status, out, _ = said(capsys, "--layers 32 --width 4096 --heads 32 --kv-heads 8 --hidden 14336 --family llama "
                                  "--vocabulary 32000 --context 32768 --untied --no-dropout --experts 8 --top-k 2 "
                                  "--capacity-factor 1 --devices 64 --ep 8 --batch 64 --sequence-length 4096 "
                                  "--stage 0")
    lines = out.split("\n")
    assert status == 0 and "46,702,792,704 parameters, 12,879,925,248 of them active" in lines[0]
    assert "dp=8 tp=1 pp=1 ep=8" in lines[1] and lines[7].startswith("per step  GB sent dp  GB sent ep")
    # experts of all tokens' two choices: 32 layers, 4 times 7/8 of 2 · 4,096 rows
    assert lines[8].split()[3] == f"{32 * 4 * 7 / 8 * 2 * 4096 * 4096 * 2 / 1e9:.2f}"
    out = said(capsys, MODEL + " --untied --devices 8 --pp 2 --cp 2 --cp-by all_to_all --schedule zb-h1 --stage 1 "
                               "--offload-optimizer --host-bandwidth 1e9")[1]
    assert "dp=2 tp=1 pp=2 cp=2" in out and "8 micro-batches, bubble 4.0 %" in out
    assert out.split("\n")[4].endswith("host") and out.split("\n")[8].split()[-1] == "cp"


def test_the_command_on_adapters(capsys):
    """Does 65e9 parameters with 4 bits fit 48 GB?"""
    llama = ("--layers 80 --width 8192 --heads 64 --hidden 22016 --vocabulary 32000 --context 2048 --family llama "
             "--untied --no-dropout --device A100 --memory 48e9 --checkpointing --lora-rank 16 ")
    status, out, _ = said(capsys, llama + "--devices 1 --base-bits 4 --sequence-length 512 --state-bits 8 --tokens 1e6")
    lines = out.split("\n")
    assert status == 0 and "fits" in lines[7]
    assert lines[1] == ("trained: adapters of rank 16 beside attention.qkv, attention.out, mlp.0, mlp.2: "
                        "168,427,520 parameters, 0.257 %")
    assert lines[2] == "frozen: 64,760,053,760 parameters of 4.127 bits, 525,606,912 of 16"
    assert "2 + 2 + 6.5" in lines[3] and f"(4·N·D: {4 * 65285660672 * 512:.4g})" in lines[4]
    assert "Frozen: no gradient" in out and "too much" in said(capsys, llama + "--devices 1")[1].split("\n")[7]
    out = said(capsys, llama + "--devices 8 --base-bits 4 --batch 16 --meshes --offload-optimizer")[1]
    assert "of 4.127 bits" in out and "dp=4 tp=1 pp=2" in out
    assert "more can't be. The first: --base-bits 4 with tp=2" in out
    out = said(capsys, llama + "--devices 8 --tp 2")[1]
    assert "dp=4 tp=2" in out and "frozen: 65,285,660,672 parameters of 16 bits\n" in out
    out = said(capsys, "--devices 2 --parameters 65e9 --lora-parameters 2e8 --base-bits 4 --memory 48e9")[1]
    assert "adapters: 200,000,000 parameters, 0.307 %\nfrozen: 65,000,000,000 parameters of 4.127 bits\n" in out
    assert "embeddings and norms too" in out and "fits" in out


LLAMA_2 = ("--family llama --layers 80 --width 8192 --heads 64 --kv-heads 8 --hidden 28672 --vocabulary 32000 "
           "--context 4096 --untied --no-dropout ")


def test_the_command_on_writing(capsys):
    """16 sequences of Llama 2 70B on 8 ranks, each of which keeps one of 8 heads: 80 · 2 · 128 · 2 bytes per token."""
    status, out, _ = said(capsys, LLAMA_2 + "--devices 8 --tp 8 --generate 16x4096 --memory-bandwidth 1e12")
    at, lines = out.index("written: "), out.split("\n")
    assert status == 0 and "Written: exact" in out and out.index("per step") < at < out.index("Exact counts")
    assert "16 sequences of 4,096 tokens, of each of which 40,960 bytes are kept on each of tp=8 ranks" in out
    row = next(line for line in lines if line.startswith("written  ")).split()
    norms = 161 * 8192      # whole on each rank; of the table of tokens 16 rows
    read = 2 * ((68_976_648_192 - 32000 * 8192 - norms) / 8 + norms + 16 * 8192) + 16 * 4096 * 40960
    assert row[1:] == ["17.25", "2.68", "19.93", "fits", "374", "4,096", f"{read / 1e9:.2f}", f"{read / 1e9:.3g}",
                       f"{16e12 / read:.0f}"]
    row = said(capsys, LLAMA_2 + "--devices 1 --generate 1x2 --precision float32")[1]
    assert "1 sequence of 2 tokens, of each of which 655,360 bytes are kept\n" in row and "too much        " in row
    assert "written" not in said(capsys, LLAMA_2 + "--devices 1")[1].lower()


def test_the_command_on_tokens_ahead(capsys):
    status, out, _ = said(capsys, MODEL + " --devices 2 --precision float32 --predict 3")
    count = SMALL.count + 2 * (12 * 36 ** 2 + 13 * 36 + 2 * 36 ** 2 + 6 * 36)
    assert status == 0 and f"predicting 3 tokens: {count:,} parameters" in out.split("\n")[0]
    out = said(capsys, MODEL + " --devices 4 --batch 8 --predict 2 --meshes")[1]
    assert "dp=2 tp=2 pp=1" in out and "tp=1 pp=2" not in out and "more can't be. The first: " in out


def test_the_command_on_windows_and_norms(capsys):
    """Of six layers the last one keeps 32,768 positions of a sequence, the others 2,048 of 8 heads' keys of 128, and
    sees 1,024."""
    status, out, _ = said(capsys, "--layers 6 --width 4096 --heads 32 --kv-heads 8 --hidden 12288 --vocabulary 151936 "
                                  "--context 32768 --family llama --untied --qk-norm --devices 1 --stage 0 "
                                  "--window 1024,1024,1024,1024,1024,all --generate 4x32768")
    count = 2 * 151936 * 4096 + 4096 + 6 * (4096 * (6144 + 4096) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128)
    assert status == 0 and out.startswith(f"Llama of 6 layers, width 4,096, 32 heads (8 of keys), windows of 1024,1024,"
                                          f"1024,1024,1024,all, norms of queries and keys, hidden 12,288, vocabulary "
                                          f"151,936, untied: {count:,} parameters\n")
    row = next(line for line in out.split("\n") if line.startswith("written  ")).split()
    cache, seen = (4 * 4096 * (5 * window + 32768) for window in (2048, 1024))
    read = seen + 2 * (count - (151936 - 4) * 4096)
    assert row[1:4] == [f"{n / 1e9:.2f}" for n in (2 * count, cache, 2 * count + cache)]
    assert row[-3] == f"{read / 1e9:.2f}"


MODEL = "--layers 3 --width 36 --heads 6 --vocabulary 50 --context 16"
EXPERTS = MODEL + " --experts 6"
MISTAKES = {
    "--devices 8 --dp 3 --tp 2 " + MODEL: "dp=3 × tp=2 × pp=1 doesn't make up 8 devices",
    "--devices 9 --tp 2 " + MODEL: "dp=? × tp=2",
    "--devices 4 --pp 4 --untied " + MODEL: "3 layers can't be cut into pp·chunks = 4 stages: lower --pp",
    "--devices 4 --tp 4 " + MODEL: "tp=4 must divide the 6 heads: take another --tp",
    "--devices 4 --device B9 " + MODEL: "device 'B9' is unknown: take one of V100, A100, H100, H200",
    "--devices 4 --heads 5 --layers 3 --width 36 --vocabulary 50 --context 16": "5 heads must divide the width 36",
    "--devices 2 --stage 4 " + MODEL: "stage 4",
    "--devices 8 --shard-over 3 " + MODEL: "--shard-over 3: it must divide the 8 ranks along dp, cp and ep",
    "--devices 8 --shard-over 0 " + MODEL: "--shard-over 0: it must divide",
    "--devices 8 --shard-over 4 --stage 0 " + MODEL: "with stage 0, which cuts nothing",
    "--devices 8 --shard-over 4 --meshes --batch 8 " + MODEL: "leave --shard-over out",
    "--devices 2 --batch 3 " + MODEL: "dp must divide the batch",
    "--devices 2 --batch 0 " + MODEL: "batch is 0",
    "--devices 0 " + MODEL: "--devices 0",
    "--devices 2 --layers 3": "missing --width --heads --vocabulary --context",
    "--devices 2": "give --parameters, or all of a GPT's",
    "--devices 2 --parameters 1e9 --layers 3": "--parameters and --layers",
    "--devices 2 --parameters nan": "--parameters nan: must be a positive number",
    "--devices 2 --parameters 1e9 --tp 2": "give --layers, --width and --heads",
    "--devices 2 --flops -1 " + MODEL: "--flops -1.0",
    "--devices 2 --flops inf " + MODEL: "--flops inf: must be a positive number",
    "--devices 2 --precision float8 " + MODEL: "take one of mixed, float32",
    "--devices 2 --sequence-length 17 " + MODEL: "raise --context",
    "--devices 2 --sequence-length 0 " + MODEL: "time is 0",
    "--devices 2 --sequence-parallel " + MODEL: "tp=1",
    "--devices 2 --pp 2 --untied --schedule zigzag " + MODEL: "gpipe, 1f1b, interleaved, zb-h1, zb-h2, zb-v",
    "--devices 2 --meshes " + MODEL: "give --batch",
    "--devices 2 --sequence-parallel both " + MODEL: "sequence_parallel='both' must be one of",
    "--devices 2 --meshes --batch 4 --sequence-parallel both " + MODEL: "sequence_parallel='both' must be one of",
    "--devices 2 --meshes --batch 4 --tokens 9 " + MODEL: "leave --tokens out",
    "--devices 2 --meshes --batch 4 --dp 2 --tp 2 " + MODEL: "leave --dp --tp out",
    "--devices 2 --meshes --batch 4 --micro-batches 0 " + MODEL: "micro_batches is 0",
    "--devices 2 --meshes --cp 0 --batch 4 " + MODEL: "--cp 0",
    "--devices 64 --meshes --batch 1 " + MODEL: "no mesh of 64 devices can train this with a batch of 1",
    "--devices 2 --schedule gpipe " + MODEL: "is for --pp 2 or more",
    "--devices 2 --pp 2 --untied --schedule zb-h1 --checkpointing " + MODEL: "leaves nothing to W: take --schedule",
    "--devices 2 --pp 2 --untied --schedule zb-v " + MODEL: "can't be cut into pp·2 = 4 stages: lower --pp (zb-v has",
    "--devices 1 --schedule zb-v " + MODEL: "--schedule zb-v is for --pp 2 or more",
    "--devices 4 --cp 3 " + MODEL: "tp=1 × pp=1 × cp=3 doesn't make up 4",
    "--devices 3 --cp 3 " + MODEL: "2·cp doesn't divide 16 tokens: --sequence-length 12",
    "--devices 9 --cp 9 " + MODEL: "2·cp doesn't divide 16 tokens: lower --cp",
    "--devices 2 --cp-by star --parameters 7e9": "take one of ring, all_to_all",
    "--devices 2 --tp 2 --hidden 101 " + MODEL: "must divide the 101 features within the feed-forward",
    "--devices 2 --micro-batches 0 " + MODEL: "micro_batches is 0",
    "--devices 4 --ep 2 --batch 6 " + EXPERTS: "dp · ep = 4 ranks in 1 micro-batches: dp · ep must divide",
    "--devices 2 --cp 2 --cp-by star " + MODEL: "take one of ring, all_to_all",
    "--devices 8 --cp 4 --tp 2 --cp-by all_to_all " + MODEL: "must divide the heads that tp=2 leaves",
    "--devices 2 --cp 2 --cp-by all_to_all --kv-heads 3 " + MODEL: "heads that tp=1 leaves, of keys too: lower",
    "--devices 6 --cp 2 --tp 3 --sequence-parallel " + MODEL: "must divide the 8 tokens of a sequence that a rank has: "
                                                             "--sequence-length 12",
    "--devices 4 --cp 2 --tp 2 --sequence-length 10 --sequence-parallel " + MODEL:
        "2·cp doesn't divide 10 tokens: --sequence-length 12",
    "--devices 2 --tp 2 --sequence-length 1 --sequence-parallel " + MODEL.replace("16", "1"): "a rank has: lower --tp",
    "--devices 12 --cp 4 --tp 3 --sequence-length 10 --sequence-parallel " + MODEL.replace("16", "30"):
        "2·cp doesn't divide 10 tokens: --sequence-length 24",      # which 8 and 12 divide
    "--devices 2 --cp 0 " + MODEL: "--cp 0: must be at least 1",
    "--devices 2 --cp 2 --parameters 1e9": "give --layers, --width and --heads",
    "--devices 4 --ep 4 " + EXPERTS: "ep=4 ranks can't share 6 experts",
    "--devices 2 --ep 2 " + MODEL: "can't share 0 experts",
    "--devices 6 --ep 2 --shard-over 3 --stage 1 " + EXPERTS: "take a multiple or a divisor of --ep",
    "--devices 2 --cp 2 " + EXPERTS: "cp=2 of a mixture of experts with a capacity",
    "--devices 2 --group sequence " + MODEL: "--group without --experts",
    "--devices 2 --no-capacity " + MODEL: "--no-capacity without --experts",
    "--devices 2 --no-capacity --capacity-factor 2 " + EXPERTS: "--no-capacity and --capacity-factor 2: take one",
    "--devices 2 --no-capacity --parameters 1e9": "--parameters and --no-capacity",
    "--devices 2 --group row " + EXPERTS: "experts of group='row': --group sequence",
    "--devices 2 --top-k 7 " + EXPERTS: "7 of 6 experts per token",
    "--devices 2 --top-k 2 " + MODEL: "--top-k without --experts",
    "--devices 2 --shared-experts 1 " + MODEL: "--shared-experts without --experts",
    "--devices 2 --shared-experts -1 " + EXPERTS: "-1 shared experts beside 6 others",
    "--devices 2 --capacity-factor 0 " + EXPERTS: "capacity factor 0.0",
    "--devices 2 --kv-heads 4 " + MODEL: "4 kv_heads must divide the 6 heads",
    "--devices 2 --family gru " + MODEL: "take one of gpt, llama",
    "--devices 2 --family llama " + MODEL.replace("36", "42"): "but of 6 heads of width 42 each has 7",
    "--devices 2 --tp 3 --kv-heads 2 " + MODEL: "doesn't make up",
    "--devices 3 --tp 3 --kv-heads 2 " + MODEL: "tp=3 must divide the 6 heads and 2 kv_heads",
    "--devices 2 --parameters 1e9 --top-k 2": "--parameters and --top-k",
    "--devices 2 --host-bandwidth -1 " + MODEL: "--host-bandwidth -1.0",
    "--devices 1 --lora-rank 0 " + MODEL: "--lora-rank 0: it must be at least 1",
    "--devices 1 --lora-rank 8 --parameters 7e9": "Give --lora-parameters, how many all have together, or --layers",
    "--devices 1 --lora-rank 8 --lora-parameters 1e6 --parameters 7e9": "--lora-rank 8 of a model of which only",
    "--devices 1 --lora-targets *qkv --lora-parameters 1e6 --parameters 7e9": "--lora-targets *qkv of a model of which",
    "--devices 1 --lora-parameters 1e6 " + MODEL: "of a GPT, whose adapters are counted: give --lora-rank",
    "--devices 1 --generate 4 " + MODEL: "--generate 4: give SEQUENCESxTOKENS, two whole numbers such as 16x4096",
    "--devices 1 --generate 4x-1 " + MODEL: "--generate 4x-1: give SEQUENCESxTOKENS",
    "--devices 1 --generate 0x8 " + MODEL: "--generate 0x8: 1 or more sequences, times 1 or more tokens",
    "--devices 1 --generate 2x17 " + MODEL: "tokens for a context of 16, beyond which nothing is kept: raise --context",
    "--devices 4 --generate 2x8 " + MODEL: "--generate 2x8: dp = 4 ranks must share the sequences equally: take 4",
    "--devices 1 --generate 2x8 --parameters 7e9": "give --layers, --width and --heads instead of --parameters",
    "--devices 1 --generate 2x8 " + EXPERTS: "or experts/k = 3, drops none: --no-capacity, or --capacity-factor 3",
    "--devices 2 --generate 2x8 --pp 2 --untied " + MODEL: "the library writes with whole layers: take --pp 1",
    "--devices 2 --meshes --batch 4 --generate 2x8 " + MODEL: "leave --generate out",
    "--devices 1 --memory-bandwidth 0 " + MODEL: "--memory-bandwidth 0.0: must be a positive number",
    "--devices 1 --window 4,,all " + MODEL: "--window '4,,all': numbers of positions, blocks like 4x64, linear,",
    "--devices 1 --window 4,0 " + MODEL: "--window '4,0': one sees 1 position or more, itself",
    "--devices 1 --window 4,all --family deepseek " + MODEL: "window=4,all of a deepseek: multi-head latent",
    "--devices 1 --qk-norm --family deepseek " + MODEL: "qk_norm=True of a deepseek: latents have norms of their own",
    "--devices 1 --window 4 --qk-norm --parameters 7e9": "--parameters and --window --qk-norm: the latter are a GPT's",
    "--devices 1 --window 4,linear --attention-dropout " + MODEL: "states have no weights to be dropped, and of chosen",
    "--devices 1 --window 4,linear --sinks " + MODEL: "of attention with scores of all keys, not of latents, states",
    "--devices 1 --gated --family deepseek " + MODEL: "gated=True of a deepseek: multi-head latent attention has no",
    "--devices 2 --cp 2 --sinks " + MODEL: "cp=2 ranks in a ring have no sinks: take --cp-by all_to_all",
    "--devices 2 --cp 2 --attention-dropout " + MODEL: "cp=2 ranks in a ring drop no weights: take --cp-by all_to_all",
    "--devices 1 --predict 0 " + MODEL: "predict is 0; it must be at least 1",
    "--devices 1 --predict 2 --parameters 7e9": "--parameters and --predict: the latter are a GPT's",
    "--devices 1 --predict 17 " + MODEL: "16 tokens for depth=16: give 17 or more by --sequence-length",
    "--devices 2 --tp 2 --predict 2 --sequence-parallel " + MODEL: "puts positions together with later tokens",
    "--devices 2 --cp 2 --predict 2 " + MODEL: "with cp=2: the model looks at several positions",
    "--devices 2 --pp 2 --untied --predict 2 " + MODEL: "--predict 2 with pp=2: all depths use the embedding",
    "--devices 2 --stage 3 --predict 2 --lora-rank 3 " + MODEL: "take --stage 2, or --predict 3",
    "--devices 1 --kv-rank -1 --family deepseek " + MODEL: "kv_rank=-1, q_rank=None must be 1 or more",
    "--devices 2 --meshes --chunks 0 --batch 4 " + MODEL: "leave --chunks out",
    "--devices 1 --lora-parameters -1 --parameters 7e9": "--lora-parameters -1.0: must be a positive number",
    "--devices 8 --ep 8 --experts 8 --dispatch-bits 5 " + MODEL: "--dispatch-bits 5: take 8 or 4",
    "--devices 8 --dispatch-bits 8 " + MODEL: "--dispatch-bits 8 without divided experts, to which rows could go",
    "--devices 8 --ep 8 --experts 8 --dispatch-once " + MODEL: "take all that choose them: give a GPT's sizes",
    "--devices 8 --experts 8 --no-capacity --dispatch-once " + MODEL: "--dispatch-once without divided experts",
    "--devices 8 --meshes --batch 8 --dispatch-once " + MODEL: "compares a step: leave --dispatch-once out",
    "--devices 8 --tp 2 --no-capacity --experts 6 --experts-over tp " + MODEL:
        "--experts-over tp without ranks that share sequences: give --tp and --sequence-parallel",
    "--devices 8 --experts 6 --no-capacity --experts-over cp " + MODEL: "share sequences: give --cp",
    "--devices 8 --tp 2 --sequence-parallel --experts 6 --experts-over tp " + MODEL: "--experts and --no-capacity",
    "--devices 8 --cp 2 --ep 2 --tp 2 --sequence-parallel --no-capacity --experts 6 --experts-over tp cp " + MODEL:
        "cp=2 · ep=2 · tp=2 ranks can't share 6 experts",
    "--devices 8 --dp 2 --cp 2 --ep 2 --stage 1 --shard-over 3 --no-capacity --experts 8 --experts-over cp " + MODEL:
        "--shard-over 3: it must divide the 8 ranks",
    "--devices 12 --cp 2 --ep 2 --stage 1 --shard-over 6 --no-capacity --experts 8 --experts-over cp " + MODEL:
        "--shard-over 6 with cp=2 · ep=2: a copy's ranks must have all experts, or share some: take a multiple or a "
        "divisor of --cp · --ep",
    "--devices 8 --ep 8 --parameters 1e9 --dispatch-bits 8": "give a GPT's sizes, --experts and --ep",
    "--devices 1 --base-bits 4 " + MODEL: "--base-bits without adapters, which all else is frozen for: give",
    "--devices 1 --lora-targets *out " + MODEL: "--lora-targets without adapters",
    "--devices 1 --lora-rank 8 --base-bits 8 " + MODEL: "--base-bits 8 with --precision mixed: frozen weights have 16",
    "--devices 1 --lora-rank 8 --base-bits 16 --precision float32 " + MODEL: "have 32 or 4 bits there",
    "--devices 2 --lora-rank 8 --base-bits 4 --tp 2 " + MODEL: "would cut the blocks of 64 elements that share a scale",
    "--devices 1 --lora-rank 8 --lora-targets *query " + MODEL: "*query meets no matrix; there are attention.qkv, att",
    "--devices 1 --lora-rank 8 --lora-targets blocks.0.* " + MODEL: "beside the same matrices of every block",
    "--devices 1 --lora-rank 8 --untied --lora-targets head " + MODEL: "beside the same matrices of every block",
    "--devices 1 --lora-rank 8 --lora-targets * " + EXPERTS: "* meets mlp.router, and of routers plan",
    "--devices 2 --stage 3 --lora-rank 8 " + MODEL.replace("3", "1", 1): "take --stage 2, or --layers 2",
    "--devices 2 --pp 2 --untied --chunks 1 --schedule interleaved --micro-batches 3 " + MODEL: "--micro-batches 4",
    "--devices 3 --pp 3 --untied --chunks 1 --schedule interleaved --micro-batches 5 " + MODEL: "--micro-batches 6",
    "--devices 1 " + MODEL.replace("3", "10001", 1): "10,001 layers: plan goes through them one by one",
    "--devices 1 --state-bits 16 " + MODEL: "--state-bits 16: take 32 or 8",
    "--devices 6 --tp 6 " + MODEL.replace("50", "5"): "tp=6 ranks can't share a vocabulary of 5: lower --tp",
    "--devices 1 --schedule 1f1b --chunks 2 " + MODEL: "2 chunks per rank are for --schedule interleaved",
    "--devices 1000000000 --meshes --batch 8 --cp 1000 --ep 1000 " + MODEL: "are more than 2,000 meshes: give fewer",
}


@pytest.mark.parametrize("line", [
    "--devices 6 --tp 6 " + MODEL.replace("50", "6"), "--devices 1 --predict 16 " + MODEL,
    "--devices 3 --pp 3 --untied " + MODEL,
    "--devices 8 --ep 4 --shard-over 2 --stage 1 --batch 8 --experts 4 " + MODEL,
    "--devices 8 --ep 2 --shard-over 4 --stage 1 --batch 8 --experts 4 " + MODEL])
def test_what_is_just_possible_is_planned(capsys, line):
    """A row of the vocabulary, or a block, on each rank; a position for the last depth; copies that divide experts."""
    status, out, err = said(capsys, line)
    assert (status, err) == (0, "") and "together" in out


@pytest.mark.parametrize("line", MISTAKES)
def test_mistakes_are_told_in_one_line(capsys, line):
    status, out, err = said(capsys, line)
    assert (status, out) == (2, "") and MISTAKES[line] in err, err
    assert err.startswith("minitorch-dist plan: ") and err.count("\n") == 1
