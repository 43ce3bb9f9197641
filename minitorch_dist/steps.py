"""A step of training, of ranks that divide the samples."""

import copy
import math
from contextlib import nullcontext

from . import backend, divergence, faults, optim
from .autodiff import autocast
from .backend import xp
from .data.loader import cut
from .parallel import BinaryCounter, same_bits
from .parallel.wrapping import check_rows

STOP = 1 << 40      # a wish to stop, in one number with a count of rows


def train_step(model, optimizer, batch, loss_sum, world, *, seed, step, units=1, clip=None, micro_shards=8,
               accumulate=1, stop=False, amp=None, scaler=None, noise=None, spikes=None, finite=True):
    """One optimizer step on a global batch.

    model      a DistributedDataParallel; the batch is moved to its device
    loss_sum   loss_sum(model, shard) -> the SUM of the shard's losses, a one-element Tensor
    units      losses per sample (1 for images, tokens for text): the sum is divided by batch.count · units
    clip       the gradients' greatest norm, or clip(model), which sees to it, and returns what it was
    accumulate run the rank's rows in so many pieces, one after another, to hold fewer activations; the gradients are
               reduced once, after the last
    stop       this rank wants to end; as soon as one does, all learn of it in the same step
    amp        the 16 bits of forward under autocast, "float16" or "bfloat16"; None: all in the model's own precision
    scaler     a GradScaler: the step is left out where it finds inf or NaN
    noise      a GradientNoiseScale of the model, which takes this step in; its small batches are the pieces
    spikes     a SpikeGuard: the step is left out where loss or gradient norm is far above those before
    finite     Diverged on all ranks where the loss is no number any more; False: it goes on

    Returns (the global batch's mean loss, whether some rank wants to stop), equal on all ranks. TypeError for a model
    whose gradients nobody sums, or no world; ValueError on all ranks where they have rows in common.
    """
    if not hasattr(model, "exact"):
        raise TypeError(f"train_step: a {type(model).__name__}, whose gradients nobody sums over the ranks: wrap it in "
                        "DistributedDataParallel or fully_shard")
    if world is None:
        raise TypeError("train_step: world is None; give it the ranks that have samples, as comm.world()")
    strike = faults.of_step(world, step + 1)
    strike("begin", model)
    optimizer.zero_grad()
    if noise is not None:
        noise.forget()      # what a step that broke off has left
    device = next(model.parameters()).device
    total = BinaryCounter()
    scale = 1 / (batch.count * units)
    if accumulate > 1 and model.exact:
        raise ValueError(f"accumulate={accumulate} in exact mode, which runs one micro-shard at a time by itself: "
                         "raise micro_shards instead")
    if model.exact and len(batch.shards) != model.passes:
        raise ValueError(f"train_step: exact mode runs {model.passes} micro-shards on each of these ranks, and the "
                         f"batch has {len(batch.shards)}: give the Loader rank=comm.rank, size=comm.size, and "
                         "micro_shards as the model has it")
    scaler = optim.GradScaler(enabled=False) if scaler is None else scaler
    with autocast(amp) if amp else nullcontext(), divergence.quiet():
        for shard in batch.shards:      # one per rank; in exact mode, this rank's micro-shards
            pieces, loss = cut(shard, accumulate), 0.0
            for i, piece in enumerate(pieces):
                with (model.no_sync() if i + 1 < len(pieces) else nullcontext(),
                      backend.random_scope(seed, step, batch.count, piece.rows, micro_shards)):
                    losses = strike("computed", loss_sum(model, piece.to(device)))
                    scaler.scale(losses * scale).backward()
                if noise is not None:
                    noise.after_backward(len(piece.labels))
                loss += losses.item()
            total.add(xp.array([loss, shard.rows[1] - shard.rows[0] + STOP * bool(stop)], xp.float64))
    strike("reduced", model)
    sums = total.total()
    world.all_reduce(sums, exact=model.exact)
    stops, rows = divmod(int(sums[1]), STOP)
    check_rows(model, batch, rows, world)
    loss = float(sums[0]) * scale
    if finite:
        divergence.check(loss, step + 1, optimizer, scaler)     # before the gradients go into the parameters
    if noise is not None:
        noise.update(scaler.get_scale())
    spiked = False
    if clip is not None or spikes is not None:
        scaler.unscale_(optimizer)
        if not scaler.found_inf(optimizer):
            norm = clip(model) if callable(clip) else optim.clip_grad_norm_(
                model.parameters(), math.inf if clip is None else clip)
            spiked = spikes is not None and spikes.spiked(step + 1, loss=loss, **{} if norm is None else {"norm": norm})
    if not spiked:
        with divergence.quiet():
            scaler.step(optimizer)
    scaler.update()
    return loss, stops > 0


def check_work(model, batch, loss_sum, world, *, seed, step, turn, micro_shards=8, amp=None):
    """ReplicaError on every rank, with the ranks that differ from most, unless all work out the same gradient, to the
    last bit: that of one shard of the batch, on a copy of the model. It is one rank's first that has rows, of each rank
    that has one in turn.

    For a processor that computes wrongly, whose error the sum over the ranks gives to all of them. It finds what
    happens again and again; a bit that turned over once, in another step, is gone. As exact mode it needs one type of
    CPU and one number of BLAS threads. Collective; a shard is sent to all, 4 bytes from each, and each runs forward and
    backward once. model: a DistributedDataParallel; the rest as in train_step.
    """
    mine = next((shard for shard in batch.shards if len(shard.labels)), None)      # of no rows all gradients are alike
    owners = [rank for rank, has in enumerate(world.all_gather_object(mine is not None)) if has]
    owner = owners[turn % len(owners)]
    shard = world.broadcast_object(mine if world.rank == owner else None, src=owner)
    replica = copy.deepcopy(model.module)
    replica.zero_grad()
    with (autocast(amp) if amp else nullcontext(),
          backend.random_scope(seed, step, batch.count, shard.rows, micro_shards)):
        loss = loss_sum(replica, shard.to(next(replica.parameters()).device))
        (faults.of_step(world, step + 1)("computed", loss) * (1 / batch.count)).backward()
    named = [(f"the gradient of {name}", p.grad) for name, p in replica.named_parameters() if p.grad is not None]
    same_bits.check_same(world, [(world, named)], f"the ranks work out different gradients of the rows "
                         f"{shard.rows[0]:,} to {shard.rows[1]:,} of step {step + 1:,}")
