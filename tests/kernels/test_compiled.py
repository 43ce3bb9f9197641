"""Every kernel compiled for every GPU type, without a GPU: it compiles, its parameters are the PTX's, it fits."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from minitorch_dist import kernels

from ..quick import asked
from . import PATIENCE
from .compile_all import examples, spilled

ROOT = Path(__file__).parents[2]
CAPABILITIES = (75, 80, 90, 100)
# Bytes of shared memory that a program may have, once asked for. Source: CUDA C++ programming guide, table of limits.
SHARED = {75: 64 << 10, 80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
CASES = [pytest.param(name, index, cc, marks=[pytest.mark.thorough] * bool(cc != 90 and index and name != "adam"))
         for name, kernel in kernels.table().items() for cc in CAPABILITIES for index in examples(kernel, cc)]


@pytest.fixture(scope="module")
def compiled(request, tmp_path_factory):
    """{id: facts} of compile_all, by two processes at once: of all for 9.0, and of what is tested here for others."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "XDG_CACHE_HOME": str(tmp_path_factory.mktemp("cubins"))}
    tested = asked(request, "name", "index", "cc")
    every = [case.values for case in CASES if case.values in tested or case.values[2] == 90]
    halves = [[f"{name}-{index}-sm{cc}" for name, index, cc in every if (cc == 90) == there] for there in (True, False)]
    running = [subprocess.Popen([sys.executable, "-m", f"{__package__}.compile_all", *half], cwd=ROOT,
                                env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
               for half in halves if half]
    try:
        answers = [process.communicate(timeout=PATIENCE) for process in running]
    finally:
        for process in running:
            process.kill()      # where a test run is interrupted
    assert not any(process.returncode for process in running), answers
    every = [json.loads(line) for out, _ in answers for line in out.splitlines()]
    return {facts.pop("id"): facts for facts in every}


@pytest.mark.parametrize("name, index, cc", CASES, ids=lambda v: str(v))
def test_compiles(compiled, name, index, cc):
    facts = compiled[f"{name}-{index}-sm{cc}"]
    assert "error" not in facts, facts["error"]
    assert facts["cubin"] > 0 and facts["shared"] <= SHARED[cc]


@pytest.mark.parametrize("name, index, cc", CASES, ids=lambda v: str(v))
def test_takes_what_its_record_says(compiled, name, index, cc):
    """build.checked has compared the record with the PTX; here it is compared with the record's own words."""
    kernel, facts = kernels.table()[name], compiled[f"{name}-{index}-sm{cc}"]
    types, _ = kernel.example(kernel.examples[index])
    assert facts["types"] == [kind for kind in types.values() if kind is not None]
    assert facts["scratch"] in (1, 2)


def test_fused_adam_moves_128_bits_at_a_time_and_keeps_all_in_registers(compiled):
    """4 loads and 3 stores of 8 elements per thread are 8 and 6 instructions of 128 bits; v̂ of amsgrad is one more."""
    for index, loads, stores in ((0, 8, 6), (1, 8, 6), (2, 10, 8)):
        facts = compiled[f"adam-{index}-sm90"]
        assert facts["memory"]["LDG.128"] == loads and facts["memory"]["STG.128"] == stores
        assert facts["local"] == 0 and max(facts["together"]) >= 8     # and none waits for another
    for index in (0, 1):
        facts = compiled[f"adam-{index}-sm90"]
        assert facts["stack"] == 0 and not {"LDL", "STL"} & set(facts["memory"])


def test_adam_of_8_bits_loads_all_from_memory_at_once_and_then_looks_all_levels_up(compiled):
    """A thread has 8 elements: 128 bits wide those of p and g, of 16 bits too; 8 codes of m, v and v̂ each in 64 bits,
    with their scale. No load waits for another, and behind them none of the 8 levels of each state."""
    for index, states, wide in ((5, 2, {"LDG.128": 4, "STG.128": 2}), (6, 3, {"LDG.128": 4, "STG.128": 2}),
                                (7, 2, {"LDG.128": 4, "STG.128": 3})):
        facts = compiled[f"adam-{index}-sm90"]
        memory = facts["memory"]
        assert {name: memory[name] for name in wide} == wide and memory["STG.64"] == states
        assert facts["local"] == facts["stack"] == 0 and not {"LDL", "STL"} & set(memory)
        loads, lookups, _ = facts["together"][-3:]
        assert loads >= 4 + 2 * states and lookups >= 8 * states and facts["registers"] <= 104


@pytest.mark.parametrize("name, index, loads", [("cross_entropy", 0, 16), ("cross_entropy_backward", 0, 20),
                                                ("cross_entropy", 4, 16), ("cross_entropy_backward", 4, 20)])
def test_rows_that_begin_anywhere_are_loaded_16_logits_at_once(compiled, name, index, loads):
    """50,257 classes: no 128 bits begin at a multiple of 128, so a thread has 16 single loads under way (backward: and
    the row's 4 numbers). With masks that are found out at run time each would wait for the one before."""
    assert max(compiled[f"{name}-{index}-sm90"]["together"]) >= loads


def test_rows_that_begin_at_multiples_of_16_bytes_are_loaded_128_bits_at_a_time(compiled):
    for name, index, wide in (("cross_entropy", 2, 2), ("cross_entropy_backward", 2, 2), ("norm", 5, 2)):
        assert compiled[f"{name}-{index}-sm90"]["memory"]["LDG.128"] >= wide


@pytest.mark.parametrize("name", ["norm_backward", "column_sums", "bias_gelu_backward", "segment_sums"])
def test_loops_load_ahead(compiled, name):
    """By LDGSTS, from memory to shared memory, where an element has the 4 bytes that this takes."""
    examples = kernels.table()[name].examples
    found = {i: compiled[f"{name}-{i}-sm90"]["memory"].get("LDGSTS.128", 0) for i in range(len(examples))
             if examples[i].get("*") == "fp32" and examples[i].get("COLUMNS") != 1}
    assert found and min(found.values()) >= 4, found


def test_16_bit_products_are_of_warpgroups(compiled):
    """HGMMA for float16 and bfloat16 on sm_90; tf32 has HMMA at least; "ieee" float32 has neither."""
    for key, facts in compiled.items():
        name, index, cc = key.rsplit("-", 2)
        if cc == "sm90" and name.startswith(("flash_attention", "matmul")):
            example = kernels.table()[name].examples[int(index)]
            memory, single, tf32 = facts["memory"], example["*"] == "fp32", example.get("PRECISION", "")[:4] == "tf32"
            assert ("HGMMA" in memory) == (not single) or tf32, key
            assert ("HMMA" in memory or "HGMMA" in memory) == (not single or tf32), key


@pytest.mark.parametrize("name", ["cross_entropy", "norm", "bias_gelu", "swiglu", "dropout", "segment", "column_sums",
                                  "matmul", "flash_attention"])
def test_blocks_are_small_enough_for_the_registers(compiled, name):
    """No example of these families, forward or backward, moves a register to memory for want of room, but where that
    Triton is known to."""
    found = {key: facts["stack"] for key, facts in compiled.items() if key.startswith(name) and key.endswith("sm90")}
    assert found and not {key: stack for key, stack in found.items() if stack > spilled(key)}, found


def test_adam_s_largest_v_so_far_keeps_nan():
    """As in the definition; maxnumf would take the other number. (Triton's interpreter has one maximum for both.)"""
    shown = command("adam", "--example", "2").stdout
    assert "arith.maximumf" in shown and "arith.maxnumf" not in shown


@pytest.mark.parametrize("stage, word", [("ttgir", "#ttg.blocked"), ("llir", "define"),
                                         ("ptx", ".target sm_80"), ("sass", "LDG.E.128")])
def test_the_command_shows_each_stage(stage, word):
    done = command("adam", "--show", stage, "--cc", "80")
    assert done.returncode == 0 and word in done.stdout, done.stderr


def test_the_command_lists_all_kernels_and_names_what_is_wrong():
    listing = command().stdout
    assert all(f"{name}  (" in listing for name in kernels.table())
    for arguments, what in ((["nothing"], "there is no kernel 'nothing', but add, adam"),
                            (["adam", "--example", "99"], "adam has the examples 0 to"),
                            (["adam", "--cc", "12"], "--cc 12 is no compute capability")):
        done = command(*arguments)
        assert done.returncode == 2 and what in done.stderr and not done.stdout
    interpreted = command(interpret="1")
    assert interpreted.returncode == 1 and "unset it" in interpreted.stderr


def command(*arguments, interpret="0"):
    return subprocess.run([sys.executable, "-m", "minitorch_dist", "kernels", *arguments], capture_output=True,
                          text=True, cwd=ROOT, env=os.environ | {"TRITON_INTERPRET": interpret}, timeout=120)
