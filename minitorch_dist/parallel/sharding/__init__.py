"""Op sharding by annotations: annotate.py, and the machine under it. Read layouts.py first, then rules.py, moves.py,
choice.py, resharding.py, sharded.py and running.py; then paper.py and planning.py."""
