"""Op sharding by annotations: one says how a few arrays lie on the ranks, and every op works out the rest.

    mesh = comm.DeviceMesh(dp=2, tp=2)
    x = split(x, 0, mesh["dp"])             # (dp, ·)
    w = mesh_split(w, mesh, [-1, 1])        # (·, tp)
    y = mt.gelu(x @ w)                      # (dp, tp): nothing is sent
    z = y @ mesh_split(v, mesh, [1, -1])    # (dp, ·) + Σtp: the sum is made when somebody needs it
    loss = mt.sum(z * z)                    # here: an all-reduce over tp
    loss.backward()                         # and over dp for the gradients of w and v

Any legal annotation gives the dense result; only what is sent differs. What is no Sharded (an array, a Tensor, labels,
a mask) is taken to be the same on all ranks, and each uses its part of it. All ranks run the same program. Inside
mt.grad, mt.jvp and their like annotate the function's arguments, and return a .full() value (TypeError otherwise). How
it works stands in sharding/: layouts.py, rules.py, choice.py, resharding.py, running.py, in this order.

Sources: Lepikhin et al. 2020, "GShard"; Xu et al. 2021, "GSPMD"; PyTorch's DTensor.
"""

import fnmatch
import hashlib

import numpy as np

from ..autodiff.primitive import lower
from ..autodiff.tensor import Tensor, tensor
from ..backend import is_array, to
from ..flat import flat_buffers
from ..nn.module import Parameter
from ..nn.transformer import GPT, MultiHeadAttention, TransformerBlock
from .sharding.layouts import SUM, WHOLE, Layout, Partial, Replicate, Shard
from .sharding.notes import looking
from .sharding.sharded import Sharded, as_sharded, merged

__all__ = ["SUM", "WHOLE", "Layout", "Partial", "Replicate", "Shard", "Sharded", "explain",
           "full_state_dict", "load_full_state_dict", "megatron", "mesh_split", "replicate", "shard_parameters",
           "sharded_parameters", "split"]


# ---------------------------------------------------------------- arrays

def replicate(x, mesh):
    """x, which is the same on all ranks of a DeviceMesh, as a Sharded."""
    return mesh_split(x, mesh, [-1] * len(x.shape))


def split(x, dim, comm):
    """x cut along `dim` over the ranks of a Communicator: mesh["dp"], or the world. x is the same on all of them, or a
    Sharded that may lie in any way on other axes."""
    if not -len(x.shape) <= dim < len(x.shape):
        raise ValueError(f"split: dimension {dim} is out of range for shape {tuple(x.shape)}")
    return _placed("split", x, {comm.name: comm}, {comm.name: Shard(dim % len(x.shape))})


def mesh_split(x, mesh, dims_mapping):
    """x, the same on all ranks of a DeviceMesh or a Sharded, cut by the mesh's axes.

    dims_mapping  per dimension the number or the name of an axis, -1 where it stays whole (as in GSPMD). To cut it
                  section by section: (axis, (8, 4, 4)). Or a Layout
    ValueError where it doesn't fit the shape.
    """
    comms = {axis: mesh[axis] for axis in mesh.axes}
    placements = layout_of("mesh_split", x.shape, mesh, dims_mapping).placements
    return _placed("mesh_split", x, comms, dict.fromkeys(comms, WHOLE) | placements)


def _placed(name, x, comms, placements):
    given, x = x, as_sharded(Tensor(x) if is_array(x) else x)
    comms = merged(name, [x, Sharded(None, (), Layout(0), comms)])
    layout = Layout(len(x.shape), x.layout.placements | placements)
    layout.check(name, x.shape, {axis: comm.size for axis, comm in comms.items()})
    placed = Sharded(x.local, x.shape, x.layout, comms).redistribute(layout)
    if is_array(given):     # of which the part may be a view, and the caller write into it
        placed.local = tensor(placed.local)
    return placed


def layout_of(name, shape, mesh, dims_mapping):
    """The Layout that a dims_mapping means; ValueError where it doesn't fit."""
    names, placements = list(mesh.axes), {}
    if isinstance(dims_mapping, Layout):
        if dims_mapping.ndim != len(shape) or dims_mapping.placements.keys() - names:
            raise ValueError(f"{name}: layout {dims_mapping} for shape {tuple(shape)} on a mesh of axes "
                             f"{', '.join(names)}")
        return dims_mapping
    if len(dims_mapping) != len(shape):
        raise ValueError(f"{name}: dims_mapping {list(dims_mapping)} for shape {tuple(shape)}: it must have one entry "
                         "per dimension, an axis of the mesh or -1")
    for dim, entry in enumerate(dims_mapping):
        axis, sections = entry if isinstance(entry, tuple) else (entry, ())
        axis = names[axis] if isinstance(axis, int) and 0 <= axis < len(names) else axis
        if axis != -1 and axis not in names:
            raise ValueError(f"{name}: {axis!r} in dims_mapping {list(dims_mapping)} is no axis of the mesh: there are "
                             f"{', '.join(f'{i} ({axis})' for i, axis in enumerate(names))}, and -1")
        if axis in placements:
            raise ValueError(f"{name}: dims_mapping {list(dims_mapping)} lets axis {axis!r} cut two dimensions")
        if axis != -1:
            placements[axis] = Shard(dim, tuple(sections))
    return Layout(len(shape), placements)


def explain(f, *args):
    """A Page that prints what f(*args), its `result`, does. Per op: how operands and result lie, what this rank sent
    for it in forward, counted by the ledger; where proposals excluded each other, what each would have cost."""
    with looking() as page:
        page.result = f(*args)
    return page


# ---------------------------------------------------------------- models

def shard_parameters(model, mesh, annotations):
    """Cut a module's parameters, the same on all ranks, in place; its forward then runs sharded as it is. Returns it.

    annotations  {name of a parameter, with * and ? as in file names: dims_mapping, see mesh_split}; of several that fit
                 the last one counts. Parameters that none names are replicated

    model.parameters() are this rank's parts, leaves: what an optimizer is made of afterwards; of them clip_grad_norm_
    takes the norm of the whole gradient; in a loss (a penalty, say) stand sharded_parameters(model).values(), of which
    parameters() are this rank's parts only. ValueError on all ranks, and nothing is cut, where a name meets nothing, an
    annotation doesn't fit, or the ranks' values differ.
    """
    named = dict(model.named_parameters())
    layouts = _agreed(named, lambda: _layouts(named, mesh, annotations), mesh.world)
    cut = {id(p): _parameter(p, mesh, layouts[name]) for name, p in named.items()}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = cut[id(p)].local
                object.__setattr__(module, name, cut[id(p)])
    flat_buffers([value.local for value in cut.values() if value.requires_grad])
    return model


def _layouts(named, mesh, annotations):
    """{name of a parameter: its Layout}."""
    for pattern in annotations:
        if not fnmatch.filter(named, pattern):
            raise ValueError(f"shard_parameters: {pattern!r} meets no parameter; there are {', '.join(named)}")
    layouts = {}
    for name, p in named.items():
        if p.leaf is not None and p.leaf.flat is not None:
            raise RuntimeError(f"shard_parameters: {name} lives in the flat buffer of an optimizer or of "
                               "DistributedDataParallel already: annotate the model before making those")
        found = [a for pattern, a in annotations.items() if fnmatch.fnmatchcase(name, pattern)]
        layouts[name] = layout_of(f"shard_parameters: {name}", p.shape, mesh, found[-1] if found else [-1] * p.ndim)
        layouts[name].check(f"shard_parameters: {name}", p.shape, mesh.axes)
        if layouts[name].pending:
            raise ValueError(f"shard_parameters: {name} is to lie {layouts[name]}: it can be cut, but is no sum")
    return layouts


def _parameter(p, mesh, layout):
    """A whole parameter as a Sharded whose part is a leaf, which says to optim.clip_grad_norm_ who has the others."""
    part = mesh_split(Tensor(p.data), mesh, layout)
    local = Parameter(part.local.data, p.dtype.kind == "f")
    if local.leaf is not None:
        axes = tuple(axis for axis in mesh.axes if axis in layout.shards)
        local.leaf.over = mesh[axes] if axes else None
        local.requires_grad_(p.requires_grad)
    return Sharded(local, p.shape, layout, part.comms)


def _agreed(named, layouts, world):
    """layouts(); ValueError on all ranks unless all can have it, and hold the same parameters and annotations."""
    failure, lines = None, []
    try:
        found = layouts()
        lines = [_line(name, p, found[name]) for name, p in named.items()]
    except (ValueError, RuntimeError) as error:
        failure = error
    everyone = world.all_gather_object((failure and str(failure), lines))
    if failure:
        raise failure
    for rank, (error, _) in enumerate(everyone):
        if error:
            raise ValueError(f"rank {rank}: {error}")
    for said in zip(*(lines for _, lines in everyone), strict=False):
        if len(set(said)) > 1:
            raise ValueError("shard_parameters: the ranks' models or annotations differ; the first difference:\n"
                             + "\n".join(f"    rank {rank}: {line}" for rank, line in enumerate(said))
                             + "\nBuild the model from the same seed, and annotate it alike, on all ranks.")
    if len({len(lines) for _, lines in everyone}) > 1:
        raise ValueError(f"shard_parameters: the ranks' models have {[len(lines) for _, lines in everyone]} parameters")
    return found


def _line(name, p, layout):
    """What has to be the same of a parameter on all ranks."""
    values = hashlib.sha256(np.ascontiguousarray(to(p.data, "cpu"))).hexdigest()
    return (f"{name}: {layout} of {p.dtype} {list(p.shape)}{'' if p.requires_grad else ', frozen'}, "
            f"values {values[:8]}")


def sharded_parameters(model):
    """{name: Sharded} of a model that shard_parameters has cut, named as named_parameters names them. ValueError where
    it hasn't."""
    at = {id(getattr(m, name).local): getattr(m, name) for m in model.modules() for name in m._parameters
          if getattr(m, name).__class__ is Sharded}
    if whole := [name for name, p in model.named_parameters() if id(p) not in at]:
        raise ValueError(f"{', '.join(whole)} of this model lies on no mesh: cut it by shard_parameters first")
    return {name: at[id(p)] for name, p in model.named_parameters()}


def full_state_dict(model):
    """model.state_dict() with whole parameters, on every rank. Collective."""
    whole = {name: np.array(to(lower(p.detach().full()), "cpu")) for name, p in sharded_parameters(model).items()}
    return model.state_dict() | whole


def load_full_state_dict(model, state):
    """Write {name: whole array}, the same on all ranks, into a model that is cut."""
    own = dict(state)
    for name, p in sharded_parameters(model).items():
        if name not in own:     # which load_state_dict will say
            continue
        whole = Sharded(Tensor(np.asarray(state[name])), np.shape(state[name]), Layout(np.ndim(state[name])), p.comms)
        own[name] = lower(whole.redistribute(p.layout).local) if whole.shape == p.shape else state[name]
    model.load_state_dict(own)


def megatron(model, axis="tp"):
    """Annotations for the transformer blocks and the embedding of a GPT that make tensor parallelism as Megatron-LM has
    it: two all-reduces forward and two backward per block. Source: Shoeybi et al. 2019."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, MultiHeadAttention):
            sections = tuple(count * module.size for count in (module.heads, module.kv_heads, module.kv_heads))
            found |= {f"{prefix}qkv.weight": [(axis, sections), -1], f"{prefix}qkv.bias": [(axis, sections)],
                      f"{prefix}out.weight": [-1, axis]}
        elif isinstance(module, TransformerBlock):
            found |= {f"{prefix}mlp.0.weight": [axis, -1], f"{prefix}mlp.0.bias": [axis],
                      f"{prefix}mlp.2.weight": [-1, axis]}
        elif isinstance(module, GPT):
            found[f"{prefix}embed.weight"] = [axis, -1]
            if module.head is not None:
                found[f"{prefix}head.weight"] = [axis, -1]
    return found
