"""The tests that failed in the last pytest, each once more in a process of its own, where nothing is an echo of another
one's error, and with every launch waited for: the call that fails is the one that has failed. The first also under
compute-sanitizer, where there is one, which names the line of a kernel that reads or writes what it mustn't.

    python benchmarks/gpu/again.py
"""

import json
import os
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
from _harness import named  # noqa: E402

MOST, AT_ONCE, SANITIZED = 24, 8, 3     # tests, processes at once, tests under compute-sanitizer
LIMIT = 60          # seconds of a test
TAIL = 6000         # characters of what each prints that are shown
SANITIZER = "compute-sanitizer"


def failed():
    """The names of the tests that failed in pytest's last run here."""
    try:
        return list(json.loads((ROOT / ".pytest_cache/v/cache/lastfailed").read_text()))
    except FileNotFoundError:
        return []


def spread(names, most):
    """At most so many of the names, from all over the list: neighbours often have one cause."""
    return [names[i * len(names) // most] for i in range(most)] if len(names) > most else names


def run(command):
    """What a command prints, with how it ended."""
    environment = os.environ | {"TRITON_INTERPRET": "0", "CUDA_LAUNCH_BLOCKING": "1"}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=LIMIT)
        said, how = done.stdout, f"status {done.returncode}"
    except subprocess.TimeoutExpired as error:
        said, how = error.stdout or b"", f"ended after {LIMIT} s"
    return f"\n--- {' '.join(command)}\n{said.decode(errors='replace')[-TAIL:].strip()}\n--- {how}"


def main():
    """Run them and print what they print."""
    named(__doc__)
    names = failed()
    print(f"{len(names)} tests have failed", flush=True)
    test = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    commands = [[*test, name] for name in spread(names, MOST)]
    if shutil.which(SANITIZER):
        commands += [[SANITIZER, *test, name] for name in spread(names, SANITIZED)]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for text in pool.map(run, commands):
            print(text, flush=True)


if __name__ == "__main__":
    main()
