"""Which models can be wrapped, and for which ranks; and what DistributedDataParallel and fully_shard have in common.

A model may say of itself that it isn't whole on each rank: parameters that lie on a mesh (sharding/annotate.py),
modules that are `divided_over` ranks with samples of their own (experts/moe.py, context/context.py), a wrapper that
reduces gradients.
"""

from contextlib import contextmanager, nullcontext

from .. import backend
from .. import comm as communication
from ..autodiff.primitive import lower, state
from ..autodiff.tensor import Tensor
from ..comm.mesh import check_no_mesh
from ..comm.reduction import REDUCIBLE
from ..ledger import keep, open_ledgers
from ..nn.module import Module
from .batch_norm import MicroShardStatistics, other_buffers, synchronise
from .exact import Sources, check_shape
from .same_model import broadcast, check_unchanged, from_rank_0, tables


class ReducingModule(Module):
    """A module whose gradients are those of the global batch: all but how they are summed.

    wrapper  what it is called in messages
    passes   backward passes per step: exact mode has one per micro-shard; done: those since the last that reduced
    sync     whether the next backward reduces
    frozen   [(name, parameter)] that want no gradient; whole: those of them that each rank has whole
    hook     runs when a parameter's gradient is complete; at_end: when a backward is through; backwards: how many were
    sources  exact mode's [(divided module, its Sources)]; leaf_of: {id of a parameter: its leaf there}

    A subclass makes its storage between __init__ and _look_after_the_rest.
    """

    def __init__(self, wrapper, module, comm, exact, micro_shards):
        super().__init__()
        check_no_mesh(wrapper, comm, "divide the samples", "dp")
        check_unwrapped(module)
        check_not_annotated(module, wrapper)
        self.add_module("", module)
        self.comm = comm if comm is not None else communication.world()
        self.exact, self.done, self.sync = exact, 0, True
        self.passes = 1
        if exact:
            check_shape(micro_shards, self.comm.size)
            self.passes = micro_shards // self.comm.size
        self.sources = sources_of(module, self.comm, wrapper) if exact else []
        self.leaf_of = {key: leaf for _, sources in self.sources for key, (_, leaf) in sources.leaves.items()}
        self.backwards = 0
        self.hook, self.at_end = self._gradient_ready, self._backward_ends      # each once, to be known by identity

    def __getattr__(self, name):
        module = self.__dict__.get("_modules", {}).get("")
        if module is not None and hasattr(module, name):
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}. Here: model.module.{name}")
        return self.__getattribute__(name)      # which has failed once, and says why

    def leaves_of(self, parameters):
        """The leaves of Sources that backward leaves these parameters' gradients in; None: in themselves."""
        leaves = [self.leaf_of[id(p)] for p in parameters if id(p) in self.leaf_of]
        return leaves or None

    def _look_after_the_rest(self, broadcast_buffers, ranks_of, cut=()):
        """Of what isn't trained. ranks_of(tensor): the Communicator of those that would hold the same; cut: ids of
        parameters whose values lie cut over them already. Collective."""
        module = self.module
        for _, m in divided(module):
            m.summed = True
        for m, sources in self.sources:
            m.sources = sources
        self.tree = tables(module)
        self.frozen = [(name, p) for name, p in module.named_parameters() if not p.requires_grad]
        self.whole = [(name, p) for name, p in self.frozen if id(p) not in cut]
        for name, values in (*self.whole, *module.named_buffers()):
            broadcast(ranks_of(values), lower(values), name)
        self.synchronised_buffers = other_buffers(module) if broadcast_buffers and not self.exact and \
            self.comm.size > 1 else []
        self.statistics = MicroShardStatistics(module, self.comm) if self.exact else None
        if not self.exact:
            synchronise(module, self.comm)

    @property
    def module(self):
        """The wrapped module."""
        return self._modules[""]

    def __call__(self, *inputs, **options):
        drawn = self.training and ("refuse" if self.exact else "warn" if self.comm.size > 1 > self.comm.rank else None)
        with backend.random_by_sample(drawn) if drawn else nullcontext():
            return super().__call__(*inputs, **options)

    def _forward_begins(self):
        check_unchanged(self.frozen, self.tree)
        for _, p in self.whole if open_ledgers else ():
            keep(lower(p), "parameter")
        if self.training and self.sync:
            from_rank_0(self.comm, self.module, self.synchronised_buffers)

    def _in_backward(self):
        """Whether a backward pass that has come to this model is under way."""
        return state.callbacks is not None and self.at_end in state.callbacks

    def _backward_ends(self):
        self.backwards += 1
        self._backward_done()

    @contextmanager
    def no_sync(self):
        """Inside, backward only adds up local gradients; the next one outside reduces the sum."""
        if self.exact:
            raise RuntimeError("no_sync in exact mode: it accumulates micro-shards by itself")
        outer, self.sync = self.sync, False
        try:
            yield
        finally:
            self.sync = outer

    def _come_last(self, leaf):
        """A hook that was registered after wrapping is still to run, and may change this gradient, which waits for the
        end of this backward; from the next one on this hook is the last."""
        leaf.hooks = (*(h for h in leaf.hooks if h is not self.hook), self.hook)

    def _zeroed_half_way(self):
        return RuntimeError(f"gradients were zeroed after {self.done} of the {self.passes} backward passes of a step "
                            "in exact mode. Call zero_grad() once, before the first; to give up a step half-way, call "
                            "forget_step() of the model")


# ---------------------------------------------------------------- what a model says of itself

def divided(module):
    """[(path, module)] of those that say they are `divided_over` ranks which have samples, or parts of them, of their
    own: experts (experts/moe.py), and what shares sequences (context/context.py), which has no parameters."""
    return [(path, m) for path, m in module.named_modules() if hasattr(m, "divided_over") and m.divided_over.size > 1]


def held_apart(module, comm, wrapper):
    """{id of a parameter: (the Communicator of the ranks that hold the same, that of those that hold the rest)} of what
    is divided over some of comm's ranks, as the samples are: of modules that say `divided_over`. ValueError unless comm
    has all these ranks. Collective where there are any."""
    apart, made = {}, {}
    for path, m in divided(module):
        over, own = m.divided_over, [p for p in m._parameters.values() if p is not None]
        if strangers := sorted(set(over.world_ranks) - set(comm.world_ranks)):
            raise ValueError(f"{wrapper}: {path or 'the module'} is divided over the ranks of {over.name!r}, which "
                             f"have samples of their own, and {comm.name!r} lacks {strangers} of them: wrap it for all "
                             f"ranks that have samples, as with mesh['dp', {axes_of(over)}]. (Of experts: ranks that "
                             "share matrices have the same samples, and can share experts where they share sequences, "
                             "too: sequence_parallel=True)")
        if own and over not in made:
            made[over] = comm.split(over.rank, name=f"{comm.name} but {over.name}")
        apart |= {id(p): (made[over], m.comm) for p in own}
    return apart


def axes_of(comm):
    """The names of a Communicator's axes, as a mesh takes them."""
    return ", ".join(map(repr, comm.name.split(",")))


def sources_of(module, comm, wrapper):
    """[(divided module, its Sources)] of exact mode, whose tree over comm's ranks must have those that a module is
    divided over as a whole subtree: else a ValueError, as for divided sequences."""
    found, ranks = [], list(comm.world_ranks)
    for path, m in divided(module):
        over = list(m.divided_over.world_ranks)
        if not m._parameters:
            raise ValueError(f"{wrapper}: exact mode can't be had of divided sequences, whose gradients are sums over "
                             "ranks inside a product: leave one of the two out")
        if m.comm.size > len(over):
            raise ValueError(f"{wrapper}: exact mode can't be had of experts over {m.comm.name!r}, some of which share "
                             f"sequences: divide them over {m.divided_over.name!r} alone, or leave exact mode out")
        if set(over) <= set(ranks) and ranks[ranks.index(over[0]) // len(over) * len(over):][:len(over)] != over:
            raise ValueError(f"{wrapper}: exact mode adds up along a tree over the ranks {ranks}, in which "
                             f"{path or 'the module'} must be divided over neighbours, not over {over}: take "
                             f"mesh['dp', {axes_of(m.divided_over)}], the samples of neighbours along the last axis")
        found.append((m, Sources(m)))
    return found


def check_summed(module, y):
    """RuntimeError where the backward of y, which a module that is `divided_over` ranks has made in training, would
    leave each rank its own gradients of what all hold alike: nobody has set `summed`."""
    if not module.summed and module.divided_over.size > 1 and module.training and isinstance(y, Tensor) \
            and y.requires_grad:
        name, over = type(module).__name__, module.divided_over.name
        raise RuntimeError(f"{name}: the ranks of {over!r} have samples, or parts of them, of their own, and nobody "
                           "sums the gradients of what they hold alike: wrap the whole model in Distributed"
                           "DataParallel(model, comm), or fully_shard it, over all ranks that have samples, as "
                           f"mesh['dp', {axes_of(module.divided_over)}]; where that is done otherwise, set summed = "
                           f"True of its {name}")


def check_rows(model, batch, rows, world):
    """ValueError where ranks have rows in common, unless they share the work on each."""
    n = batch.count * world.size // getattr(model, "comm", world).size
    if rows > n and rows > n * max((m.divided_over.size for _, m in divided(model) if not m._parameters), default=1):
        raise ValueError(f"train_step: a batch of {batch.count} samples, of which the {world.size} ranks have {rows} "
                         "together: each needs rows of its own, as of Loader(…, rank=world.rank, size=world.size)")


def annotated(module):
    """{name: Sharded} of the parameters that lie on a mesh (sharding/annotate.py)."""
    return {f"{path}.{name}".lstrip("."): getattr(m, name) for path, m in module.named_modules()
            for name in m._parameters if hasattr(getattr(m, name), "comms")}


# ---------------------------------------------------------------- what a wrapper refuses

def check_reducible(module, wrapper, instead=""):
    """ValueError where gradients can't be summed over ranks. instead: what else to do."""
    if odd := [f"{name} ({p.dtype})" for name, p in module.named_parameters()
               if p.requires_grad and p.dtype not in REDUCIBLE]:
        raise ValueError(f"{wrapper}: gradients of {', '.join(odd)} can't be summed over ranks: train in float32 or "
                         f"float64{instead}")


def check_not_annotated(module, wrapper, instead=None):
    """ValueError if parameters lie on a mesh, where ops and backward make the sums over ranks. instead: what to do
    (default: annotate the batch)."""
    if found := list(annotated(module)):
        instead = instead or f'leave {wrapper} out, and annotate the batch, as in annotate.split(x, 0, mesh["dp"])'
        raise ValueError(f"{wrapper}: {', '.join(found[:4])} of this model lies on a mesh, where gradients are summed "
                         f"already: {instead}")


def sharing_a_batch(model, name):
    """The Communicator over which a wrapper in the model sums gradients, for what is called `name`. ValueError where
    there is none, and several ranks."""
    for m in model.modules():
        if isinstance(m, ReducingModule):
            return m.comm
    if (world := communication.world()).size > 1:
        raise ValueError(f"{name}: which of the {world.size} ranks have samples of one batch? Give their comm, or the "
                         "model in its DistributedDataParallel or fully_shard")
    return world


def check_alone(module, wrapper):
    """ValueError if a rank can't go through the module by itself, because others must answer its messages."""
    check_not_annotated(module, wrapper, f"{wrapper} wants a model that each rank has whole")
    for path, m in divided(module):
        raise ValueError(f"{wrapper}: {path or 'the model'} is divided over the ranks of {m.divided_over.name!r}, "
                         f"which must go through it together: {wrapper} wants a model that each rank has whole")
    for path, m in module.named_modules():
        if isinstance(m, ReducingModule) and m.comm.size > 1:
            raise ValueError(f"{wrapper}: {path or 'the model'} is a {type(m).__name__} over {m.comm.size} ranks, "
                             f"whose backward waits for all of them: {wrapper} wants a model that each rank has whole")


def check_unwrapped(module):
    """ValueError if some of the module belongs to a wrapper that reduces gradients already: both would reduce it."""
    wrapped = [path or "all" for path, m in module.named_modules() if isinstance(m, ReducingModule)]
    hooked = [name for name, p in module.named_parameters() if p.leaf is not None
              and any(isinstance(getattr(h, "__self__", None), ReducingModule) for h in p.leaf.hooks or ())]
    if wrapped or hooked:
        raise ValueError(f"DistributedDataParallel or fully_shard: {', '.join(wrapped or hooked[:4])} of this model "
                         f"{'is one' if wrapped else 'belongs to one'} already, and both would reduce the gradients: "
                         "use that one, or wrap copy.deepcopy(module) of the module inside. A model is wrapped once, "
                         "as a whole; which blocks are gathered together is fully_shard's units=list(model.blocks)")
