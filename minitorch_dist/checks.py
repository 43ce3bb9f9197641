"""What a training program is asked to look at on its way: whether the replicas have parted, whether the ranks work out
the same, which one is slow; and faults on purpose, to see it found. The options are program.ArgumentParser's.

    checks = Checks(args, world, model, steps, loss_sum)        # before anything has begun
    checks.begin()
    for batch in batches:
        …                                                       # a step
        checks.after(run.step, batch, saves, progress.say)      # and then the checkpoint, which is checked so
    checks.end(progress.say)
"""

from . import faults, training
from .parallel.same_bits import check_same_bits, replicated
from .parallel.stragglers import Stragglers


class Checks:
    """The checks of one run.

    args      the command line, of which --check-replicas, --check-work (where the program has it) and --stragglers say
              every how many steps
    model     a DistributedDataParallel, a fully_shard model, or the list of a pipeline's stages on this rank
    steps     of the run; updates: of the optimizer in each, by which faults count theirs
    loss_sum  as training.train_step's, for --check-work; work: what else training.check_work takes
    peers     the ranks with the same work (default: all), as a pipeline's that share its samples

    Making them is collective. ValueError on all ranks for what can't be compared, and for MINITORCH_FAULT's faults that
    can't strike in this run.
    """

    def __init__(self, args, world, model, steps, loss_sum=None, peers=None, updates=1, **work):
        faults.struck.clear()
        stages = model if isinstance(model, list) else [model]
        faults.refuse(world, [p for stage in stages for p in stage.parameters()], updates * steps)
        self.world, self.model, self.loss_sum, self.work = world, model, loss_sum, work
        self.replicas, self.again, self.every = args.check_replicas, getattr(args, "check_work", None), args.stragglers
        if self.replicas:
            copies = max(world.all_gather_object(max((comm.size for comm, _ in replicated(model)), default=0)))
            if not copies:
                raise ValueError(f"--check-replicas {self.replicas}: every rank holds pieces of its own, of which "
                                 "there is no copy to compare them with")
            self.compares = copies > 1
        self.stragglers = Stragglers(world, self.every, peers=peers) if self.every else None
        self.report, self.updates, self.first = None, updates, updates * steps      # updates that were done before

    def begin(self):
        """The first step comes next: what was before, as a warm start, is no part of it."""
        if self.stragglers:
            self.stragglers.begin()

    def after(self, step, batch, saves, say):
        """So many steps are done, the last with this batch; saves: a checkpoint comes next. ReplicaError on all ranks
        where they differ. Collective."""
        self.first = min(self.first, self.updates * (step - 1))
        if self.stragglers and (new := self.stragglers.step()):
            if new.slow and (self.report is None or set(new.slow) != set(self.report.slow)):
                say(f"step {step:,}: {new}")
            self.report = new
        if self.replicas and (saves or step % self.replicas == 0):
            check_same_bits(self.model, step, self.world)
        if self.again and (saves or step % self.again == 0):
            training.check_work(self.model, batch, self.loss_sum, self.world, step=step - 1, turn=step // self.again,
                                **self.work)

    def end(self, say):
        """The run has ended: what is left to be told. Collective."""
        if self.stragglers:
            say(str(self.report) if self.report else f"--stragglers {self.every}: the run has ended before so many "
                "steps, and nothing is told")
        if self.replicas and not self.compares:
            say(f"--check-replicas {self.replicas}: no two ranks hold the same parameters, and nothing was compared")
        if self.again and self.world.size == 1:
            say(f"--check-work {self.again}: one rank has nobody to compare its work with")
        for fault in faults.spared(self.world, self.first):
            say(f"{faults.VARIABLE}: {fault}: it hasn't struck")
