"""DeviceMesh: who talks to whom, by hand, and what doesn't make a mesh."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist.comm import DeviceMesh
from tests.crews import crews

CASES = "tests.comm.cases:"


def test_every_axis_has_its_communicators():
    """dp=2 × pp=1 × tp=2: lines along tp are (0, 1) and (2, 3), along dp (0, 2) and (1, 3); sums of world ranks."""
    expected = [({"dp": 0, "tp": 0}, 0 + 2, 0 + 1), ({"dp": 0, "tp": 1}, 1 + 3, 0 + 1),
                ({"dp": 1, "tp": 0}, 0 + 2, 2 + 3), ({"dp": 1, "tp": 1}, 1 + 3, 2 + 3)]
    for rank, (coords, sums, places, sent, text) in enumerate(crews.call(CASES + "mesh", 4)):
        assert coords == expected[rank][0] | {"pp": 0}
        assert sums == {"dp": expected[rank][1], "tp": expected[rank][2], "pp": rank, "dp,pp,tp": 6}
        assert places == {"dp": coords["dp"], "tp": coords["tp"], "pp": 0, "dp,pp,tp": rank}
        assert set(sent) == set(sums) and text.startswith("DeviceMesh(dp=2, pp=1, tp=2)\n")


def test_ranks_of_one_color_differ_along_the_named_axes_alone():
    """Of twelve ranks, each by itself: who passes the same color."""
    groups = {}
    for rank in range(12):
        def split(color, name):
            groups.setdefault(name, {}).setdefault(color, []).append(rank)  # noqa: B023
            return SimpleNamespace()
        mesh = DeviceMesh(SimpleNamespace(rank=rank, size=12, split=split), a=2, b=3, c=2)
        assert mesh["a", "c"].axes == {"a": mesh["a"], "c": mesh["c"]} and mesh["b"].axes == {}
    grid = np.arange(12).reshape(2, 3, 2)
    wanted = {"a": grid.transpose(1, 2, 0).reshape(6, 2), "b": grid.transpose(0, 2, 1).reshape(4, 3),
              "c": grid.reshape(6, 2), "a,c": grid.transpose(1, 0, 2).reshape(3, 4)}
    assert {name: sorted(each.values()) for name, each in groups.items()} == \
        {name: sorted(rows.tolist()) for name, rows in wanted.items()}


def test_one_process_is_a_mesh_too():
    mesh = DeviceMesh(dp=1, tp=-1)
    assert copy.copy(mesh)["dp"] is mesh["dp"]
    assert mesh.axes == {"dp": 1, "tp": 1} and mesh["tp"].size == mesh["dp", "tp"].size == 1
    x = np.ones(3)
    mesh["tp"].all_reduce(x)
    assert x.tolist() == [1, 1, 1]


@pytest.mark.parametrize(("axes", "words"), [
    ({}, "name the axes"), ({"dp": 2}, "dp=2 doesn't make up the 1 ranks"), ({"dp": 2, "tp": -1}, "dp=2 × tp=-1"),
    ({"dp": 0}, "at least 1"), ({"dp": -1, "tp": -1}, "one may be -1"), ({"dp": -2}, "at least 1")], ids=str)
def test_what_makes_no_mesh(axes, words):
    with pytest.raises(ValueError, match=words):
        DeviceMesh(**axes)


@pytest.mark.parametrize("names", ["pp", ("tp", "dp"), (), ("dp", "dp")], ids=str)
def test_unknown_axes(names):
    with pytest.raises(KeyError, match="dp, tp"):
        DeviceMesh(dp=1, tp=1)[names]
