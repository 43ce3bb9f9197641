# 10.2: what arrives is written over what it should be added to
def chunks(x, size):
    return [x[x.size * i // size:x.size * (i + 1) // size] for i in range(size)]


def reduce_scatter(comm, x, table, exchange):
    parts = chunks(x, comm.size)
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    for send, receive in table(comm.rank, comm.size)[:comm.size - 1]:
        exchange(comm, parts[send], right, parts[receive], left)
        parts[receive] += parts[receive]
