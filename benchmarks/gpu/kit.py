"""What a GPU that is lent by the minute needs, made ready where time costs nothing: a folder for in_turn.py to find.

    python benchmarks/gpu/kit.py            # makes kit/: half an hour on two cores, the tests run on an emulated GPU
    python benchmarks/gpu/kit.py --quick    # for the benchmarks alone, in some minutes

    kit/cache/      machine code of the kernels that tests and benchmarks use, for compute capability 9.0 (H100, H200)
    kit/wheels/     an MPI, which is often missing

Needs what `make test-emulated` installs. Triton must be of the version that the lent machine has: code of another isn't
taken there, and compiled anew. The Python may be another one. The tests that are too large for an emulated GPU run on
one that computes nothing: they fail, and what they ask for is compiled all the same.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _harness import named  # noqa: E402

KIT = Path("kit").absolute()
EMULATED = [sys.executable, "-m", "tests.device.emulated"]
TESTS = ["-m", "pytest", "-q", "-rs", "tests/kernels", "tests/device", "-m"]
BENCHMARKS = [[*EMULATED, "--idle", f"benchmarks/gpu/{name}.py"] for name in ("adam", "kernels", "train")]
LARGE = [*EMULATED, "--idle", *TESTS, "gpu and large"]
OTHERS = [*EMULATED, *TESTS, "gpu and not large"]


def machine_code(folder):
    """The files of a cache with machine code in them; those with PTX, which only emulated GPUs take, go."""
    from minitorch_dist.kernels.build import read
    found = []
    for path in folder.glob("minitorch_dist/kernels/*.json"):
        binary = read(path)
        if binary is not None and binary.cubin.startswith(b"\x7fELF"):
            found.append(path)
        else:
            path.unlink()
    shutil.rmtree(folder / "minitorch_dist" / "emulated-cupy", ignore_errors=True)
    return found


def main():
    """Make kit/, adding to what is there."""
    named(__doc__, flags=("--quick",))
    environment = os.environ | {"XDG_CACHE_HOME": str(KIT / "cache"), "MACHINE_CODE": "1", "EMULATED_GPUS": "1"}
    for command in [*BENCHMARKS, *([] if "--quick" in sys.argv else [LARGE, OTHERS])]:
        print("\n$", *command[1:], flush=True)
        status = subprocess.run(command, cwd=ROOT, env=environment).returncode
        if status and command is not LARGE:
            raise SystemExit(f"status {status}: the kit isn't complete")
    subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(KIT / "wheels"), "mpich"],
                   check=True)
    found = machine_code(KIT / "cache")
    size = sum(path.stat().st_size for path in KIT.rglob("*") if path.is_file())
    print(f"\n{KIT}: {len(found)} kernels, {size / 1e6:.0f} MB. Take it along, beside the checkout's README.md, and "
          "there: python benchmarks/gpu/in_turn.py --minutes 9 --out FOLDER")


if __name__ == "__main__":
    main()
