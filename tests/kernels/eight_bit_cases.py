"""A model whose Adam keeps its state in 8 bits, on the CPU or on what is taken for a GPU: for tests with and without
one."""

import numpy as np

import minitorch_dist as mt
from minitorch_dist import ledger, optim

SHAPES = (70, 30), (33,), (0, 3), (47, 5)
OPTIONS = ({}, {"kind": "Adam", "weight_decay": 0.1, "maximize": True}, {"amsgrad": True}, {"dtype": "float16"},
           {"kind": "Adam", "dtype": "bfloat16", "amsgrad": True})


def leaves(device="cpu", dtype="f4"):
    rng = np.random.default_rng(3)
    return [mt.tensor(rng.standard_normal(shape), dtype=mt.backend.as_dtype(dtype), device=device, requires_grad=True)
            for shape in SHAPES]


def take_steps(steps, device="cpu", kind="AdamW", dtype="f4", **options):
    """(the parameters, the optimizer, the launches of each step). Two groups; gradients of sizes far apart, from the
    third step on scaled ones; in the second, one parameter rests."""
    params = leaves(device, dtype)
    optimizer = getattr(optim, kind)([{"params": params[:2]}, {"params": params[2:], "lr": 3e-3, "betas": (0.8, 0.99)}],
                                     lr=1e-2, state_bits=8, **options)
    counts = []
    for step in range(steps):
        for k, p in enumerate(params):
            rng = np.random.default_rng([step, k])
            g = rng.standard_normal(p.shape) * 10.0 ** rng.uniform(-3, 0, p.shape)
            p.grad = None if (step, k) == (1, 1) else mt.tensor(g, dtype=p.dtype, device=device)
        with ledger.record() as book:
            optimizer.step(grad_scale=4.0 if step > 1 else None)
        counts.append(dict(book.launches))
    return params, optimizer, counts


def assert_alike(here, there):
    """Parameters and state of two (parameters, optimizer): where rounding decides between two levels it may decide
    otherwise, of one number in some 10⁵."""
    for p, q in zip(here[0], there[0], strict=True):
        x, y = (each.detach().cpu().numpy().astype("f8") for each in (p, q))
        rounding = {"float32": 2e-5, "float16": 1e-3, "bfloat16": 8e-3}[p.dtype.name]
        assert np.linalg.norm(y - x) <= rounding * np.linalg.norm(x)
    for a, b in zip(here[1].state_dict()["state"], there[1].state_dict()["state"], strict=True):
        assert set(a) == set(b)
        for name in a:
            assert np.linalg.norm(b[name] - a[name]) <= 2e-3 * np.linalg.norm(a[name]), name
            if name != "master":
                elsewhere = np.abs(b[name] - a[name]) > 1e-5 * np.abs(a[name])
                assert np.count_nonzero(elsewhere) <= 0.01 * elsewhere.size, name


def check_steps(device, steps, **options):
    """The steps of the CPU's tiles, on a device where kernels are taken, in one launch each."""
    (cpu, tiled, _), (gpu, fused, counts) = take_steps(steps, **options), take_steps(steps, device, **options)
    assert counts == [{"adam": 1}] * steps
    assert_alike((cpu, tiled), (gpu, fused))
    assert fused.state_dict()["steps"] == tiled.state_dict()["steps"]
