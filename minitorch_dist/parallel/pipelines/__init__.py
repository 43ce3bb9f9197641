"""Pipelines: a model's layers cut over the ranks, and the schedules by which micro-batches go through them.

Read schedules.py first, which needs no ranks, then pipeline.py.
"""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "gpt_stages": ["cut_gpt"],
    "pipeline": ["Pipeline"],
    "schedules": ["SCHEDULES", "schedule_of"],
    "slices": ["lengths_of_equal_work"],
    "stages": ["balanced", "cut_sequential", "full_state_dict"],
    "two_buffered": ["PipeDream2BW"],
})
