"""A job that goes on: started again after a failure, on the ranks that are left.

attempts.py decides, from what has happened so far, what comes next, and works out what was lost; job.py starts mpirun,
hands on signals and sees that no process is left, keeper.py also when the supervisor is killed; command.py is
`minitorch-dist supervise`.
"""

from .attempts import Attempt, Rule, goodput, next_start
from .command import add_command, supervise
from .job import Job

__all__ = ["Attempt", "Job", "Rule", "add_command", "goodput", "next_start", "supervise"]
