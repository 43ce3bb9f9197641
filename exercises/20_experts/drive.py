"""How the answers of this chapter are called."""

import contextlib
import sys

import numpy as np


@contextlib.contextmanager
def places(capacity):
    """An IndexError by a slot beyond the last place says what such a slot is, too."""
    try:
        yield
    except IndexError as error:
        if f"axis 1 with size {capacity}" not in str(error):
            raise
        raise IndexError(f"{error}: an expert has places 0 to {capacity - 1}; a choice with a greater slot has none, "
                         "and is dropped").with_traceback(error.__traceback__) from None


# ---------------------------------------------------------------- 20.1 and 20.2


def route(learner, inputs, run):
    """One of the file's functions; inputs come back as they are then."""
    given = {name: value for name, value in inputs.items() if name != "what"}
    with places(inputs.get("capacity")):
        result = getattr(run.module, inputs["what"])(**given)
    if inputs["what"] == "route":
        result = dict(zip(("expert", "slot", "gates"), result, strict=True))
    return given | (result if isinstance(result, dict) else {"result": result})


def balance_loss(learner, inputs, run):
    """One of the two losses, or the experiment with both."""
    if inputs["what"] == "experiment":
        return {name: counts(learner, run, weight, **{key: inputs[key] for key in ("x", "target", "params", "rate")})
                for name, weight in (("without", 0.0), ("with", inputs["weight"]))}
    given = {name: value for name, value in inputs.items() if name != "what"}
    loss, grad = getattr(run.module, inputs["what"])(**given)
    return given | {"loss": loss, "grad": grad}


def counts(loss, run, weight, x, target, params, rate):
    """[[tokens whose first choice an expert is] for each step], of a layer of linear experts with k = 1."""
    router, experts = params["router"].copy(), params["experts"].copy()
    tokens, found = np.arange(len(x)), []
    for _ in range(params["steps"]):
        logits = x @ router
        expert, _, gates = (np.asarray(out) for out in run.earlier["route"](logits, 1))
        first, gate = expert[:, 0], gates[:, :1]
        found.append(np.bincount(first, minlength=logits.shape[1]).tolist())
        answer = np.einsum("ti,tio->to", x, experts[first])
        dy = (gate * answer - target) / len(x)
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        by_gate = (dy * answer).sum(1, keepdims=True)
        dlogits = -p * gate * by_gate
        dlogits[tokens, first] += (gate * by_gate)[:, 0]
        router -= rate * x.T @ (dlogits + weight * np.asarray(loss(logits, first)[1]))
        by_experts = np.zeros_like(experts)
        np.add.at(by_experts, first, np.einsum("ti,to->tio", x, gate * dy))
        experts -= rate * by_experts
    return found


# ---------------------------------------------------------------- 20.3

def ExpertParallel(learner, inputs, run):
    """One of the file's functions, all forwards and then all backwards of a layer, or a training run."""
    return {"to_experts": travel, "to_tokens": travel, "layer": layer, "gradients": gradients,
            "training": train}[inputs["what"]](learner, inputs, run)


def travel(learner, inputs, run):
    """Call twice, with other rows, and look at what the first call returned after the second."""
    rows, way = inputs["rows"].copy(), getattr(run.module, inputs["what"])
    returned = way(run.comm, rows)
    result = np.array(returned)
    way(run.comm, rows / 2)
    return {"result": result, "changed": [] if np.array_equal(rows, inputs["rows"]) else ["rows"],
            "overwritten": not np.array_equal(result, returned)}


def pieces(run):
    """What of 20.1 and 20.2 the learner's layer is given."""
    return {name: getattr(router_of(run), name) for name in ("route", "rows_of", "route_backward")} | {
        "balance_loss": run.earlier["balance_loss"]}


def router_of(run):
    """The module of 20.1's answer: `uses` brings one object of it."""
    return sys.modules[run.earlier["route"].__module__]


def flat(inputs):
    """{label: copy} of a layer's arrays."""
    found = {name: np.copy(x) for name, x in inputs["params"].items()}
    for number, one in enumerate(inputs["passes"]):
        found |= {f"{name} of forward {number}": np.copy(one[name]) for name in ("x", "dy")}
    return found


def other(inputs):
    """The settings of a second layer, which is made beside the first."""
    return {"params": {name: x / 2 for name, x in inputs["params"].items()}, "k": 1 + (inputs["k"] == 1),
            "capacity": inputs["capacity"] + 1}


def layer(learner, inputs, run):
    given = {name: x * 3 if inputs["changes"] else x for name, x in inputs["params"].items()}
    made, _ = (learner(run.comm, params, of["k"], of["capacity"], pieces(run))
               for params, of in ((given, inputs), (other(inputs)["params"], other(inputs))))
    for name, x in inputs["params"].items():        # as an optimizer would
        given[name][...] = x
    inputs = inputs | {"params": given}
    before = flat(inputs)
    with places(inputs["capacity"]):
        done = [made.forward(one["x"]) for one in inputs["passes"]]
        ys, values = [np.array(y) for y, _, _ in done], [float(value) for _, value, _ in done]
        found = {number: made.backward(done[number][2], inputs["passes"][number]["dy"],
                                       inputs["passes"][number]["weight"]) for number in inputs["order"]}
        found = [found[number] for number in range(len(done))]
    after = flat(inputs)
    return {"ys": ys, "balances": values, "dxs": [np.array(dx) for dx, _ in found],
            "grads": [{name: np.array(g) for name, g in grads.items()} for _, grads in found],
            "changed": [name for name in before if not np.array_equal(before[name], after[name])]}


def mesh_of(run, ep):
    from minitorch_dist.comm import DeviceMesh
    return DeviceMesh(run.comm, dp=-1, ep=ep)


def gradients(learner, inputs, run):
    mesh = mesh_of(run, inputs["ep"])
    grads = {name: g.copy() for name, g in inputs["grads"].items()}
    found = run.module.global_gradients(mesh["dp"], mesh["ep"], grads, inputs["count"])
    found = {name: np.array(g) for name, g in found.items()}
    return {"grads": found, "changed": [name for name, g in grads.items()
                                        if not np.array_equal(g, inputs["grads"][name])]}


def train(learner, inputs, run):
    """{"losses": the mean loss of every step, on all ranks}, of a GPT whose experts are the learner's."""
    try:
        return {"losses": losses(learner, inputs, run, mesh_of(run, inputs["ep"]))}
    except Exception as error:      # whose cause another case shows, and says better
        return {"failed": f"{type(error).__name__}: {error}"}


def mixture(learner, whole, inputs, run, ep):
    """A Module in the place of the library's MoE, with this rank's experts."""
    from minitorch_dist import nn
    from minitorch_dist.autodiff import custom_vjp
    here = whole.experts.up.shape[0] // ep.size
    mine = slice(ep.rank * here, (ep.rank + 1) * here)

    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Parameter(np.ascontiguousarray(whole.router.weight.numpy().T))
            self.up, self.down = (nn.Parameter(x.numpy()[mine].copy()) for x in (whole.experts.up, whole.experts.down))

        def forward(self, x):
            made = []

            def function(x, router, up, down):
                return forward(x, router, up, down)[0]

            def forward(x, router, up, down):
                tokens = x.reshape(-1, x.shape[-1])
                capacity = router_of(run).capacity_of(len(tokens), router.shape[1], inputs["moe"]["k"],
                                                       inputs["moe"]["capacity_factor"])
                moe = learner(ep, {"router": router, "up": up, "down": down}, inputs["moe"]["k"], capacity,
                              pieces(run))
                y, balance, kept = moe.forward(np.ascontiguousarray(tokens))
                made.append((moe, kept))
                return (np.asarray(y).reshape(x.shape), np.asarray(balance, dtype=x.dtype)), ()

            def backward(residuals, cotangents):
                dy, weight = cotangents
                moe, kept = made[0]
                dx, grads = moe.backward(kept, np.ascontiguousarray(dy.reshape(-1, dy.shape[-1])), float(weight))
                return np.asarray(dx).reshape(dy.shape), *(np.asarray(grads[n]) for n in ("router", "up", "down"))
            return custom_vjp(function).defvjp(forward, backward)(x, self.router, self.up, self.down)
    return Mixture()


def losses(learner, inputs, run, mesh):
    from minitorch_dist import nn, optim
    world, model = run.comm, nn.GPT(**inputs["model"], dtype=np.float64, moe=inputs["moe"])
    for p, array in zip(model.parameters(), inputs["parameters"], strict=True):
        p.data[...] = array
    for block in model.blocks:
        block.mlp = mixture(learner, block.mlp, inputs, run, mesh["ep"])
    optimizer, found = optim.SGD(model.parameters(), lr=inputs["rate"]), []
    for tokens in inputs["tokens"]:
        here = np.array_split(tokens, world.size)[world.rank]
        labels = here[:, 1:]
        optimizer.zero_grad()
        logits, aux = model(here[:, :-1])
        loss = nn.cross_entropy(logits, labels, reduction="sum") + labels.size * inputs["weight"] * aux
        loss.backward()
        apply_gradients(run, mesh, model, labels.size)
        total = np.array([float(loss.numpy()), labels.size])
        world.all_reduce(total)
        optimizer.step()
        found.append(float(total[0] / total[1]))
    return found


def apply_gradients(run, mesh, model, count):
    """The learner's global_gradients: of each block's experts, and of all else in one array."""
    experts = [{name: getattr(block.mlp, name) for name in ("up", "down")} for block in model.blocks]
    apart = {id(p) for of in experts for p in of.values()}
    dense = [p for p in model.parameters() if id(p) not in apart]
    flat = np.concatenate([gradient(p).ravel() for p in dense])
    for params in experts:
        grads = {name: gradient(p).copy() for name, p in params.items()}
        found = run.module.global_gradients(mesh["dp"], mesh["ep"], grads, count)
        for name, p in params.items():
            p.grad[...] = found[name]
    flat, start = run.module.global_gradients(mesh["dp"], mesh["ep"], {"all else": flat}, count)["all else"], 0
    for p in dense:
        p.grad[...] = flat[start:start + p.size].reshape(p.shape)
        start += p.size


def gradient(parameter):
    """As an array."""
    return parameter.grad if isinstance(parameter.grad, np.ndarray) else parameter.grad.numpy()
