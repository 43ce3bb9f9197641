"""Ranks on a grid with named axes, one for each way of dividing the work.

    mesh = DeviceMesh(dp=2, tp=2)      dp \\ tp   0  1
    mesh["tp"]                         0         0  1       ranks of the world; the last axis is the fastest,
    mesh["dp", "tp"]                   1         2  3       so that its ranks are neighbours
    mesh.coords                        rank 2: {"dp": 1, "tp": 0}
"""

import math

import numpy as np


class DeviceMesh:
    """The communicators of a grid of ranks.

    world   Communicator of all of them (default: comm.world())
    axes    name=size, the slowest first; one size may be -1: what the others leave
    Every axis's communicator is made at once, on all ranks in the same order, and is called as the axis is: that is
    the name under which the ledger counts. ValueError where the sizes don't make up the world.
    """

    def __init__(self, world=None, **axes):
        if world is None:
            from . import world as all_ranks
            world = all_ranks()
        self.world, self.axes = world, _sizes(axes, world.size)
        self.ranks = np.arange(world.size).reshape(tuple(self.axes.values()))
        self.coords = dict(zip(self.axes, map(int, np.unravel_index(world.rank, self.ranks.shape)), strict=True))
        self._comms = {}
        for name in self.axes:
            self[name]

    def __getitem__(self, names):
        """The Communicator of the ranks that differ from this one along the named axis, or axes, alone.

        Of several axes, in the mesh's order, it is made when it is asked for first: all ranks must ask.
        """
        names = (names,) if isinstance(names, str) else tuple(names)
        if not names or list(names) != [name for name in self.axes if name in names]:
            raise KeyError(f"the mesh's axes are {', '.join(self.axes)}, in this order; got "
                           f"{', '.join(map(str, names))}")
        if names not in self._comms:
            others = [name for name in self.axes if name not in names]
            color = 0
            for name in others:
                color = color * self.axes[name] + self.coords[name]
            comm = self.world.split(color, name=",".join(names))
            comm.axes = {name: self[name] for name in names} if len(names) > 1 else {}
            self._comms[names] = comm
        return self._comms[names]

    def __getattr__(self, name):
        axes = vars(self).get("axes", {})
        if name.startswith("_") or not axes:
            raise AttributeError(f"a DeviceMesh has no {name!r}")
        raise AttributeError(f"a DeviceMesh, of axes {', '.join(axes)}, has no {name!r}: where a Communicator is "
                             f'wanted, give that of an axis, as mesh["{list(axes)[-1]}"], or mesh.world')

    def __str__(self):
        return f"DeviceMesh({', '.join(f'{name}={size}' for name, size in self.axes.items())})\n{self.ranks}"


def check_no_mesh(caller, comm, whose, axis):
    """TypeError for a DeviceMesh where the Communicator of some of its ranks belongs. whose: which ranks these are;
    axis: what it is called usually."""
    if isinstance(comm, DeviceMesh):
        raise TypeError(f"{caller}: comm is a DeviceMesh, of axes {', '.join(comm.axes)}; it must be the Communicator "
                        f'of the ranks that {whose}, as mesh["{axis}"]')


def _sizes(axes, ranks):
    if not axes:
        raise ValueError("DeviceMesh: name the axes, as in DeviceMesh(dp=2, tp=2)")
    rest = [name for name, size in axes.items() if size == -1]
    given = math.prod(size for size in axes.values() if size != -1)
    if len(rest) > 1 or any(size < 1 for size in axes.values() if size != -1):
        raise ValueError(f"DeviceMesh: {axes}: sizes are at least 1, and one may be -1")
    sizes = axes | dict.fromkeys(rest, ranks // given)
    if math.prod(sizes.values()) != ranks:
        raise ValueError(f"DeviceMesh: {' × '.join(f'{name}={size}' for name, size in axes.items())} doesn't make up "
                         f"the {ranks} ranks that there are")
    return sizes
