"""Op sharding by annotations: the machine under parallel/annotate.py. Read layouts.py first, then rules.py, choice.py,
resharding.py, sharded.py and running.py."""
