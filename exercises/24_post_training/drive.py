"""How the answers of this chapter are called."""

import numpy as np

# ---------------------------------------------------------------- 24.1


def pack(learner, inputs, run):
    """Each of the file's functions."""
    file, what = run.module, inputs["what"]
    if what == "best_fit":
        sizes = list(inputs["sizes"])
        return {"result": file.best_fit(sizes, inputs["length"]), "changed": sizes != inputs["sizes"]}
    if what == "visible":
        return {"result": file.visible(inputs["documents"])}
    documents = [d.copy() for d in inputs["documents"]]
    if what == "pieces":
        return {"result": [list(piece) for piece in file.pieces(documents, inputs["length"])]}
    try:
        found = learner(documents, inputs["length"])
    except ValueError as error:
        cut = [tuple(piece) for piece in file.pieces(documents, inputs["length"])]
        rows = file.best_fit([stop - start for _, start, stop in cut], inputs["length"])
        raise ValueError(f"{error}; the rows have {inputs['length']} positions, your pieces begin with {cut[:3]}, and "
                         f"best_fit's rows with {rows[:2]}").with_traceback(error.__traceback__) from None
    arrays = {name: getattr(found, name) for name in ("tokens", "targets", "documents", "positions")}
    return arrays | {"visible": file.visible(found.documents),
                     "changed": not all(map(np.array_equal, documents, inputs["documents"]))}


# ---------------------------------------------------------------- 24.2

def generate(learner, inputs, run):
    """Reads of several caches by turns, writing, or numbers."""
    if inputs["what"] == "read":
        return reads(inputs, run)
    if inputs["what"] == "generate":
        return writes(learner, inputs, run)
    if inputs["what"] == "lines":
        sizes = run.module.Sizes(*inputs["sizes"])
        return {"nbytes": run.module.nbytes(sizes, 1, inputs["sizes"][1], 4)} | {
            name: [float(run.module.to_write(sizes, inputs["time"], count, kept)) for count in inputs["counts"]]
            for name, kept in (("kept", True), ("anew", False))}
    return {"result": getattr(run.module, inputs["what"])(run.module.Sizes(*inputs["sizes"]), *inputs["more"])}


def counted(run, inputs, of):
    """A Model that notes, of each call, how many positions of a row were worked on, in [of]."""
    class Model(run.module.Model):
        def embed(self, tokens, positions):
            if np.size(positions) and np.max(positions) >= self.sizes.length:
                raise IndexError(f"position {np.max(positions)} is out of bounds: the model has {self.sizes.length}, "
                                 "from 0 on")
            return super().embed(tokens, positions)

        def project(self, layer, x):
            of.append([int(layer), int(x.shape[0]), int(x.shape[1])])
            return super().project(layer, x)
    return Model(run.module.Sizes(*inputs["sizes"]), {name: x.copy() for name, x in inputs["parameters"].items()})


def reads(inputs, run):
    """{"logits": [[of each read] of each cache], "worked": [[layer, rows, positions]]}."""
    worked, found = [], []
    model = counted(run, inputs, worked)
    caches = [run.module.Cache(model, len(job[0])) for job in inputs["jobs"]]
    for number in range(max(map(len, inputs["jobs"]))):
        for at, (cache, job) in enumerate(zip(caches, inputs["jobs"], strict=True)):
            if number < len(job):
                tokens = job[number].copy()
                found.append([at, number, cache.read(tokens)])
                tokens[...] = 0
    return {"logits": [[each for at, _, each in found if at == i] for i in range(len(caches))], "worked": worked}


def writes(learner, inputs, run):
    """{"tokens", "seen": [logits that each pick got], "worked", "changed"}, of the last call of one or several with the
    same model; "before": the tokens of those before it."""
    worked, seen = [], []
    model, tokens = counted(run, inputs, worked), inputs["tokens"].copy()

    def pick(logits):
        if len(seen) == len(inputs["noise"]):
            raise RuntimeError(f"pick was called more than {len(seen)} times; count={len(seen)}")
        if np.shape(logits) != inputs["noise"][0].shape:
            raise ValueError(f"pick gets logits of shape {np.shape(logits)}; they must be (batch, vocabulary), here "
                             f"{inputs['noise'][0].shape}")
        seen.append(np.array(logits))
        return (logits + inputs["noise"][len(seen) - 1]).argmax(-1)
    before = []
    for _ in range(inputs["again"]):
        before.append(learner(model, tokens.copy(), len(inputs["noise"]), pick))
        seen.clear()
        worked.clear()
    found = learner(model, tokens, len(inputs["noise"]), pick)
    return {"tokens": found, "seen": seen, "worked": worked, "before": before,
            "changed": not np.array_equal(tokens, inputs["tokens"])}


# ---------------------------------------------------------------- 24.3

def fresh(inputs):
    """The arguments among the inputs, arrays as copies."""
    return {name: value.copy() if isinstance(value, np.ndarray) else value for name, value in inputs.items()
            if name != "what"}


def changed(inputs, given):
    return [name for name, value in inputs.items()
            if isinstance(value, np.ndarray) and not np.array_equal(value, given[name], equal_nan=True)]


def token_losses(learner, inputs, run):
    """Each of the file's functions."""
    given = fresh(inputs)
    if inputs["what"] == "curves":
        return curves(run.module, **given)
    found = getattr(run.module, inputs["what"])(**given)
    if inputs["what"] == "advantages":
        return {"advantages": found, "changed": changed(inputs, given)}
    losses, slopes = found
    return {"losses": losses, "slopes": slopes, "changed": changed(inputs, given)}


def curves(file, ratios, low, high):
    """What a token's loss is, over ρ: {"good", "bad", "k3"}."""
    log_ratios = np.log(ratios)[None]
    found = {name: file.clipped(log_ratios, 0 * log_ratios, np.array([a]), low, high)[0][0]
             for name, a in (("good", 1.0), ("bad", -1.0))}
    return found | {"k3": file.k3(log_ratios[0], 0 * log_ratios[0])[0]}


# ---------------------------------------------------------------- 24.4

def grpo(learner, inputs, run):
    """Each of the file's functions."""
    given = fresh(inputs)
    if inputs["what"] == "spread":
        return {"result": run.module.spread_advantages(run.comm, **given), "changed": changed(inputs, given)}
    loss, slopes = learner(run.comm, run.earlier["token_losses"], **given)
    return {"loss": loss, "slopes": slopes, "changed": changed(inputs, given)}


# ---------------------------------------------------------------- 24.5

class Table:
    """A policy that looks at all tokens; "rows" counts what it was asked for."""

    def __init__(self, last, before, all_of_them):
        self.last, self.before, self.all_of_them, self.rows = last, before, all_of_them, 0

    def __call__(self, tokens):
        self.rows += len(tokens)
        return (self.last[tokens[:, -1]] + self.before[tokens[:, -2]]
                + self.all_of_them[(tokens * (1 + np.arange(tokens.shape[1]))).sum(1) % len(self.all_of_them)])


def piece(pair, questions):
    """An empty piece may begin anywhere: here at the end."""
    first, behind = pair
    return [first, behind] if first != behind else [questions, questions]


def roll_out(learner, inputs, run):
    """Each of the file's functions, or a training run."""
    file, what = run.module, inputs["what"]
    if what == "share":
        return {"result": [piece(file.share(questions, rank, size), questions) for questions, size in inputs["of"]
                           for rank in range(size)]}
    if what == "draw":
        return {"result": file.draw(inputs["logits"].copy(), inputs["noise"].copy(), inputs["temperature"])}
    if what == "training":
        return train(learner, inputs, run)
    policy, questions = Table(*inputs["tables"]), inputs["questions"].copy()
    found = learner(run.comm, policy, questions, lambda tokens: inputs["worth"][tokens].sum(1) / 3, **inputs["how"])
    return {"tokens": found.tokens, "counted": found.counted, "rewards": found.rewards, "mean": found.mean,
            "rows": policy.rows, "changed": not np.array_equal(questions, inputs["questions"])}


def train(learner, inputs, run):
    """{"means": the rewards' mean of every step, "losses": [of every update]}, of a small GPT of the library's that
    begins with nothing, with 24.3's gradients."""
    import minitorch_dist as mt
    from minitorch_dist import nn, optim
    from minitorch_dist.nn.preference import token_log_probs
    world, time, how = run.comm, inputs["questions"].shape[2], inputs["how"]
    hooks, world.hooks[:] = world.hooks[:], []
    models = [nn.GPT(**inputs["model"], dtype=np.float64) for _ in range(2)]
    for model in models:
        for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
            p.data[...] = array
    model, reference = models
    optimizer = optim.Adam(model.parameters(), lr=inputs["rate"])
    ends = np.cumsum([p.size for p in model.parameters()])[:-1]

    def policy(tokens):
        with mt.no_grad():
            return model(tokens).numpy()[:, -1]

    def reward(tokens):
        right = tokens[:, time:] == np.stack([tokens[:, 0], 0 * tokens[:, 0] + how["end"]], 1)
        return (right & (tokens[:, time:time + 1] != how["end"])).mean(1)

    def log_probs(model, tokens):
        return token_log_probs(model(tokens[:, :-1])[:, time - 1:], tokens[:, time:])

    means, losses = [], []
    for step, questions in enumerate(inputs["questions"]):
        answers = learner(world, policy, questions, reward, step=step, **how)
        with mt.no_grad():
            old, before = (log_probs(m, answers.tokens).numpy() for m in models)
        means.append(answers.mean)
        for _ in range(inputs["updates"]):
            optimizer.zero_grad()
            now = log_probs(model, answers.tokens)
            loss, slopes = run.earlier["grpo"](
                world, run.earlier["token_losses"], now.numpy().copy(), old, before, answers.rewards, answers.counted,
                how["group"], **inputs["loss"])
            now.backward(slopes)
            flat = np.concatenate([p.grad.data.ravel() for p in model.parameters()])
            world.all_reduce(flat)
            for p, part in zip(model.parameters(), np.split(flat, ends), strict=True):
                p.grad.data[...] = part.reshape(p.shape)
            optimizer.step()
            losses.append(loss)
    world.hooks[:] = hooks
    return {"means": means, "losses": losses, "reference": float(reference.embed.weight.data.sum())}
