"""Communicator: a group of ranks and everything they can say to each other. The only gateway to other ranks.

Every collective has the same five parts: check the arguments, run the hooks and the ledger, choose the engine by where
the array lives, make sure that all ranks mean the same (comm/mismatch.py), and do it now or hand back a Work.
"""

import weakref

import numpy as np

from minitorch_dist import ledger

from ..backend import on_host, recording, refuse_in_graph, zeros
from ..torch_names import NAMES, tell
from . import check, mismatch
from .algorithms import ALGORITHMS, Wire, named
from .device import OnDevices, down, up
from .local import LocalEngine, aligned_zeros
from .messages import Messages
from .nodes import NodesWindow
from .objects import Objects
from .reduction import OPS, WIRE_BYTES, cut, scatter_along_tree
from .shared import Repeated, Request, Window
from .state import Call, Like, state
from .where import caller
from .work import Deferred, Then, Work, timeline_detail

ENGINES = ("auto", "mpi", "shared")


class Communicator(Messages, Objects, OnDevices):
    """`size` ranks, of which this process is `rank`.

    rank, size    as in MPI: ranks count from 0
    name          the axis under which the ledger counts
    world_ranks   the members' ranks in the world
    axes          {name: Communicator} of the axes of a DeviceMesh that it takes together; {} where it is of one
    token         a number that its ranks know it by, and no other communicator; 0: they don't
    hooks         objects with before(op, x, peer) and after(op, x, peer), called around every operation, for
                  counting, checking, a simulated link or an injected fault. op: the method's name; x: the array that
                  holds the input or receives the data (None for a barrier); peer: the other rank, or the root, else
                  None. Of a posted operation, `after` comes when it has completed. One that has sent(op, nbytes) too
                  hears after `before` how many bytes this rank sends, by the ledger's count.
    algorithm     who reduces: "auto" (the shared window where the array lives in it, else MPI), "mpi", "shared" (as
                  auto, but ValueError where the ranks share no memory), a name of comm/algorithms.ALGORITHMS, or a
                  function like those there (or "folder/file.py:name", where it stands): f(wire, x, combine), called on
                  every rank with a flat array x that is to become the reduction by combine(a, b, out=) of all ranks'
                  x; wire has rank, size, send(x, to), recv(x, source) and exchange(leaving, to, arriving, source)

    Collectives are called by all ranks in the same order, with arrays of the same shape and dtype; otherwise they
    raise a MismatchError on all ranks. Arrays are NumPy's or CuPy's, C-contiguous; `gpu_path` says how those on GPUs
    travel (comm/device.py). An array made by `empty` is in the node's shared window, where reductions are several times
    faster than MPI's own; all ranks must then pass the same piece of it. Where the ranks live on several nodes each
    node has its window, and comm/nodes.py says what goes through it. Calls come from one thread at a time. With
    async_op=True a call returns a Work at once, and the arrays may not be touched until it has been waited for.
    """

    def __deepcopy__(self, memo):
        return self     # a copy of what is cut over the ranks is cut over the same

    def __init__(self, engine, name, hooks=(), algorithm="auto", token=0):
        self.rank, self.size, self.world_ranks = engine.rank, engine.size, engine.world_ranks
        self.name, self.axes, self.token = name, {}, token
        self._splits = 0
        state.groups.add(token)
        self.hooks = list(hooks)
        self._engine = engine
        self._elsewhere = {rank for node in engine.nodes if self.rank not in node for rank in node}
        self._window = None
        if engine.size > 1:
            self._window = (Window if engine.on_one_node else NodesWindow).open(engine, name)
        self._check = self._window   # who checks what the window doesn't run
        if engine.size == 1 or not mismatch.wanted():
            self._check = None
        elif self._window is None:
            self._check = mismatch.AcrossNodes(engine, name)
        self._repeated = {}          # (id of an array, op): its reduction, worked out
        self.algorithm = algorithm

    def __repr__(self):
        return f"Communicator({self.name!r}, rank {self.rank} of {self.size})"

    @property
    def algorithm(self):
        """Who reduces; to be set alike on all ranks."""
        return self._algorithm

    @algorithm.setter
    def algorithm(self, algorithm):
        algorithm = named(algorithm)
        check.algorithm(algorithm, (*ENGINES, *ALGORITHMS))
        if algorithm == "shared" and self._window is None and self.size > 1:
            raise ValueError(f"algorithm='shared': the ranks of {self.name!r} share no memory (a node each, or a "
                               f"container of their own each); choose 'auto' or 'mpi'")
        self._algorithm = algorithm
        self._repeated.clear()

    def empty(self, shape, dtype, device="cpu"):
        """A zeroed array, C-contiguous, 64-byte aligned: in the node's shared window where there is one, or on a GPU.
        Collective. (Where a rank has no memory or file descriptor left for the window, all have it in plain memory.)"""
        if device != "cpu":
            return zeros(shape, dtype, device)
        x = None
        if self._window is not None and self._algorithm in ("auto", "shared") and np.prod(shape, dtype=np.int64):
            self.agree("empty", np.dtype(dtype), tuple(np.atleast_1d(shape).tolist()))
            x = self._window.empty(shape, dtype)
        return aligned_zeros(shape, dtype) if x is None else x

    def in_window(self, x):
        """True if the array lives in the shared window of this communicator."""
        return self._window is not None and on_host(x) and self._window.find(x) is not None

    # ------------------------------------------------------------ reductions

    def all_reduce(self, x, op="sum", async_op=False, exact=False, algorithm=None, what=None):
        """x becomes the sum, mean, max or min of all ranks' x, in place and with the same bits on all ranks.

        exact=True (sum only): ((x0+x1)+(x2+x3))+…, the balanced tree in rank order, to the last bit, whatever the
        engine; the size must be a power of two. algorithm: who reduces, for this call; see the class. what: a name for
        what x is, which must be the same on all ranks. (A posted exact all-reduce outside the window, and those by a
        function, run inside their `wait`.)
        """
        known = self._repeated.get((id(x), op))
        if known is not None and not known.fits(x):
            known = None
        if known is not None and not (exact or algorithm or what or self.hooks or ledger.open_ledgers
                                      or recording.graph is not None):
            if async_op:
                return Work(known.call, (x,), known.post())
            if not self._window.pending:
                return known.run()
        check.array("all_reduce", "x", x, written=True)
        check.reduction("all_reduce", x, op)
        if exact:
            check.exact("all_reduce", op, self.size)
        algorithm = self._algorithm if algorithm is None else named(algorithm)
        check.algorithm(algorithm, (*ENGINES, *ALGORITHMS))
        by = "" if algorithm == "auto" else f" by {name_of(algorithm)}"
        detail = op + " exact" * exact + by + (f", {what}" if what else "")
        call, key = self._begin("all_reduce", x, None, detail)
        place = self._place(x) if algorithm in ("auto", "shared") else None
        if place is not None and (self._window.keeps_tree or not exact):
            self._count_bytes("all_reduce", *self._window.sent(x))
            key = mismatch.of_piece(key, place)
            if known is None and detail == op and self._algorithm == "auto" and self._window.remembers:
                self._remember(x, op, place, call, key)
            return self._run(call, key, (x,), async_op, work=self._window.all_reduce(x, place, op, exact))
        if algorithm not in ENGINES and not exact:
            self._count("all_reduce", 0)     # its messages are counted one by one
            return self._run(call, key, (x,), async_op, start=lambda: self._by_hand(x, op, algorithm, async_op))
        self._count("all_reduce", x.nbytes, formula="all_reduce exact" if exact else "all_reduce")
        return self._run(call, key, (x,), async_op, start=lambda: self._engine_of(x).all_reduce(x, op, exact, async_op))

    def _remember(self, x, op, place, call, key):
        """Keep what was worked out for this array as long as it lives."""
        name, known = (id(x), op), self._repeated
        known[name] = Repeated(self._window, x, place, op, call, key)
        known[name].reference = weakref.ref(x, lambda _: known.pop(name, None))

    def _by_hand(self, x, op, algorithm, async_op):
        """All-reduce by one of comm/algorithms.py, or a function like them."""
        if async_op:
            return Deferred(lambda: self._by_hand(x, op, algorithm, False))
        if self.size > 1 and not on_host(x):
            host = down(x)
            self._by_hand(host, op, algorithm, False)
            up(host, x)
        elif self.size > 1:
            function = algorithm if callable(algorithm) else ALGORITHMS[algorithm].function
            function(Wire(self), x.reshape(-1), OPS[op])
            if op == "mean":
                np.divide(x, self.size, out=x)
        return None

    def reduce(self, x, dst=0, op="sum", async_op=False):
        """Rank dst's x becomes the reduction of all ranks' x, in place; the others' x stay as they are."""
        check.array("reduce", "x", x, written=self.rank == dst)
        check.rank("reduce", "dst", dst, self.size)
        check.reduction("reduce", x, op)
        call, key = self._begin("reduce", x, dst, f"{op}, dst={dst}")
        self._count("reduce", 0 if self.rank == dst else x.nbytes)
        place, key = self._piece(x, key)
        work = None if place is None else self._window.reduce(x, place, dst, op)
        return self._run(call, key, (x,), async_op, lambda: self._engine_of(x).reduce(x, dst, op, async_op), work)

    def reduce_scatter(self, out, x, op="sum", async_op=False, exact=False, what=None):
        """out becomes this rank's N-th of the reduction of all ranks' x; x.size = N · out.size.

        x stays as it is, except where out is this rank's own part of it, which is allowed. exact=True (sum only): the
        bits of an exact all_reduce. what: a name for what x is, which must be the same on all ranks.
        """
        check.array("reduce_scatter", "out", out, written=True)
        check.array("reduce_scatter", "x", x)
        check.reduction("reduce_scatter", x, op)
        check.parts("reduce_scatter", "x", x, "out", out, self.size, self.rank)
        if exact:
            check.exact("reduce_scatter", op, self.size)
        call, key = self._begin("reduce_scatter", x, None, op + " exact" * exact + (f", {what}" if what else ""))
        place, key = self._piece(x, key)
        by_tree = exact and self.size > 1 and (place is None or not self._engine.on_one_node)
        work = None if place is None or by_tree else self._window.reduce_scatter(out, x, place, op)
        across = self._window.across if work else 0
        self._count_bytes("reduce_scatter", (self.size - 1) * out.nbytes, across * out.nbytes)

        def start():
            if not by_tree:
                return self._engine_of(x).reduce_scatter(out, x, op, async_op)
            request, add_up = scatter_along_tree(self._engine_of(x), out, x, async_op)
            return Then(request, add_up) if async_op else add_up()
        return self._run(call, key, (x, out), async_op, start, work)

    # ------------------------------------------------------------ moves

    def all_gather(self, out, x, async_op=False, what=None):
        """out becomes all ranks' x, one after the other; out.size = N · x.size. x may be this rank's part of out.
        what: a name for what x is, which must be the same on all ranks."""
        check.array("all_gather", "out", out, written=True)
        check.array("all_gather", "x", x)
        check.parts("all_gather", "out", out, "x", x, self.size, self.rank)
        call, key = self._begin("all_gather", x, None, what)
        place, key = self._piece(out, key)
        work = None if place is None else self._window.all_gather(out, place, x)
        across = self._window.across if work else 0
        self._count_bytes("all_gather", (self.size - 1) * x.nbytes, across * x.nbytes)
        return self._run(call, key, (x, out), async_op, lambda: self._engine_of(x).all_gather(out, x, async_op), work)

    def gather(self, out, x, dst=0, async_op=False):
        """Rank dst's out becomes all ranks' x, one after the other; out.size = N · x.size. The others pass None."""
        check.array("gather", "x", x)
        check.rank("gather", "dst", dst, self.size)
        if self.rank == dst:
            check.array("gather", "out", out, written=True)
            check.parts("gather", "out", out, "x", x, self.size, self.rank)
        call, key = self._begin("gather", x, dst, f"dst={dst}")
        self._count("gather", 0 if self.rank == dst else x.nbytes)
        return self._run(call, key, (x, out), async_op, start=lambda: self._engine_of(x).gather(out, x, dst, async_op))

    def scatter(self, out, x, src=0, async_op=False):
        """out becomes this rank's N-th of rank src's x; x.size = N · out.size. The others pass None for x."""
        check.array("scatter", "out", out, written=True)
        check.rank("scatter", "src", src, self.size)
        if self.rank == src:
            check.array("scatter", "x", x)
            check.parts("scatter", "x", x, "out", out, self.size, self.rank)
        call, key = self._begin("scatter", out, src, f"src={src}")
        self._count("scatter", x.nbytes if self.rank == src else 0, out.nbytes if self.rank == src else 0)
        return self._run(call, key, (out, x), async_op, lambda: self._engine_of(out).scatter(out, x, src, async_op))

    def all_to_all(self, out, x, send_counts=None, recv_counts=None, async_op=False, what=None):
        """Rank i's j-th part of x becomes rank j's i-th part of out.

        The parts are `send_counts` rows of x and `recv_counts` rows of out (along the first axis, one number per
        rank); without counts they are equal. What i sends j must be what j has room for: MismatchError on all ranks.
        what: a name for what x is, which must be the same on all ranks.
        """
        check.array("all_to_all", "out", out, written=True)
        check.array("all_to_all", "x", x)
        equal = send_counts is None and recv_counts is None
        send_counts, recv_counts = check.exchange(out, x, send_counts, recv_counts, self.size, self.rank)
        call, key = self._begin("all_to_all", x, None, ", ".join(filter(None, ("" if equal else "counts", what))))
        if not equal:       # each rank has rows of its own
            key = (*key[:2], ("rows", *x.shape[1:]), key[3])
        self._count("all_to_all", x.nbytes, x.nbytes * send_counts[self.rank] // max(len(x), 1))

        def start():
            if equal or self._check is None:
                return self._engine_of(x).all_to_all(out, x, send_counts, recv_counts, async_op)
            counts = mismatch.Counts(self._engine, self.name, send_counts, recv_counts)
            if not async_op:
                counts.meet()
            request = self._engine_of(x).all_to_all(out, x, send_counts, recv_counts, async_op)
            return mismatch.Checked(counts, None, request) if async_op else None
        return self._run(call, key, (x, out), async_op, start)

    def broadcast(self, x, src=0, async_op=False):
        """x becomes rank src's x, in place."""
        check.array("broadcast", "x", x, written=self.rank != src)
        check.rank("broadcast", "src", src, self.size)
        call, key = self._begin("broadcast", x, src, f"src={src}")
        self._count("broadcast", x.nbytes if self.rank == src else 0)
        return self._run(call, key, (x,), async_op, start=lambda: self._engine_of(x).broadcast(x, src, async_op))

    def barrier(self):
        """Return when all ranks have come here."""
        call, key = self._begin("barrier")
        self._count("barrier", 0)
        if self._window is None or not self._engine.on_one_node:
            self._run(call, key, (None,), False, start=self._engine.barrier)
        else:
            self._do(call, (None,), False, lambda: self._window.meet(self._window.post(key)))

    def agree(self, op, dtype=None, shape=None, detail=None):
        """Return when all ranks have come here, having compared what they mean by it: MismatchError on all of them if
        they don't say the same. For calls that aren't one operation on an array, but messages, which nobody compares.
        op, detail: words; dtype, shape: of the array, if there is one. The ledger and the hooks don't hear of it."""
        if self._check is not None:
            state.enter(Call(self, op))
            try:
                self._check.meet(self._check.post((op, dtype, shape, detail)))
            finally:
                state.leave()

    # ------------------------------------------------------------ groups

    def split(self, color, key=None, name=None):
        """The communicator of all ranks that pass the same color, ordered by key (default: as here). Collective.

        color: an integer ≥ 0, or None for a rank that joins none and gets None. The default name is `NAME/COLOR`.
        The hooks and the algorithm of this communicator are copied.
        """
        if color is not None and (not isinstance(color, (int, np.integer)) or color < 0):
            raise ValueError(f"split: color={color!r} must be an integer ≥ 0, or None to join no group")
        self.agree("split")
        self._splits += 1
        engine = self._engine.split(color, self.rank if key is None else key)
        if engine is None:
            return None
        token = self.token and mismatch.fingerprint((self.token, self._splits, int(color)))
        return Communicator(engine, f"{self.name}/{color}" if name is None else name, self.hooks,
                            self._algorithm, token)

    def late(self, number=None):
        """World ranks that haven't called collective `number` (None: the last one posted), of those that can be seen
        from here and told (with MINITORCH_CHECK=0 not all calls are numbered)."""
        return [] if self._check is None else self._check.late(number)

    def free(self):
        """Give back what MPI keeps for it, of which it has some 2,000; afterwards nothing can be sent. Collective.
        (On several nodes the parts of its window, three more, stay.)"""
        self.agree("free")
        self._engine.free()

    # ------------------------------------------------------------ the parts of every call

    def _place(self, x):
        if self._window is None or self._algorithm not in ("auto", "shared") or not on_host(x):
            return None
        return self._window.find(x)

    def _piece(self, x, key):
        """(where x lies in the window, or None; the key, which says it too: it must be the same piece on all ranks)."""
        place = self._place(x)
        return place, key if place is None else mismatch.of_piece(key, place)

    def _begin(self, op, x=None, peer=None, detail=None, number=None, tag=None):
        """The hooks hear of an operation: (its Call, the key by which they compare it). number, tag: the Call's."""
        refuse_in_graph(op)
        for hook in self.hooks:
            hook.before(op, x, peer)
        like = Like.of(x)
        return Call(self, op, like, peer, number, tag), (op, *(like or (None, None)), detail)

    def _count(self, op, nbytes, share=None, formula=None):
        if ledger.open_ledgers or self.hooks:
            if share is None:   # the first and last byte of this rank's N-th
                first, last = cut(nbytes, self.rank, self.size)
                share = last - first
            self._count_bytes(op, WIRE_BYTES[formula or op](nbytes, share, self.size))

    def _count_bytes(self, op, nbytes, between=0):
        """between: of the nbytes that this rank sends, those that go to another node, where that is known."""
        if ledger.open_ledgers:
            ledger.message(self.name, op, nbytes, between)
        for hook in self.hooks:
            if hasattr(hook, "sent"):
                hook.sent(op, nbytes)

    def _run(self, call, key, buffers, async_op, start=None, work=None):
        """Check and run, or post, a collective: this rank's `work()` in the window if given, else `start()`."""
        if not on_host(buffers[0]):
            key = (*key[:3], f"{key[3] or ''} on a GPU".strip())
        if work is not None:
            def start():
                return Request(self._window, self._window.post(key, caller() if async_op else None), work)
            return self._do(call, buffers, async_op, start if async_op else lambda: start().wait())
        if self._check is None:
            return self._do(call, buffers, async_op, start)
        if async_op:        # MPI doesn't match it with a call that blocks
            number = self._check.post((*key[:3], ", ".join(filter(None, (key[3], "posted")))), caller())
            return self._do(call, buffers, True, lambda: mismatch.Checked(self._check, number, start()))

        def checked():
            self._check.meet(self._check.post(key))
            state.met = True
            start()
        return self._do(call, buffers, False, checked)

    def _do(self, call, buffers, async_op, start):
        """Run or post an operation."""
        begin = ledger.now() if ledger.open_ledgers else None
        if async_op:
            return Work(call, buffers, start(), begin)
        state.enter(call)
        try:
            start()
        finally:
            state.leave()
        for hook in self.hooks:
            hook.after(call.op, buffers[0], call.peer)
        if begin is not None:
            detail = timeline_detail(buffers[0])
            ledger.span("communication", call.op, begin, detail)
            ledger.span("compute", "wait", begin, detail)
        return None


tell(Communicator, NAMES["Communicator"])


def name_of(algorithm):
    """As the ranks compare it, and as summaries show it."""
    return algorithm.__qualname__ if callable(algorithm) else algorithm


def world_of_one(algorithm="auto"):
    """The communicator of a process that is alone."""
    return Communicator(LocalEngine(), "world", algorithm=algorithm)
