"""Sparse storage: bytes counted by hand, and every array back as it was."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from minitorch_dist import nn
from minitorch_dist.compress import prune, sparse


@given(st.lists(st.integers(1, 9), max_size=4), st.integers(0, 100), st.sampled_from(["f2", "f4", "f8"]))
@settings(max_examples=60, deadline=None)
def test_bitmask_gives_the_array_back(shape, seed, dtype):
    random = np.random.default_rng(seed)
    mask = random.random(shape) < random.random()
    array = np.where(mask, random.integers(-2, 3, shape), 0).astype(dtype)      # with zeros that stay
    packed = sparse.pack(array, np.asarray(mask))
    assert packed.unpack().dtype == array.dtype and (packed.unpack() == array).all()
    assert (packed.mask() == mask).all() and packed.unpack().shape == array.shape
    assert packed.nbytes == -(-mask.size // 8) + int(np.sum(mask)) * np.dtype(dtype).itemsize


@pytest.mark.parametrize(("n", "m", "bits"), [(2, 4, 2), (1, 4, 2), (1, 2, 1), (3, 5, 3), (4, 8, 3)])
@pytest.mark.parametrize("kernel", [(), (3,), (2, 3)])
def test_n_of_m_takes_the_bits_of_its_places(n, m, bits, kernel):
    random = np.random.default_rng(0)
    layer = {0: nn.Linear, 1: nn.Conv1d, 2: nn.Conv2d}[len(kernel)]
    net = layer(3 * m, 5, kernel) if kernel else nn.Linear(3 * m, 5)
    net.weight.data[...] = random.standard_normal(net.weight.shape)
    mask = prune.n_of_m(net, n, m)["weight"]
    prune.Pruning(net, {"weight": mask})
    array = net.weight.numpy()
    packed = sparse.pack(array, mask, (n, m))
    assert (packed.unpack() == array).all() and (packed.mask() == mask).all()
    kept = array.size // m * n
    assert packed.values.size == kept and packed.nbytes == 4 * kept + -(-kept * bits // 8)


def test_two_of_four_halves_a_matrix_but_for_two_bits():
    """Mishra et al.: 4 elements take 2 values and 2 · 2 bits: of float16 64 bits become 36."""
    net = nn.Linear(64, 32, bias=False, dtype=np.float16)
    masks = prune.n_of_m(net)
    prune.Pruning(net, masks)
    packed = sparse.pack_all(net.state_dict(), masks, (2, 4))
    assert sparse.nbytes(packed) * 64 == 64 * 32 * 2 * 36


def test_a_model_goes_into_a_file_and_comes_back(tmp_path):
    net = nn.mlp((20, 15))
    masks = prune.magnitude(net, 0.9)
    prune.Pruning(net, masks)
    state = net.state_dict()
    packed = sparse.pack_all(state, masks)
    weights, biases = sum(m.size for m in masks.values()), 20 + 15 + 10
    kept = sum(m.size - round(0.9 * m.size) for m in masks.values())
    assert sparse.nbytes(packed) == sum(-(-m.size // 8) for m in masks.values()) + 4 * (kept + biases)
    path = tmp_path / "small.safetensors"
    sparse.save(path, packed)
    assert path.stat().st_size < sparse.nbytes(packed) + 2000 < 4 * weights / 5
    back = sparse.load(path)
    assert all((back[n].mask() == m).all() for n, m in masks.items())
    other = nn.mlp((20, 15))
    other.load_state_dict(sparse.unpack_all(back))
    assert all((other.state_dict()[n] == v).all() for n, v in state.items())
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_what_would_be_lost_or_does_not_fit_raises(tmp_path):
    array, mask = np.arange(8.0).reshape(2, 4), np.array([[True, True, False, False]] * 2)
    with pytest.raises(ValueError, match=r"4 of the 4 values under the mask aren't zero"):
        sparse.pack(array, mask)
    with pytest.raises(ValueError, match=r"one shape"):
        sparse.pack(array, mask[:1])
    with pytest.raises(ValueError, match="int64, .* the mask be bool"):
        sparse.pack(array, mask.astype(np.int64))
    array[~mask] = 0
    with pytest.raises(ValueError, match=r"doesn't keep 1 of every 4"):
        sparse.pack(array, mask, (1, 4))
    with pytest.raises(ValueError, match=r"shape \(4,\) doesn't keep 2 of every 4 along axis 1"):
        sparse.pack(array[0], mask[0], (2, 4))
    with pytest.raises(ValueError, match="masks for w"):
        sparse.pack_all({"weight": array}, {"w": mask})
    sparse.save(tmp_path / "whole", {"weight": sparse.pack(array, mask)})
    (tmp_path / "cut").write_bytes((tmp_path / "whole").read_bytes()[:-3])
    from safetensors.numpy import save
    (tmp_path / "other").write_bytes(save({"a": array}))
    for name in ("cut", "other"):
        with pytest.raises(ValueError, match="no file of a pruned model, or damaged"):
            sparse.load(tmp_path / name)


def test_a_file_with_one_bit_flipped_is_refused(tmp_path):
    """In values, places, names, shapes and kinds, whichever."""
    array = np.arange(1, 9, dtype=np.float32).reshape(2, 4)
    mask = array % 4 < 2
    sparse.save(tmp_path / "whole", {"a": sparse.pack(array * mask, mask, (2, 4)), "b": sparse.pack(array)})
    written = (tmp_path / "whole").read_bytes()
    for place in range(len(written)):
        changed = bytearray(written)
        changed[place] ^= 1 << place % 8
        (tmp_path / "changed").write_bytes(changed)
        with pytest.raises(ValueError, match="has changed since|has no CRC-32|no file of a pruned model, or damaged"):
            sparse.load(tmp_path / "changed")


def test_a_file_of_before_there_was_a_crc_says_so(tmp_path):
    from safetensors import safe_open
    from safetensors.numpy import save_file
    path, old = tmp_path / "some.safetensors", tmp_path / "old.safetensors"
    sparse.save(path, {"w": sparse.pack(np.eye(4, dtype=np.float32), np.eye(4, dtype=bool))})
    with safe_open(path, "numpy") as file:
        save_file({name: file.get_tensor(name) for name in file.keys()},        # noqa: SIM118
                  old, {"packed": file.metadata()["packed"]})
    with pytest.raises(ValueError, match="has no CRC-32.*an older version has written it"):
        sparse.load(old)
