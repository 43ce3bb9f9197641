"""What tests share: bytecode, ranks, and trainings that take long, which begin with the session, one after the other,
beside the tests that leave a core idle.
"""

import importlib
import os
import sys
from concurrent.futures import ThreadPoolExecutor

# Hundreds of processes import the library: none of them should have to compile it.
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
# A second BLAS thread makes one process on a busy machine slower, at four times the CPU seconds. Where bits mustn't
# depend on it there are two: crews.threads.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest  # noqa: E402

from .crews import crews  # noqa: E402

# test: (its module, the module's functions: of a folder, which trains, and whether it can be done here)
AHEAD = {
    "test_lenet_learns_mnist": ("tests.test_train", "lenet", "has_mnist"),
    "test_it_learns_to_add": ("tests.test_gpt", "adding", None),
}


@pytest.fixture(scope="session", autouse=True)
def ahead(request, tmp_path_factory):
    """{test: future of what its training gives}, of those tests that will run."""
    chosen = {item.name for item in request.session.items}
    with ThreadPoolExecutor(1) as pool:
        futures = {}
        for test, (path, train, possible) in AHEAD.items():
            module = importlib.import_module(path) if test in chosen else None
            if module and (possible is None or getattr(module, possible)()):
                futures[test] = pool.submit(getattr(module, train), tmp_path_factory.mktemp("ahead"))
        yield futures
        for future in futures.values():
            future.cancel()


@pytest.fixture(scope="module", autouse=True)
def end_of_crews():
    """Ranks that tests share live as long as their module."""
    with crews:
        yield
