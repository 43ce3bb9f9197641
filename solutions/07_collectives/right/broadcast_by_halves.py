# 07.2: each range gives its second half the data
def broadcast(comm, x, src):
    """The first of a range has the data, and gives it to the middle of the range; then each half goes on."""
    me, n = (comm.rank - src) % comm.size, comm.size

    def spread(first, last):
        if last - first < 2:
            return
        middle = (first + last + 1) // 2
        if me == first:
            comm.send(x, (middle + src) % n)
        elif me == middle:
            comm.recv(x, (first + src) % n)
        spread(*((first, middle) if me < middle else (middle, last)))
    spread(0, n)
