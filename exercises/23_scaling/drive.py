"""How the answers of this chapter are called."""

import math

import numpy as np

# ---------------------------------------------------------------- 23.1


def multipliers(learner, inputs, run):
    """Each of the file's functions; "check" trains nets of all widths with them."""
    return {"multipliers": factors, "changes": changes, "growth": growth, "check": coordinate_check}[inputs["what"]](
        run.module, inputs)


def factors(file, inputs):
    """The products that can be told from outside, and whether all factors are 1."""
    shapes, base = ({name: tuple(shape) for name, shape in inputs[which].items()} for which in ("shapes", "base"))
    found = {name: file.Factors(*each) for name, each in file.multipliers(shapes, base).items()}
    return {"result": {name: {"init · output": f.init * f.output, "lr · output": f.lr * f.output}
                       for name, f in found.items()},
            "ones": all(number == 1 for f in found.values() for number in f)}


def changes(file, inputs):
    normal, base = inputs["normal"], {name: tuple(shape) for name, shape in inputs["base"].items()}
    before = {name: values.copy() for name, values in normal.items()}
    found = file.changes(normal, dict(inputs["std"]), base, inputs["lr"],
                         list(zip(inputs["x"], inputs["y"], strict=True)))
    return {"result": found, "changed": not all(np.array_equal(normal[name], before[name]) for name in before)}


def growth(file, inputs):
    return {"result": file.growth(inputs["widths"], inputs["sizes"])}


def coordinate_check(file, inputs):
    """{"changes": {way: [[of each layer] of each width]}, "powers": {way: [of each layer]}}."""
    rng, base = np.random.default_rng(inputs["seed"]), {name: tuple(s) for name, s in inputs["base"].items()}
    sides = base["input.weight"][0], base["output.weight"][1]
    batches = [(rng.standard_normal((inputs["samples"], sides[0])), rng.standard_normal((inputs["samples"], sides[1])))
               for _ in range(inputs["steps"])]
    narrow = base["input.weight"][1]
    found = {"by µP": [], "as it is": []}
    for width in inputs["widths"]:
        shapes = {name: tuple(width if side == narrow else side for side in shape) for name, shape in base.items()}
        normal = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
        for way, beside in (("by µP", base), ("as it is", shapes)):
            std = {name: shape[0] ** -0.5 if len(shape) == 2 else 0.2 for name, shape in beside.items()}
            found[way].append(file.changes(normal, std, beside, inputs["lr"], batches))
    return {"changes": found, "powers": {way: [file.growth(inputs["widths"], list(layer))
                                               for layer in zip(*sizes, strict=True)] for way, sizes in found.items()}}


# ---------------------------------------------------------------- 23.2

def NoiseScale(learner, inputs, run):
    """Each step's estimates, and the scale before the first and after each; several objects by turns."""
    if inputs["what"] == "known":
        return of_known(learner, inputs, run)
    made = [learner(run.comm, job["decay"]) for job in inputs["jobs"]]
    found = {"estimates": [[] for _ in made], "scales": [[float(each.scale())] for each in made], "changed": False}
    for step in range(max(len(job["steps"]) for job in inputs["jobs"])):
        for number, (each, job) in enumerate(zip(made, inputs["jobs"], strict=True)):
            if step >= len(job["steps"]):
                continue
            given = job["steps"][step]
            arrays = [*given["gradients"], given["whole"]]
            before = [array.copy() for array in arrays]
            one = each.update(list(zip(given["gradients"], given["samples"], strict=True)), given["whole"])
            found["estimates"][number].append(None if one is None else np.array(one, float))
            found["scales"][number].append(float(each.scale()))
            found["changed"] |= not all(map(np.array_equal, arrays, before))
    return found


def of_known(learner, inputs, run):
    """{"ratios", "scales"} after each step: gradients drawn from a distribution whose Σ and G are known."""
    made, size = learner(run.comm, inputs["decay"]), inputs["size"]
    samples, deviations = np.array(inputs["shards"], float), np.linspace(*inputs["deviations"], size)
    rng, found = np.random.default_rng(inputs["seed"]), {"ratios": [], "scales": []}
    for _ in range(inputs["steps"]):
        noise = deviations * rng.standard_normal((len(samples), size)) / np.sqrt(samples)[:, None]
        gradients = inputs["mean"] + noise
        own = range(run.comm.rank, len(samples), run.comm.size)
        one = made.update([(gradients[i], int(samples[i])) for i in own], samples @ gradients / samples.sum())
        found["ratios"].append(float(one[0]) / float(one[1]) if one else float("nan"))
        found["scales"].append(float(made.scale()))
    return found


# ---------------------------------------------------------------- 23.3

def cheapest(learner, inputs, run):
    """Each of the file's functions with its arguments, and the lines of the picture."""
    file, what = run.module, inputs["what"]
    if what == "lines":
        return lines(file, inputs)
    more = [tuple(one) if isinstance(one, list) else one for one in inputs["more"]]
    found = getattr(file, what)(*([file.Job(*inputs["job"])] if "job" in inputs else []), *more)
    result = [list(x) if isinstance(x, tuple) else x for x in found] if isinstance(found, tuple) else found
    own = {"own": of_job(file, file.Job(*inputs["job"]), inputs["tried"])} if "job" in inputs else {}
    return {"result": result} | own


def of_job(file, job, batches):
    """What the functions give that others may call."""
    return {"critical": [file.critical(job) for _ in batches], "steps": [file.steps(job, b) for b in batches],
            "samples": [file.samples(job, b) for b in batches]}


def lines(file, inputs):
    """The curve through two runs, and the batches that are cheapest at some prices."""
    job, batches = file.of_two(*map(tuple, inputs["two"])), inputs["batches"]
    if job is None:
        return {}
    settings = [file.adam_settings(1.0, (1.0, 1.0), 1.0, batches[0], b) for b in batches]
    chosen = [file.cheapest(job, price, 1.0, max(batches)) for price in inputs["prices"]]
    return {"steps": [float(file.steps(job, b)) for b in batches],
            "samples": [float(file.samples(job, b)) for b in batches],
            "critical": float(file.critical(job)), "least": [float(x) for x in job], "chosen": chosen,
            "chosen steps": [float(file.steps(job, b)) for b in chosen],
            "chosen samples": [float(file.samples(job, b)) for b in chosen],
            "sgd": [float(file.sgd_rate(1.0, batches[0], b, file.critical(job))) for b in batches],
            "adam": [float(each[0]) if each else float("nan") for each in settings]}


# ---------------------------------------------------------------- 23.4

def changed(inputs, given):
    return [name for name, value in given.items() if not np.array_equal(value, inputs[name])]


def drawn(file, law, compute):
    """The best model and its tokens, for the picture; nan of a law that is none, as a wrong fit may have it."""
    try:
        return [math.nan if isinstance(x, complex) else float(x) for x in file.optimal(law, compute)]   # α + β below 0
    except ArithmeticError:
        return [math.nan, math.nan]


def fit(learner, inputs, run):
    """Each of the file's functions with its arguments; of a fit what it expects of larger runs, too."""
    file, what = run.module, inputs["what"]
    if what == "objective":
        given = {name: inputs[name].copy() for name in ("theta", "n", "d", "losses")}
        with np.errstate(all="ignore"):
            value, gradient = file.objective(*given.values())
        return {"value": float(value), "gradient": np.array(gradient, float), "changed": changed(inputs, given)}
    if what == "loss":
        given = {name: np.copy(inputs[name])[()] for name in ("n", "d")}
        return {"result": file.loss(file.Law(*inputs["law"]), *given.values()), "changed": changed(inputs, given)}
    if what == "optimal":
        return {"result": [float(x) for x in file.optimal(file.Law(*inputs["law"]), inputs["compute"])]}
    starts = file.STARTS
    if inputs["noise"]:
        file.STARTS = [*starts, *starts]        # so that values are surely equal, as they are by chance now and then
    with np.errstate(all="ignore"):
        law = file.Law(*map(float, learner(inputs["n"].copy(), inputs["d"].copy(), inputs["losses"].copy())))
        large = file.loss(law, inputs["large n"], inputs["large d"])
        best = [drawn(file, law, c) for c in inputs["budgets"]]
    file.STARTS = starts
    return {"fit": list(law), "large": np.array(large, float), "best": best}


# ---------------------------------------------------------------- 23.5

def clip_scores(learner, inputs, run):
    """What it returns, what it has changed, and what of it is the array that it was given."""
    before = {name: value.copy() for name, value in inputs.items() if hasattr(value, "copy")}
    with np.errstate(all="ignore"):
        w_q, w_k, scores = learner(run.comm, **inputs)
    found = {"w_q": w_q, "w_k": w_k, "scores": scores}
    return {name: np.array(value) for name, value in found.items()} | {
        "dtypes": [str(np.asarray(value).dtype) for value in (w_q, w_k, scores)],
        "changed": [name for name, value in before.items() if not np.array_equal(value, inputs[name])],
        "views": [name for name in ("w_q", "w_k") if np.shares_memory(found[name], inputs[name])]}
