"""What is sent along each axis of a mesh: collectives and messages, as data. SENT_ALONG is the table.

Counts are those of the library's own code, which the ledger confirms.
"""

from collections import Counter
from dataclasses import dataclass
from math import prod

from ..autodiff.ops.attention import band_of
from ..comm.cost import predict
from ..comm.reduction import WIRE_BYTES
from ..flat import BLOCK
from ..nn.windows import DELTA, LINEAR, STATES
from ..parallel.context.ring_attention import steps
from ..parallel.encodings import Blocks, row_bytes
from ..parallel.experts.moe import dispatched_in
from ..parallel.experts.once import visits

# shard: of dp, where only some share a copy (Job.shard_over); near: of these, who keep values until backward
AXES = ("dp", "shard", "near", "tp", "pp", "cp", "ep")
# How tensor parallelism cuts a block.
COLUMNS, ROWS = ("attention.qkv", "attention.project", "mlp.0"), ("attention.out", "mlp.2")


@dataclass(frozen=True)
class Collective:
    """`count` times per step among so many ranks of an axis; nbytes is of the whole array (all_to_all: of a rank's), or
    of the message (op "send")."""

    axis: str
    ranks: int
    op: str
    nbytes: float
    count: float = 1

    @property
    def sent(self):
        """Bytes that a rank sends: the mean over the ranks, which differ by some bytes where they don't divide it."""
        return self.count * WIRE_BYTES[self.op](self.nbytes, self.nbytes / self.ranks, self.ranks)

    def seconds(self, costs):
        """By rings, of which an all-gather or a reduce-scatter is one half; all_to_all: a message to each other."""
        n = self.ranks
        if self.op == "send":
            return self.count * (costs.alpha + costs.beta * self.nbytes)
        if self.op == "all_to_all":
            return self.count * (n - 1) * (costs.alpha + costs.beta * self.nbytes / n)
        return self.count * predict("ring", n, self.nbytes, costs) / (1 if self.op == "all_reduce" else 2)


def travelling(bits, nbytes):
    """Bytes of an element on its way, which has `nbytes` otherwise (bits None)."""
    return nbytes if bits is None else row_bytes(Blocks(bits), BLOCK) / BLOCK


def copy_axis(job):
    """The axis along which ranks share a copy."""
    return "shard" if job.copies > 1 else "dp"


def data_parallel(job, pieces, parameters):
    """Of gradients and parameters, in pieces as pieces_of gives: buckets or units; with them travels which of the
    trained parameters somebody has used: in the buckets, or as an int32 each. A unit's part is summed over the copies.
    Of what is frozen the values alone travel, in stage 3, and as they are. What neighbours keep comes from all ranks
    once per forward. Of gradients that stay each rank's own only who has some is told."""
    found, axis, near = [], copy_axis(job), job.near
    for piece in pieces:
        size, ranks, copies, sizes, gathers = piece[:5]
        if job.stage == 0:
            told = len(piece.members) if piece.unsummed else size
            found += [Collective("dp", ranks, "all_reduce", told * sizes["gradient"])] if "gradient" in sizes else []
            continue
        trained, passes, times = "gradient" in sizes, job.micro_batches, gathers
        if job.stage < 3 or job.pp > 1:
            passes = times = 1
        value = size * travelling(job.param_bits if trained else None, sizes["parameter"])
        afar = times if near is None else 1
        found += [Collective(axis, ranks, "all_gather", value, passes * afar),
                  *[Collective("near", near, "all_gather", value, passes * (times - 1))] * (near is not None)]
        if trained:
            found += [*gradients(job, axis, ranks, size * travelling(job.reduce_bits, sizes["gradient"])),
                      Collective("dp", copies, "all_reduce", size / ranks * sizes["gradient"])]
    if job.stage and parameters:
        found.append(Collective("dp", job.replicas, "all_reduce", 4 * parameters))
    return [it for it in found if it.ranks > 1]


def gradients(job, axis, ranks, nbytes):
    """Of a unit's gradients: in few bits first within neighbours, then each part between groups of them."""
    if job.reduce_bits is None:
        return [Collective(axis, ranks, "reduce_scatter", nbytes)]
    if job.near is None:
        return [Collective(axis, ranks, "all_to_all", nbytes)]
    return [Collective("near", job.near, "all_to_all", nbytes),
            Collective(axis, ranks // job.near, "all_to_all", nbytes / job.near)]


def _tokens(job):
    """Of a call, of a micro-batch or a slice of one, on a rank: the mean."""
    return job.samples / job.calls * job.time / job.cp


def tensor_parallel(job, place, stages):
    """Two all-reduces of a block's output forward, two backward; one forward behind the embedding, one backward before
    the output layer; three numbers per label, which is vocab_parallel_cross_entropy.

    A mixture of experts is the same on all ranks, and sends nothing along tp: half of a block is left.
    Multi-head latent attention sums the gradients of latents and of the key instead of its input's
    (parallel/tensor/heads.py).
    With sequence parallelism each becomes an all-gather and a reduce-scatter; with "regather" backward gathers the
    inputs of column-parallel matrices once more; experts take whole sequences, by an all-gather forward and one
    backward, or each rank's positions, for which gradients of the router and of shared experts are summed, and means
    of the auxiliary loss. Gradients of norms and of row-parallel biases are summed, those of positions gathered
    (parallel/tensor/sequence_parallel.py, mixtures.py). Gradients of norms of queries and keys are summed in any case.
    """
    blocks, first, last = sum(len(s[0]) for s in stages), any(s[1] for s in stages), any(s[2] for s in stages)
    m, tokens, adapters = job.calls, _tokens(job), job.adapters
    nbytes, gsize = tokens * job.model.width * job.sizes["parameter"], job.sizes["gradient"]
    flows, times = job.flows(stages), 2 if job.checkpointing else 1
    taken, forward = (times * number_of(flows, names) for names in (COLUMNS, ROWS))
    entered = number_of(flows, COLUMNS, lambda inputs, _: inputs)       # whose input has a gradient
    left = number_of(flows, ROWS, lambda _, output: output)     # whose output has one
    of_states = [(count, window, flow) for count, window, flow in flows if window in STATES]
    of_latents = [each for each in flows if job.model.latent is not None and each not in of_states]
    if job.sequence_parallel:
        trained, gpt = adapters is None, job.model.family == "gpt"
        again = gathered_again(job, flows, last) if job.sequence_parallel == "regather" else 0
        vectors = (4 * blocks + forward // times + 2 * last if gpt else 2 * blocks + last) * trained
        if job.model.experts and "tp" not in job.experts_over:
            # They take whole sequences, and give this rank's part.
            taken += times * blocks
            left += sum(count * flow["mlp.experts"][1] for count, _, flow in flows)
        found = [("all_gather", nbytes, m * (taken + last + left + first * trained + again)),
                 ("reduce_scatter", nbytes, m * (forward + first + entered + last)),
                 ("all_reduce", job.model.width * gsize, m * vectors),
                 ("all_gather", job.time / job.slices / job.cp * job.model.width * gsize, m * first * gpt * trained)]
        if "tp" in job.experts_over:
            found += own_positions(job, blocks, times)
    else:
        found = [("all_reduce", nbytes, m * (forward + first + entered + last))]
    if adapters is None:    # of norms that all heads share: of queries and keys, and of what states give
        shared = 2 * blocks * job.model.qk_norm + sum(count for count, *_ in of_states)
        found += [("all_reduce", job.model.width // job.model.heads * gsize, m * shared)] * (shared > 0)
    if adapters is not None:
        found += [("all_reduce", prod(shape) * gsize, m) for shape in whole_in_adapters(job, stages)]
    if of_latents:
        found += latents(job, of_latents)
    return [Collective("tp", job.tp, *what) for what in [*found, *[("all_reduce", 4 * tokens, 3 * m)] * last]]


def own_positions(job, blocks, times):
    """Of mixtures that route a rank's own positions; `times` forward."""
    m = job.micro_batches * blocks
    weights = [shape for name, shape in job.model.mixture(job.expert_ranks) if not name.startswith("mlp.experts.")]
    return [("all_reduce", nbytes, m * times) for nbytes in means(job)] + [
        ("all_reduce", prod(shape) * job.sizes["gradient"], m) for shape in weights if job.adapters is None]


def means(job):
    """Bytes of what the balance loss is made of, means over all positions of a group: how often each expert is chosen
    first, float64, and its probability, float32."""
    groups = 1 if job.model.group is None else job.samples / job.micro_batches
    return 8 * groups * job.model.experts, 4 * groups * job.model.experts


def means_of_experts(job, flows):
    """The same along cp, where the probabilities' cotangents are summed as well."""
    uses, probabilities = means(job)
    forward = (1 + job.checkpointing) * sum(count for count, *_ in flows)
    back = sum(count * (job.adapters is None or flow["mlp.router"][0] > 0) for count, _, flow in flows)
    return [Collective("cp", job.cp, "all_reduce", nbytes, count * job.micro_batches)
            for nbytes, count in ((uses, forward), (probabilities, forward + back))]


def number_of(flows, names, weight=lambda *_: 1):
    """How many matrices of these names there are in the blocks of Job.flows; weight(how many inputs have a gradient,
    whether the output has one): for how many one counts."""
    return sum(count * weight(*flow[name]) for count, _, flow in flows for name in names if name in flow)


def latents(job, flows):
    """What latents send beside the other columns: a message each of the queries' latents, those of keys and values and
    the key; with sequence parallelism also the sums of gradients of what makes them."""
    sizes, gsize, m = job.model.latent, job.sizes["gradient"], job.calls
    blocks = m * sum(count for count, *_ in flows)
    enter = {"attention.q": sizes.q_rank or job.model.width, "attention.kv": sizes.kv_rank, None: sizes.rope_size}
    nbytes = {name: _tokens(job) * features * job.sizes["parameter"] for name, features in enter.items()}
    # Backward: of what gradients flow to; the key's come out of `down` as they are.
    back = {name: m * sum(count * (flow[name][0] if name else flow["attention.down"][1]) for count, _, flow in flows)
            for name in enter}
    if not job.sequence_parallel:
        return [("all_reduce", each, back[name]) for name, each in nbytes.items()]
    takes = [name for name in enter if name and (job.adapters is None or name in job.adapters.layers)]
    again = takes if job.sequence_parallel == "regather" else []
    whole = [sizes.down * job.model.width, sizes.kv_rank, *([sizes.q_rank] if sizes.q_rank else [])]
    return [*(("all_gather", each, (1 + job.checkpointing + (name in again)) * blocks)
              for name, each in nbytes.items()),
            *(("reduce_scatter", each, back[name]) for name, each in nbytes.items()),
            *(("all_reduce", count * gsize, blocks) for count in whole if job.adapters is None)]


def gathered_again(job, flows, last):
    """How many inputs of column-parallel matrices backward gathers once more, for each op that has kept one."""
    if job.adapters is None:
        return last + number_of(flows, COLUMNS)
    layers = job.adapters.layers
    head = ("head" in layers or job.tiled_loss)
    return last * head + sum(count * (name in layers) for count, _, flow in flows for name in COLUMNS if name in flow)


def whole_in_adapters(job, stages):
    """[shape] of A beside what is cut by columns, and of B beside what is cut by rows: all ranks have them whole. What
    makes latents isn't cut; with sequence parallelism each rank has some of its tokens."""
    found = []
    for layer, (a, b) in job.adapter_matrices(stages):
        if layer == "attention.down":
            found += [a, b] if job.sequence_parallel else []
        else:
            found.append(b if layer in ROWS else a)
    return found


def pipeline_parallel(job, place, stages):
    """A micro-batch's activations to the next stage, and the gradients of them back, where it is another rank's. And
    between the first stage's rank and the last one's, where these are two, the gradients of an embedding that both
    have."""
    last = max(map(max, job.placement))
    owners = {stage: rank for rank, own in enumerate(job.placement) for stage in own}
    messages = sum(owners[other] != place for stage in job.placement[place]
                   for other in (stage - 1, stage + 1) if 0 <= other <= last)
    features = job.model.width + bool(job.model.experts)        # the auxiliary loss goes along
    nbytes = _tokens(job) * features * job.sizes["parameter"] / (job.tp if job.sequence_parallel else 1)
    found = [Collective("pp", job.pp, "send", nbytes, messages * job.calls)]
    ends = {owners[0], owners[last]}
    if job.copied and job.adapters is None and place in ends and len(ends) == 2:
        elements = -(-job.model.vocabulary // job.tp) * job.model.width / (job.shards if job.stage else 1)
        found.append(Collective("pp", 2, "all_reduce", elements * max(4, job.sizes["gradient"])))
    return found


def context_parallel(job, place, stages):
    """By a ring, keys and values to the next rank, ranks - 1 times, or as far as a block's window reaches in zigzag,
    forward, and backward too, with as many times their gradients behind them; or all-to-alls of queries, keys, values
    and the result, forward and backward. Checkpointing goes forward once more."""
    size, again, features = job.sizes["parameter"], job.checkpointing, job.model.features
    query, key, value, result = (_tokens(job) * each / job.tp * size for each in features.values())
    flows = job.flows(stages)
    of_keys, of_states = ([each for each in flows if (each[1] in STATES) == by_states] for by_states in (False, True))
    found = states(job, of_states) if of_states else []
    if job.model.experts:
        found += means_of_experts(job, flows)
    if job.cp_by == "ring":
        hops = sum(count * (1 + again + 2 * (flow["attention.values"][0] > 0)) * (
            steps(job.time // job.cp, job.cp, band_of(True, window), "zigzag") - 1)
            for count, window, flow in of_keys)
        return [*found, Collective("cp", job.cp, "send", key + value, hops * job.micro_batches)]
    blocks, back = there_and_back(of_keys, "attention.values")
    calls = ((1 + again) * blocks + back) * job.micro_batches
    return found + [Collective("cp", job.cp, "all_to_all", nbytes, calls) for nbytes in (query, key, value, result)]


def states(job, flows):
    """Of attention by states: a state of each head and what is left of one, of both pieces of a zigzag, in float32, to
    all, and their gradients back. (parallel/context/linear_context.py)"""
    size, found = job.model.width // job.model.heads, []
    for kind, numbers in ((LINEAR, size * size + 1), (DELTA, 2 * size * size)):
        nbytes = 4 * 2 * job.cp * job.samples / job.micro_batches * job.model.heads / job.tp * numbers
        blocks, back = there_and_back([each for each in flows if each[1] == kind], "attention.values")
        found += [Collective("cp", job.cp, op, nbytes, count * job.micro_batches) for op, count in (
            ("all_gather", (1 + job.checkpointing) * blocks), ("reduce_scatter", back)) if count]
    return found


def there_and_back(flows, product):
    """(blocks of Job.flows, those of them in which backward comes to a product)."""
    return sum(count for count, *_ in flows), sum(count * (flow[product][0] > 0) for count, _, flow in flows)


def expert_parallel(job, place, stages):
    """All rows of the experts there and back, forward and backward: four all-to-alls per block (six where checkpointing
    goes forward again), of the same size whatever the tokens choose. An expert's places are a whole number in each
    micro-batch. Without a capacity the numbers of rows go ahead, and rows are as if all experts were used alike, and
    tokens chose them at random. Where a token goes to a rank once, each choice's place goes, and its gate both ways.
    """
    blocks, back = there_and_back(job.flows(stages), "mlp.experts")
    forward = (1 + job.checkpointing) * blocks
    row = job.model.width * job.sizes["parameter"]
    short = row if job.dispatch_bits is None else row_bytes(
        dispatched_in(job.model.width, job.dispatch_bits), job.model.width)
    model, ahead, each, ranks = job.model, 8 * job.model.experts, 1, job.expert_ranks
    if job.dispatch_once:
        ahead, each = ahead + 8 * ranks, visits(model.experts, model.top_k, ranks) / model.top_k
    found = [("counts", ahead, forward * job.micro_batches)] * (model.capacity_factor is None)
    time = job.time // job.cp
    for samples, times in Counter(job.pieces).items():
        # Of the rank's own positions.
        rows = model.rows(samples * time, time) / (job.tp if "tp" in job.experts_over else 1)
        found += [(what, each * rows * nbytes, (forward + back) * times)
                  for what, nbytes in (("to the experts", short), ("and back", row))]
        if job.dispatch_once:
            found += [("places", 4 * rows, forward * times), ("gates", 4 * rows, (forward + back) * times)]
    return [Collective(job.expert_axis, ranks, "all_to_all", nbytes, count) for _, nbytes, count in found]


SENT_ALONG = {"tp": tensor_parallel, "pp": pipeline_parallel, "cp": context_parallel, "ep": expert_parallel}
