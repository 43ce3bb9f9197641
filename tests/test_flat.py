"""FlatBuffer: values and gradients of many tensors as views of two arrays."""

from functools import partial

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.flat import ALIGN, BLOCK, FlatBuffer, flat_buffers, layout, round_up
from minitorch_dist.parallel import DistributedDataParallel, fully_shard
from tests.device.fake_cupy import installed

SHAPES = [(3, 5), (), (17,), (0, 4), (1,), (2, 3, 4), (61, 71)]


def leaves(shapes=SHAPES, dtype=np.float32, seed=0):
    random = np.random.default_rng(seed)
    return [mt.tensor(random.standard_normal(shape).astype(dtype), requires_grad=True) for shape in shapes]


def inside(view, whole):
    """The first element's index in the 1-d array that `view` lives in."""
    offset = view.__array_interface__["data"][0] - whole.__array_interface__["data"][0]
    assert offset % whole.itemsize == 0 and 0 <= offset <= whole.nbytes - view.nbytes
    return offset // whole.itemsize


@pytest.mark.parametrize(("n", "unit", "up"), [(0, 16, 0), (1, 16, 16), (16, 16, 16), (17, 16, 32)])
def test_round_up(n, unit, up):
    assert round_up(n, unit) == up


def test_layout_is_aligned_disjoint_and_complete():
    tensors = leaves()
    segments, total = layout(tensors)
    assert total % BLOCK == 0 and total - segments[-1].end < BLOCK
    end = 0
    for s, t in zip(segments, tensors, strict=True):
        assert s.tensor is t and s.stop - s.start == t.data.size
        assert s.start == end and s.start % ALIGN == 0 and s.end % ALIGN == 0 and 0 <= s.end - s.stop < ALIGN
        end = s.end
    assert layout([]) == ([], BLOCK)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_stay_and_live_in_one_array(dtype):
    tensors = leaves(dtype=dtype)
    before = [t.numpy().copy() for t in tensors]
    flat = FlatBuffer(tensors)
    assert flat.params.shape == flat.grads.shape == (flat.size,) and flat.params.dtype == dtype
    covered = np.zeros(flat.size, bool)
    for t, values, s in zip(tensors, before, flat.segments, strict=True):
        assert t.shape == values.shape and t.dtype == dtype and (t.numpy() == values).all()
        if t.data.size:
            assert inside(t.data, flat.params) == s.start
        covered[s.start:s.stop] = True
    assert (flat.params[~covered] == 0).all() and (flat.grads == 0).all()
    flat.params += 1        # views, not copies
    assert all((t.numpy() == values + 1).all() for t, values in zip(tensors, before, strict=True))


def test_first_gradient_is_written_into_the_view_and_later_ones_are_added_there():
    random = np.random.default_rng(1)
    tensors = leaves()
    flat = FlatBuffer(tensors)
    flat.grads[...] = np.nan        # what is left there from before must not be seen
    total = [np.zeros(t.shape) for t in tensors]
    for _ in range(3):
        cts = [random.standard_normal(t.shape).astype(np.float32) for t in tensors]
        sum((t * ct).sum() for t, ct in zip(tensors, cts, strict=True)).backward()
        total = [a + ct for a, ct in zip(total, cts, strict=True)]
    for t, want, s in zip(tensors, total, flat.segments, strict=True):
        np.testing.assert_allclose(t.grad.numpy(), want, rtol=0, atol=1e-6)
        assert (flat.grads[s.start:s.stop].reshape(t.shape) == t.grad.numpy()).all()


def test_gradients_that_were_there_move_along():
    a, b = leaves([(3, 5), (4,)])
    ct = np.arange(15, dtype=np.float32).reshape(3, 5)
    (a * ct).sum().backward()
    flat = FlatBuffer([a, b])
    assert (a.grad.numpy() == ct).all() and b.grad is None
    assert inside(a.grad.data, flat.grads) == flat.segments[0].start
    (a * ct).sum().backward()
    assert (flat.grads[:15] == 2 * ct.ravel()).all()


@pytest.mark.parametrize("fill_missing", [False, True])
def test_collect(fill_missing):
    a, b, c = leaves([(3, 5), (4,), (2, 2)])
    flat = FlatBuffer([a, b, c])
    flat.grads[...] = 7
    a.grad = mt.tensor(np.full((3, 5), 2, np.float32))      # by hand: not the view
    (c * 3.0).sum().backward()
    flat.collect(fill_missing)
    wanted = np.concatenate([np.full(15, 2), np.zeros(4), np.full(4, 3)])
    assert (np.concatenate([flat.grads[s.start:s.stop] for s in flat.segments]) == wanted).all()
    assert (b.grad is None) != fill_missing
    flat.grads *= 10        # now each gradient is the view
    assert (a.grad.numpy() == 20).all() and (c.grad.numpy() == 30).all()
    if fill_missing:
        assert (b.grad.numpy() == 0).all()


def test_collect_tells_the_tape_what_it_overwrites():
    a, b = leaves([(3,), (3,)])
    FlatBuffer([a, b])
    (a * 2.0).sum().backward()
    y = a.grad * b      # saves a's gradient
    a.grad = mt.tensor(np.ones(3, np.float32))
    a.node.flat.collect(fill_missing=False)
    with pytest.raises(RuntimeError, match="overwritten"):
        y.sum().backward()
    a.grad = None
    (a * 2.0).sum().backward()
    y, a.grad = a.grad * b, None        # and where it is zeroed
    a.node.flat.collect(fill_missing=False)
    with pytest.raises(RuntimeError, match="overwritten"):
        y.sum().backward()


def test_zero_grad_forgets():
    tensors = leaves([(3, 5), (4,)])
    flat = FlatBuffer(tensors)
    for factor in (1.0, 5.0):
        flat.zero_grad()
        assert all(t.grad is None for t in tensors)
        sum((t * factor).sum() for t in tensors).backward()
        assert all((t.grad.numpy() == factor).all() for t in tensors)


def test_the_tape_outlives_the_move():
    a, = leaves([(4,)])
    values = a.numpy().copy()
    y = (a * a).sum()
    FlatBuffer([a])
    y.backward()
    np.testing.assert_allclose(a.grad.numpy(), 2 * values, rtol=1e-6)


def test_gradient_storage_comes_from_the_given_function():
    made = []

    def empty(size, dtype, device):
        made.append(np.full(size, np.nan, dtype))
        return made[-1]
    flat = FlatBuffer(leaves(), empty=empty)
    assert len(made) == 1 and flat.grads is made[0] and (flat.grads == 0).all()


@pytest.mark.parametrize("first", [BLOCK, BLOCK - ALIGN, 5])
def test_what_travels_behind_the_gradients(first):
    """Has room of its own, behind a tensor that fills its block, too."""
    tensors = leaves([(first,), (0,)])
    flat = FlatBuffer(tensors, spare=ALIGN + 3)
    flat.tail[...] = np.arange(1, ALIGN + 4)
    assert flat.size == BLOCK * (1 if first == 5 else 2) == len(flat.grads)
    tensors[0].grad = mt.tensor(np.full(first, 7, np.float32))
    flat.collect(fill_missing=True)
    end = -(-first // ALIGN) * ALIGN
    assert (flat.grads[:first] == 7).all() and (flat.grads[first:end] == 0).all()
    assert flat.grads[end:].tolist() == [*range(1, ALIGN + 4), *[0] * (flat.size - end - ALIGN - 3)]


def test_storage_that_is_given():
    """With room for all in both, or more; what stands in the padding of the parameters stays."""
    for sizes in ((BLOCK, 2 * BLOCK), (2 * BLOCK, BLOCK)):
        with pytest.raises(ValueError, match=f"of {2 * BLOCK} elements can't live in {BLOCK}"):
            FlatBuffer(leaves(), storage=[np.zeros(size, np.float32) for size in sizes])
    params, grads = (np.full(3 * BLOCK, 5, np.float32) for _ in range(2))
    flat = FlatBuffer(leaves([(3,)]), storage=(params, grads))
    assert flat.params is params and flat.grads is grads and flat.size == 3 * BLOCK
    assert (params[3:] == 5).all() and not grads.any()


def test_who_has_moved_on_lives_elsewhere():
    a, b = leaves([(3,), (2, 2)])
    values = a.numpy().copy()
    old = FlatBuffer([a, b])
    new = FlatBuffer([a])
    assert [s.tensor for s in old.live] == [b] and [s.tensor for s in new.live] == [a]
    old.live_in(np.arange(old.size, dtype=np.float32))
    assert (a.numpy() == values).all() and (b.numpy() == [[16, 17], [18, 19]]).all()
    assert inside(a.data, new.params) == 0 and inside(b.data, old.params) == ALIGN


def test_what_does_not_belong_raises():
    a, b = leaves([(3,), (3,)])
    wide, = leaves([(3,)], np.float64)
    with pytest.raises(ValueError, match="float32.*float64"):
        FlatBuffer([a, wide])
    with pytest.raises(ValueError, match="one dtype"):
        FlatBuffer([])
    with installed(), pytest.raises(ValueError, match="tensors of one device, got .'cpu', 'cuda:0'.: move the model"):
        FlatBuffer([a, mt.ones(3, device="cuda", requires_grad=True)])
    with pytest.raises(ValueError, match=r"\(3,\)"):
        FlatBuffer([a, a * b])
    with pytest.raises(ValueError, match="require grad"):
        FlatBuffer([mt.tensor([1.0, 2.0])])
    with pytest.raises(ValueError, match="twice"):
        FlatBuffer([a, b, a])
    a.leaf.over = object()      # shares of other ranks' parameters
    with pytest.raises(ValueError, match="whole parameters, or shares of them on the same ranks, not both"):
        FlatBuffer([a, b])


def test_flat_buffers_finds_and_makes():
    old, narrow, more = leaves([(3,), (4, 5), (2,)])
    wide, wider = leaves([(3,), (4, 5)], np.float64)
    home = FlatBuffer([old])
    flats = flat_buffers([narrow, wide, old, wider, more])
    assert [f.dtype for f in flats] == [np.float32, np.float64, np.float32]
    assert flats[2] is home and narrow.node.flat is more.node.flat is flats[0] and wide.node.flat is wider.node.flat
    again = flat_buffers([old, wider, more])        # a second look moves nothing
    assert [again[0] is home, again[1] is flats[1], again[2] is flats[0]] == [True] * 3


def test_flat_buffers_parts_what_lives_apart():
    """By device, and by who has the other shares; who stands twice has one place."""
    a, b, c, d, e = leaves([(3,), (4,), (5,), (6,), (7,)])
    for tensor, over in ((b, "rows"), (c, "columns"), (d, "rows")):
        tensor.leaf.over = over
    with installed():
        far = mt.ones(3, device="cuda", requires_grad=True)
        flats = flat_buffers([a, b, a, far, c, d, e])
    assert [[s.tensor for s in flat.segments] for flat in flats] == [[a, e], [b, d], [far], [c]]
    assert [(flat.device, flat.over) for flat in flats] == [
        ("cpu", None), ("cpu", "rows"), ("cuda:0", None), ("cpu", "columns")]


def test_a_linear_layers_weight_gradient_is_made_where_it_belongs(monkeypatch):
    """No copy: the product is written into the flat buffer at once, unless another contribution is there or due."""
    from minitorch_dist.autodiff import reverse
    rng = np.random.default_rng(0)
    w, b = (mt.tensor(rng.standard_normal(shape), requires_grad=True) for shape in ((3, 5), (3,)))
    x = rng.standard_normal((7, 5))
    flat = FlatBuffer([w, b])
    in_place = []
    real = reverse.accumulate
    monkeypatch.setattr(reverse, "accumulate", lambda leaf, *args: in_place.append(args[1] is leaf.grad_view)
                        or real(leaf, *args))
    mt.linear(x, w, b).sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), np.ones((3, 7)) @ x)
    assert True in in_place and np.shares_memory(w.grad.numpy(), flat.grads)
    mt.linear(x, w, b).sum().backward()             # a second contribution is added, not written over
    np.testing.assert_allclose(w.grad.numpy(), 2 * np.ones((3, 7)) @ x)
    w.grad = b.grad = None
    (mt.linear(x, w, b) + mt.linear(x, w, b)).sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), 2 * np.ones((3, 7)) @ x)


@pytest.mark.parametrize("uses", [2, 3])
def test_the_last_of_a_weights_contributions_is_added_where_the_sum_belongs(monkeypatch, uses):
    """A table that embeds tokens and makes logits, too: no sum beside the flat buffer, nor a copy of it."""
    from minitorch_dist.autodiff import reverse
    rng = np.random.default_rng(0)
    values, tokens, places = rng.standard_normal((7, 5)), np.array([3, 0, 3, 6]), []
    real = reverse.accumulate
    monkeypatch.setattr(reverse, "accumulate", lambda leaf, *args: places.append(args[1] is leaf.grad_view)
                        or real(leaf, *args))

    def loss(w):
        return (mt.embedding(tokens, w) @ w.T * (mt.sum(w * w) if uses == 3 else 2.0)).sum()
    x, sums = values[tokens], values.sum(axis=0)
    wanted = np.tile(x.sum(axis=0), (7, 1))
    np.add.at(wanted, tokens, sums)
    factor = (values ** 2).sum() if uses == 3 else 2.0
    wanted = wanted * factor + (2 * values * (x @ values.T).sum() if uses == 3 else 0)
    w = mt.tensor(values.copy(), requires_grad=True)
    flat = FlatBuffer([w])
    loss(w).backward()
    assert places == [True] and np.shares_memory(w.grad.numpy(), flat.grads)
    np.testing.assert_allclose(w.grad.numpy(), wanted, rtol=1e-12)
    loss(w).backward()              # what is there stays, and gets the sum added
    assert places == [True, False]
    np.testing.assert_allclose(w.grad.numpy(), 2 * wanted, rtol=1e-12)


def test_a_gradient_serves_as_a_cotangent_of_the_pass_that_writes_there():
    """The weight's gradient is made where its cotangent lies, before the bias's reads it."""
    rng, found = np.random.default_rng(0), []
    weight, x, bias = rng.standard_normal((5, 5)), rng.standard_normal((5, 5)), rng.standard_normal(5)
    for flat in (False, True):
        leaves = [mt.tensor(v, requires_grad=True) for v in (weight, bias)]
        if flat:
            FlatBuffer(leaves)
        (leaves[0] ** 2).sum().backward()
        ct, leaves[0].grad = leaves[0].grad, None
        mt.linear(mt.tensor(x), *leaves).backward(ct)
        found.append([leaf.grad.numpy().copy() for leaf in leaves])
    for alone, together, wanted in zip(*found, (2 * weight.T @ x, 2 * weight.sum(axis=0)), strict=True):
        np.testing.assert_allclose(alone, wanted, rtol=1e-12)
        np.testing.assert_allclose(together, wanted, rtol=1e-12)


def test_a_tensor_that_was_given_another_array_is_noticed():
    tensors = leaves([(3, 5), (17,)])
    flat = FlatBuffer(tensors)
    tensors[0].data[...] = 1.0
    flat.collect(fill_missing=False)
    tensors[1].data = np.zeros(17, np.float32)
    with pytest.raises(RuntimeError, match=r"parameter of shape \(17,\) was given another array.*p\[...\] = values"):
        flat.collect(fill_missing=False)
    FlatBuffer(tensors)         # where it lives now
    flat.collect(fill_missing=False)


@pytest.mark.parametrize("wrap", [lambda m: m, DistributedDataParallel, fully_shard, partial(fully_shard, stage=1)],
                         ids=["plain", "DDP", "ZeRO 3", "ZeRO 1"])
def test_who_keeps_a_gradient_keeps_its_numbers(wrap):
    """As in torch, where zero_grad() lets go of it: gradients of two losses can be compared."""
    model, x = nn.Linear(3, 1, dtype=np.float64), mt.tensor(np.ones((2, 3)))
    model = wrap(model)
    optimizer = optim.SGD(model.parameters(), 0.0)
    mt.sum(model(x) * 2.0).backward()
    kept = [p.grad for p in model.parameters()]
    place = kept[0].data
    for factor in (5.0, 7.0):
        optimizer.zero_grad()
        optimizer.step()            # which zeroes the places of gradients that aren't there
        mt.sum(model(x) * factor).backward()
        assert {value for g in kept for value in g.numpy().flat} == {4.0}
        assert {value for p in model.parameters() for value in p.grad.numpy().flat} == {2 * factor}
    assert next(iter(model.parameters())).grad.data is place     # only who keeps one pays for a copy
