"""Rollouts: the ranks draw answers to a batch of questions, and have them rewarded; then they train on these.

    questions of the global batch     q0 q1 q2 q3 │ q4 q5 q6 q7         rank 0 │ rank 1
    `group` answers to each           q0a0 q0a1 … │ q4a0 q4a1 …         a group stays on one rank
    rewards, and advantages within a group; log-probabilities by who drew, and by the reference
    one all-reduce of four numbers: tokens, rewards, KL, failures

    drawn = roll_out(model, batch, reward, world, group=8, count=3, seed=0, step=step, reference=reference)
    training.train_step(model, optimizer, drawn.batch, loss_sum, world, seed=0, step=step, units=drawn.units)

    def loss_sum(model, answers):       # a sum, which train_step divides by the GLOBAL number of tokens
        return grpo_loss(log_probs(model, answers), answers.old, answers.advantages, answers.counted, answers.reference)

The random numbers of answer a to question q at a step are keyed by (seed, step, q, a), q being its row of the global
batch, and never by rank: the answers are the same on any number of ranks, but where two tokens' chances are so close
that rounding decides. In exact mode a micro-shard of questions is answered by itself, by products of the same shapes
everywhere: then the same to the last bit.

A model that is cut generates so, of ψ bytes, for `count` tokens (bytes that each rank sends):

    fully_shard   gathered once for the whole rollout: (N-1)/N · ψ; by a forward for each token it would be count times
                  that, and in stages 1 and 2 it is what the next forward would gather in any case
    tensor parallel   as it is, each rank keeping its heads' keys and values: for each position that is worked on
                  2 · 2(t-1)/t · rows · dim numbers per block (and the logits, where the vocabulary is cut)

Source: Shao et al. 2024, "DeepSeekMath" (4.1); the losses are in nn/preference.py.
"""

from contextlib import contextmanager
from dataclasses import dataclass, replace

from .. import backend
from ..autodiff.primitive import lower
from ..backend import to, to_device_of, xp
from ..data.loader import Batch, Shard
from ..data.text import IGNORED
from ..nn.decoding import evaluating
from ..nn.preference import group_advantages, kl_k3, token_log_probs
from .exact import BinaryCounter
from .wrapping import ReducingModule

# Of temperatures: logits of some 10⁸ over the one are finite in float32, and slopes over the other are above 0.
COLDEST, HOTTEST = 1e-30, 1e30


@dataclass(frozen=True)
class Answers(Shard):
    """Rows [lo, hi) of the global batch's answers, those to a question one after another.

    inputs, labels  int64 (n, time): questions with their answers, and the next tokens, IGNORED where they are no part
                    of an answer
    old             (n, time): the log-probabilities of the labels by the policy that drew them; 0 where IGNORED
    reference       the same by the reference, or None
    rewards, advantages  float64 (n,)
    temperature     that they were drawn at
    """

    old: xp.ndarray
    rewards: xp.ndarray
    advantages: xp.ndarray
    reference: xp.ndarray | None
    temperature: float

    @property
    def counted(self):
        """bool (n, time): the answers' tokens."""
        return self.labels != IGNORED

    def arrays(self):
        found = super().arrays()
        del found["temperature"]
        return found


@dataclass(frozen=True)
class Rollouts:
    """What a batch of questions has become.

    batch   a Batch of answers, whose shards are Answers: what train_step takes
    tokens  how many tokens all answers have, on all ranks together
    reward  the mean over all answers
    kl      the mean over all tokens of the estimated KL(policy ‖ reference), or None
    """

    batch: Batch
    tokens: int
    reward: float
    kl: float | None

    @property
    def units(self):
        """Tokens per answer: train_step's `units`, which make it divide by `tokens`."""
        return self.tokens / self.batch.count


class Draws:
    """A stream of its own for each answer, in the place of a Generator: rows (lo, hi) of the global batch's answers."""

    def __init__(self, seed, step, rows, group):
        self.streams = [backend.stream("rollout", seed, step, *divmod(row, group)) for row in range(*rows)]

    def gumbel(self, size):
        """(answers, classes): row i from answer i's stream."""
        out = xp.empty(size)
        for row, stream in zip(out, self.streams, strict=True):
            row[...] = stream.gumbel(size=row.shape)
        return out


@contextmanager
def whole(model):
    """The module inside of a wrapper, with all values of its own; of fully_shard they are gathered for as long."""
    if hasattr(model, "gathered"):
        with model.gathered() as module:
            yield module
    else:
        yield model.module if isinstance(model, ReducingModule) else model


def log_probs(model, answers):
    """(n, time): of the labels of Answers by a model, 0 where they are IGNORED."""
    logits = model(answers.inputs)
    logits = logits[0] if isinstance(logits, tuple) else logits
    logits = logits if answers.temperature == 1 else logits / answers.temperature
    return token_log_probs(logits, answers.labels, IGNORED)


def roll_out(model, batch, reward, comm, *, group, count, seed, step, temperature=1.0, end=None, reference=None,
             scale_rewards=True):
    """Draw `group` answers to each question, and have them rewarded: Rollouts. Collective.

    model      DistributedDataParallel, fully_shard, or a GPT that is the same on all ranks, cut or not; in evaluation
               here, so that with dropout in training the first step's ratio is not 1
    batch      a Loader's Batch. inputs: questions (n, question) of one width; labels: what the reward needs
    reward     reward(tokens (rows, question + count), labels (rows, …)) -> (rows,), arrays on the host: of each answer.
               Called for each shard, so of a small batch with no rows on some ranks
    comm       the ranks that share the batch
    group      answers to a question, 2 or more
    count      tokens of an answer at most, so that question + count - 1 ≤ the model's length
    end        the token that ends an answer, and is its last; behind it an answer is filled up with it
    reference  a model as above, that the KL is told from, or None
    scale_rewards  see group_advantages
    ValueError or TypeError where something doesn't fit, MismatchError where the ranks don't agree. What `reward` raises
    on one rank comes out there, and RuntimeError, which says so, on the others.
    """
    settings = {"group": group, "count": count, "seed": seed, "step": step, "temperature": temperature, "end": end,
                "reference": reference is not None, "scale_rewards": scale_rewards, "questions": batch.count}
    comm.agree("roll_out", detail=repr(settings))
    group, count = backend.whole("group", group), backend.whole("count", count)
    temperature = backend.number(temperature)       # of float64 it would make such logits of float32's
    if count < 1 or not COLDEST <= temperature <= HOTTEST:
        raise ValueError(f"roll_out: count={count}, temperature={temperature}: at least one token, drawn at a "
                         f"temperature of {COLDEST} to {HOTTEST}, which float32 can divide by")
    total, shards, failure = BinaryCounter(), [], None
    with whole(model) as policy:
        if (wanted := batch.inputs.shape[1] + count - 1) > policy.length:
            raise ValueError(f"roll_out: questions of {batch.inputs.shape[1]} tokens and answers of {count} are "
                             f"trained on as {wanted}, and the model sees {policy.length}: shorten them")
        for shard in batch.shards:
            rows = tuple(group * row for row in shard.rows)
            draws = Draws(seed, step, rows, group)
            tokens = written(policy, xp.repeat(shard.inputs, group, 0), count, temperature, draws, end)
            inputs, labels = as_samples(tokens, shard.inputs.shape[1], end)
            try:
                rewards = rewarded(reward, tokens, xp.repeat(shard.labels, group, 0))
            except Exception as error:      # the other ranks may need this one to draw theirs
                rewards, failure = xp.zeros(len(tokens)), failure or error
            advantages = group_advantages(rewards, group, scale_rewards)
            answers = Answers(shard.index, inputs, labels, rows, None, rewards, advantages, None, temperature)
            shards.append(with_log_probs(answers, policy, "old"))
    if reference is not None:
        with whole(reference) as before:
            shards = [with_log_probs(answers, before, "reference") for answers in shards]
    for answers in shards:
        kl = 0.0 if reference is None else float(kl_k3(answers.old, answers.reference).sum(dtype=xp.float64))
        total.add(xp.array([answers.counted.sum(), answers.rewards.sum(), kl, float(failure is not None)]))
    sums = total.total()
    comm.all_reduce(sums, exact=getattr(model, "exact", False))
    if sums[3]:
        raise_together(failure, comm)
    answers = Batch(*(xp.concatenate([getattr(a, name) for a in shards]) for name in ("inputs", "labels")),
                    group * batch.count, tuple(group * row for row in batch.rows), shards)
    return Rollouts(answers, int(sums[0]), float(sums[1]) / answers.count,
                    None if reference is None else float(sums[2]) / int(sums[0]))


def written(model, questions, count, temperature, draws, end):
    """Questions with their answers, int64 (rows, question + count), on the host."""
    tokens = to(model.generate(questions, count, temperature, draws, end), "cpu")
    missing = questions.shape[1] + count - tokens.shape[1]      # all rows have ended before
    return xp.pad(tokens, ((0, 0), (0, missing)), constant_values=end) if missing else tokens


def as_samples(tokens, question, end):
    """(inputs, labels) of rows of tokens: labels are the next tokens up to an answer's end, IGNORED elsewhere."""
    labels = tokens[:, 1:].copy()
    if end is not None:
        ended = (tokens[:, question:] == end).cumsum(1) - (tokens[:, question:] == end) > 0
        labels[:, question - 1:][ended] = IGNORED
    labels[:, :question - 1] = IGNORED
    return xp.ascontiguousarray(tokens[:, :-1]), labels


def rewarded(reward, tokens, labels):
    """The rewards, float64 (rows,). ValueError where they are something else."""
    rewards = xp.asarray(reward(tokens, labels), xp.float64)
    if rewards.shape != (len(tokens),) or not xp.isfinite(rewards).all():
        raise ValueError(f"roll_out: reward gave an array {rewards.shape} for {len(tokens)} answers, or one that isn't "
                         "finite: a number for each")
    return rewards


def raise_together(failure, comm):
    """Raise the exception that this rank's rewards ended with; RuntimeError where only others' did. Collective."""
    everyone = comm.all_gather_object(failure and f"{type(failure).__name__}: {failure}")
    if failure:
        raise failure
    for rank, text in enumerate(everyone):
        if text:
            raise RuntimeError(f"roll_out: the rewards of rank {rank} of {comm.name!r} ended with {text}")


def with_log_probs(answers, model, name):
    """The Answers with log_probs by a model as the field `name`, on the host."""
    here = replace(answers, inputs=to_device_of(answers.inputs, lower(model.embed.weight)),
                   labels=to_device_of(answers.labels, lower(model.embed.weight)))
    with evaluating(model):
        return replace(answers, **{name: to(lower(log_probs(model, here)), "cpu")})
