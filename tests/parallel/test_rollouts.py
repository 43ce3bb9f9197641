"""Answers that ranks draw, and what they learn from them, are those of one process; told numbers are those by hand."""

import numpy as np
import pytest

from minitorch_dist import comm, data, nn
from minitorch_dist.data.text import IGNORED
from minitorch_dist.parallel import rollouts
from tests.crews import crews, threads

from . import rollout_cases as cases

CASES = "tests.parallel.rollout_cases:"
NAMES = "inputs", "labels", "rewards", "advantages", "old", "reference"


def joined(told):
    """[{name: array of the global batch's answers}] by step, from what each rank has told."""
    steps = []
    for of_ranks in zip(*told, strict=True):
        parts = {rows: arrays for *_, answers in of_ranks for rows, *arrays in answers}
        ends = sorted(parts)
        assert ends[0][0] == 0 and all(a[1] == b[0] for a, b in zip(ends, ends[1:], strict=False))
        steps.append({name: np.concatenate([parts[rows][i] for rows in ends]) for i, name in enumerate(NAMES)})
    return steps


@pytest.fixture(scope="module")
def one_process():
    """(parameters, what it told, its answers) of a training in one process."""
    ((state, told),) = crews.call(CASES + "train", 1, ("ddp",))
    return state, told, joined([told])


def test_what_is_told_is_what_one_works_out_by_hand(one_process):
    _, told, steps = one_process
    assert len(steps) == 3 and [count for *_, count, _, _ in told] == [15, 15, 6]
    for (tokens, reward, kl, *_), found in zip(told, steps, strict=True):
        counted, group = found["labels"] != IGNORED, cases.GROUP
        lengths = counted.sum(1)
        assert tokens == lengths.sum() and len(set(lengths)) > 1
        assert abs(reward - found["rewards"].mean()) < 1e-12
        difference = found["reference"] - found["old"]
        assert abs(kl - (np.exp(difference) - 1 - difference)[counted].sum() / tokens) < 1e-12 and kl > 0.001
        assert not found["old"][~counted].any() and not found["reference"][~counted].any()
        for first in range(0, len(lengths), group):
            rewards, found_here = (found[name][first:first + group] for name in ("rewards", "advantages"))
            wanted = 0 if len(set(rewards)) == 1 else (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-4)
            np.testing.assert_allclose(found_here, np.broadcast_to(wanted, group), atol=1e-12)
    assert any((found["rewards"] == 0.1).all() for found in [{"rewards": s["rewards"].reshape(-1, cases.GROUP)[i]}
                                                             for s in steps for i in range(len(s["rewards"]) // 3)])


def test_old_log_probs_are_the_tempered_models(one_process):
    """Of the first step, whose model and reference are known."""
    found = one_process[2][0]
    for model, name in ((cases.gpt(), "old"), (cases.gpt(2.9), "reference")):
        logits = model(found["inputs"]).numpy() / cases.OPTIONS["temperature"]
        all_log_probs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        for i, t in zip(*np.nonzero(found["labels"] != IGNORED), strict=True):
            assert abs(found[name][i, t] - all_log_probs[i, t, found["labels"][i, t]]) < 1e-10


@pytest.mark.parametrize("way, n", [("ddp", 2), ("ddp", 3), (1, 2), (3, 2), (3, 3), ("tensor", 2), ("tensor", 4)])
def test_any_ranks_draw_the_same_answers_and_learn_the_same(one_process, way, n):
    state, told, steps = one_process
    found = crews.call(CASES + "train", n, (way,))
    for wanted, here in zip(steps, joined([told for _, told in found]), strict=True):
        for name in NAMES:
            np.testing.assert_allclose(here[name], wanted[name], rtol=0, atol=1e-10, err_msg=name)
    for _, theirs in found:
        for (*numbers, losses, _), (*wanted, wanted_losses, _) in zip(theirs, told, strict=True):
            np.testing.assert_allclose(numbers, wanted, rtol=0, atol=1e-10)
            np.testing.assert_allclose(losses, wanted_losses, rtol=0, atol=1e-10)
    for name, value in found[0][0].items():
        np.testing.assert_allclose(value, state[name], rtol=0, atol=1e-10, err_msg=name)


def test_exact_mode_to_the_last_bit():
    found = {(way, n): crews.call(CASES + "train", n, (way, True), env=threads(n))
             for way, n in (("ddp", 1), ("ddp", 2), ("ddp", 4), (3, 2))}
    ((state, told),) = found.pop(("ddp", 1))
    for ranks in found.values():
        for wanted, here in zip(joined([told]), joined([theirs for _, theirs in ranks]), strict=True):
            for name in NAMES:
                np.testing.assert_array_equal(here[name], wanted[name])
        for _, theirs in ranks:
            assert [step[:5] for step in theirs] == [step[:5] for step in told]
        for name, value in ranks[0][0].items():
            np.testing.assert_array_equal(value, state[name])


@pytest.mark.parametrize("n", [2, 3])
def test_sharded_values_travel_once_for_a_rollout(n):
    for rollout, by_token, once in crews.call(CASES + "bytes_sent", n, (3,)):
        assert rollout == once > 0 and by_token == cases.COUNT * once
    for rollout, by_token, once in crews.call(CASES + "bytes_sent", n, (1,)):
        assert rollout == once and by_token == 0     # and the next forward needn't


def test_what_a_model_that_is_cut_sends():
    """For the questions, each further token but the last, and once more all for the log-probabilities: 2 all-reduces
    per block, and that of the embedding, whose rows are cut."""
    for sent, rows in crews.call(CASES + "tensor_bytes", 2):
        positions = 2 * (cases.QUESTION + cases.COUNT - 1)
        assert sent == 2 * (2 - 1) / 2 * (2 * 2 + 1) * rows * 16 * 8 * positions


def test_divided_experts_go_on_together():
    """Where one rank's rows have ended, and the others need its experts."""
    for rank, (found, text, end, (reward, wanted)) in enumerate(crews.call(CASES + "of_divided_experts", 2)):
        ended = (text[cases.QUESTION:] == end).cumsum() > 0
        assert ended[-2] == (rank == 0)
        assert found[0, :cases.QUESTION].tolist() == text[:cases.QUESTION].tolist()
        assert found[0, cases.QUESTION:].tolist() == np.where(ended, end, text[cases.QUESTION:]).tolist()
        assert abs(reward - wanted) < 1e-12


def test_ranks_that_share_experts_stop_together_when_all_rows_have_ended():
    for rank, (found, texts, end) in enumerate(crews.call(CASES + "all_have_ended", 2)):
        first, second = places = [row.tolist().index(end) for row in texts[:, cases.QUESTION:]]
        assert first != second and max(places) < texts.shape[1] - cases.QUESTION - 1
        ended = (texts[rank, cases.QUESTION:] == end).cumsum() > 0
        wanted = np.where(ended, end, texts[rank, cases.QUESTION:])[:max(places) + 1]
        assert found[0, cases.QUESTION:].tolist() == wanted.tolist()


def test_a_batch_of_answers_is_that_of_its_shards():
    """Of two micro-shards of 4 questions; rewards may be left in their own scale, and there may be no reference."""
    questions, labels = np.arange(12).reshape(4, 3) % cases.VOCABULARY, np.arange(4)
    batch, = data.Loader(questions, labels, 4, micro_shards=2).epoch(0)
    options = cases.OPTIONS | {"step": 0, "scale_rewards": False}
    found = rollouts.roll_out(cases.gpt(), batch, cases.reward, comm.world(), **options)
    first, second = found.batch.shards
    assert (first.rows, second.rows, found.batch.rows, found.batch.count) == ((0, 6), (6, 12), (0, 12), 12)
    for name in ("inputs", "labels"):
        np.testing.assert_array_equal(getattr(found.batch, name), np.concatenate([getattr(a, name)
                                                                                  for a in (first, second)]))
    for answers in (first, second):
        rewards = answers.rewards.reshape(-1, cases.GROUP)
        np.testing.assert_allclose(answers.advantages, (rewards - rewards.mean(1, keepdims=True)).reshape(-1))
        assert np.ptp(rewards) > 0 and answers.reference is None
    assert found.kl is None


def test_log_probs_are_those_without_dropout():
    model = nn.GPT(cases.VOCABULARY, cases.LENGTH, layers=1, heads=2, dim=8, dropout=0.5)
    inputs, labels = np.array([[1, 2, 3], [4, 5, 6]]), np.array([[IGNORED, 3, 4], [IGNORED, 6, 7]])
    answers = rollouts.Answers(0, inputs, labels, (0, 2), None, np.zeros(2), np.zeros(2), None, 0.7)
    found = rollouts.with_log_probs(answers, model, "old").old
    assert model.training
    np.testing.assert_array_equal(found, rollouts.log_probs(model.eval(), answers).numpy())


def test_draws_belong_to_the_answer():
    def drawn(rows, step=3, seed=1, group=4):
        draws = rollouts.Draws(seed, step, rows, group)
        return np.concatenate([draws.gumbel((rows[1] - rows[0], 5)) for _ in range(3)], 1)
    whole = drawn((0, 12))
    assert len(np.unique(whole)) == whole.size
    np.testing.assert_array_equal(np.concatenate([drawn((0, 4)), drawn((4, 12))]), whole)
    for other in (drawn((0, 12), step=4), drawn((0, 12), seed=2), drawn((12, 24))):
        assert not np.isin(other, whole).any()
    np.testing.assert_array_equal(drawn((0, 6), group=2), whole[[0, 1, 4, 5, 8, 9]])       # of each question the first
    assert rollouts.Draws(1, 3, (5, 5), 4).gumbel((0, 5)).shape == (0, 5)


def test_an_answer_ends_with_its_end():
    tokens = np.array([[9, 8, 1, 2, 3, 4], [9, 8, 7, 7, 1, 7], [7, 7, 1, 2, 3, 7], [7, 8, 7, 7, 7, 7]])
    inputs, labels = rollouts.as_samples(tokens, 2, end=7)
    np.testing.assert_array_equal(inputs, tokens[:, :-1])
    none = IGNORED
    assert labels.tolist() == [[none, 1, 2, 3, 4], [none, 7, none, none, none], [none, 1, 2, 3, 7],
                               [none, 7, none, none, none]]
    assert rollouts.as_samples(tokens, 2, end=None)[1].tolist() == [[none, *row[2:]] for row in tokens.tolist()]


def test_all_answers_that_end_early_are_filled_up():
    model = cases.gpt()
    model.generate = lambda questions, *_: np.concatenate([questions, [[cases.END]] * len(questions)], 1)
    found = rollouts.written(model, np.ones((2, 3), int), 4, 1.0, None, cases.END)
    assert found.tolist() == [[1, 1, 1] + [cases.END] * 4] * 2
    assert isinstance(model, nn.GPT)


@pytest.mark.parametrize("n", [1, 2])
def test_what_does_not_fit_is_said_on_all_ranks(n):
    for rank, found in enumerate(crews.call(CASES + "errors", n)):
        for name, words in (("too long", "trained on as 11, and the model sees 9"),
                            ("one too long", "trained on as 10, and the model sees 9"), ("nothing", "count=0"),
                            ("likeliest", "temperature=0"),
                            ("coldest", "temperature=1e-31"), ("hottest", "temperature=1e+31"),
                            ("alone", "two or more answers"), ("pairs", "reward gave an array"),
                            ("not finite", "isn't finite")):
            assert found[name][0] == "ValueError" and words in found[name][1], (name, found[name])
        assert found["one rank's"] == (("KeyError", "'no such problem'") if rank == n - 1 else ("RuntimeError", (
            "roll_out: the rewards of rank 1 of 'world' ended with KeyError: 'no such problem'")))
        assert found["fits"] is found["as long as can be"] is found["one token"] is None


@pytest.mark.parametrize("name, values", [("step", (0, 1)), ("scale_rewards", (True, False))])
def test_ranks_that_mean_other_rollouts(name, values):
    for kind, text in crews.call(CASES + "other_settings", 2, (name, values)):
        assert kind == "MismatchError" and all(f"'{name}': {value}" in text for value in values)


def test_settings_of_numpy_are_those_of_python():
    """A temperature of float64 makes none of what a float32 model has."""
    batch, = data.Loader(np.ones((2, 3), int), np.zeros(2), 2).epoch(0)
    model = nn.GPT(cases.VOCABULARY, cases.LENGTH, layers=1, heads=2, dim=8)

    def drawn(group, count, temperature):
        answers, = rollouts.roll_out(model, batch, cases.reward, comm.world(), group=group, count=count, seed=0, step=0,
                                     temperature=temperature).batch.shards
        return answers
    ours, theirs = drawn(3, 5, 0.7), drawn(np.int8(3), np.int8(5), np.float64(0.7))
    assert theirs.old.dtype == np.float32 and theirs.old.tobytes() == ours.old.tobytes()
    assert rollouts.log_probs(model, theirs).dtype == np.float32 and theirs.rows == (0, 6)
    with pytest.raises(TypeError, match="group=2.0: must be a whole number"):
        drawn(2.0, 5, 0.7)
