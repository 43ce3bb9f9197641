"""Run a Python program on emulated GPUs, with a real CuPy and real Triton kernels:

    python -m tests.device.emulated -m pytest -m gpu tests/kernels tests/device
    python -m tests.device.emulated mnist_demo/train.py --device cuda --steps 2

    python -m tests.device.emulated --idle benchmarks/host.py           # one that computes nothing, in no time

What follows is what one would give to python. EMULATED_GPUS=2 in the environment makes it two. Needs CuPy for CUDA 12
with NVIDIA's compiler (pip install .[emulated-gpu]), Triton and a C compiler. A step of a small network takes seconds.
"""

import importlib.util
import os
import sys
from pathlib import Path

from minitorch_dist.kernels.build import cache_folder

HERE = Path(__file__).parent


def environment():
    """What the program and its ranks are started with: site/sitecustomize.py calls hooks.install in each."""
    paths = [str(HERE / "site"), str(HERE.parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    return os.environ | {"PYTHONPATH": os.pathsep.join(paths), "TRITON_INTERPRET": "0",
                         "EMULATED_GPUS": os.environ.get("EMULATED_GPUS", "1"),
                         "CUPY_CACHE_DIR": str(cache_folder().with_name("emulated-cupy"))}


if __name__ == "__main__":
    arguments = [argument for argument in sys.argv[1:2] if argument != "--idle"] + sys.argv[2:]
    if not arguments:
        sys.exit(__doc__)
    if importlib.util.find_spec("cupy_backends") is None:       # before each process that is started says it by itself
        sys.exit("tests.device.emulated: there is no CuPy here: make test-emulated, or pip install '.[emulated-gpu]', "
                 "installs it")
    if sys.argv[1] == "--idle":
        os.environ["IDLE_GPU"] = "1"
    os.execve(sys.executable, [sys.executable, *arguments], environment())
