"""ZeRO and FSDP: data parallelism in which each rank keeps a part of what all ranks would hold alike.

    model = fully_shard(nn.GPT(vocabulary=65, length=64), comm.world(), stage=3)
    optimizer = optim.AdamW(model.parameters(), 1e-3)       # of this rank's shards: its state exists for 1/N alone
    for batch in loader.epoch(e):
        optimizer.zero_grad()
        for shard in batch.shards:
            loss = cross_entropy(model(shard.inputs), shard.labels, reduction="sum") / batch.count
            loss.backward()             # the last one leaves, on every rank, its shard of the global batch's gradient
        optimizer.step()

Stage 1 cuts the optimizer's state, 2 gradients as well, 3 parameters as well: what each holds and sends is a table in
zero.py. In every stage gradients are reduce-scattered, as soon as those of a unit are complete. Stages 1 and 2 then
gather the stepped parameters once, in the next forward. Stage 3 gathers a unit's before its forward, and frees them
after it; and again in backward, where the next unit's travel meanwhile:

    forward    gather u0, use, free | gather u1, use, free | …
    backward   … | gather u1 and, ahead, u0 | use u1, reduce its gradients, free | use u0, reduce, free

With `shard_over` N are those ranks, which share a copy of the state; the copies' gradients are added up (hybrid.py).
With reshard_after_forward=g backward gathers from g neighbours (hybrid.py), and mp_policy may have all of it sent in 8
and 4 bits (few_bits.py): ZeRO++.
Of experts that are divided over ranks (experts/moe.py) they are those that hold the same.

Sources: Rajbhandari et al. 2020, "ZeRO"; Zhao et al. 2023, "PyTorch FSDP".
"""

from contextlib import contextmanager

from ... import ledger
from ...autodiff.modes import saved_tensors_hooks
from ...autodiff.primitive import mode, state
from ...autodiff.reverse import at_end_of_backward, one_pass
from ...autodiff.writes import log, tick
from ...backend import xp
from ..full_state import load_full_state_dict
from ..same_model import check_same_model
from ..wrapping import ReducingModule, check_reducible, held_apart
from .gathering import Gathering
from .grouping import default_units, either, frozen, group, trained
from .hybrid import check_communicator, grid_of, grid_of_share, group_size, with_near
from .mixed_precision import AS_IT_IS
from .trained_units import TrainedUnit
from .units import Unit

FROZEN = 1 << 16    # beside counts of ranks that have used a parameter: one that has frozen it


def fully_shard(module, comm=None, stage=3, **options):
    """The module with its optimizer state, gradients and parameters cut over the ranks: see FullySharded."""
    return FullySharded(module, comm, stage, **options)


class FullySharded(ReducingModule):
    """A module whose state is cut over the ranks; all conventions are DistributedDataParallel's.

    module             built alike on all ranks (checked), before any optimizer; rank 0's values are broadcast. Frozen
                       parameters are cut in stage 3, as units of their own, which are gathered with those beside them;
                       in the other stages they are whole, and buffers always. Divided experts are units of their own,
                       beside the rest of their module
    comm               all ranks that have samples (default: the world's)
    shard_over         hybrid sharding: the Communicator of the ranks that share one copy of the state, say a node's
                       (default: comm); the other groups of comm hold copies. ValueError unless these make a grid
    stage              1: the optimizer's state is cut; 2: gradients as well; 3: parameters as well
    units              modules whose parameters are gathered and reduced together (default: those in the outermost
                       Sequentials and ModuleLists, such as a GPT's blocks). A parameter belongs to the innermost unit
                       around all modules that hold it; what is in none is a unit by itself, alive while the whole model
                       runs. The model is wrapped once: in place of fully_shard(block) for each, units=list(blocks)
    reshard_after_forward  False: stage 3 keeps a unit's values from forward to backward, and gathers once (2ψ); None:
                       True, but False in a Pipeline. A number g of neighbours, say a node's, or their Communicator: g
                       ranks keep the values together, 1/g each, and backward gathers from them (hybrid.py); not with
                       divided experts. ValueError unless g > 1 divides the ranks that share a copy
    mp_policy          a MixedPrecisionPolicy: parameters and gradients of 16 bits beside float32 pieces
    broadcast_buffers, exact, micro_shards   as DistributedDataParallel's

    parameters() and named_parameters() give this rank's pieces, under the module's names (units.py). The module's own
    tensors have values during forward only; whoever reads them at another time gets a ShardedParameterError. Hooks on a
    piece see the sum over the ranks, when all gradients are there. Of pieces that are frozen after wrapping, alike on
    all ranks, no gradients are made from the next forward on, nor sent, where all of a unit are (of a part of one zeros
    are: TrainedUnit.reduce says why); and what a step has made of them until then is dropped, which one process and
    DistributedDataParallel keep. A loss may have pieces in it, 0.05 * sum((p ** 2).sum() for p in model.parameters()):
    each rank has its part of that penalty, whose gradients are added to the sums (not in exact mode, nor beside hooks
    on them: a backward of its own there).

    Inside no_sync(), and between exact mode's micro-shards, a rank keeps whole gradients (exact: log₂ of the
    micro-shards + 1 of them), in every stage. What a checkpoint keeps of a unit's values is freed when backward has
    used it. In stage 3 all ranks go through the same units, and use the same parameters of each, or get a
    MismatchError; in the others a parameter may be used by some ranks only. Those that no rank has used in the last
    step stand in `unused_parameters`, and have no gradient. Units of at most two modules are gathered at a time
    (gathering.py); one that backward needs again when two others were used since is gathered again.
    """

    def __init__(self, module, comm=None, stage=3, units=None, reshard_after_forward=None, mp_policy=AS_IT_IS,
                 broadcast_buffers=True, exact=False, micro_shards=8, shard_over=None):
        if stage not in (1, 2, 3):
            raise ValueError(f"fully_shard: stage={stage!r}; 1 cuts the optimizer's state, 2 gradients as well, 3 "
                             "parameters as well (0 is DistributedDataParallel)")
        check_communicator(shard_over)
        super().__init__("fully_shard", module, comm, exact, micro_shards)
        if owned := [name for name, p in module.named_parameters() if p.leaf is not None and p.leaf.flat is not None]:
            raise ValueError(f"fully_shard: {', '.join(owned[:4])} of this model lives in an optimizer's flat buffer "
                             "already: make the optimizer afterwards, of the fully_shard model's parameters()")
        mp_policy = AS_IT_IS if mp_policy is None else mp_policy
        self.stage, self.reshard, self.policy = stage, group_size(reshard_after_forward, stage), mp_policy
        apart = held_apart(module, self.comm, "fully_shard")
        if units is None:
            units = default_units(module, either if stage == 3 else trained)
        groups = group(module, units, apart=apart)
        cut = group(module, units, frozen, apart) if stage == 3 else []
        check_same_model(module, self.comm, "fully_shard", apart, stage=stage,
                         units=[name for _, name, _ in (*groups, *cut)], reshard_after_forward=self.reshard,
                         mp_policy=mp_policy, broadcast_buffers=broadcast_buffers, exact=exact,
                         micro_shards=micro_shards, shard_over=shard_over and shard_over.size)
        check_reducible(module, "fully_shard")
        mp_policy.check(module, stage, exact)
        self._check_near(apart)
        self.grid = with_near(grid_of(self.comm, shard_over), reshard_after_forward, self.reshard)
        grids = {each: grid_of_share(self.grid, *each) for each in dict.fromkeys(apart.values())}
        self.apart = {key: grids[each] for key, each in apart.items()}
        if not groups:
            raise ValueError("fully_shard: the model has no parameter that requires grad, so nothing to train (a stage "
                             "of a pipeline that has none goes unwrapped)")
        self.under_way = False      # a backward that hasn't come to its end
        self.spoiled, self.unused_parameters = False, []
        self.begins = self.ends = True      # the whole model: see becomes_stage
        self._make_units(groups, cut)
        self._look_after_the_rest(broadcast_buffers, lambda tensor: self.grid_of(tensor).everyone, self.piece_of)
        self.frozen += [(name, piece) for unit in self.units[len(self.trained):]
                        for name, piece in zip(unit.names, unit.pieces, strict=True)]

    def _check_near(self, apart):
        if apart and not isinstance(self.reshard, bool | None):
            raise ValueError(f"fully_shard: reshard_after_forward over {self.reshard} ranks of a model with divided "
                             "experts, whose neighbours have others: take True or False")

    def grid_of(self, tensor):
        """The Grid of a parameter or a buffer of the module: of an expert's share (experts/moe.py) another one."""
        return self.apart.get(id(tensor), self.grid)

    def _make_units(self, groups, cut):
        """groups: of what is trained; cut: of what is frozen and cut all the same."""
        self.trained = [TrainedUnit(name, named, self.grid_of(named[0][1]), self.stage, self.policy,
                                    self.leaves_of(tensor for _, tensor in named)) for _, name, named in groups]
        self.units = self.trained + [Unit(f"{name}, frozen", named, self.grid_of(named[0][1]))
                                     for _, name, named in cut]
        self.unit_of = {key: unit for unit in self.trained for key in unit.places}
        self.piece_of = {id(s.tensor): piece for unit in self.units
                         for s, piece in zip(unit.segments, unit.pieces, strict=True)}
        for unit in self.trained:
            for leaf in unit.leaves:
                leaf.register_post_accumulate_grad_hook(self.hook)
        self.order, self.posted, self.in_flight = self.trained, 0, []     # of reductions
        self.once = self.stage < 3      # parameters are gathered once a step, all of them in its first forward
        self.stale = True       # if so: other ranks may have stepped parameters that this one hasn't gathered
        self.keeping = False    # stage 3: values are here from the first forward to the backward that reduces
        of_module = {}
        for (m, _, _), unit in zip((*groups, *cut), self.units, strict=True):
            of_module.setdefault(id(m), (m, []))[1].append(unit)
        self.values = Gathering(self.units, of_module.pop(id(None), (None, []))[1], self.reshard is not False,
                                self._in_backward, self._value_used)
        for m, units in of_module.values() if self.stage == 3 else ():
            self.values.watch(m, units)

    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        """(name, this rank's piece) of every parameter, under the module's names; in stages 1 and 2 frozen ones are
        whole."""
        return ((name, self.piece_of.get(id(p), p)) for name, p in self.module.named_parameters(
            prefix, recurse, remove_duplicate))

    # ------------------------------------------------------------ forward

    def forward(self, *inputs, **options):
        if self.begins:
            inputs, options = self.policy.inputs(inputs), self.policy.inputs(options)
        if not self._in_backward():     # where a checkpoint runs forward again
            self._clean_up()
        self._forward_begins()
        for unit in self.trained:
            unit.follow()
        for unit in self.units if ledger.open_ledgers else ():
            unit.count()
        with ledger.spanning("compute", "forward"):
            if self.once:
                self._refresh()
                return self._handed_on(self.module(*inputs, **options))
            with self.values.forward():
                if self.values.held:
                    self._check_unstepped("inside gathered(), whose values are older: end that block before the step")
                self.values.enter(self.values.outer)
                outer = state.again_in
                with saved_tensors_hooks(*self.values.packing(*state.pack or (None, None))), \
                        mode(again_in=lambda start: self.values.again(start, outer)):
                    output = self.module(*inputs, **options)
                self.values.leave(self.values.outer, output)
            return self._handed_on(output)

    def _handed_on(self, output):
        return self.policy.outputs(output) if self.ends else output

    def _refresh(self):
        """Gather the parameters that the optimizers have stepped."""
        if self.stale:
            if self.stage == 3 and not self.keeping:
                self.values.settle()
                self.values.hold(1)
                self.keeping = True
            for unit in self.units:
                unit.post_refresh()
            for unit in self.units:
                unit.refresh()
                unit.open()
            self.stale, self.dated = False, tick()
        self.values.entered = [(self.dated, [unit]) for unit in self.units]
        self._check_unstepped("after a forward had gathered the parameters from all ranks, which the others have not "
                              "seen: call the optimizer's step right after backward, before any other forward, and "
                              "give the model to what writes to all of it, as optimizer.averaged(model)")

    def _check_unstepped(self, told):
        """RuntimeError where a piece was written since the values were gathered, and what is wrong with that."""
        for unit in self.units:
            if write := log.since(unit.part, self.dated):
                raise RuntimeError(f"{write[1]} has written to this rank's part of {unit.name} {told}")

    # ------------------------------------------------------------ what backward triggers

    def _pass_begins(self):
        """The backward pass under way has come to this model, maybe for the first time."""
        if not at_end_of_backward(self.at_end):
            return
        self._clean_up()
        self.under_way = True
        zeroed = any(unit.flat.forgotten for unit in self.trained)
        if zeroed and (kept := [name for unit in self.trained for name in unit.remembered()]):
            raise RuntimeError("zero_grad() has come to some parameters, but not to what no_sync() has added up of "
                               f"{', '.join(kept[:4])}: call the model's, which forgets all gradients together")
        if self.exact and self.done and zeroed:
            raise self._zeroed_half_way()
        if self.spoiled and not zeroed:
            raise RuntimeError("a backward of this step has raised an exception, and what no_sync() had added up is "
                               "gone: call zero_grad() and begin the step anew")
        self.spoiled = False
        self.done = 0 if zeroed else self.done
        self.last = self.done + 1 == self.passes if self.exact else self.sync
        for unit in self.trained:
            if zeroed:
                unit.empty()
            unit.flat.forgotten.clear()
            unit.expect()
            if not self.last:       # whose gradients nobody would miss before the last
                unit.check_zeroed(self.exact)
        self.order = [unit for unit in self.values.backward_begins() if unit in self.trained]
        self.posted = 0

    def _value_used(self):
        if state.callbacks is not None:     # a functional transform leaves no gradients here
            self._pass_begins()

    def _gradient_ready(self, tensor):
        """A parameter's gradient is complete."""
        self._pass_begins()
        if tensor.leaf.hooks[-1] is not self.hook:      # a later one may change it: it is taken at the end
            self._come_last(tensor.leaf)
            return
        self.unit_of[id(tensor)].take(tensor)
        # Strictly in order, so that all ranks post the same sequence.
        while self.posted < len(self.order) and not self.order[self.posted].missing:
            self._complete(self.order[self.posted])
            self.posted += 1

    def _complete(self, unit):
        """A unit's backward is over: reduce its gradients, and free its values. Where all of it has been frozen nobody
        waits for a sum; what is frozen may be wanted still, for the gradients of what lies below."""
        if not unit.wanted:
            unit.forget()
        elif self.last:
            unit.reduce(self.exact, folded=self.exact and self.done > 0)
            self.in_flight.append(unit)
            if len(self.in_flight) > 1:     # beside the one on its way a rank holds one more unit's whole gradients
                self.in_flight.pop(0).finish(self.exact)
        elif self.exact:
            unit.fold()
        if not unit.users and len(unit.wanted) == len(unit.pieces):
            unit.drop()

    def _let_go(self):
        """Stage 3: what has been kept over forwards and backwards may be freed."""
        if self.keeping:
            self.values.hold(-1)
            self.keeping, self.stale = False, True

    def _backward_done(self):
        """The backward pass is through: complete what unused parameters have left open, and wait."""
        for unit in self.trained:
            for leaf in unit.leaves:
                if leaf.grad is not None:
                    unit.take(leaf)
        for unit in self.order[self.posted:]:
            self._complete(unit)
        for unit in self.in_flight:
            unit.finish(self.exact)
        self.in_flight = []
        for unit in self.order if self.last else ():
            unit.settle()
        if self.last:
            self._let_go()
        self.values.backward_ends()
        if self.exact:
            self.statistics.fold(self.last)
        self.done = 0 if self.last else self.done + 1
        if self.last:
            self._hand_out()
        self.under_way = False

    def _hand_out(self):
        """Every parameter that some rank has used has its gradient, the others have none."""
        named = [each for unit in self.trained for each in zip(unit.names, unit.pieces, unit.used, strict=True)]
        counts = xp.array([users + FROZEN * (not piece.requires_grad) for _, piece, users in named], xp.int32)
        self.comm.all_reduce(counts)
        frozen_on, counts = (each.tolist() for each in divmod(counts, FROZEN))
        names = [name for name, *_ in named]
        if odd := [name for name, ranks in zip(names, frozen_on, strict=True) if 0 < ranks < self.comm.size]:
            raise RuntimeError(f"fully_shard: {', '.join(odd[:4])} of parameters() is frozen on some ranks, which make "
                               "no gradients of it, and not on others: call requires_grad_() alike on all ranks")
        self.unused_parameters = [name for name, users, ranks in zip(names, counts, frozen_on, strict=True)
                                  if not (users or ranks)]
        counts = iter(counts)
        for unit in self.trained:
            unit.hand_out([next(counts) for _ in unit.pieces])
            if self.stage < 3:
                unit.close()
        self.stale = True
        for unit in self.trained:
            unit.run_hooks()

    def _clean_up(self):
        """Clear away what a forward or a backward that raised has left: on all ranks, that have met the exception in
        the same place. Where they haven't, their calls differ from here on, and the mismatch check says so."""
        if self.under_way:
            self.spoiled = not self.exact and (self.done > 0 or not self.last)
            self._forget()

    def _forget(self):
        """What backward passes have added up counts for nothing."""
        for unit in self.trained:
            unit.forget()
            for leaf in unit.leaves if state.callbacks is None else ():     # else the next backward's first is there
                leaf.grad = None
        self.values.backward_ends()
        self.in_flight, self.under_way, self.done = [], False, 0
        if self.exact:
            self.statistics.forget()

    # ------------------------------------------------------------ for users

    def set_reshard_after_backward(self, reshard):
        """False: stage 3 gathers all parameters once a step, in its first forward, and keeps them until the backward
        that reduces gradients is through, over any number of micro-batches. True, at the beginning: not so. The other
        stages do it always."""
        self.once = self.stage < 3 or not reshard
        if not self.once:
            self._let_go()

    def becomes_stage(self, begins, ends):
        """It is a stage of a Pipeline, which gathers once a step. What goes from stage to stage is as it would be in
        one process: mp_policy's inputs and outputs are those of the whole model."""
        self.set_reshard_after_backward(False)
        self.begins, self.ends = begins, ends

    def backward_without_gradients(self):
        """A backward pass that reaches no parameter here: this rank's zeros, for those that wait for them."""
        with one_pass("backward"):
            self._pass_begins()

    def forget_step(self):
        """Give up the step under way, whose backward passes so far then count for nothing."""
        self._forget()
        self.zero_grad()

    @contextmanager
    def gathered(self):
        """Inside, the module's own parameters have their whole values, to be read: for generating text, or looking at
        weights. Collective. RuntimeError if something has written to them, which would be lost."""
        kept = self.keeping
        if self.once:
            self._refresh()
        elif not self.values.held:
            if not (self.values.running or self._in_backward()):
                self._clean_up()
                self.values.settle()
            for unit in self.units:
                unit.gather()
                unit.open()
            self.dated = tick()
        begin, change = tick(), int(self.stage == 3)
        self.values.hold(change)
        try:
            yield self.module
            written = [unit.name for unit in self.units if log.since(unit.whole, begin)]
        finally:
            self.values.hold(-change)
            if not kept:
                self._let_go()
        if written:
            raise RuntimeError(f"parameters of {', '.join(written)} were written inside gathered(), which changes "
                               "this rank's copy only: use load_state_dict")

    def state_dict(self):
        """RuntimeError: no rank has it."""
        raise RuntimeError("state_dict of a fully_shard model: its values are cut over the ranks; "
                           "full_state_dict(model) collects them on rank 0")

    def load_state_dict(self, saved):
        """Write what full_state_dict gave, or the unwrapped model's state_dict: rank 0's counts. Collective; errors as
        Module.load_state_dict, on all ranks."""
        load_full_state_dict(self, saved)

    def __reduce_ex__(self, protocol):
        raise TypeError("a fully_shard model can't be copied or pickled: its units and hooks belong to these "
                        "parameters and these ranks. Save full_state_dict(model)")
