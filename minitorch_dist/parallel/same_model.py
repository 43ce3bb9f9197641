"""Is the model the same on all ranks? Asked once, when it is wrapped, so that no gradient meets another's."""

import hashlib


def describe(module, settings):
    """What has to be equal on all ranks, one line each: the settings, then parameters and buffers in their order."""
    lines = [f"{name}={value!r}" for name, value in settings.items()]
    for name, p in module.named_parameters():
        lines.append(f"parameter {name!r}: {p.dtype} {list(p.shape)}{'' if p.requires_grad else ', frozen'}")
    for name, b in module.named_buffers():
        lines.append(f"buffer {name!r}: {b.dtype} {list(b.shape)}")
    return lines


def check_same_model(module, comm, **settings):
    """Raise ValueError on every rank, with the first difference, unless parameters (names, order, shapes, dtypes, which
    are frozen), buffers and settings are the same on all ranks. Collective."""
    if comm.size == 1:
        return
    lines = describe(module, settings)
    digests = comm.all_gather_object(hashlib.sha256("\n".join(lines).encode()).hexdigest())
    if len(set(digests)) == 1:
        return
    everyone = comm.all_gather_object(lines)
    at = next(i for i in range(max(map(len, everyone))) if len({tuple(said[i:i + 1]) for said in everyone}) > 1)
    versions = {}
    for rank, said in enumerate(everyone):
        versions.setdefault(said[at] if at < len(said) else "nothing more", []).append(rank)
    raise ValueError("DistributedDataParallel: the ranks have wrapped different models; the first difference:\n"
                     + "\n".join(f"    rank{'s' * (len(who) > 1)} {', '.join(map(str, who))}: {what}"
                                 for what, who in versions.items())
                     + "\nBuild the model from the same settings on all ranks (their values may differ: rank 0's are "
                       "broadcast).")


def exchanged(path, table, values):
    """The error for a module whose `table` {name: parameter or module} doesn't hold `values` any more."""
    old = {id(value) for value in values}
    new = [name for name, value in table.items() if id(value) not in old]
    what = f"{', '.join(new)} is new" if new else f"it has {', '.join(table) or 'nothing'} left"
    return RuntimeError(f"{path or 'the model'} was changed after it was wrapped in DistributedDataParallel ({what}), "
                        "which reduces the gradients of the parameters that it was given: wrap the model when it is "
                        "complete. To change values, write to a parameter under no_grad()")
