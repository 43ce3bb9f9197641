"""bfloat16 itself: how it is rounded, what it is called, where it is stored, and that nobody pays for it unasked."""

import copy
import pickle
import subprocess
import sys

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, checkpoints, comm, ledger, nn, optim, training
from minitorch_dist.parallel.offload import streaming

DTYPE = np.dtype(mt.bfloat16)


def nearest(x):
    """The bits of the nearest bfloat16, of two as near the even one: on the bits of a float32 that isn't NaN."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


@pytest.fixture(scope="module")
def every():
    """All 65,536 of them."""
    return np.arange(1 << 16, dtype=np.uint16).view(DTYPE)


def test_all_values_go_to_float32_and_back(every):
    with np.errstate(invalid="ignore"):     # of signalling NaNs
        wide = every.astype(np.float32)
        back = backend.to_half(wide, DTYPE)
    nan = np.isnan(wide)
    assert nan.sum() == 2 * 127 and (np.isnan(back) == nan).all()
    np.testing.assert_array_equal(np.signbit(np.float32(back)), np.signbit(wide))
    np.testing.assert_array_equal(back.view(np.uint16)[~nan], every.view(np.uint16)[~nan])
    np.testing.assert_array_equal(wide.view(np.uint32)[~nan] >> 16, every.view(np.uint16)[~nan])


def test_rounding_is_to_the_nearest_and_of_two_to_the_even_one():
    """Halves between two neighbours and what is next to them, all magnitudes, subnormal numbers, the largest ones."""
    rng = np.random.default_rng(5)
    finite = np.arange(0, 0x7F800000, 1 << 16, dtype=np.uint32)
    halves = np.concatenate([finite + np.uint32(0x8000 + k) for k in (-1, 0, 1)])
    x = np.concatenate([halves, rng.integers(0, 0x7F800001, 50_000, dtype=np.uint32),
                        rng.integers(0, 0x00800000, 5000, dtype=np.uint32)]).view(np.float32)
    x = np.concatenate([x, -x])
    x = x[~np.isnan(x)]
    for found in (backend.to_half(x, DTYPE), backend.to_half(x[::-1], DTYPE)[::-1], mt.astype(x, "bfloat16"),
                  mt.tensor(x).to("bfloat16").numpy()):
        np.testing.assert_array_equal(found.view(np.uint16), nearest(x))
    assert np.isinf(backend.to_half(np.float32([3.4e38, -3.4e38]), DTYPE)).all()


@pytest.mark.filterwarnings("error")
def test_what_is_too_large_becomes_inf_without_a_word():
    for x in (np.full(2, 3.4e38, np.float32), np.full(2, 1e300), np.float32(3.4e38)):
        assert np.isinf(np.float32(backend.to_half(x, DTYPE))).all()


def test_float64_goes_by_way_of_float32():
    """As in torch: it may be rounded twice."""
    x = np.concatenate([10.0 ** np.random.default_rng(6).uniform(-44, 38, 5000), [1 + 2.0 ** -8 + 2.0 ** -40]])
    np.testing.assert_array_equal(backend.to_half(x, DTYPE).view(np.uint16), nearest(x.astype(np.float32)))


def test_its_numbers():
    info = mt.backend.finfo(DTYPE)
    assert [float(x) for x in (info.eps, info.max, info.tiny, info.smallest_subnormal)] == [
        2.0 ** -7, (2 - 2.0 ** -7) * 2.0 ** 127, 2.0 ** -126, 2.0 ** -133]
    assert backend.finfo(np.dtype("f2")) == np.finfo("f2")


# ---------------------------------------------------------------- names

def test_which_dtypes_are_floating():
    floating = {d for d in map(np.dtype, [*"?bBhHiIqQefd", DTYPE, "V2", "S2"]) if backend.is_floating(d)}
    assert floating == {np.dtype(d) for d in ("f2", "f4", "f8", DTYPE)}
    assert [backend.is_short(np.dtype(d)) for d in ("f2", DTYPE, "f4", "i2", "V2")] == [True, True, False, False, False]
    import ml_dtypes
    assert not backend.is_bfloat16(np.dtype(ml_dtypes.float8_e4m3fn))


def test_a_code_gives_its_dtype_back():
    for dtype in map(np.dtype, [*"?bBhHiIqQefd", ">f4", DTYPE]):
        assert backend.as_dtype(backend.dtype_code(dtype)) == dtype
    assert np.dtype(DTYPE.str) != DTYPE         # so it has another one


def test_the_name_will_do():
    for x in (mt.zeros(2, dtype="bfloat16"), mt.ones(2, dtype=mt.bfloat16), mt.full((2,), 0.5, "bfloat16"),
              mt.tensor([1.0, 2.0], "bfloat16"), mt.arange(3, dtype="bfloat16"), mt.eye(2, "bfloat16"),
              mt.randn(2, dtype="bfloat16"), mt.rand(2, dtype=DTYPE), mt.zeros(2).to("bfloat16"),
              mt.zeros(2).astype("bfloat16"), mt.zeros_like(mt.zeros(2, dtype="bfloat16")),
              nn.Linear(2, 3).to("bfloat16").weight, nn.Linear(2, 3, dtype=mt.bfloat16).bias,
              mt.random.uniform(backend.stream("u"), (3,), -1.0, 1.0, "bfloat16"),
              mt.random.normal(backend.stream("n"), (3,), dtype=mt.bfloat16)):
        assert x.dtype == DTYPE and x.requires_grad_().requires_grad


def test_it_prints_as_what_it_is():
    assert repr(mt.tensor([1.0, 0.1, -2.5], "bfloat16")) == "tensor([ 1.    ,  0.1001, -2.5   ], dtype=bfloat16)"
    assert repr(mt.tensor(3.0, "bfloat16", requires_grad=True)) == "tensor(3., dtype=bfloat16, requires_grad)"


def test_nobody_imports_ml_dtypes_unasked():
    program = ("import sys, minitorch_dist as mt; a = 'ml_dtypes' in sys.modules; mt.ones(2) * 2.0; "
               "b = 'ml_dtypes' in sys.modules; mt.ones(2).to('bfloat16'); print(a, b, 'ml_dtypes' in sys.modules)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.split() == ["False", "False", "True"]


def test_without_ml_dtypes_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    for use in (lambda: mt.bfloat16, lambda: mt.zeros(2).to("bfloat16"), lambda: mt.autocast("bfloat16").__enter__()):
        with pytest.raises(ImportError, match="pip install ml_dtypes"):
            use()
    with pytest.raises(AttributeError, match="bfloat"):
        mt.bfloat       # noqa: B018


# ---------------------------------------------------------------- storage

def model(dtype="bfloat16", seed=1):
    mt.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7), nn.Linear(7, 3)).to(dtype)


def trained(model, steps=2):
    optimizer = optim.Adam(model.parameters(), lr=0.01)
    x = np.random.default_rng(1).standard_normal((4, 5)).astype(model[0].weight.dtype)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.cross_entropy(model(x), np.arange(4) % 3).backward()
        optimizer.step()
    return optimizer


def test_a_checkpoint_gives_all_bits_back(tmp_path):
    """Parameters as BF16 on the disk, and the float32 values that Adam keeps of them."""
    first = model()
    optimizer = trained(first)
    checkpoints.save(tmp_path / "there", first, optimizer)
    second = model(seed=2)
    again = trained(second, steps=1)
    checkpoints.load(tmp_path / "there", second, again)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert b.dtype == DTYPE
        np.testing.assert_array_equal(a.numpy(), b.numpy())
    for a, b in zip(optimizer.state_dict()["state"], again.state_dict()["state"], strict=True):
        assert a.keys() == b.keys() == {"master", "exp_avg", "exp_avg_sq"}
        for name in a:
            np.testing.assert_array_equal(a[name], b[name])
    assert b'"BF16"' in (tmp_path / "there" / "rank-0.safetensors").read_bytes()
    stored = checkpoints.loading.StoredValues(tmp_path / "there")
    np.testing.assert_array_equal(stored["0.weight"], first[0].weight.numpy())
    with pytest.raises(checkpoints.CheckpointError, match="is bfloat16 of shape .*, this model's is <f4"):
        checkpoints.load(tmp_path / "there", model(np.float32))


def test_a_checkpoint_is_read_by_a_process_that_has_not_heard_of_it(tmp_path):
    checkpoints.save(tmp_path / "there", model())
    program = ("import sys; from minitorch_dist.checkpoints.loading import StoredValues; "
               f"print(StoredValues({str(tmp_path / 'there')!r})['0.bias'].dtype)")
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.strip() == "bfloat16"


def test_what_numpy_can_not_store_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"save_parameters: 0\.weight is bfloat16"):
        training.save_parameters(tmp_path / "p.npz", model())
    assert not list(tmp_path.iterdir())


def test_copies_pickles_and_streams_keep_it(tmp_path):
    x = model()[0].weight
    for y in (copy.deepcopy(x), pickle.loads(pickle.dumps(x))):
        assert y.dtype == DTYPE and y.requires_grad
        np.testing.assert_array_equal(y.numpy(), x.numpy())
    whole, streamed, given = model().eval(), model().eval(), np.ones((2, 5), DTYPE)
    streaming.stream_from_disk(streamed, tmp_path)
    with mt.no_grad():
        np.testing.assert_array_equal(streamed(given).numpy(), whole(given).numpy())


def test_the_ledger_counts_two_bytes():
    x = mt.ones(100, dtype=DTYPE, requires_grad=True)
    with ledger.record(memory=True) as book:
        y = mt.tanh(x)
        assert book.live["activation"] == 200
    del y


def test_ranks_are_told_what_can_not_be_added_up():
    world = comm.world()
    with pytest.raises(TypeError, match="dtype bfloat16 can't be reduced; cast to one of float32"):
        world.all_reduce(np.ones(3, DTYPE))
