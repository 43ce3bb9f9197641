"""Gossip against a NumPy simulation by explicit matrices, closed forms, data parallelism, and counted bytes."""

import numpy as np
import pytest

from minitorch_dist import optim
from minitorch_dist.parallel.local_sgd import Topology, topologies
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import gossip_cases as cases
from . import plain
from .diloco_cases import rows_of

CASES = "tests.parallel.gossip_cases:"


def by_hand(graph, n):
    """[W(0), W(1) …], edge by edge: rank i sends to i + step; degrees of the path, and of its shortcut from 1 to 3."""
    def shifted(steps):
        w = np.zeros((n, n))
        for i in range(n):
            targets = {(i + step) % n for step in steps} | {i}
            for target in targets:
                w[target, i] = 1 / len(targets)
        return w
    powers = [step for step in (1, 2, 4, 8, 16) if step < n]
    if graph == "path":
        pairs = {frozenset(pair) for pair in [(i, i + 1) for i in range(n - 1)] + [(1, 3)] * (n > 3)}
        degree = [sum(i in pair for pair in pairs) for i in range(n)]
        w = np.zeros((n, n))
        for i, j in map(sorted, pairs):
            w[i, j] = w[j, i] = 1 / (1 + max(degree[i], degree[j]))
        return [w + np.diag(1 - w.sum(1))]
    return {"ring": [shifted([1, -1])], "exponential": [shifted(powers)], "complete": [np.full((n, n), 1 / n)],
            "one-peer": [shifted([step]) for step in powers] or [np.ones((1, 1))]}[graph]


def flat(params):
    return np.concatenate([p.reshape(-1) for p in params])


def gradient(values, rows):
    x, labels = plain.dataset()
    params, at = [], 0
    for p in plain.initial():
        params.append(values[at:at + p.size].reshape(p.shape))
        at += p.size
    return flat(plain.loss_and_gradient(params, x[rows], labels[rows], len(rows))[1])


def simulated(matrices, n, steps, every=1, overlap=0, left_out=None):
    """All ranks' values (n, ψ): momentum by hand, then products with whole matrices. left_out: (rank, step)."""
    x = np.stack([flat(plain.initial())] * n)
    b, w, sent, when, meeting = np.zeros_like(x), None, None, None, 0
    for step in range(1, steps + 1):
        for k in range(n):
            if (k, step) != left_out:
                b[k] = cases.MOMENTUM * b[k] + gradient(x[k], rows_of(k, step))
        x = x - cases.LR * np.array([b[k] if (k, step) != left_out else 0 * b[k] for k in range(n)])
        if overlap and step - overlap == when:
            x = x + (w @ sent - sent)
        if step % every == 0:
            w, sent, when, meeting = matrices[meeting % len(matrices)], x, step, meeting + 1
            x = x if overlap else w @ x
    return x


def close(got, wanted, tolerance=1e-12):
    np.testing.assert_allclose(got, wanted, rtol=tolerance, atol=tolerance)


SETTINGS = {"": {}, "every 3": {"every": 3}, "D-PSGD": {"overlap": 1}, "late": {"every": 3, "overlap": 2},
            "a whole round late": {"every": 2, "overlap": 2}}


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
def test_ranks_are_those_of_the_simulation(n):
    steps = 11
    found = crews.call(CASES + "runs", n, (SETTINGS, steps))
    for (graph, name), _ in found[0].items():
        x = simulated(by_hand(graph, n), n, steps, **SETTINGS[name])
        for rank in range(n):
            own, mean, again, consensus, end = found[rank][graph, name]
            close(flat(own), x[rank])
            close(flat(mean), x.mean(0))
            close(consensus, np.sqrt(((x - x.mean(0)) ** 2).sum() / n))
            assert (flat(again) == flat(own)).all() and (flat(end) == flat(found[0][graph, name][4])).all()
            close(flat(end), x.mean(0))


def test_with_overlap_it_is_the_papers_formula():
    """x_i ← Σ_j W_ij x_j - η g_i(x_i), of all ranks at once; and AdamW, whose state stays each rank's own."""
    n, steps = 3, 9
    w, = by_hand("ring", n)
    x = np.stack([flat(plain.initial())] * n)
    found = crews.call(CASES + "by_adamw", n, (steps,))
    for step in range(1, steps + 1):
        x = (w @ x if step > 1 else x) - cases.LR * np.stack([gradient(x[k], rows_of(k, step)) for k in range(n)])
        for rank in range(n):
            close(flat(found[rank][0][step - 1]), x[rank])
    x, m, v = np.stack([flat(plain.initial())] * n), 0, 0
    for step in range(1, steps + 1):
        g = np.stack([gradient(x[k], rows_of(k, step)) for k in range(n)])
        m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
        x = w @ (x * (1 - 0.02 * 0.1) - 0.02 * m / (1 - 0.9 ** step) / (np.sqrt(v / (1 - 0.999 ** step)) + 1e-8))
    for rank in range(n):
        close(flat(found[rank][1]), x[rank])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_complete_graph_is_data_parallelism(n):
    random = np.random.default_rng(8)
    batches = [random.permutation(plain.SAMPLES)[:6 * n] for _ in range(20)]
    _, params = plain.train(batches, cases.LR, cases.MOMENTUM)
    for own, consensus in crews.call(CASES + "as_data_parallel", n, (batches,)):
        close(flat(own), flat(params))
        assert consensus < 1e-14


@pytest.mark.parametrize("n", [3, 4])
def test_the_mean_moves_by_the_mean_gradient_on_any_graph(n):
    """½ Σ a (w - c_k)² on rank k: the mean of all w goes to the mean of the c_k by (1 - ηa) a step, in closed form."""
    a, start, lr, steps = np.array([0.5, 1.5, 3.0]), np.array([2.0, -1.0, 0.3]), 0.2, 7
    centres = np.random.default_rng(3).standard_normal((n, 3))
    for found in crews.call(CASES + "quadratics", n, (a, centres, start, lr, steps, SETTINGS)):
        assert len(found) == len(cases.GRAPHS) * len(SETTINGS)
        for path in found.values():
            for step, mean in enumerate(path, 1):
                close(mean, centres.mean(0) + (1 - lr * a) ** step * (start - centres.mean(0)))


@pytest.mark.parametrize("n", [2, 3, 5])
def test_by_averaging_alone_ranks_come_nearer_by_the_second_eigenvalue(n):
    """The slowest wave round the ring by |λ₂| = 1 - gap, anything else by that or more."""
    second = (1 + 2 * np.cos(2 * np.pi / n)) / 3 if n > 2 else 0
    assert topologies.ring(n).gap == pytest.approx(1 - abs(second), abs=1e-12)
    wave = np.cos(2 * np.pi * np.arange(n) / n)[:, None] * np.array([1.0, -2.0, 0.5]) + 3
    for overlap in (0, 1):
        for *found, (_, ended) in crews.call(CASES + "averaging", n, ("ring", wave, 6, {"overlap": overlap})):
            assert ended < 1e-13        # and nothing that was on its way moves a rank any more
            distances = [consensus for _, consensus in found][overlap:]
            first = distances[0]
            for step, distance in enumerate(distances):
                assert distance == pytest.approx(first * abs(second) ** step, rel=1e-10, abs=1e-13)
    noise = np.random.default_rng(1).standard_normal((n, 4))
    for graph in ("exponential", "path", "ring"):
        second = 1 - cases.GRAPHS[graph](n).gap
        for _, *found, _ in crews.call(CASES + "averaging", n, (graph, noise, 6, {})):
            distances = [np.sqrt(((noise - noise.mean(0)) ** 2).sum() / n), *(consensus for _, consensus in found)]
            assert all(b <= second * a + 1e-13 for a, b in zip(distances, distances[1:], strict=False))


def test_one_peer_after_another_has_the_mean_after_log2_n_meetings():
    noise = np.random.default_rng(1).standard_normal((4, 4))
    for found in crews.call(CASES + "averaging", 4, ("one-peer", noise, 2, {})):
        (_, first), (_, between), (own, last), _ = found
        assert last < 1e-15 < 0.1 * first < between < first
        close(own, noise.mean(0), 1e-15)


@pytest.mark.parametrize("graph", cases.GRAPHS)
def test_ranks_that_are_alike_stay_so_to_the_bit(graph):
    """And as a rank by itself, whose gradients are everybody's."""
    assert all(crews.call(CASES + "alike", 3, (graph,)))


def test_a_rank_whose_scaler_leaves_a_step_out_takes_part_in_the_meeting():
    x = simulated(by_hand("ring", 3), 3, 6, left_out=(1, 4))
    for rank, own in enumerate(crews.call(CASES + "with_scaler", 3, (6, 4))):
        close(flat(own), x[rank])


def test_pruned_weights_stay_so():
    assert crews.call(CASES + "pruned", 3) == [[True] * 6] * 3


def test_a_meeting_between_forward_and_backward_raises():
    gossip = cases.new()
    late = (gossip.model(np.ones((2, plain.FEATURES))) ** 2).sum()
    gossip.step()       # without a gradient: what is written is what others have sent
    with pytest.raises(RuntimeError, match="Gossip has overwritten"):
        late.backward()
    late = (gossip.model(np.ones((2, plain.FEATURES))) ** 2).sum()
    with gossip.average(), pytest.raises(RuntimeError, match="Gossip has overwritten"):
        late.backward()


def test_state_of_other_ranks_or_of_another_model_is_refused():
    gossip = cases.new()
    saved = gossip.state_dict()
    (facts,), count = saved["groups"], len(saved["state"])
    for change, said in (({"groups": [facts | {"ranks": 2 * facts["ranks"]}]}, f"2 ranks and {count} parameters"),
                         ({"state": saved["state"][1:]}, f"1 ranks and {count - 1} parameters")):
        with pytest.raises(ValueError, match=f"the saved state is of {said}, this run has 1 and {count}"):
            gossip.load_state_dict(saved | change)


# ---------------------------------------------------------------- the graphs

def test_matrices_are_those_made_by_hand():
    for n in range(1, 18):
        for graph, make in cases.GRAPHS.items():
            for made, wanted in zip(make(n).matrices, by_hand(graph, n), strict=True):
                close(made, wanted, 1e-15)


def test_spectral_gaps_are_closed_forms():
    for n in range(3, 18):
        assert topologies.ring(n).gap == pytest.approx(2 / 3 * (1 - np.cos(2 * np.pi / n)), abs=1e-12)
        assert topologies.complete(n).gap == pytest.approx(1, abs=1e-12)
        shifts = [2 ** j for j in range((n - 1).bit_length())]      # of a wave, (1 + ω^shift)/2 is left of its height
        turns = [np.prod([abs(np.cos(np.pi * m * shift / n)) for shift in shifts]) for m in range(1, n)]
        if n & (n - 1):
            assert topologies.one_peer(n).gap == pytest.approx(1 - max(turns) ** (1 / len(shifts)), abs=1e-12)
        if n % 2 == 0:
            assert topologies.exponential(n).gap == pytest.approx(2 / (1 + np.ceil(np.log2(n))), abs=1e-12)
    for rows, columns in ((3, 3), (3, 4), (4, 5), (1, 6)):
        wave = [1 / 5 + 2 / 5 * (np.cos(2 * np.pi * a / rows) + np.cos(2 * np.pi * b / columns))
                for a in range(rows) for b in range(columns)][1:]
        if rows > 2:
            assert topologies.torus(rows, columns).gap == pytest.approx(1 - np.abs(wave).max(), abs=1e-12)
    assert topologies.torus(1, 6).gap == pytest.approx(topologies.ring(6).gap)
    assert [topologies.one_peer(n).gap == 1 for n in range(1, 10)] == [n in (1, 2, 4, 8) for n in range(1, 10)]
    assert all(make(1).gap == 1 for make in cases.GRAPHS.values())


def test_a_topology_says_who_takes_what():
    star = topologies.metropolis(4, [(0, 1), (0, 2), (3, 0)], "star")
    assert str(star).splitlines() == [
        "star of 4 ranks; spectral gap 0.25", "    x0 ← 0.25 x0 + 0.25 x1 + 0.25 x2 + 0.25 x3",
        "    x1 ← 0.25 x0 + 0.75 x1", "    x2 ← 0.25 x0 + 0.75 x2", "    x3 ← 0.25 x0 + 0.75 x3"]
    assert star.sends(7, 0) == [1, 2, 3] and star.sends(7, 2) == [0] and star.takes(0, 2) == [(0, 0.25)]
    peers = topologies.one_peer(8)
    assert peers.period == 3 and [peers.sends(k, 6) for k in range(4)] == [[7], [0], [2], [7]]
    assert [peers.takes(k, 6) for k in range(3)] == [[(5, 0.5)], [(4, 0.5)], [(2, 0.5)]]
    assert "  W(2)\n    x0 ← 0.5 x0 + 0.5 x4\n" in str(peers) and "3 matrices in turns" in str(peers)
    assert repr(topologies.ring(3)).startswith("ring of 3 ranks (") and repr(star) != repr(topologies.metropolis(
        4, [(0, 1), (0, 2), (0, 3), (1, 2)], "star"))


@pytest.mark.parametrize(("make", "words"), [
    (lambda: Topology("mine", [[[0.5, 0.5], [0.4, 0.5]]]), r"mine: W\(0\): row 1 sums to 0.9, .* a mean"),
    (lambda: Topology("mine", [np.eye(2), [[0.6, 0.4], [0.5, 0.5]]]), r"W\(1\): column 0 sums to 1.1.*would move"),
    (lambda: Topology("mine", [[[1.5, -0.5], [-0.5, 1.5]]]), "weights from -0.5 to 1.5"),
    (lambda: Topology("mine", [[[np.nan, 1], [1, 0]]]), "weights from nan"),
    (lambda: Topology("mine", [np.eye(2)]), "never come nearer"),
    (lambda: Topology("mine", [[[0, 1], [1, 0]]]), "never come nearer"),
    (lambda: topologies.metropolis(4, [(0, 1), (2, 3)]), "never come nearer"),
    (lambda: topologies.metropolis(4, [(0, 4)]), r"edge \(0, 4\) isn't one of two of the ranks 0 to 3"),
    (lambda: topologies.metropolis(4, [(1, 1)]), r"edge \(1, 1\)"),
    (lambda: Topology("mine", []), "shapes none"), (lambda: Topology("mine", [np.ones((2, 3))]), r"shapes \(2, 3\)"),
    (lambda: Topology("mine", [np.ones((1, 1)), np.eye(2)]), r"\(1, 1\), \(2, 2\)"),
    (lambda: topologies.ring(0), "of 0 ranks"), (lambda: topologies.torus(0, 3), r"\(0, 0\)"),
    (lambda: topologies.torus(-1, -1), r"-1 × -1 torus: matrices of shapes \(0, 0\)")],
    ids=lambda value: value if isinstance(value, str) else "")
def test_matrices_that_arent_doubly_stochastic_are_refused(make, words):
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize("make", [
    topologies.ring, topologies.complete, topologies.exponential, topologies.one_peer,
    lambda n: topologies.torus(n, 2), lambda n: topologies.metropolis(n, [(0, 1), (1, 2)])])
def test_ranks_may_be_counted_by_numpy_and_are_whole(make):
    for found, wanted in zip(make(np.int8(3)).matrices, make(3).matrices, strict=True):
        np.testing.assert_array_equal(found, wanted)
    with pytest.raises(TypeError, match="=1.5: must be a whole number"):
        make(1.5)


# ---------------------------------------------------------------- what is sent

@pytest.mark.parametrize("n", [1, 3, 4])
@pytest.mark.parametrize("graph", cases.GRAPHS)
def test_a_meeting_sends_all_elements_to_each_neighbour(n, graph):
    """To the byte, and nothing between; buffers are two arrays, and one for each that sends."""
    size = 4 * (70 * 90 + 90 + 90 * 13)     # the last bias is frozen
    matrices = by_hand(graph, n)
    for every, overlap in ((1, 0), (2, 1)):
        for rank, (steps, at_end, held) in enumerate(crews.call(CASES + "traffic", n, (graph, every, overlap))):
            most = max((w[rank] > 0).sum() - 1 for w in matrices)
            assert held == size * (2 + most)
            for step, (calls, sent) in enumerate(steps, 1):
                w = matrices[(step // every - 1) % len(matrices)]
                to, of = (w[:, rank] > 0).sum() - 1, (w[rank] > 0).sum() - 1
                due = step % every == 0
                assert calls == {("world", op): count for op, count in (("recv", of), ("send", to)) if due and count}
                assert sum(sent.values()) == (size * to if due else 0)
            assert at_end == {("world", "all_reduce"): 1}


def test_messages_travel_while_the_next_step_is_made():
    """Two messages of 3 s each (one sent, one received) per step of 10 s, but the first at its end."""
    assert crews.call(CASES + "waited", 2, (0, 10.0, 3.0)) == [6 * 16.0] * 2
    assert crews.call(CASES + "waited", 2, (1, 10.0, 3.0)) == [60.0] * 2
    assert crews.call(CASES + "waited", 2, (1, 5.0, 3.0)) == [6 * 5.0 + 5 * 1.0] * 2


# ---------------------------------------------------------------- BatchNorm, checkpoints, devices

def test_statistics_of_batch_norm_are_a_ranks_own_and_the_mean_at_the_end():
    found = crews.call(CASES + "with_statistics", 3, (6,))
    for k in range(2):
        mean = np.mean([own[k] for own, *_ in found], axis=0)
        for own, inside, again, end in found:
            close(inside[k], mean)
            assert (own[k] == again[k]).all() and (end[k] == found[0][3][k]).all()
            assert np.abs(own[k] - mean).max() > 1e-3
            close(end[k], mean)


@pytest.mark.parametrize(("at", "settings", "kind"), [
    (4, {}, "SGD"), (5, {"overlap": 1}, "AdamW"), (4, {"every": 3, "overlap": 2}, "Adafactor")], ids=str)
def test_a_resumed_run_continues_bit_for_bit(tmp_path, at, settings, kind):
    for runs, alone, mean, under_way in crews.call(CASES + "resumed", 3, (str(tmp_path), at, settings, kind)):
        assert under_way == bool(settings)
        for first, *others in zip(*runs, strict=True):
            assert all((first == other).all() for other in others)
        assert all((a == b).all() for a, b in zip(alone, mean, strict=True))


def test_what_cant_be_saved_or_gone_on_from(tmp_path):
    for said in crews.call(CASES + "refused_at_load", 2, (str(tmp_path),)):
        apart, step, finish, again, load, other, alone = said
        assert "other values on rank 1 than on rank 0" in apart         # outside of average()
        for what, text in (("step", step), ("finish", finish), ("average", again), ("load_state_dict", load)):
            assert f"Gossip.{what} inside average()" in text
        assert "topology='ring of 2 ranks" in other and "every=1 (now 2)" in other
        assert "rank-1-momentum.0.bias" in alone


@pytest.mark.parametrize("overlap", [0, 1])
def test_on_a_gpu_the_bits_are_the_hosts(overlap):
    """On the stand-in, which refuses what CuPy refuses."""
    for host, there in ranks.call(CASES + "on_host_and_gpu", 2, (overlap,)):
        assert all((a == b).all() for a, b in zip(host, there, strict=True)) and host[-1] > 0


# ---------------------------------------------------------------- what is wrong

def test_ranks_that_disagree_are_told_so_on_all():
    for said in crews.call(CASES + "disagreeing", 3):
        assert len(said) == 4 and all("Gossip" in text for text in said.values()), said
        assert "rank 2: topology='path of 3 ranks" in said["path"] and "every=2" in said["every=2"]
        assert "overlap=1" in said["overlap=1"] and "'lr': 0.5" in said["'lr': 0.5"]


def test_what_a_rank_hasnt_whole_is_refused():
    for said in crews.call(CASES + "wrapped_wrongly", 2):
        assert "the model is a DistributedDataParallel over 2 ranks" in said["ddp"]
        assert "the model is a DistributedDataParallel, wrapped or cut" in said["alone"]
        assert "the model is a FullySharded over 2 ranks" in said["sharded"]
        assert "0 is a ColumnParallelLinear, wrapped or cut" in said["tp"]
        assert "is divided over the ranks of 'world'" in said["experts"]
        assert "float32, float64" in said["dtypes"]
        assert "topology=ring of 3 ranks" in said["ranks"] and "for the 2 ranks of 'world'" in said["ranks"]
        assert "topology='ring'" in said["no topology"]


@pytest.mark.parametrize(("settings", "words"), [
    ({"every": 0}, "every=0"), ({"every": 2.5}, "every=2.5"), ({"every": float("inf")}, "every=inf"),
    ({"overlap": -1}, "overlap=-1"), ({"overlap": 0.5}, "overlap=0.5"),
    ({"every": 2, "overlap": 3}, "overlap=3.*every=2")], ids=str)
def test_settings_that_mean_nothing_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        cases.new(**settings)


def test_an_optimizer_of_other_parameters_is_refused():
    with pytest.raises(ValueError, match="Gossip: the inner optimizer doesn't update 0.bias"):
        cases.new(inner=lambda model: optim.SGD([model[0].weight]))


@pytest.mark.parametrize("overlap", [0, 1])
def test_a_rank_that_diverges_is_named_by_those_that_take_of_it(overlap):
    found = crews.call(CASES + "diverged", 4, (overlap,))
    for rank in (0, 1, 2):
        assert f"rank {rank} takes nothing of what was sent after step 3, when rank 1 had values" in found[rank][0]
    assert found[3] == (None, True) and [finite for _, finite in found] == [True, False, True, True]


def test_a_neighbour_that_has_left_ends_the_job():
    run = ranks.launch(["-m", "tests.parallel.gossip_cases"], 3, limit=60)
    assert run.returncode and not run.timed_out, run.report()
    assert any("for rank 1, which has left the program" in text for text in run.stderr), run.report()



def test_steps_are_counted_on_beyond_what_a_setting_of_8_bits_holds():
    gossip = cases.new(every=np.int8(3), overlap=np.int8(1))
    gossip.steps = 127
    for _ in range(3):
        gossip.step()
    assert gossip.meetings == 1 and gossip.pending is None
