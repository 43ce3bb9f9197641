"""Pipelines: a model's layers cut over the ranks, and the schedules by which micro-batches go through them.

Read schedules.py first, which needs no ranks, then pipeline.py.
"""

from ...later import of_modules

__getattr__, __all__ = of_modules(__name__, {
    "gpt_stages": ["cut_gpt"],
    "pipeline": ["Pipeline", "balanced", "cut_sequential", "full_state_dict"],
    "schedules": ["SCHEDULES", "schedule_of"],
    "two_buffered": ["PipeDream2BW"],
})
