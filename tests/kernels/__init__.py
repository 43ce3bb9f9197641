# Seconds for a process that compiles or emulates a few hundred kernels: half a minute to two on a free machine, from an
# empty cache, at low priority (tests/aside.py) and beside other work ten times that. Who hangs is ended all the same.
PATIENCE = 2400
