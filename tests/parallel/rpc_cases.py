"""What the ranks do in the tests of remote calls."""

import time

import numpy as np

import minitorch_dist as mt
from minitorch_dist import backend, comm, ledger
from minitorch_dist.parallel.servers.rpc import Future, Rpc
from minitorch_dist.parallel.servers.rref import itself

rpc = None      # the Rpc of the case under way, for functions that call on


def begin():
    global rpc
    rpc = Rpc(comm.world())
    return rpc


# ---------------------------------------------------------------- what is called

def here(*args, **kwargs):
    """(the rank that runs this, what it got)"""
    return comm.world().rank, args, kwargs


def to_and_fro(depth, other):
    """The ranks that were gone through, each waiting for the next."""
    me = comm.world().rank
    return [me, *(rpc.rpc_sync(other, to_and_fro, (depth - 1, me)) if depth else [])]


def scaled(x, factor):
    """A new array; x becomes 0, which nobody else shall see."""
    result = x * factor
    x[...] = 0
    return result


def number_of(*arrays):
    """Of elements."""
    return sum(array.size for array in arrays)


def refuse(what):
    raise KeyError(what)


class Odd(Exception):
    """Can't be unpickled."""

    def __init__(self, a, b):
        super().__init__(f"{a} and {b}")


def raise_odd():
    raise Odd(1, 2)


class Unreadable:
    """Can't be unpickled either, but pickled."""

    def __reduce__(self):
        return refuse, ("to be read",)


def hand_on(to):
    """Its answer is that of another call, which fails."""
    return rpc.rpc_async(to, refuse, ("handed on",))


def modes():
    """Whether this is recorded, whether there is a scope of random numbers, whether there must be one."""
    return mt.is_grad_enabled(), backend.random_state.scope is not None, backend.random_state.by_sample


def forward(hops, to):
    """Nobody waits for what comes after."""
    if hops:
        rpc.rpc_async(to, forward, (hops - 1, comm.world().rank))
    arrived.append(hops)


arrived = []


def a_lambda():
    return lambda: 1


class Counter:
    """An object to be kept."""

    def __init__(self, start):
        if start < 0:
            raise ValueError(f"a counter can't start at {start}")
        self.value, self.buffer = start, np.zeros(1 << 17)       # too large to leave at once

    def add(self, n):
        self.value += n
        return self.value

    def fill(self, value):
        self.buffer[...] = value
        return self.buffer      # as it is now, whatever comes

    def later(self):
        self.answer = Future()
        return self.answer

    def later_with_a_callback(self):
        self.later().add_done_callback(lambda future: refuse("a callback"))
        return self.answer

    def now(self, value):
        self.answer.set_result(value)

    def never(self):
        self.answer.set_exception(LookupError("nothing came"))


def forgotten():
    """A Future that nobody keeps."""
    return Future()


def add_there(ref, n):
    """A call by way of a third rank."""
    return ref.rpc_sync().add(n)


# ---------------------------------------------------------------- cases

def calls():
    """{what: what came out}, of every rank; each calls the next one, all at once."""
    world, seen = comm.world(), {}
    after = (world.rank + 1) % world.size
    with begin():
        seen["next"] = rpc.rpc_sync(after, here, (1,), {"two": 2})
        futures = [rpc.rpc_async(to, here, (to,)) for to in range(world.size)]
        seen["all"] = [future.wait() for future in futures]
        seen["nested"] = rpc.rpc_sync(after, to_and_fro, (5, world.rank))
        with mt.no_grad(), backend.random_scope(1, 2, 3, (0, 3)), backend.random_by_sample():
            seen["modes"] = rpc.rpc_sync(after, modes), modes()
        x = np.arange(5000.0).reshape(50, 100) + world.rank
        for name, array in (("C", x), ("F", np.asfortranarray(x)), ("strided", x[:, ::3]), ("small", x[:2, :3].copy()),
                            ("empty", x[:0]), ("float32", x.astype("f4")), ("half of a large one", x[:25])):
            result = rpc.rpc_sync(after, scaled, (array, 2.0))
            seen[name] = (result == 2 * x.astype(array.dtype)[tuple(map(slice, array.shape))]
                          if name != "strided" else result == 2 * array).all(), result.flags.writeable, \
                array.size == 0 or array.max() > 0
        large = np.full(1 << 19, world.rank + 1.0)      # 4 MiB: all ranks send before anybody receives
        seen["large"] = rpc.rpc_sync(after, scaled, (large, 1.0)).sum()
    return seen


def objects():
    """{what: what came out}, of rank 0; the object lives on the last rank, others call it by way of each other."""
    world, seen = comm.world(), {}
    last = world.size - 1
    with begin():
        if world.rank == 0:
            counter = rpc.remote(last, Counter, (10,))
            seen["owner"] = counter.owner, counter.is_owner()
            seen["add"] = [counter.rpc_sync().add(n) for n in (1, 2)]
            seen["by another"] = [rpc.rpc_sync(to, add_there, (counter, 100)) for to in range(world.size)]
            seen["to_here"] = counter.to_here().value
            first, second = counter.rpc_async().fill(1.0), counter.rpc_async().fill(2.0)
            time.sleep(0.05)        # both have run, and neither answer has been taken
            seen["snapshots"] = second.wait().mean(), first.wait().mean()
            later = counter.rpc_async().later()
            seen["not yet"] = later.is_completed()
            counter.rpc_sync().now("then")
            seen["later"] = later.wait()
            late = counter.rpc_async().later_with_a_callback()
            try:
                counter.rpc_sync().now("late")
            except KeyError as error:
                seen["callback"] = str(error)
            seen["late"] = late.wait(timeout=5)
            x = np.ones(1 << 20)
            kept = rpc.remote(last, np.asarray, (x,))
            x[...] = -1
            seen["kept"] = kept.to_here().min()
            replaced = counter.rpc_async().later()      # by the next one
            never = counter.rpc_async().later()
            counter.rpc_sync().never()
            bad = rpc.remote(last, Counter, (-1,))
            waiting = counter.rpc_async().later()       # and wait: alone, for itself
            if world.size == 1:
                try:
                    waiting.wait()
                except RuntimeError as error:
                    seen["alone"] = str(error)
            counter.rpc_sync().now("at last")
            for name, act in {"never": never.wait, "replaced": lambda: replaced.wait(timeout=5),
                              "forgotten": lambda: rpc.rpc_async(last, forgotten).wait(timeout=5),
                              "bad": lambda: bad.rpc_sync().add(1), "bad here": bad.local_value,
                              "not here": counter.local_value if last else lambda: rpc.object("nothing"),
                              "pickled": lambda: world.broadcast_object(counter),
                              "waits": Future().wait, "twice": lambda: late.set_result("too late")}.items():
                try:
                    act()
                    seen[name] = "nothing"
                except Exception as error:
                    seen[name] = f"{type(error).__name__}: {error}"
    return seen


def errors():
    """{what: (type, text, notes)}, of every rank calling the next one."""
    world, seen = comm.world(), {}
    after, other = (world.rank + 1) % world.size, Rpc(world, "other")
    begin()

    def attempt(name, act):
        try:
            act()
            seen[name] = "nothing", "", ""
        except Exception as error:
            seen[name] = type(error).__name__, str(error), "".join(getattr(error, "__notes__", []))
    attempt("raises", lambda: rpc.rpc_sync(after, refuse, ("nothing of the kind",)))
    attempt("odd", lambda: rpc.rpc_sync(after, raise_odd))
    unread = rpc.rpc_async(after, Unreadable)
    attempt("unread", unread.wait)
    attempt("still unread", lambda: unread.wait(timeout=1))
    attempt("handed on", lambda: rpc.rpc_sync(after, hand_on, (world.rank,)))
    attempt("no tuple", lambda: rpc.rpc_sync(after, np.add, np.ones((2, 3))))
    attempt("of another", lambda: rpc.rpc_sync(after, itself, (other.register("x", 1),)))
    attempt("deep", lambda: rpc.rpc_sync(after, to_and_fro, (120, world.rank)))
    attempt("a lambda", lambda: rpc.rpc_sync(after, lambda: 1))
    attempt("gives a lambda", lambda: rpc.rpc_sync(after, a_lambda))
    attempt("no such rank", lambda: rpc.rpc_sync(world.size, here))
    attempt("no such owner", lambda: rpc.rref(world.size, "x"))
    attempt("then", lambda: rpc.rpc_sync(after, here))
    rpc.rpc_async(after, refuse, ("lost",))     # nobody waits for it
    attempt("at the end", rpc.shutdown)
    attempt("after the end", lambda: rpc.rpc_sync(after, here))
    attempt("a second end", rpc.shutdown)

    def leave():
        with rpc:
            refuse("a block after the end")
    attempt("a block after the end", leave)
    other.shutdown()
    seen["freed"] = not getattr(rpc.comm._engine, "comm", None)
    return seen


def forwarded():
    """The hops that have come to this rank, of a call that ranks 1 and 2 hand to each other while all shut down."""
    arrived.clear()
    with begin():
        if rpc.rank == 0:
            rpc.rpc_sync(1, forward, (9, 2))
    return arrived


def abandoned():
    """What each rank hears where rank 1 raises, and all catch."""
    try:
        with begin():
            if rpc.rank == 1:
                refuse("to go on")
    except (KeyError, RuntimeError) as error:
        return type(error).__name__, str(error)


def waits():
    """On rank 0: what a wait with a limit says while rank 1 doesn't serve, and what comes when it does."""
    world = comm.world()
    with begin():
        said = None
        if world.rank == 0:
            future = rpc.rpc_async(1, here)
            try:
                future.wait(timeout=0.05)
            except TimeoutError as error:
                said = str(error)
        world.barrier()
        if world.rank == 1:
            served = 0
            while not served:
                served = rpc.serve()
            result = served, rpc.serve()
        world.barrier()
        if world.rank == 0:
            looks = 1
            while not future.is_completed():    # a look may be what makes MPI fetch the answer
                looks += 1
            result = said, looks, future.wait()
    return result


def traffic():
    """(bytes by operation of a call with arrays of 80,000 and 800 bytes that gives one of 80,000, those that go as they
    are of one with 4,096 and 4,088); this rank's calls."""
    world = comm.world()
    with begin():
        with ledger.record() as book:
            if world.rank == 0:
                rpc.rpc_sync(1, np.add, (np.ones((100, 100)), np.ones(100)))
            rpc.shutdown()
    with begin(), ledger.record() as short:
        if world.rank == 0:
            rpc.rpc_sync(1, number_of, (np.ones(512), np.ones(511)))
    return {key: n for key, n in book.bytes_sent.items() if key[0] == "rpc"}, short.bytes_sent["rpc", "send"]
