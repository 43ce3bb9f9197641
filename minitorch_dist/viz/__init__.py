"""Pictures: of runs (curves), of the tape (graph), of Jacobians and of memory (differentiation), of what
ranks did when (timeline), of models (models).

matplotlib is loaded only to draw, and without its global state: no window opens, and no setting of the caller changes.
"""

from .curves import (
    COLORS,
    HEADLINES,
    SAME_JOB,
    SETTINGS,
    Run,
    RunError,
    Verdict,
    curves,
    deltas,
    read_run,
    verdict,
)
from .differentiation import jacobian_filling, memory
from .figure import STYLE
from .graph import graph, graph_text
from .models import attention_maps, confusion_matrix, filters, learning_curve, text_surprise
from .timeline import schedule, timeline
