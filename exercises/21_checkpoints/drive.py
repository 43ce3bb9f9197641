"""How the answers of this chapter are called."""

import importlib.util
import json
from pathlib import Path

import numpy as np


def neighbour(name):
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


simulated = neighbour("simulated")
Writer = neighbour("waiting").Writer        # 21.4
SECOND_LIVES = 40      # crashes of a save after which the program begins again


# ---------------------------------------------------------------- 21.1

def save(learner, inputs, run):
    """All that can be found if the power fails in one of several saves. {"rows": a row for each kind of find after each
    call, "left": what is on the disk when a save has returned}."""
    rows, left = [], []
    checkpoints = [(one["step"], files_of(one)) for one in inputs["saves"]]
    disk, old = simulated.Disk(), None
    for step, files in checkpoints:
        crashes = explore(run, disk, old, (step, files), checkpoints, rows)
        left.append(space(run, disk, (step, files), checkpoints))
        for state in some(crashes, SECOND_LIVES):
            second_life(run, state, checkpoints, old, inputs["again"], rows, left)
        old = (step, files)
    return {"rows": rows, "left": left}


def files_of(one):
    return {name: data.tobytes() for name, data in one["files"].items()}


def some(things, most):
    """As many of them, from everywhere."""
    return things[::-(-len(things) // most)] if things else []


def explore(run, disk, old, new, known, rows, life="", every=True):
    """Save once; a row of `rows` for each kind of find. Returns the states that crashes leave."""
    finds, seen, first = {}, set(), len(disk.calls)

    def look(disk, done=False):
        crashes = disk.crashes() if every or done else [(disk.worst(), ["all that isn't safe"])]
        for state, lost in crashes:
            key = tuple(sorted(state.items()))
            if key not in finds:
                finds[key] = told(run, state, known)
            which = (0 if life else len(disk.calls), done, finds[key])
            if which in seen:
                continue
            seen.add(which)
            rows.append({"old": old and old[0], "new": new[0], "call": disk.calls[-1] if disk.calls else "",
                         "number": len(disk.calls) - first, "done": done, "found": finds[key], "life": life,
                         "lost": lost[:4], "disk": {name: len(data) for name, data in list(state.items())[:12]}})
    disk._after = look
    if run.module.save(disk, new[0], dict(new[1])) is not None:
        raise ValueError("save returns something: nobody asks for it")
    look(disk, done=True)
    disk._after = lambda disk: None
    return [dict(key) for key in finds]


def told(run, state, known):
    """What latest makes of it: "nothing", the step, or what is wrong."""
    disk = simulated.Disk(state)
    try:
        found = run.module.latest(disk)
    except NotImplementedError:
        raise
    except Exception as error:
        return f"raises {type(error).__name__}: {str(error)[:100]}"
    if found is None:
        return "nothing"
    try:
        step, files = found
        files = {str(name): bytes(data) for name, data in dict(files).items()}
    except (TypeError, ValueError):
        return f"strange: {type(found).__name__}, and (step, {{name: bytes}}) is asked for"
    return described(step, files, known)


def described(step, files, known):
    of_step = [wanted for number, wanted in known if number == step and not isinstance(step, bool)]
    if not of_step:
        return f"strange: step {step!r}, which nobody has saved"
    if files in of_step:
        return f"{step}"
    wanted = of_step[-1]
    for name in [*wanted, *files]:
        if name not in files:
            return f"torn: step {step} without its {name}"
        if name not in wanted:
            return f"mixed: step {step} with {name}, which isn't of this checkpoint"
        if files[name] != wanted[name]:
            whose = [number for number, other in known if other.get(name) == files[name] and files[name]]
            if whose and whose[0] != step:
                return f"mixed: step {step} with {name} of step {whose[0]}"
            how = ("empty" if not files[name] else "zeros" if not any(files[name])
                   else f"{len(files[name])} of {len(wanted[name])} bytes" if len(files[name]) != len(wanted[name])
                   else "other bytes")
            return f"torn: step {step}, whose {name} is {how}"
    return "strange"


def second_life(run, state, known, old, again, rows, left):
    """The program begins again on what a crash has left, and saves: the step that it died in, or one in between."""
    found = told(run, state, known)
    if found not in ("nothing", *(str(step) for step, _ in known)):
        return      # there is a row about that
    last = -1 if found == "nothing" else int(found)
    before = next(((step, files) for step, files in known if step == last), None)
    for one in again:
        if one["step"] > last:
            new = one["step"], files_of(one)
            disk = simulated.Disk(state)
            explore(run, disk, before, new, [*known, new], rows, life=f"{', '.join(sorted(state)[:6])}", every=False)
            left.append(space(run, disk, new, [*known, new], life=True))


def space(run, disk, new, known, life=False):
    """What is on the disk when save has returned; "old": files with bytes of another checkpoint; "more": as many names
    are there as the same save doesn't leave on an empty disk."""
    step, files = new
    others = {data for _, of in known for data in of.values()} - {*files.values(), b""}
    old = [name for name in disk.list() if any(data in disk.read(name) for data in others)]
    empty = simulated.Disk()
    run.module.save(empty, step, dict(files))
    return {"life": life, "step": step, "of it": sum(map(len, files.values())), "names": disk.list()[:12],
            "bytes": sum(len(disk.read(name)) for name in disk.list()), "old": old[:3],
            "more": len(disk.list()) - len(empty.list())}


# ---------------------------------------------------------------- 21.2

def capture(learner, inputs, run):
    """The curve of a run, and of one that is killed after each of `kills` and resumed from what a file would hold."""
    def new():
        return run.module.Run(inputs["x"].copy(), inputs["y"].copy(), inputs["seed"])
    steps, found = inputs["steps"], {"went on": {}, "resumed": {}, "ends": {}, "changed": [], "bytes": 0}
    one = new()
    found["whole"] = [one.step() for _ in range(steps)]
    for kill in inputs["kills"]:
        one = new()
        for _ in range(kill):
            one.step()
        state = learner(one)
        if not isinstance(state, dict):
            raise TypeError(f"capture gave a {type(state).__name__}; a dict is asked for")
        kept = as_file(state)
        found["bytes"] = max(found["bytes"], bytes_of(kept))
        found["went on"][str(kill)] = [one.step() for _ in range(steps - kill)]
        found["changed"] += differences(state, kept, f"captured after step {kill}")
        state, other = as_file(kept), new()
        run.module.restore(other, state)
        found["resumed"][str(kill)] = [other.step() for _ in range(steps - kill)]
        found["ends"][str(kill)] = [np.array(other.weights), np.array(other.mean)]
        found["changed"] += differences(state, kept, f"restored after step {kill}")
    found["changed"] = found["changed"][:3]
    return found


def as_file(value, name="the state"):
    """A value as it comes back from a file: arrays, and what JSON has. TypeError for all else."""
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{name} is an array of objects, which no file can hold")
        return value.copy()
    if isinstance(value, dict):
        if odd := [key for key in value if not isinstance(key, str)]:
            raise TypeError(f"{name} has the key {odd[0]!r}; names are strings")
        return {key: as_file(item, f"{name}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_file(item, f"{name}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, bool | int | float | str):
        return json.loads(json.dumps(value))
    raise TypeError(f"{name} is a {type(value).__name__}, which no file can hold: numbers, strings, arrays, and lists "
                    "and dicts of these can be read again by any program")


def bytes_of(value):
    """Of all arrays, and of lists, which are as good: 8 of each number."""
    if isinstance(value, dict):
        return sum(map(bytes_of, value.values()))
    if isinstance(value, list):
        return sum(bytes_of(item) if isinstance(item, np.ndarray | list | dict) else 8 * (not isinstance(item, str))
                   for item in value)
    return value.nbytes if isinstance(value, np.ndarray) else 0


def differences(state, kept, what):
    """[words] for each item of the state that isn't what it was."""
    try:
        now = as_file(state)
    except TypeError as error:
        return [f"{what}: {error}"]
    return [f"{name}, {what}" for name in kept
            if not (name in now and json.dumps(now[name], default=np.ndarray.tolist)
                    == json.dumps(kept[name], default=np.ndarray.tolist))]


# ---------------------------------------------------------------- 21.3

class Folder:
    """Files of this check in the folder that all ranks see, and how many bytes went where."""

    def __init__(self, name):
        self.path, self.written, self.got, self.files = Path(name), 0, 0, []
        self.path.mkdir(exist_ok=True)

    def write(self, file, data):
        if not isinstance(data, bytes | bytearray | memoryview):
            raise TypeError(f"folder.write({file!r}, …): bytes are wanted, not a {type(data).__name__}")
        if not isinstance(file, str) or "/" in file:
            raise ValueError(f"folder.write({file!r}, …): a name without a slash is wanted")
        (self.path / file).write_bytes(data)
        self.written += len(data)
        self.files.append(file)

    def read(self, file, start, count):
        if start < 0 or count < 0:
            raise ValueError(f"folder.read({file!r}, {start}, {count}): both are 0 or more")
        with open(self.path / file, "rb") as there:
            there.seek(start)
            data = there.read(count)
        self.got += len(data)
        return data


def load(learner, inputs, run):
    return {"cut": cuts, "travel": travel, "training": train}[inputs["what"]](learner, inputs, run)


def cuts(learner, inputs, run):
    found = [run.module.cut(dict(zip(one["names"], one["sizes"], strict=True)), one["rank"], one["ranks"])
             for one in inputs["questions"]]
    return {"cuts": [[[name, start, stop] for name, start, stop in one] for one in found]}


def travel(learner, inputs, run):
    """Several writers and readers, dealt out to the ranks: what readers got, how many bytes they read, what they
    raised."""
    comm, folder = run.comm, Folder(f"travel-{inputs['number']}")
    mine, count = {}, len(inputs["writers"])
    for writer in range(comm.rank, count, comm.size):
        pieces = [(name, start, stop, inputs["arrays"][name][start:stop].copy())
                  for name, start, stop in inputs["writers"][writer]]
        folder.files = []
        mine[writer] = json.loads(json.dumps(run.module.save(folder, writer, pieces))), folder.files
    every = {writer: of for theirs in comm.all_gather_object(mine) for writer, of in theirs.items()}
    notes = [every[writer][0] for writer in range(count)]
    hurt = every[inputs["hurt"]][1][-1] if every[inputs["hurt"]][1] else ""
    if comm.rank == 0:
        damage(folder.path / hurt, inputs["harm"])
    if inputs["harm"] == "silent":
        notes.pop()
    comm.barrier()
    found = {"read": {}, "bytes": {}, "raised": {}, "written": folder.written, "file": hurt,
             "files": [file for _, files in every.values() for file in files]}
    for reader in range(comm.rank, len(inputs["readers"]), comm.size):
        wanted = [tuple(one) for one in inputs["readers"][reader]]
        folder.got = 0
        try:
            read = learner(folder, json.loads(json.dumps(notes)), wanted)
            found["read"][str(reader)] = [np.array(one) for one in read]
            found["bytes"][str(reader)] = folder.got
        except run.module.CheckpointError as error:
            found["raised"][str(reader)] = str(error)
        except Exception as error:
            if not inputs["harm"]:
                raise
            found["raised"][str(reader)] = f"{type(error).__name__}: {error}"
    return found


def damage(path, harm):
    if harm == "missing":
        path.unlink()
    if harm == "short":
        data = path.read_bytes()
        path.write_bytes(data[:len(data) // 24 * 8])


def train(learner, inputs, run):
    try:
        return {"losses": resumed(learner, inputs, run)}
    except Exception as error:      # whose cause another case shows, and says better
        return {"failed": f"{type(error).__name__}: {error}"}


def resumed(learner, inputs, run):
    """The losses of a run of ZeRO stage 3 on all ranks, killed, and resumed by fewer: what both have in common is what
    the learner's functions have written. A rank that has none gives []."""
    folder, kill = Folder("training"), inputs["kill"]
    model, optimizer = network(inputs, run.comm)
    losses = [step(inputs, at, model, optimizer, run.comm) for at in range(kill)]
    pieces = [(name, start, stop, array.reshape(-1)) for name, start, stop, array in mine(model, optimizer)]
    notes = together(run.comm, lambda: run.module.save(folder, run.comm.rank, pieces))
    done = optimizer.state_dict()["steps"][0]
    del model, optimizer
    few = run.comm.split(0 if run.comm.rank < inputs["later"] else None)
    if few is None:
        return losses
    model, optimizer = network(inputs | {"parameters": [0 * p for p in inputs["parameters"]]}, few)
    wanted = mine(model, optimizer)
    read = together(few, lambda: learner(folder, json.loads(json.dumps(notes)), [(n, a, b) for n, a, b, _ in wanted]))
    read = [np.array(values, array.dtype) for values, (_, _, _, array) in zip(read[few.rank], wanted, strict=True)]
    for (_, _, _, array), values in zip(wanted, read, strict=True):
        array.reshape(-1)[...] = values
    state = optimizer.state_dict(copy=False)
    optimizer.load_state_dict(state | {"steps": [done] * len(state["steps"])})
    return losses + [step(inputs, at, model, optimizer, few) for at in range(kill, len(inputs["x"]))]


def together(comm, function):
    """[what it gives on each rank], unless it raises on any: then on all."""
    try:
        found = function(), None
    except Exception as error:
        found = None, f"rank {comm.rank}: {type(error).__name__}: {error}"
    found = comm.all_gather_object(found)
    if errors := [error for _, error in found if error]:
        raise RuntimeError(errors[0])
    return [value for value, _ in found]


def network(inputs, comm):
    from minitorch_dist import nn, optim
    from minitorch_dist.parallel import fully_shard
    (hidden, features), _, (classes, _), _ = (p.shape for p in inputs["parameters"])
    model = nn.Sequential(nn.Linear(features, hidden, dtype=np.float64), nn.Tanh(),
                          nn.Linear(hidden, classes, dtype=np.float64))
    for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
        p.data[...] = array
    model = fully_shard(model, comm)
    return model, optim.Adam(model.parameters(), inputs["rate"])


def mine(model, optimizer):
    """[(name, start, stop, array)]: this rank's part of all parameters and of Adam's state."""
    from minitorch_dist.checkpoints.layout import state_of
    return [(name, *layout.pieces[0][0][0], array) for name, (layout, array) in state_of(model, optimizer)[0].items()
            if array.size]


def step(inputs, at, model, optimizer, comm):
    """The mean loss of the global batch."""
    from minitorch_dist import nn
    x, labels = (np.array_split(inputs[name][at], comm.size)[comm.rank] for name in ("x", "labels"))
    optimizer.zero_grad()
    loss = nn.cross_entropy(model(x), labels, reduction="sum") * (1 / len(inputs["x"][at]))
    loss.backward()
    optimizer.step()
    total = np.array([float(loss.numpy())])
    comm.all_reduce(total)
    return float(total[0])


# ---------------------------------------------------------------- 21.5

def interval(learner, inputs, run):
    if inputs["what"] == "formula":
        return {"result": [learner(pause, mtbf) for pause, mtbf in inputs["pairs"]]}
    given = {name: inputs[name] for name in ("work", "pause", "behind", "restart")}
    found = [run.module.simulate(interval=every, uptimes=list(uptimes), **given)
             for every in inputs["intervals"] for uptimes in inputs["uptimes"]]
    if any(one is None for one in found):
        raise TypeError("simulate returned nothing: after the last of the uptimes the machine doesn't fail any more, "
                        "and the work is done some time")
    return {"seconds": np.array([float(seconds) for seconds, _ in found]),
            "lost": np.array([float(lost) for _, lost in found])}
