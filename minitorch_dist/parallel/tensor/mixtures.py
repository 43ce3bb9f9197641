"""A mixture of experts where ranks share the sequences (sequence_parallel.py): they route whole ones, or their parts.

    experts over mesh["ep"]             x_r ── all-gather ── route, experts of all positions ── this rank's part of y

        The t ranks do the same work, and have the same gradients.

    experts over mesh["ep", "tp"]       x_r ── route ── all-to-all ── experts ── all-to-all ── y_r

        No work is done twice, and no sequence gathered: rows go from the rank that has the position to the one that has
        the expert. A rank holds 1/t of the experts that it would hold otherwise.

What a token gets must then depend on no other token: no capacity. What the auxiliary loss is made of are means over
tokens, which are those over all ranks' positions: a few numbers per expert are summed. So are gradients of the router
and of shared experts.

    mesh = comm.DeviceMesh(dp=-1, ep=2, tp=2)
    parallelize_module(model, mesh["tp"], plan_of(model), sequence_parallel=True)
    parallelize_module(model, mesh["ep", "tp"], moe.plan_of(model))         # in any order
    model = DistributedDataParallel(model, mesh["dp", "ep"])                # who has samples of its own

Source: Liu et al. 2025, "MoE parallel folding: heterogeneous parallelism mappings for efficient large-scale MoE model
training with Megatron Core".
"""

from ...nn.module import Module
from ...nn.moe import MoE
from ..collectives import gather_from, scatter_to
from ..fsdp.fully_sharded import FullySharded
from ..positions import TIME, check_axes, check_routing, shared_by
from .plans import meet
from .sequence_parallel import WHOLE, dropouts_on_part, summed


class SequenceParallelMoE(Module):
    """A MoE between the parts: (batch, time/t, dim) -> (y of the same shape, the auxiliary loss on all ranks).

    Whole sequences are routed, as in one process. Each rank does all of that work and keeps all that the MoE keeps for
    backward, with "regather" too, just as without sequence parallelism; all have the same gradients, and nothing is
    summed. With `own` each rank routes its own positions. It adds nothing to the MoE's names.
    """

    def __init__(self, moe, comm):
        super().__init__()
        self.add_module("", moe)
        self.comm, self.own = comm, False

    @property
    def moe(self):
        """The wrapped MoE."""
        return self._modules[""]

    def forward(self, x):
        check_axes("SequenceParallelMoE", x)
        if self.own:
            with summed(self.moe, self.comm, but=self.moe.experts):
                return self.moe(x)
        y, aux = self.moe(gather_from(x, self.comm, TIME))
        return scatter_to(y, self.comm, TIME), aux


def check(model, chosen, comm):
    """ValueError where a mixture's experts are to be divided over ranks that share its sequences, by a plan's call
    (chosen: {path: way}, over comm) or before, and these ranks can't route their own positions."""
    sharing = {id(m.moe): m.comm for m in model.modules() if isinstance(m, SequenceParallelMoE)}
    for path, m in model.named_modules():
        if not isinstance(m, MoE):
            continue
        positions = sharing.get(id(m), comm if chosen.get(path) == WHOLE else None)
        experts = comm if chosen.get(path) == "experts" else getattr(m.experts, "comm", None)
        if positions is None or experts is None or not meet(positions, experts):
            continue
        what = f"parallelize_module: {path}: ranks of {experts.name!r}, which divide the experts,"
        if strangers := sorted(set(positions.world_ranks) - set(experts.world_ranks)):
            raise ValueError(f"{what} share sequences with {strangers}, which don't: divide the experts over all of "
                             f'{positions.name!r}, as in mesh["ep", "{positions.name}"], or over none of them')
        check_routing(f"{what} share its sequences", m, "divide the experts over ranks with samples of their own, not "
                      f"{positions.name!r} too")


def route_own(model):
    """Let ranks that share a mixture's sequences, and its experts as well, route their own positions from now on.
    Collective over the ranks of both."""
    made = {}       # (who shares the sequences, who the experts): of these those with samples of their own
    for m in [m for m in model.modules() if isinstance(m, SequenceParallelMoE) and not m.own]:
        positions, experts = m.comm, m.moe.experts
        if hasattr(experts, "comm") and meet(positions, experts.comm):
            if (positions, experts.comm) not in made:
                names = [name for name in experts.comm.name.split(",") if name not in positions.name.split(",")]
                made[positions, experts.comm] = experts.comm.split(
                    positions.rank, name=",".join(names) or experts.comm.name)
            m.own, experts.divided_over = True, made[positions, experts.comm]
            shared_by(m.moe, alike=positions)
            dropouts_on_part(m, positions)      # a router's adapter has one


def collected(model):
    """{name of an expert's parameter: the Communicator of those that share its sequences}, of a fully_shard model whose
    full_state_dict has it on the first of these alone: ranks with samples of their own have other experts."""
    if not isinstance(model, FullySharded):
        return {}
    own = [(path, m) for path, m in model.named_modules() if isinstance(m, SequenceParallelMoE) and m.own]
    return {f"{path}.experts.{name}": m.comm for path, m in own for name, p in m.moe.experts.named_parameters()
            if model.grid_of(p).over is not None}
