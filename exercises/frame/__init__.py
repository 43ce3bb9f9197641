"""The frame of the course: what a chapter's check.py imports. docs/authoring.md is its manual.

  course.py    what lies on disk: chapters, exercises, and their names
  child.py     what runs in each process of a check: the learner's code, and nothing that knows the truth
  fence.py     what an answer may not do in them
  launch.py    starts those processes and brings back outputs, or what went wrong
  starting.py  forks them where many answers are checked (starter.py, for mpirun starter_client.py)
  check.py     what a chapter says of an exercise: cases, truth, signatures, demands, picture
  comparing.py whether outputs are those expected, leaf by leaf
  judge.py     the verdict on a launch: which known mistake explains what is wrong
  wording.py   what is said of it where no mistake is known
  checking.py  all of it together: one answer in, one Verdict out
  seeds.py     what a check says over many seeds, for authors
  answers.py   the learner's side: mine/, progress, whose earlier answers are used, slots
"""

from .check import Check, Outputs, demand, gives, when
