"""Pipeline parallelism: the ranks hold different layers, and the batch goes through them in pieces.

    stages = cut_sequential(model, mesh["pp"].size)                         # alike on all ranks
    stage = DistributedDataParallel(stages[mesh.coords["pp"]], mesh["dp"])  # the other axis divides the samples
    pipeline = Pipeline([stage], mesh["pp"], one_forward_one_backward(mesh["pp"].size, 8))
    for step, batch in enumerate(loader.epoch(0)):
        optimizer.zero_grad()
        loss = pipeline.run(batch, loss_sum, seed=0, step=step, over=mesh["dp"])
        optimizer.step()

What a stage sends is its output forward and its input's gradient backward, of one micro-batch each; backward ends at
the lowest stage that has something to train. Gradients add up over the micro-batches. With
DistributedDataParallel(exact=True) its micro-shards are the micro-batches, and the bits are those of one process in
exact mode.

    stage = fully_shard(stages[mesh.coords["pp"]], mesh["dp"], stage=1)     # instead: ZeRO inside of a pipeline

Of a chunk that is fully_shard's the parameters are gathered once a step, in its first forward; in stage 3 they stay
until its last backward is through, instead of travelling for each micro-batch. Gradients add up whole, in all stages,
and are reduced once, as the last backward completes them. Sent per step, of a chunk's ψ elements, whatever the number
of micro-batches: 2ψ · (N-1)/N. Between steps a rank holds what its stage says. Llama 3 was trained so (Dubey et al.
2024, "The Llama 3 herd of models", 3.3.2), Megatron-LM's distributed optimizer is stage 1.

Where a schedule cuts backward in two (zb_h1), the gradient of a stage's input is sent as soon as it is there, and the
gradients of weights are made later, without doing anything twice (autodiff/input_first.py). The first stage sends none:
all of its backward is in W.

Where it combines a forward with a backward (dual_pipe_v), the two take turns at their all-to-alls
(parallel/turns.py); the forward begins.

A step of training ends for all ranks together. run() returns the mean loss everywhere, by a broadcast, for which ranks
that are through wait for the others; only then come the norm for clipping, a GradScaler's agreement, the optimizer. So
zb_h2 and zb_v, whose ranks are at work for the same time each but begin and end one after the other, wait here for
(p-1)·T_F per step. In their paper ranks begin the next batch meanwhile, with an optimizer step that is taken back if it
turns out that some rank had a NaN or too large a norm ("post-validation"). Nothing is taken back here, and no number
depends on the schedule.
"""

from contextlib import ExitStack, nullcontext
from functools import partial

import numpy as np

from ...autodiff import ops, reverse
from ...autodiff.input_first import InputFirst
from ...autodiff.primitive import lower, state
from ...autodiff.tensor import Tensor
from ...backend import device_of, random_scope, xp
from ...comm.mesh import check_no_mesh
from ...data.loader import cut
from ...data.packing import apart
from ...ledger import spanning
from ...nn.decoding import evaluating
from ...optim.clip import clip_stages, is_part_of_pipeline, tree_sum
from .. import tied
from ..fsdp.fully_sharded import FullySharded
from ..same_model import check_same
from ..turns import in_turns
from ..wrapping import ReducingModule
from . import documents
from .checks import check_alike, check_chunks, check_links, check_statistics, described, is_trained, measured
from .messages import Messages
from .schedule_steps import BACKWARD, FORWARD, INPUT, WEIGHT, combined, placement_of, slices_of
from .schedules import play
from .slices import Slices, check_slices


def _losses(y):
    """What a last stage has made of targets: (losses, an auxiliary one or None)."""
    return y if isinstance(y, tuple) else (y, None)


def _summed(y, labels):
    """Its sum."""
    losses, aux = _losses(y)
    return ops.sum(losses) if aux is None else ops.sum(losses) + labels.size * aux


def _without_gradients(before):
    """The backward of what leads to no parameter of this stage: only what stages behind have of a tied one's gradient
    comes to it."""
    if before:
        with reverse.one_pass("backward"):
            reverse.run(before)


class Pipeline:
    """This rank's part of a model that is cut by layers.

    chunks     its modules: stages placement_of(schedule)[comm.rank], in this order; plain, DistributedDataParallel or
               fully_shard
    comm       the Communicator along the pipeline
    schedule   for comm.size ranks: gpipe(…), one_forward_one_backward(…), interleaved(…), zb_h1(…), zb_h2(…), zb_v(…),
               v_half(…), v_min(…), dual_pipe_v(…) or a list of one's own. Exact mode takes the micro-batches' gradients
               in their order
    lengths    of a schedule with slices: their numbers of positions (default: equal ones; slices.py)
    live       the greatest number of micro-batches (of a stage), or of their slices, whose activations this rank has
               held at once
    waiting    the greatest number of those for which it has held what W needs
    Every output's first axis is the samples, and the rest of its shape depends on the inputs' shape alone. Collective.
    A parameter that several stages share gets the sum of their gradients (parallel/tied.py). ValueError for a schedule
    that isn't for these ranks, or can't be done, or isn't everybody's.
    """

    def __init__(self, chunks, comm, schedule, lengths=None):
        check_no_mesh("Pipeline", comm, "have the stages of one pipeline", "pp")
        check_same(comm, described(schedule), "Pipeline: the ranks have different schedules",
                   "Make it from the same settings on all of them.")
        placement = placement_of(schedule)
        trained, self.exact, self.reads = check_chunks(chunks, comm)
        counts = [*map(len, trained)]
        if counts != [len(stages) for stages in placement]:
            raise ValueError(f"Pipeline: a schedule for {len(schedule)} ranks whose stages are {placement}, on "
                             f"{comm.size} ranks, which have {', '.join(map(str, counts))} chunks")
        play(schedule)      # raises if it can't be done
        self.chunks, self.comm, slices = list(chunks), comm, slices_of(schedule)
        # What is done, by pieces: micro-batches, or their slices, in the order of forwards
        self.steps = [step._replace(micro_batch=step.micro_batch * slices + step.slice, slice=0)
                      for step in schedule[comm.rank]]
        for stage, chunk in zip(placement[comm.rank], chunks, strict=True):
            if isinstance(chunk, FullySharded) and sum(counts) > 1:     # one stage is no pipeline: it does as it would
                chunk.becomes_stage(stage == 0, stage == sum(counts) - 1)
        self._check_order(schedule)
        # stage: (its rank, its place among that rank's chunks)
        self.places = {stage: (rank, chunk) for rank, stages in enumerate(placement)
                       for chunk, stage in enumerate(stages)}
        self.pieces = 1 + max(step.micro_batch for step in self.steps)
        self.micro_batches, self.slices = self.pieces // slices, None
        self.last = len(self.places) - 1
        # The lowest stage that has something to train: it sends no gradient down, and none below it gets one.
        self.lowest = min((stage for stage, (rank, chunk) in self.places.items() if trained[rank][chunk]),
                          default=self.last)
        self.device = next((device_of(lower(p)) for chunk in chunks for p in chunk.parameters()), "cpu")
        self.messages = Messages(comm, self.places, self.pieces, self.device, slices)
        if slices > 1 or lengths is not None:
            check_slices(self.chunks, comm, self.exact)
            self.slices = Slices(self.chunks, slices, lengths)
        stages = {stage: self.chunks[chunk] for stage, (rank, chunk) in self.places.items() if rank == comm.rank}
        self.ties, self.chains = tied.Ties(stages, comm, self.exact), None
        if self.exact:
            check_links(self.ties, schedule)
            self.chains = tied.Chains(self.ties, stages, comm, self.micro_batches, self.device, self.messages.tags)
        if comm.size > 1:
            is_part_of_pipeline([p for chunk in chunks for p in chunk.parameters()])
        self.live = self.waiting = 0
        self.under_way = None       # "run" or "evaluate", until it has come to its end

    def _check_order(self, schedule):
        """ValueError, on all ranks, if exact mode's sums, which are one tree over the micro-batches, would get them in
        another order on one of them."""
        if not self.exact:
            return
        for rank, row in enumerate(schedule):
            for stage in {step.stage for step in row}:
                order = [step.micro_batch for step in row if step.stage == stage and step.kind in (BACKWARD, WEIGHT)]
                if order != sorted(order):
                    raise ValueError("Pipeline: exact mode adds gradients up in the order of the micro-batches, and on "
                                     f"rank {rank} of this schedule B or W come in the order "
                                     f"{', '.join(map(str, order))}: sort these, or leave exact mode")

    def run(self, batch, loss_sum, *, seed, step, units=1, micro_shards=8, over=None, scaler=None, packed=False):
        """Forwards and backwards of a global batch; then all gradients are complete. Returns its mean loss, everywhere.

        batch      of a Loader whose rank and size are those of the other axis: a pipeline's ranks have the same rows
        loss_sum   loss_sum(output, labels) -> the SUM of the losses, a one-element Tensor; called on the last stage.
                   None: the last stage is given the labels as `targets`, and gives losses, whose sum is taken
                   (cut_gpt's do, without logits); with experts a pair, of which the second, an auxiliary loss, is added
                   as often as there are labels
        units      losses per sample: the sum is divided by batch.count · units
        over       the Communicator of the axis that divides the samples, mesh["dp"]; None: the batch is whole
        scaler     a GradScaler that scales the loss which backward begins from; its comm has all ranks of the pipeline
        packed     whether the inputs are packed rows (data/packing.py), whose documents the stages take (documents.py)
        Unless all of that fits, and rows and documents are the same ones on all ranks of the pipeline, all get an
        error, before anything is sent.
        """
        self._begin("run", batch, loss_sum, packed, scaler, over)
        self.kept, self.halves = {}, {}
        self.scale, self.scaler = 1 / (batch.count * units), scaler
        if scaler is not None:      # a stage with nothing to train hears of no GPU otherwise, and the others' are there
            scaler.move_to(self.device)
        self.statistics = {}        # exact mode: of (chunk, micro-batch), until its gradients come
        self.left = [self.pieces] * len(self.chunks)
        self.random = seed, step, batch.count, micro_shards
        self.ties.begin()
        with self._told():
            for steps in combined(self.steps):
                works = [partial(self._do, *step[:3]) for step in steps]
                if len(works) == 1:
                    works[0]()
                else:
                    in_turns(*works, device=self.device)
        self.messages.finish()
        if self.chains is not None:
            self.chains.finish()
        self.ties.add_up()
        return self._of_all(over, 1) * self.scale

    def evaluate(self, batch, measure, *, over=None, packed=False):
        """The forwards of a global batch alone, in evaluation mode and off the tape, in the schedule's order. Returns
        what is measured, summed over the whole batch, everywhere: a float, or a float64 array.

            right = lambda output, labels: (output.argmax(1) == labels).sum()
            sum(pipeline.evaluate(batch, right, over=mesh["dp"]) for batch in Loader(…).epoch(0)) / len(test_labels)

        measure     measure(output, labels) -> SUMS over the samples: a number, or several in a tuple or an array of the
                    same shape in all calls; called on the last stage, for each micro-batch. None: the last stage is
                    given the labels as `targets`, and the losses that it gives are summed, without an auxiliary one
        batch, over, packed    as in run(), with the same errors
        TypeError or ValueError for what can't be added up. A rank holds one micro-batch's activations, and outputs
        that the next stage hasn't taken yet. Modules are in the modes they were in afterwards.
        """
        self._begin("evaluate", batch, measure, packed)
        with self._told(), ExitStack() as stack:
            for chunk in self.chunks:
                stack.enter_context(evaluating(chunk))
                if isinstance(chunk, FullySharded):     # once, and not for each micro-batch
                    stack.enter_context(chunk.gathered())
            for kind, k, stage, _ in self.steps:
                if kind == FORWARD:
                    if self.slices is not None:
                        self.slices.at(k)
                    _, y, labels = self._through(stage, self.places[stage][1], k)
                    if stage < self.last:
                        self._hand_on(stage, k, y)
                    else:
                        self.sums.append(measured(_losses(y)[0].sum() if measure is None else measure(y, labels)))
                    if self.slices is not None:
                        self.slices.read(self.places[stage][1], k)
        self.messages.finish()
        check_alike(self.sums)
        return self._of_all(over)

    def _told(self):
        """Inside, the chunks know whether they work on slices."""
        return nullcontext() if self.slices is None else self.slices.told()

    def _do(self, kind, k, stage):
        """A step."""
        _, chunk = self.places[stage]
        if self.slices is not None:
            self.slices.at(k)
        if kind == FORWARD:
            seed, step, count, micro_shards = self.random
            with random_scope(seed, step, count, self.shards[k].rows, micro_shards):
                self._forward(stage, chunk, k)
        elif kind == INPUT:
            self._input_gradient(stage, chunk, k)
        else:
            self._weight_gradients(kind, stage, chunk, k)
            if self.slices is not None:
                self.slices.through(chunk, k)

    def _begin(self, who, batch, last, packed, scaler=None, over=None):
        """A batch; `last` is what is called on the last stage, or None."""
        self._agree(who, batch, scaler, packed, last, over)
        if self.under_way:
            raise RuntimeError(f"an earlier {self.under_way}() of this pipeline has raised, and what it has sent is "
                               "still on its way: it would be taken for this batch's. Start again from a checkpoint")
        self.under_way, self.at_end, self.sums, first = who, last, [], self.shards[0].inputs
        self.messages.begin((who, state.autocast and state.autocast.dtype, first.dtype, first.shape[1:]))

    def _agree(self, who, batch, scaler, packed, last, over=None):
        """Before anything is sent: that all ranks have the same rows, and none an error. One that all have is raised,
        of another a MismatchError tells all of them."""
        said, problem = None, None
        try:
            self._check_scaler(scaler)
            self._check_frozen()
            self._check_loss(who, last)
            check_statistics(self.chunks if who == "run" else [], over, self.exact)
            self.shards, self.packed = self._shards_of(batch), packed
            said = (f"rows {self.shards[0].rows[0]} to {self.shards[-1].rows[1]} of {batch.count}, "
                    f"{documents.told(self.chunks, batch.inputs, packed, self.reads)}")
        except (RuntimeError, TypeError, ValueError) as error:
            said, problem = str(error), error
        self.comm.agree(f"Pipeline.{who}", detail=said)
        if problem is not None:
            raise problem

    def _check_scaler(self, scaler):
        if scaler is not None and scaler.enabled and not set(self.comm.world_ranks) <= set(
                scaler.comm.world_ranks if scaler.comm is not None else ()):
            raise ValueError("Pipeline: a GradScaler that looks at this rank's stages only would leave out other steps "
                             "than the others do: make it with comm=…, all ranks that train the model")

    def _check_frozen(self):
        if thawed := [stage for stage, (rank, chunk) in self.places.items()
                      if rank == self.comm.rank and stage < self.lowest and is_trained(self.chunks[chunk])]:
            raise RuntimeError(f"Pipeline: stage {thawed[0]} has something to train, and had nothing when the Pipeline "
                               f"was made: gradients end at stage {self.lowest}. Make the Pipeline anew, on all ranks")
        self.ties.check()

    def _check_loss(self, who, last):
        rank, chunk = self.places[self.last]
        if last is None and rank == self.comm.rank and not documents.takes_targets(self.chunks[chunk]):
            name = "measure" if who == "evaluate" else "loss_sum"
            raise ValueError(f"{type(self).__name__}.{who}: {name}=None, and the last stage's forward takes no "
                             f"`targets` of which to make losses: give {name}, or take stages of cut_gpt")

    def _shards_of(self, batch):
        """The batch's micro-batches, or their slices."""
        shards = batch.shards if len(batch.shards) > 1 else cut(batch.shards[0], self.micro_batches)
        if len(shards) != self.micro_batches:
            raise ValueError(f"Pipeline: the schedule has {self.micro_batches} micro-batches, and this rank's batch "
                             f"comes in {len(shards)} micro-shards")
        return shards if self.slices is None else self.slices.cut(shards)

    def _of_all(self, over, size=None):
        """The end of a batch: the sums of all of it, which the last stage knows (so many numbers; None: it tells), on
        all ranks."""
        total, src = np.asarray(tree_sum(self.sums), np.float64), self.places[self.last][0]
        if size is None:
            total = self.comm.broadcast_object(total, src)
            flat = total.reshape(-1).copy()
        else:
            flat = total.reshape(size)
            self.comm.broadcast(flat, src)
        if over is not None:
            over.all_reduce(flat, exact=self.exact)
        self.under_way = self.shards = None
        return flat.reshape(total.shape) if total.ndim else float(flat[0])

    def clip_grad_norm_(self, max_norm, error_if_nonfinite=True):
        """optim.clip_grad_norm_ of the whole model, after run(): of all ranks' stages. Returns the norm before; in
        exact mode it has the bits of one process. Collective."""
        mine = {stage: self.chunks[chunk].parameters() for stage, (rank, chunk) in self.places.items()
                if rank == self.comm.rank}
        return clip_stages(mine, max_norm, self.comm, error_if_nonfinite)

    def _through(self, stage, chunk, k):
        """A micro-batch's input, which has arrived, its output, and its labels."""
        shard, module, numbers = self.shards[k].to(self.device), self.chunks[chunk], None
        x = shard.inputs
        if self.packed:
            x, numbers = apart(x)
            numbers = documents.of_chunk(module, numbers)
        if stage:
            x = Tensor(self.messages.receive(FORWARD, stage, k, len(shard.inputs)))
            x.requires_grad_(stage > self.lowest)
        wrapped, ends = isinstance(module, ReducingModule), stage == self.last and self.at_end is None
        with nullcontext() if wrapped else spanning("compute", "forward"):      # a wrapper notes its own
            y = documents.call(module, x, numbers, **{"targets": shard.labels} if ends else {})
        return x, y, shard.labels

    def _hand_on(self, stage, k, y):
        """What the next stage works on."""
        samples = len(self.shards[k].inputs)
        if not hasattr(y, "shape"):
            raise TypeError(f"Pipeline: stage {stage} gives a {type(y).__name__}; what goes from stage to stage is one "
                            "array: put several together along the last axis, and take them apart in the next stage")
        if y.shape[:1] != (samples,):
            raise ValueError(f"Pipeline: stage {stage} makes {list(y.shape)} of {samples} samples; the first axis must "
                             "be the samples")
        self.messages.send(FORWARD, stage + 1, k, lower(y))

    def _forward(self, stage, chunk, k):
        self.live = max(self.live, len(self.kept) + 1)
        x, y, labels = self._through(stage, chunk, k)
        if stage == self.last:
            y = _summed(y, labels) if self.at_end is None else self.at_end(y, labels)
            self.sums.append(y.item())
            y = y * self.scale
            y = y if self.scaler is None else self.scaler.scale(y)
        else:
            self._hand_on(stage, k, y)
        self.kept[chunk, k] = x, y
        module = self.chunks[chunk]
        if isinstance(module, ReducingModule) and module.exact:     # its statistics go with its gradients
            self.statistics[chunk, k] = module.statistics.exchange()

    def _weight_gradients(self, kind, stage, chunk, k):
        """B, or W: those of the chunk's last micro-batch complete its gradients, and a wrapper reduces them."""
        self.left[chunk] -= 1
        module = self.chunks[chunk]
        if (chunk, k) in self.statistics:
            module.statistics.exchange(self.statistics.pop((chunk, k)))
        wrapped = isinstance(module, ReducingModule) and is_trained(module)
        seen = module.backwards if wrapped else 0
        with (module.no_sync() if wrapped and self.left[chunk] and not module.exact else nullcontext(),
              nullcontext(()) if self.chains is None else self.chains.backward(stage, k) as before):
            if kind == BACKWARD:
                self._backward(stage, chunk, k, before)
            elif halves := self.halves.pop((chunk, k)):
                halves.weights(before)
            else:
                _without_gradients(before)
            if wrapped and module.backwards == seen:        # no parameter is used: a wrapper counts it all the same
                module.backward_without_gradients()

    def _backward(self, stage, chunk, k, before):
        x, y, arrived = self._from_behind(stage, chunk, k)
        if stage > self.lowest:     # at once: a wrapper's backward ends when its gradients are summed
            x.register_post_accumulate_grad_hook(lambda x: self.messages.send(BACKWARD, stage - 1, k, lower(x.grad)))
        if getattr(y, "requires_grad", False):      # not so of first stages with nothing to train
            reverse.backward_from(y, None if arrived is None else Tensor(arrived), before=before)
        else:
            _without_gradients(before)
        if stage > self.lowest and x.grad is None:
            self.messages.send(BACKWARD, stage - 1, k, xp.zeros_like(lower(x)))

    def _input_gradient(self, stage, chunk, k):
        x, y, arrived = self._from_behind(stage, chunk, k)
        halves = found = None
        if getattr(y, "requires_grad", False):
            halves = InputFirst(y, x if stage > self.lowest else None)
            found = halves.input(xp.ones_like(lower(y)) if arrived is None else arrived)
        if stage > self.lowest:
            self.messages.send(BACKWARD, stage - 1, k, xp.zeros_like(lower(x)) if found is None else found)
        self.halves[chunk, k] = halves
        self.waiting = max(self.waiting, len(self.halves))

    def _from_behind(self, stage, chunk, k):
        """A micro-batch's input and output, and what the next stage says of the latter: None for the last one, and for
        those that get no gradient."""
        x, y = self.kept.pop((chunk, k))
        ends = stage == self.last or stage < self.lowest
        return x, y, None if ends else self.messages.receive(BACKWARD, stage, k, None, like=lower(y))
