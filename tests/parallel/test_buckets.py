"""Buckets: how they are cut and cut anew, what is unused, what must be equal on all ranks, and what isn't trained."""

import numpy as np
import pytest

from minitorch_dist.parallel.buckets import MIB, cut
from tests.crews import crews

from . import ddp_cases

CASES = "tests.parallel.ddp_cases:"


def close(got, wanted, tolerance):
    for g, w in zip(got, wanted, strict=True):
        np.testing.assert_allclose(g, w, rtol=0, atol=tolerance)


def test_buckets_hold_about_their_bytes_in_the_order_given():
    class Leaf:     # all that cut() looks at
        def __init__(self, nbytes, dtype="f4"):
            self.data, self.dtype = np.zeros(nbytes, np.uint8), dtype
    params = [Leaf(n) for n in (100, 50, 600, 400, 300, 700)]

    def sizes(first, cap):
        return [[p.data.nbytes for p in bucket] for bucket in cut(iter(params), first, cap)]
    assert sizes(100, 1000) == [[100], [50, 600, 400], [300, 700]]
    assert sizes(120, 10 ** 9) == [[100, 50], [600, 400, 300, 700]]
    assert sizes(1, 1) == [[n] for n in (100, 50, 600, 400, 300, 700)]
    assert sizes(MIB, 1) == sizes(1, 1)         # the first is never larger than the others may be
    assert sizes(MIB, MIB) == [[100, 50, 600, 400, 300, 700]]
    mixed = [Leaf(10), Leaf(10, "f8"), Leaf(10, "f8"), Leaf(10)]
    assert cut(mixed, MIB, MIB) == [[mixed[0]], [mixed[1], mixed[2]], [mixed[3]]]
    assert cut([], 1, 1) == []


@pytest.mark.parametrize("n", [1, 2, 4])
def test_parameters_that_take_no_part(n):
    """Used somewhere: zeros here. Used nowhere: no gradient, no decay, as in one process, and named."""
    inputs = [ddp_cases.heads_input(rank) for rank in range(n)]
    used = {f"head{rank % 3}.weight" for rank in range(n)} | {"trunk.weight"}
    for results in crews.call(CASES + "unused_parameters", n):
        for params, grads, unused, after in results:
            trunk = params["trunk.weight"]
            wanted = {name: np.zeros_like(p) for name, p in params.items() if name in used}
            for rank, (x, ct) in enumerate(inputs):
                head = f"head{rank % 3}.weight"
                wanted[head] += ct.T @ (x @ trunk.T)
                wanted["trunk.weight"] += (ct @ params[head]).T @ x
            assert {name for name, g in grads.items() if g is not None} == used
            assert set(unused) == set(params) - used and "head3.weight" in unused
            for name in params:
                if name in used:
                    np.testing.assert_allclose(grads[name], wanted[name], rtol=0, atol=1e-13)
                    assert (params[name] != after[name]).any()
                else:
                    assert (params[name] == after[name]).all()


def test_the_order_of_the_first_backward():
    """Layers registered in the order opposite to their use: after the first backward, buckets follow the use."""
    results = {how: crews.call(CASES + "order_rebuilt", 2, (how,)) for how in ("optimizer after", "optimizer before")}
    for how, everyone in results.items():
        for before, after, events, digests, values, said in everyone:
            assert [names[0][:6] for names in before] == [f"layer{i}" for i in (0, 0, 1, 1, 2, 2, 3, 3)]
            assert [names[0][:6] for names in after] == [f"layer{i}" for i in (3, 3, 2, 2, 1, 1, 0, 0)]
            first, second, _ = ([event for event in book if event[0] == "post"] for book in events)
            assert [e[1] for e in first] == [e[1] for e in second] == [f"bucket {k}" for k in range(8)]
            # In the first backward nothing could be posted before the last layer's gradients; now overlap is there.
            assert posted_before_the_last_gradient(events[0]) == 0
            assert posted_before_the_last_gradient(events[1]) == 7
            assert digests == everyone[0][3], f"{how}: the ranks' parameters differ"
            assert list(values) == list(everyone[0][4]) and "summed over the ranks already" in said
        close(everyone[0][4].values(), results["optimizer after"][0][4].values(), 0)


def posted_before_the_last_gradient(events):
    last = max(i for i, (kind, _) in enumerate(events) if kind == "gradient")
    return sum(kind == "post" for kind, _ in events[:last])


def test_models_that_differ_raise_on_every_rank_with_the_first_difference():
    wanted = {"shape": ("parameter '0.weight': float32 [5, 4]", "parameter '0.weight': float32 [6, 4]"),
              "dtype": ("'0.weight': float32", "'0.weight': float64"),
              "more": ("nothing more", "late: Linear("),
              "layer": ("3: Dropout(p=0.1)", "3: Dropout(p=0.2)"), "router": (", k=2, ", ", k=1, "),
              "layer in parts": ("PartDropout(p=0.1)", "PartDropout(p=0.2)"),
              "frozen": ("[5, 4]", "[5, 4], frozen"),
              "settings": ("bucket_cap_mb=25", "bucket_cap_mb=3")}
    for said in crews.call(CASES + "different_models", 3):
        for what, (usual, odd) in wanted.items():
            lines = said[what].splitlines()
            assert lines[1].strip().startswith("ranks 0, 1: ") and usual in lines[1], said[what]
            assert lines[2].strip().startswith("rank 2: ") and odd in lines[2], said[what]


@pytest.mark.parametrize("n", [1, 3])
def test_a_parameter_with_two_names_is_one(n):
    """Its two uses' gradients are added before it is reduced, once."""
    for names, w, grad in crews.call(CASES + "shared_parameter", n):
        assert len(names) == 2
        wanted = np.zeros_like(w)
        for rank in range(n):
            random = np.random.default_rng([5, rank])
            x, ct = random.standard_normal((5, 3)), random.standard_normal((5, 3))
            h = np.tanh(x @ w.T)
            wanted += h.T @ ct + ((ct @ w.T) * (1 - h * h)).T @ x
        np.testing.assert_allclose(grad, wanted, rtol=0, atol=1e-13)


def test_frozen_parameters_are_broadcast_and_left_alone():
    everyone = crews.call(CASES + "frozen_parameters", 2)
    for values, grads in everyone:
        close(values.values(), everyone[0][0].values(), 0)
        assert grads["0.weight"] is None and grads["0.bias"] is None
        hidden = [np.full((2, 4), 1.0 + r) @ values["0.weight"].T + values["0.bias"] for r in (0, 1)]
        np.testing.assert_allclose(grads["1.weight"], np.ones((3, 2)) @ (hidden[0] + hidden[1]), rtol=0, atol=1e-13)


def test_buffers_are_broadcast_before_each_forward_in_training():
    # Rank r adds r + 1 to the buffer in every forward. Broadcast: rank 0's 1, then each adds its own; no broadcast in
    # evaluation, inside of no_sync() and in exact mode.
    assert crews.call(CASES + "buffers", 4) == [
        [3.0] * 4, [1 + 2 + 2.0, 6.0, 6.0, 6.0], [1 + 3 + 3.0, 9.0, 9.0, 9.0], [1 + 4 + 4.0, 12.0, 12.0, 12.0]]


def test_a_buffer_that_is_assigned_is_broadcast_too():
    assert crews.call(CASES + "assigned_buffer", 3) == [2.0, 1 + 2.0, 1 + 3.0]


@pytest.mark.parametrize("n", [1, 2, 4])
def test_freezing_for_a_while(n):
    """A frozen parameter gets no gradient, and is one of its buckets again as soon as it is thawed."""
    wanted = ddp_cases.frozen_alone(n)
    for values, while_frozen, last in crews.call(CASES + "frozen_and_thawed", n):
        assert while_frozen["trunk.weight"] is None and last["trunk.weight"] is not None
        for name, value in wanted.items():
            np.testing.assert_allclose(values[name], value, rtol=0, atol=1e-12, err_msg=name)


def test_what_is_refused_when_a_model_is_wrapped():
    for said in crews.call(CASES + "thawed_too_late", 2):
        assert "0.weight" in said["thawed"] and "wrap" in said["thawed"]
        assert "float16" in said["float16"] and "fp16_compress" in said["float16"]
        assert "'rows' is read-only" in said["read-only buffer"]


def test_buffers_of_any_strides_and_without_axes_are_rank_0s():
    turned = np.arange(12.0).reshape(3, 4).T
    for found in crews.call(CASES + "odd_buffers", 3):
        for values, strides, frozen, steps in found:
            assert values == turned.tolist() and strides == turned.strides and steps >= 2, found
            assert frozen == np.arange(6.0).reshape(3, 2).T.tolist()


def test_a_buffer_that_is_rank_0s_already_may_be_waiting_for_its_backward():
    found = crews.call(CASES + "two_forwards_one_backward", 2)
    for of_wrapper in zip(*found, strict=True):
        expected = np.outer(np.arange(1.0, 5), sum(xs.sum((0, 1)) for xs, _ in of_wrapper))
        for _, gradient in of_wrapper:
            np.testing.assert_allclose(gradient, expected.ravel(), rtol=1e-12)


@pytest.mark.parametrize("exact", [False, True])
def test_the_pass_after_one_that_raised(exact):
    for first, after, another, held in crews.call(CASES + "after_a_pass_that_raised", 2, (exact,)):
        assert held == sorted(first)
        for name, gradient in first.items():
            for later in (after[name], another[name]):
                assert (later is None) if gradient is None else (gradient == later).all(), name
