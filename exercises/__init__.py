"""The course: chapters to work through, and the grader. `python -m exercises` shows the map."""
