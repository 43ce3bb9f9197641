"""fully_shard in 16 bits beside float32 pieces: what is rounded, summed, sent and held."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import comm, nn
from minitorch_dist.backend import as_dtype
from minitorch_dist.compress.low_precision import convert_to_low_precision_training
from minitorch_dist.parallel import MixedPrecisionPolicy, fully_shard
from minitorch_dist.testing import ranks
from tests.crews import crews

from . import policy_cases as cases

CASES = "tests.parallel.policy_cases:"


@pytest.fixture(scope="module")
def by_hand():
    """{(policy, ranks): states}: float32 masters, models of 16 bits, gradients rounded and added up one by one."""
    return {(name, n): cases.by_hand(cases.POLICIES[name], n) for name in ("values", "both", "gradients", "nothing")
            for n in (1, 2, 3)}


@pytest.mark.parametrize("n", [1, 2, 3])
def test_curves_are_those_made_by_hand(by_hand, n):
    """What 16 bits round is 1e5 times what the order of float32's sums does."""
    ways = [(name, stage) for name in ("values", "both", "gradients") for stage in (1, 2, 3)]
    for (name, _), states in crews.call(CASES + "curves", n, (ways,))[0].items():
        for state, wanted in zip(states, by_hand[name, n], strict=True):
            assert {key: value.dtype for key, value in state.items()} == dict.fromkeys(wanted, np.float32)
            for key in wanted:
                np.testing.assert_allclose(state[key], wanted[key], rtol=1e-5, atol=2e-7, err_msg=f"{name}, {key}")


def test_the_curves_can_tell(by_hand):
    """One policy from another, and one number of ranks from another where what travels is rounded."""
    def apart(a, b):
        return max(abs(by_hand[a][-1][key] - by_hand[b][-1][key]).max() for key in by_hand[a][-1])
    for n in (1, 2, 3):
        for a, b in (("values", "nothing"), ("gradients", "nothing"), ("gradients", "values")):
            assert apart((a, n), (b, n)) > 1e-4
    assert apart(("both", 1), ("both", 2)) > 1e-5 > apart(("nothing", 1), ("nothing", 2))


@pytest.mark.parametrize("n", [1, 4])
def test_under_autocast_the_bits_of_exact_mode_stay(n):
    """Autocast rounds the same weights to the same 16 bits: of every Linear's products."""
    assert len(set(crews.call(CASES + "exact_digests", n)[0].values())) == 1


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("policy, value, gradient", [("values", 2, 4), ("both", 2, 2), ("gradients", 4, 2),
                                                     ("nothing", 4, 4)])
def test_what_a_step_sends_and_a_rank_holds(n, stage, policy, value, gradient):
    """To the byte, padding included; of ψ elements, gathers · value · ψ + gradient · ψ bytes, times (N-1)/N."""
    for seen in crews.call(CASES + "counted", n, (policy, stage)):
        psi, sizes = sum(seen["sizes"]), sorted(seen["sizes"], reverse=True)
        share = psi // n
        assert seen["sent"]["all_gather"] == (2 if stage == 3 else 1) * value * share * (n - 1)
        sums = "reduce_scatter" if gradient == 4 else "all_to_all"
        assert seen["sent"][sums] == gradient * share * (n - 1)
        assert set(seen["sent"]) == {"all_gather", sums, "all_reduce"}
        pieces = 4 * share if value == 2 else 0         # beside what forward uses, as an optimizer's copy
        assert seen["live"]["optimizer"] == 8 * share + pieces
        assert seen["live"]["parameter"] == (value * psi if stage < 3 else 4 * share - pieces)
        summed = 4 * share * (gradient == 2 or stage > 1)
        assert seen["live"]["gradient"] == summed + (gradient * psi if stage == 1 else 0)
        assert seen["live"]["buffer"] == 0
        arriving = 2 * (gradient == 2)      # bytes of each element of the others' parts of a sum, of two units at most
        gathered = value * (stage == 3)
        assert max(arriving, gathered) * sizes[0] <= seen["peak"]["buffer"] <= (arriving + gathered) * sum(sizes[:2])


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_who_sees_which_dtype(stage):
    for seen in crews.call(CASES + "seen_inside", 2, (stage,)):
        assert seen == {"inputs": "float16", "weight": "float16", "output": "float32", "pieces": {"float32"}}


@pytest.mark.parametrize("stage", [2, 3])
def test_one_ranks_overflow_is_everybodys(stage):
    for seen in crews.call(CASES + "scaled", 2, (stage,)):
        assert seen == [(256.0, [True, True]), (128.0, [False, False]), (128.0, [True, True])]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_accumulation_and_checkpoints(stage):
    """A backward adds up in float32 and is rounded once, no_sync each time (one part in 256); a checkpoint runs in the
    same 16 bits."""
    for found in crews.call(CASES + "accumulated", 2, (stage,)):
        largest = max(abs(g).max() for g in found["one"])
        assert largest > 0.1
        for one, twice, again in zip(found["one"], found["no_sync"], found["checkpoint"], strict=True):
            np.testing.assert_array_equal(one, again)
            np.testing.assert_allclose(twice, one, rtol=2 ** -6, atol=largest * 2 ** -7)
    for one, unrounded in zip(*(crews.call(CASES + "accumulated", 1, (stage,))[0][way] for way in ("one", "values")),
                              strict=True):
        np.testing.assert_array_equal(one, unrounded.astype(as_dtype("bfloat16")).astype(np.float32))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_rule_by_hand_gives_gradients_of_the_values(stage):
    """Products of few bits have one: they see 16 bits, while the parameter's gradient is kept in float32."""
    def gradients(wrap):
        mt.manual_seed(3)
        model = wrap(convert_to_low_precision_training(nn.Sequential(nn.Linear(16, 8)), "rowwise"))
        x = np.random.default_rng(1).standard_normal((5, 16)).astype(as_dtype("bfloat16"))
        model(x).sum().backward()
        return [p.grad.numpy().astype(np.float32).reshape(-1) for p in model.parameters()]
    policy = MixedPrecisionPolicy("bfloat16")
    for got, wanted in zip(gradients(lambda m: fully_shard(m, comm.world_of_one(), stage, mp_policy=policy)),
                           gradients(lambda m: m.to("bfloat16")), strict=True):
        np.testing.assert_array_equal(got[:wanted.size], wanted)


def test_on_a_gpu():
    """The host's bits where 16 bits only travel; where products are made in them, one rounding may differ."""
    for seen in ranks.call(CASES + "on_a_gpu", 2):       # the GPU that is played there stays with its process
        assert {where for _, (apart, (where,)) in seen.items()} == {"cuda"}
        assert seen["gradients", 2][0] == 0
        assert all(apart < 1e-4 for apart, _ in seen.values()), seen


def test_float32_is_what_there_is_without():
    assert MixedPrecisionPolicy("bfloat16", reduce_dtype="float32") == MixedPrecisionPolicy("bfloat16")
    assert not MixedPrecisionPolicy(np.float32, np.float32).rounds
    assert MixedPrecisionPolicy("bfloat16", output_dtype="float32").output_dtype == "float32"


def test_what_is_refused():
    for errors in crews.call(CASES + "refused", 2):
        assert "param_dtype='float8'" in errors["unknown"] and "float16 or bfloat16" in errors["unknown"]
        assert "reduce_dtype='float64'; it may be float16 or bfloat16" in errors["wide"]
        assert "output_dtype='int32'" in errors["whole numbers"]
        assert "exact mode adds gradients up in their own precision, not in bfloat16" in errors["exact"]
        assert "0.weight (float64)" in errors["float64"] and "train in float32" in errors["float64"]
        assert "mp_policy=MixedPrecisionPolicy" in errors["ranks differ"]


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_loaded_counts_and_errors_are_everybodys(stage):
    for moved, back, errors in crews.call(CASES + "loaded", 2, (stage,)):
        assert moved and back
        assert errors[0] == "KeyError" and "has no class, groups" in errors[1] and "check_kind" in errors[2]
        assert "((90, 7), 'float64')}] saved for [{'momentum': ((90, 7), 'float32')}]" in errors[3]
        assert len(errors) == (5 if stage == 3 else 4) and (stage < 3 or "inside gathered()" in errors[4])


@pytest.mark.parametrize("kind", ["norm", "tensor"])
def test_numbers_of_16_bits_that_ranks_add_up(kind):
    """BatchNorm's statistics, and tensor parallelism's partial products, are added in float32."""
    wanted, = crews.call(CASES + "sums_of_16_bits", 1, (kind,))
    total = sum(np.linalg.norm(g) for g in wanted.values())
    found = crews.call(CASES + "sums_of_16_bits", 2, (kind,))
    if kind == "norm":      # each rank has its piece, one after the other
        for name, g in wanted.items():
            got = np.concatenate([grads[name].reshape(-1) for grads in found])
            assert np.linalg.norm(got - g.reshape(-1)) < 2.0 ** -8 * total, name      # one rounding of bfloat16
    else:
        for grads in found:
            for name in ("4.weight", "4.bias"):     # behind the sum; whole on each rank
                assert np.linalg.norm(grads[name] - wanted[name]) < 0.02 * np.linalg.norm(wanted[name]), name
