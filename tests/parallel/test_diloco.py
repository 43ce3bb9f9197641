"""DiLoCo against a NumPy simulation of its workers, closed forms, data parallelism, and counted bytes."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import checkpoints, ledger, nn, optim
from minitorch_dist.flat import BLOCK, layout, round_up
from minitorch_dist.parallel.local_sgd import DiLoCo
from minitorch_dist.parallel.local_sgd.fragments import fragments_of, timetable
from tests.crews import crews, threads
from tests.device.fake_cupy import installed

from . import diloco_cases as cases
from . import plain

CASES = "tests.parallel.diloco_cases:"
FRAGMENTS = {1: [[0, 1, 2, 3]], 2: [[0, 1], [2, 3]]}      # of plain's four parameters


def simulated(workers, steps, every, fragments=1, overlap=0, mix=1.0, finish=False, clip=None, left_out=()):
    """(each worker's parameters, the common ones), by hand: AdamW inside, Nesterov's momentum outside."""
    x, labels = plain.dataset()
    own = [plain.initial() for _ in range(workers)]
    m, v = ([[np.zeros_like(p) for p in plain.initial()] for _ in range(workers)] for _ in range(2))
    common, b, updates = plain.initial(), [np.zeros_like(p) for p in plain.initial()], [0] * workers
    seen, sent, delta = np.zeros((fragments, workers)), [0] * fragments, [None] * fragments

    def send(f, step):
        delta[f] = {i: sum(n * (common[i] - own[k][i]) for k, n in enumerate(seen[f])) / seen[f].sum()
                    for i in FRAGMENTS[fragments][f]}
        seen[f], sent[f] = 0, step

    def take(f, mix):
        for i, d in delta[f].items():
            b[i] = 0.9 * b[i] + d
            common[i] = common[i] - 0.7 * (d + 0.9 * b[i])
            for k in range(workers):
                own[k][i] = (1 - mix) * own[k][i] + mix * common[i]
        delta[f] = None
        if mix == 1:
            seen[f] = 0
    for step in range(1, steps + 1):
        for k in range(workers):
            rows = cases.rows_of(k, step)
            seen[:, k] += len(rows)
            if (k, step) in left_out:
                continue
            updates[k] += 1
            _, grads = plain.loss_and_gradient(own[k], x[rows], labels[rows], len(rows))
            norm = np.sqrt(sum((g * g).sum() for g in grads))
            scale = clip / (norm + 1e-6) if clip and norm > clip else 1.0
            for i, g in enumerate(grads):
                m[k][i] = 0.9 * m[k][i] + 0.1 * scale * g
                v[k][i] = 0.999 * v[k][i] + 0.001 * (scale * g) ** 2
                direction = m[k][i] / (1 - 0.9 ** updates[k]) / (np.sqrt(v[k][i] / (1 - 0.999 ** updates[k])) + 1e-8)
                own[k][i] = own[k][i] * (1 - cases.LR * cases.DECAY) - cases.LR * direction
        for f in range(fragments):
            if step % every == (f + 1) * every // fragments % every:
                send(f, step)
        for f in range(fragments):
            if delta[f] is not None and step == sent[f] + overlap:
                take(f, mix)
    for f in range(fragments) if finish else ():
        if delta[f] is not None:
            take(f, mix)
        if seen[f].any():
            send(f, steps)
            take(f, 1.0)
    return [[p.copy() for p in common] for _ in own] if finish else own, common


def close(got, wanted, tolerance=1e-12):
    for a, b in zip(got, wanted, strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


SETTINGS = {        # name -> (settings, steps, finish)
    "rounds": ({"every": 4}, 12, False),
    "in mid-round": ({"every": 5}, 12, False),
    "an end in mid-round": ({"every": 5}, 12, True),
    "fragments": ({"every": 5, "fragments": 2}, 13, False),
    "overlap": ({"every": 4, "overlap": 3}, 13, False),
    "mixing": ({"every": 4, "overlap": 2, "mix": 0.5}, 13, False),
    "streaming": ({"every": 5, "fragments": 2, "overlap": 4, "mix": 0.25}, 16, False),
    "an end that forgets": ({"every": 4, "overlap": 2}, 9, True),
    "an end after forgetting": ({"every": 4, "overlap": 2}, 10, True),
    "an end on the way": ({"every": 5, "fragments": 2, "overlap": 3, "mix": 0.25}, 16, True),
}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_workers_are_those_of_the_simulation(n):
    found = crews.call(CASES + "runs", n, (SETTINGS,))
    for name, (settings, steps, finish) in SETTINGS.items():
        own, common = simulated(n, steps, finish=finish, **settings)
        for rank in range(n):
            close(found[rank][name][0], own[rank])
            close(found[rank][name][1], common)
            assert all((a == b).all() for a, b in zip(found[rank][name][1], found[0][name][1], strict=True))


def test_meeting_after_every_step_is_data_parallelism():
    """Of batches of unequal sizes; SGD inside, SGD(lr=1) outside."""
    n, steps = 3, 25
    x, labels = plain.dataset()
    params = plain.initial()
    for step in range(1, steps + 1):
        rows = np.concatenate([cases.rows_of(worker, step) for worker in range(n)])
        _, grads = plain.loss_and_gradient(params, x[rows], labels[rows], len(rows))
        params = [p - 0.3 * g for p, g in zip(params, grads, strict=True)]
    for own, common in crews.call(CASES + "as_data_parallel", n, (steps,)):
        close(own, params, 1e-10)
        close(common, params, 1e-10)


@pytest.mark.parametrize("every", [1, 2, 7])
def test_two_quadratics(every):
    """½ Σ a_k (w - c_k)²: a worker's H steps are w → c_k + (1 - ηa_k)^H (w - c_k), so that a round is a contraction to
    a point between the c_k, which for H > 1 is not the least of the sum."""
    lr, samples, rounds, start = 0.2, [3, 5], 4, np.array([2.0, -1.0, 0.3])
    a = np.array([[0.5, 1.5, 3.0], [2.0, 0.7, 0.1]])
    c = np.array([[1.0, 0.0, -2.0], [-1.0, 4.0, 0.5]])
    share = np.array(samples)[:, None] / 8
    shrunk = (1 - lr * a) ** every
    factor = (share * shrunk).sum(0)
    fixed = (share * (1 - shrunk) * c).sum(0) / (1 - factor)
    least = (share * a * c).sum(0) / (share * a).sum(0)
    assert np.allclose(fixed, least, atol=1e-12) == (every == 1)
    for path in crews.call(CASES + "quadratics", 2, (a, c, start, samples, lr, every, rounds)):
        for round_, w in enumerate(path, 1):
            np.testing.assert_allclose(w, fixed + factor ** round_ * (start - fixed), rtol=1e-12, atol=1e-14)


def test_exact_sums_are_those_of_the_tree_to_the_last_bit():
    found = crews.call(CASES + "on_its_way", 4)
    samples = [n for _, _, n, _ in found]
    assert len(set(samples)) > 1
    for i, before in enumerate(found[0][1]):
        parts = [n * (before - own[i]) for own, _, n, _ in found]
        outer = ((parts[0] + parts[1]) + (parts[2] + parts[3])) / sum(samples)
        for _, _, _, after in found:
            assert ((before - outer) == after[i]).all() and (after[i] != before).any()


@pytest.mark.parametrize("inside", [1, 3])
def test_exact_workers_have_the_same_bits_on_one_rank_and_on_two(inside):
    """Two ranks, four, and four with the worker's state cut."""
    two, four, cut = (crews.call(CASES + "in_exact_mode", n, (how, 6), env=threads(n))
                      for n, how in ((2, "ddp"), (4, "ddp"), (4, inside)))
    assert two[0] == two[1] == four[0] == four[1] == four[2] == four[3] == cut[0] == cut[2]


@pytest.mark.parametrize("inside", ["ddp", 1, 2, 3, "tp"])
def test_a_worker_of_two_ranks_is_a_worker(inside):
    settings, steps = {"every": 4, "fragments": 2, "overlap": 1, "mix": 0.75}, 9
    clip = None if inside == "tp" else 0.4
    options = {"clip": clip} | ({"spoilt": ((1, 3), (0, 6))} if inside in ("ddp", 3) else {})
    found = crews.call(CASES + "with_ranks_inside", 4, (inside, settings, steps, options))
    left_out = options.get("spoilt", ())
    own, common = simulated(2, steps, clip=clip, left_out=left_out, **settings)
    _, (w0, b0, w1, b1) = simulated(2, 4, clip=clip, left_out=left_out, **settings)
    for rank in range(4) if inside == "ddp" else (0, 2):        # whole values are on a worker's first rank
        close(found[rank][0], own[rank // 2])
        close(found[rank][1], common)
        close([found[rank][2]], [np.tanh(plain.dataset()[0] @ w0.T + b0) @ w1.T + b1])


def message(encoding, sizes, ranks, itemsize=4):
    """Bytes of a fragment of matrices and vectors: what all ranks send together, by hand."""
    if encoding is None:
        total = round_up(sum(round_up(m, 16) + round_up(v, 16) for m, v in sizes) + ranks, BLOCK)
        return 2 * (ranks - 1) * itemsize * total
    each = sum((-(-m // 2) + itemsize if encoding == "4 bits" else itemsize * m) + itemsize * v for m, v in sizes)
    return ranks * (ranks - 1) * (each + itemsize)


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(("encoding", "fragments", "overlap"), [
    (None, 1, 0), (None, 2, 1), ("4 bits", 1, 0), ("4 bits", 2, 1), ("whole", 1, 0)])
def test_a_round_sends_a_message_and_nothing_between(n, encoding, fragments, overlap):
    """Each fragment at its step, counted to the byte over all ranks; and what is held beside the inner training."""
    layers = [(70 * 90, 90), (90 * 13, 13)]
    found = crews.call(CASES + "traffic", n, (encoding, fragments, overlap))
    op = "all_reduce" if encoding is None else "all_gather"
    parts = [layers] if fragments == 1 else [[layer] for layer in layers]
    for step in range(1, 9):
        seen = [steps[step - 1] for steps, _ in found]
        due = [f for f in range(fragments) if step % 4 == (f + 1) * 4 // fragments % 4]
        taken = [f for f in range(fragments) if step > overlap and (step - overlap) % 4 == (f + 1) * 4 // fragments % 4]
        for calls, _, events in seen:
            assert calls == {("world", op): 1} if due else not calls
            assert events == [("post", f"fragment {f}") for f in due] + [("take", f"fragment {f}") for f in taken]
        sent = sum(sent.get(("world", op), 0) for _, sent, _ in seen)
        assert sent == sum(message(encoding, parts[f], n) for f in due)
    held = [[np.zeros(size) for layer in part for size in layer] for part in parts]
    inner = layout(map(_Sized, [size for part in held for size in part]))[1]
    assert found[0][1] == 4 * (2 * inner + 3 * sum(layout(map(_Sized, part), n)[1] for part in held))


class _Sized:
    def __init__(self, data):
        self.data = data


def test_four_bits_are_a_seventh_and_less_of_the_bytes_for_two_workers():
    layers = [(70 * 90, 90), (90 * 13, 13)]
    assert 6.5 < message(None, layers, 2) / message("4 bits", layers, 2) < 8


def test_numbers_sent_whole_by_gathering_are_those_of_the_all_reduce():
    settings = {name: ({**options, "encoding": cases.ENCODINGS["whole"]}, steps, finish)
                for name, (options, steps, finish) in SETTINGS.items() if name in ("streaming", "rounds")}
    for rank, found in enumerate(crews.call(CASES + "runs", 3, (settings,))):
        for name, (options, steps, _) in settings.items():
            own, common = simulated(3, steps, **{k: v for k, v in options.items() if k != "encoding"})
            close(found[name][0], own[rank])
            close(found[name][1], common)


def test_four_bits_lead_where_all_bits_do():
    """Workers agree to the last bit, and are nearer to the exact common values than these have moved."""
    settings = {"4 bits": ({"every": 4, "encoding": cases.ENCODINGS["4 bits"]}, 16, False)}
    found = crews.call(CASES + "runs", 2, (settings,))
    _, exact = simulated(2, 16, every=4)
    for got, others, wanted, start in zip(found[0]["4 bits"][1], found[1]["4 bits"][1], exact, plain.initial(),
                                          strict=True):
        assert (got == others).all()
        assert 0 < np.linalg.norm(got - wanted) < 0.5 * np.linalg.norm(wanted - start)


def test_each_worker_rounds_by_draws_of_its_own():
    """Of one difference a worker sends 8 magnitudes; sums of several workers' have more."""
    assert max(crews.call(CASES + "rounded_alike", 1)[0]) <= 8
    assert min(crews.call(CASES + "rounded_alike", 2)[0]) > 8


# ---------------------------------------------------------------- saved, and gone on from

STREAMING = {"every": 4, "fragments": 2, "overlap": 2, "mix": 0.5}


@pytest.mark.parametrize(("at", "settings", "on_its_way", "inner"), [
    (3, STREAMING, [True, False], "AdamW"),
    (5, STREAMING | {"encoding": cases.ENCODINGS["4 bits"]}, [False, True], "AdamW"),
    (4, {"every": 4}, [False], "AdamW"), (6, {"every": 4, "exact": True}, [False], "Adafactor")], ids=str)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, at, settings, on_its_way, inner):
    for runs, common, loaded, pending in crews.call(
            CASES + "resumed", 2, (str(tmp_path), at, settings, (None, None), inner)):
        assert pending == on_its_way
        for which in (0, 1):
            for first, *others in zip(*(run[which] for run in runs), strict=True):
                assert all((first == other).all() for other in others)
        assert all((a == b).all() for a, b in zip(common, loaded, strict=True))     # by a model without workers


@pytest.mark.parametrize("inner", ["AdamW", "Adafactor"])
def test_a_run_goes_on_with_its_workers_cut_in_another_way(tmp_path, inner):
    found = crews.call(CASES + "resumed", 4, (str(tmp_path), 3, STREAMING, (3, "ddp"), inner))
    for rank in (0, 2):
        first, _, third, _ = found[rank][0]
        for which in (0, 1):
            close(third[which], first[which])


def test_what_cant_be_saved_or_gone_on_from(tmp_path):
    for said in crews.call(CASES + "refused_at_load", 2, (str(tmp_path),)):
        apart, every, workers, loading, stepping, again = said
        assert "other values on rank 1 than on rank 0" in apart         # outside of common()
        assert "every=3 (now 4)" in every and "worker-1-" in workers
        assert "inside common()" in loading and "inside common()" in stepping and "inside common()" in again


def test_a_checkpoint_of_before_leads_out_of_divergence(tmp_path):
    own, common = simulated(2, 5, every=2, overlap=1)
    for rank, (fine, told) in enumerate(crews.call(CASES + "back_after_divergence", 2, (str(tmp_path),))):
        close(fine[0], own[rank])
        close(fine[1], common)
        assert "after step 4 worker 1 sent fragment 0 with values that aren't finite" in told


@pytest.mark.parametrize("encoding", [None, "4 bits"])
def test_on_a_gpu_the_bits_are_the_hosts(tmp_path, encoding):
    """On the stand-in, which refuses what CuPy refuses; saved, and gone on from, in mid-round."""
    def run(device):
        model = cases.build().to(device)
        diloco = DiLoCo(model, cases.adamw(model), encoding=cases.ENCODINGS[encoding], **STREAMING)
        for step in range(1, 10):
            rows, (x, labels) = cases.rows_of(0, step), plain.dataset()
            diloco.zero_grad()
            nn.cross_entropy(model(mt.tensor(x[rows]).to(device)), labels[rows]).backward()
            diloco.step(len(rows))
            if step == 7:
                with diloco.common():
                    checkpoints.save(tmp_path / device, model, diloco)
                checkpoints.load(tmp_path / device, model, diloco)
        diloco.finish()
        return model.state_dict()
    host = run("cpu")
    with installed():
        there = run("cuda:0")
    assert all((host[name] == there[name]).all() for name in host)


# ---------------------------------------------------------------- what takes part, and when

@pytest.mark.parametrize(("inside", "settings"), [
    (None, {"every": 3}), (None, {"every": 3, "fragments": 2, "overlap": 2, "mix": 0.5}), (1, {"every": 2})], ids=str)
def test_pruned_weights_stay_so_in_the_common_values(inside, settings):
    for seen in crews.call(CASES + "pruned", 2 if inside is None else 4, (inside, settings)):
        assert all((there == mask).all() and not mask.all() for there, mask in seen)
        assert len(seen) in ((16,) if inside is None else (0, 16))      # on a worker's first rank


def test_a_worker_without_samples_has_no_weight():
    found = crews.call(CASES + "without_samples", 2)
    for said, _, common in found:
        assert "no worker has had a sample" in said
        close(common, found[0][1])


def test_an_end_after_steps_without_samples_moves_nothing():
    """Nor where a message of none is on its way."""
    for overlap, steps in ((0, 5), (2, 6), (2, 7), (2, 9)):
        model = cases.build()
        diloco = DiLoCo(model, cases.adamw(model), every=4, overlap=overlap)
        cases.fit(diloco, range(1, 5), 0)
        for _ in range(overlap):
            diloco.step(1)
        before = cases.both(diloco)[1]
        while diloco.steps < steps:
            diloco.step(0)
        diloco.finish()
        assert diloco.steps == steps and not diloco.fragments[0].pending
        assert all((a == b).all() for values in cases.both(diloco) for a, b in zip(values, before, strict=True))


def test_an_end_sends_nothing_of_what_mix_1_forgets():
    for mix, wanted in ((1.0, ["take"]), (0.5, ["take", "post", "take"])):
        model = cases.build()
        diloco = DiLoCo(model, cases.adamw(model), every=4, overlap=2, mix=mix)
        cases.fit(diloco, range(1, 6), 0)
        with ledger.record() as book:
            diloco.finish()
        assert book.events == [(what, "fragment 0") for what in wanted]


def test_a_meeting_between_forward_and_backward_raises():
    model = cases.build()
    diloco = DiLoCo(model, optim.SGD(model.parameters()), every=1)
    late = (model(np.ones((2, plain.FEATURES))) ** 2).sum()
    diloco.step(1)      # without a gradient: what is written are the common values
    with pytest.raises(RuntimeError, match="DiLoCo has overwritten"):
        late.backward()
    with diloco.common():
        late = (model(np.ones((2, plain.FEATURES))) ** 2).sum()
    with pytest.raises(RuntimeError, match="DiLoCo has overwritten"):
        late.backward()
    late = (model(np.ones((2, plain.FEATURES))) ** 2).sum()
    diloco.load_state_dict(diloco.state_dict())
    with pytest.raises(RuntimeError, match="DiLoCo has overwritten"):
        late.backward()


def test_state_of_other_workers_or_of_another_model_is_refused():
    model = cases.build()
    diloco = DiLoCo(model, optim.SGD(model.parameters()), every=1)
    saved = diloco.state_dict()
    (facts,), count = saved["groups"], len(saved["state"])
    for change, said in (({"groups": [facts | {"workers": 2 * facts["workers"]}]}, f"2 workers and {count} parameters"),
                         ({"state": saved["state"][1:]}, f"1 workers and {count - 1} parameters")):
        with pytest.raises(ValueError, match=f"the saved state is of {said}, this run has 1 and {count}"):
            diloco.load_state_dict(saved | change)


def test_frozen_parameters_stay_out():
    model = cases.build()
    model[0].bias.requires_grad_(False)
    diloco = DiLoCo(model, optim.SGD([p for p in model.parameters() if p.requires_grad]), every=4)
    assert [name for f in diloco.fragments for name in f.names] == ["0.weight", "2.weight", "2.bias"]


def test_fragments_are_all_parameters_once_in_stripes_or_neighbours():
    model = nn.GPT(vocabulary=11, length=6, layers=5, heads=2, dim=8)
    names = [name for name, _ in model.named_parameters()]

    def blocks(pattern, fragments):
        parts = fragments_of(model, fragments, pattern)
        assert sorted(name for part in parts for name, _ in part) == sorted(names)
        return [sorted({name.split(".")[1] for name, _ in part if name.startswith("blocks")}) for part in parts]
    parts = fragments_of(model, 3, "strided")
    rest = [k for k, part in enumerate(parts) if any(n.startswith("embed") for n, _ in part)]
    assert rest == [0] and blocks("strided", 3) == [["2"], ["0", "3"], ["1", "4"]]
    assert blocks("sequential", 3) == [["0"], ["1", "2"], ["3", "4"]]


def test_settings_of_numpy_are_those_of_python():
    """Of 8 bits they would overflow: in twice 100, and where steps are counted on."""
    model = cases.build()
    diloco = DiLoCo(model, cases.adamw(model), every=np.int8(100), fragments=2.0, overlap=np.int8(1),
                    mix=np.float64(0.3))
    assert [f.due for f in diloco.fragments] == [50, 100] and type(diloco.mix) is float
    diloco.steps = 199
    diloco.step(1)
    assert [f.pending for f in diloco.fragments] == [False, True]


def test_the_timetable():
    assert timetable(6, 3, 1) == [(2, 3), (4, 5), (6, 7)] and timetable(7, 2) == [(3, 3), (7, 7)]
    for every in range(1, 9):
        for fragments in range(1, every + 1):
            sent = [step for step, _ in timetable(every, fragments)]
            assert len(set(sent)) == fragments and sent[0] >= 1 and sent[-1] == every
