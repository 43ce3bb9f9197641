"""crews.call: what ranks.call does, by ranks that stay until the test module's end (minitorch_dist/testing/crew.py)."""

from minitorch_dist.testing.crew import Crews

crews = Crews()


def threads(n):
    """Environment for n ranks of exact mode: of BLAS threads a process alone has two, where several have one each."""
    return {"OMP_NUM_THREADS": "2"} if n == 1 else {}
