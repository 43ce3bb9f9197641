"""Op sharding by annotations: the machine under parallel/annotate.py. Read layouts.py first, then rules.py, moves.py,
choice.py, resharding.py, sharded.py and running.py; then paper.py and planning.py."""
