"""Op sharding by annotations: one says how a few arrays lie on the ranks, and every op works out the rest.

    mesh = comm.DeviceMesh(dp=2, tp=2)
    x = split(x, 0, mesh["dp"])             # (dp, ·)
    w = mesh_split(w, mesh, [-1, 1])        # (·, tp)
    y = mt.gelu(x @ w)                      # (dp, tp): nothing is sent
    z = y @ mesh_split(v, mesh, [1, -1])    # (dp, ·) + Σtp: the sum is made when somebody needs it
    loss = mt.sum(z * z)                    # here: an all-reduce over tp
    loss.backward()                         # and over dp for the gradients of w and v
    u = mesh_split(u, mesh, [("dp", "tp"), -1])     # both cut the rows, tp inside of dp's parts: (dp × tp:2, ·)

Any legal annotation gives the dense result; only what is sent differs. What is no Sharded (an array, a Tensor, labels,
a mask) is taken to be the same on all ranks, and each uses its part of it. All ranks run the same program. Inside
mt.grad, mt.jvp and their like annotate the function's arguments, and return a .full() value (TypeError otherwise). How
it works stands in sharding/: layouts.py, rules.py, moves.py, choice.py, resharding.py, running.py, in this order.

`plan` seeks the annotations that send the fewest bytes, on a `paper_mesh`, where one process stands for many: paper.py,
planning.py. Checkpoints (checkpoints/) of a model that is cut have its parts, and can be loaded however cut.

Sources: Lepikhin et al. 2020, "GShard"; Xu et al. 2021, "GSPMD"; PyTorch's DTensor.
"""

import fnmatch
from copy import deepcopy

import numpy as np

from ...autodiff.primitive import lower
from ...autodiff.tensor import Tensor, tensor
from ...backend import is_array, is_floating, is_whole, to
from ...comm.communicator import Communicator
from ...comm.mesh import DeviceMesh
from ...flat import flat_buffers
from ...nn.attention import MultiHeadAttention
from ...nn.cross_attention import CrossAttention
from ...nn.latent import LatentAttention
from ...nn.linear_attention import LinearAttention
from ...nn.module import Parameter
from ...nn.moe import MoE
from ...nn.transformer import GPT, TransformerBlock, is_gated
from ..same_model import agreed, told
from ..wrapping import annotated
from .layouts import SUM, WHOLE, Layout, Partial, Replicate, Shard, inside
from .notes import looking
from .paper import is_paper, paper_mesh
from .planning import planned
from .sharded import Sharded, as_sharded, merged

__all__ = ["SUM", "WHOLE", "Layout", "Partial", "Replicate", "Shard", "Sharded", "explain", "full_state_dict",
           "load_full_state_dict", "megatron", "mesh_split", "paper_mesh", "plan", "replicate", "shard_parameters",
           "sharded_parameters", "split"]


# ---------------------------------------------------------------- arrays

def replicate(x, mesh):
    """x, which is the same on all ranks of a DeviceMesh, as a Sharded."""
    _check("replicate", mesh, DeviceMesh, x)
    return mesh_split(x, mesh, [-1] * len(x.shape))


def split(x, dim, comm):
    """x cut along `dim` over the ranks of a Communicator: mesh["dp"], or the world; mesh["dp", "cp"]: over both, dp the
    outer one. x is the same on all of them, or a Sharded that may lie in any way on other axes: each part that those
    make of `dim` is cut."""
    _check("split", comm, Communicator, x)
    if not -len(x.shape) <= dim < len(x.shape):
        raise ValueError(f"split: dimension {dim} is out of range for shape {tuple(x.shape)}")
    dim, comms = dim % len(x.shape), comm.axes or {comm.name: comm}
    there = x.layout.cutting(dim) if x.__class__ is Sharded else {}
    cuts = [(p.sections, x.comms[axis].size) for axis, p in there.items()]
    axes = [(axis, comms[axis].size, ()) for axis in comms if axis not in there]
    return _placed("split", x, comms, _inner(dim, x.shape[dim], cuts, axes))


def mesh_split(x, mesh, dims_mapping):
    """x, the same on all ranks of a DeviceMesh or a Sharded, cut by the mesh's axes.

    dims_mapping  per dimension the number or the name of an axis, -1 where it stays whole (as in GSPMD). To cut it
                  section by section: (axis, (8, 4, 4)). By several axes, the outer one first: ("dp", "tp"), as in
                  JAX's PartitionSpec; the first of them may have sections, (("tp", (8, 4, 4)), "dp"). Or a Layout
    ValueError where it doesn't fit the shape.
    """
    _check("mesh_split", mesh, DeviceMesh, x)
    comms = {axis: mesh[axis] for axis in mesh.axes}
    placements = layout_of("mesh_split", x.shape, mesh, dims_mapping).placements
    return _placed("mesh_split", x, comms, dict.fromkeys(comms, WHOLE) | placements)


def _check(name, where, kind, *values):
    """TypeError unless `where` is of the kind on which values can lie, and they can."""
    if not isinstance(where, kind):
        there = "a DeviceMesh" if kind is DeviceMesh else 'a Communicator, mesh["dp"] or comm.world()'
        raise TypeError(f"{name}: got a {type(where).__name__} where it takes {there}")
    for x in values:
        if not hasattr(x, "shape"):
            raise TypeError(f"{name}: a {type(x).__name__}, {x!r}, can't lie on a mesh: give it an array or a tensor")


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
    if not isinstance(dims_mapping, list | tuple):
        raise TypeError(f"{name}: dims_mapping {dims_mapping!r} for shape {tuple(shape)}: it must be a list with an "
                        "axis of the mesh or -1 per dimension, or a Layout")
    if len(dims_mapping) != len(shape):
        raise ValueError(f"{name}: dims_mapping {list(dims_mapping)} for shape {tuple(shape)}: it must have one entry "
                         "per dimension, an axis of the mesh or -1")
    for dim, entry in enumerate(dims_mapping):
        axes = []
        for axis, sections in _entries(entry):
            if is_whole(axis) and not isinstance(axis, bool) and 0 <= axis < len(names):
                axis = names[axis]
            if axis not in names:
                raise ValueError(f"{name}: {axis!r} in dims_mapping {list(dims_mapping)} is no axis of the mesh: there "
                                 f"are {', '.join(f'{i} ({axis})' for i, axis in enumerate(names))}, and -1")
            if axis in placements or axis in [other for other, _, _ in axes]:
                raise ValueError(f"{name}: dims_mapping {list(dims_mapping)} lets axis {axis!r} cut twice")
            if axes and sections:
                raise ValueError(f"{name}: {entry!r} in dims_mapping {list(dims_mapping)}: the outermost axis alone "
                                 "can cut in sections, those after it cut its parts")
            axes.append((axis, mesh.axes[axis], sections))
        placements |= _inner(dim, shape[dim], [], axes)
    return Layout(len(shape), placements)


def _entries(entry):
    """[(axis, sections)] of an entry of a dims_mapping."""
    if not isinstance(entry, list | tuple):
        return [] if entry == -1 else [(entry, ())]
    if len(entry) == 2 and isinstance(entry[1], list | tuple) and all(
            isinstance(s, int | np.integer) for s in entry[1]):
        return [(entry[0], tuple(entry[1]))]
    return [pair for part in entry for pair in (_entries(part) if isinstance(part, list | tuple) else [(part, ())])]


def _inner(dim, extent, cuts, axes):
    """{axis: Shard} of axes that cut a dimension one inside of the other. axes: [(name, size, sections)]; cuts:
    [(sections, n)] of those that cut it already."""
    placements, cuts = {}, list(cuts)
    for axis, n, sections in axes:
        if cuts:
            sections = inside(extent, cuts) if n > 1 else ()
        placements[axis] = Shard(dim, sections)
        cuts.append((sections, n))
    return placements


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
    _check("shard_parameters", mesh, DeviceMesh)
    named = dict(model.named_parameters())

    def look():
        found = _layouts(model, named, mesh, annotations)
        return found, [told(name, p, f"{found[name]} of ") for name, p in named.items()]
    layouts = agreed(mesh.world, look, "shard_parameters: the ranks' models or annotations differ",
                     "Build the model from the same seed, and annotate it alike, on all ranks.")
    cut = {id(p): _parameter(p, mesh, layouts[name]) for name, p in named.items()}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                module._parameters[name] = cut[id(p)].local
                object.__setattr__(module, name, cut[id(p)])
    flat_buffers([value.local for value in cut.values() if value.requires_grad])
    return model


def plan(model, mesh, axis, *args, annotations=None, f=None, out=None):
    """Which annotations of a model's parameters on one axis send the fewest bytes, forward and backward, of all that
    cut each dimension inside of what other axes cut there. Returns a Plan, which prints; its `annotations` are
    shard_parameters'.

    mesh         a paper_mesh: nobody else takes part
    args         annotated, or the same on all ranks; requires_grad_() where a gradient is to flow to them
    annotations  on the mesh's other axes, which stay as they are
    f            f(model, *args), which only ops lead through (default: the model itself), and which returns what
                 backward is to start at. Backward's bytes are counted for all that it records: also for what leads to
                 a comparison, or to nothing
    out          how what it returns is to lie, a dims_mapping: as the input does, where blocks follow each other (None:
                 anyhow, but with its sums made)

    Every matrix is to be cut over the axis, in whatever way: to leave all whole would send nothing, and share nothing.
    A large model's blocks are like a small one's. ValueError where it is no paper_mesh, or has no such axis, and where
    f does what no op does: brings values together (full, item), or returns something else.
    """
    _check("plan", mesh, DeviceMesh)
    if not is_paper(mesh) or axis not in mesh.axes:
        raise ValueError(f"plan: axis {axis!r} of a mesh of {', '.join(mesh.axes)}: it takes one of the axes of a "
                         "paper_mesh, on which many ways can be tried by one process")
    dense, model = dict(model.named_parameters()), shard_parameters(deepcopy(model), mesh, annotations or {})
    given = sharded_parameters(model)
    if cut := [name for name, p in given.items() if axis in p.layout.placements]:
        raise ValueError(f"plan: {', '.join(cut)} is annotated on axis {axis!r}, of which the annotations are sought")
    return planned(lambda: (f or type(model).__call__)(model, *args), [x for x in args if x.__class__ is Sharded],
                   given, axis, mesh.axes[axis], lambda name, layout: _parameter(dense[name], mesh, layout),
                   lambda value: value.settle() if out is None else mesh_split(value, mesh, out))


def _layouts(model, named, mesh, annotations):
    """{name of a parameter: its Layout}."""
    if not isinstance(annotations, dict):
        raise TypeError(f"shard_parameters: annotations {annotations!r} must be a dict, {{name: dims_mapping}}")
    if there := list(annotated(model)):
        raise RuntimeError(f"shard_parameters: {', '.join(there[:4])} lies on a mesh already: name all annotations at "
                           "once, or make the model anew and load its values (load_full_state_dict, checkpoints)")
    for pattern in annotations:
        if not fnmatch.filter(named, pattern):
            raise ValueError(f"shard_parameters: {pattern!r} meets no parameter; there are {', '.join(named)}")
    for path, module in model.named_modules():
        if getattr(type(module), "is_part", False):
            raise ValueError(f"shard_parameters: {path} is this rank's part of a module that parallelize_module has "
                             "cut, and annotations are of whole parameters: leave it out, and annotate those, as in "
                             "annotate.megatron(model)")
        if getattr(module, "context", None) is not None:
            raise ValueError(f"shard_parameters: {path or 'the model'} works on this rank's part of the sequences, by "
                             "context_parallel, whose messages no op can work out: leave it out, and annotate the "
                             "batch along time, as in annotate.split(x, 1, mesh[…])")
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
    local = Parameter(part.local.data, is_floating(p.dtype))
    if local.leaf is not None:
        axes = tuple(axis for axis in mesh.axes if axis in layout.shards)
        if axes:
            local.leaf.over, local.leaf.part_of = mesh[axes], p.shape
        local.requires_grad_(p.requires_grad)
    return Sharded(local, p.shape, layout, part.comms)


def sharded_parameters(model):
    """{name: Sharded} of a model that shard_parameters has cut, named as named_parameters names them. ValueError where
    it hasn't."""
    at = {id(p.local): p for p in annotated(model).values()}
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
        if np.shape(state[name]) != p.shape:
            raise ValueError(f"load_full_state_dict: {name} has shape {p.shape}, the values have shape "
                             f"{np.shape(state[name])}")
        whole = Sharded(Tensor(np.asarray(state[name])), p.shape, Layout(len(p.shape)), p.comms)
        own[name] = lower(whole.redistribute(p.layout).local)
    model.load_state_dict(own)


def megatron(model, axis="tp"):
    """Annotations for the transformer blocks and the embedding of a GPT that make tensor parallelism as Megatron-LM has
    it: two all-reduces forward and two backward per block. Source: Shoeybi et al. 2019."""
    found = {}
    for path, module in model.named_modules():
        prefix = f"{path}." if path else ""
        if isinstance(module, LatentAttention):     # what makes the latents stays whole
            found |= {f"{prefix}q.weight": [axis, -1], f"{prefix}kv.weight": [axis, -1],
                      f"{prefix}out.weight": [-1, axis]}
        elif isinstance(module, LinearAttention):
            sections = (module.heads * module.size,) * 4 + (module.heads,) * module.numbers
            found |= _columns(f"{prefix}project", module.project, (axis, sections)) | {
                f"{prefix}decay.bias": [axis], f"{prefix}out.weight": [-1, axis]}
        elif isinstance(module, CrossAttention):
            found |= {**_columns(f"{prefix}q", module.q, axis), f"{prefix}out.weight": [-1, axis],
                      **_columns(f"{prefix}kv", module.kv, (axis, (module.kv_heads * module.size,) * 2))}
        elif isinstance(module, MultiHeadAttention):
            sections = tuple(count * module.size for count in module.parts)
            found |= _columns(f"{prefix}qkv", module.qkv, (axis, sections)) | {f"{prefix}out.weight": [-1, axis]}
            found |= {} if module.sinks is None else {f"{prefix}sinks.score": [axis]}
        elif isinstance(module, TransformerBlock) and not isinstance(module.mlp, MoE):
            first, outputs = module.mlp[0], axis
            if is_gated(module.mlp):
                outputs = axis, (first.weight.shape[0] // 2,) * 2
            found |= _columns(f"{prefix}mlp.0", first, outputs) | {f"{prefix}mlp.2.weight": [-1, axis]}
        elif isinstance(module, GPT):
            found[f"{prefix}embed.weight"] = [axis, -1]
            if module.head is not None:
                found[f"{prefix}head.weight"] = [axis, -1]
    return found


def _columns(path, linear, outputs):
    """Annotations of a Linear whose outputs are cut."""
    return {f"{path}.weight": [outputs, -1]} | ({} if linear.bias is None else {f"{path}.bias": [outputs]})
