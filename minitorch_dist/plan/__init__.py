"""What a training run takes, on paper, before anybody rents a machine: memory, bytes on the wire, time.

    print(plan(Job(Parameters(7.5e9), dp=64, stage=3), DEVICES["V100"]).fullest)

activations.py has what is kept for backward, as tables; paper.py the rest.
"""

from .devices import DEVICES, Device
from .generation import Generation
from .job import Job
from .model import GPT, Parameters
from .paper import Plan, plan
