"""Programs that somebody might write, with cuda_graph and without: the same numbers, call after call, or an error."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim

from .test_cuda_graphs import gpu, made, on_gpu  # noqa: F401

PROGRAMS, RECORDED = {}, set()


def program(function=None, *, recorded=True):
    """A program(wrap) that gives what it computed; `recorded` says whether graphs must have been made of it."""
    if function is None:
        return lambda function: program(function, recorded=recorded)
    PROGRAMS[function.__name__] = function
    if recorded:
        RECORDED.add(function.__name__)
    return function


def values(tree):
    """Arrays and tensors as NumPy's, in any nesting."""
    if isinstance(tree, dict):
        return [(key, values(value)) for key, value in tree.items()]
    if isinstance(tree, (list, tuple)):
        return [values(value) for value in tree]
    if isinstance(tree, mt.Tensor):
        return np.array(tree.cpu().numpy())
    return tree.get() if hasattr(tree, "get") else tree


def grads(model):
    return values([p.grad for p in model.parameters()])


def net(seed=1, layers=None):
    mt.manual_seed(seed)
    return (layers or nn.Linear)(4, 3).to("cuda")


def assert_equal(found, expected):
    assert type(found) is type(expected)
    if isinstance(found, (list, tuple)):
        assert len(found) == len(expected)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)
    else:
        np.testing.assert_array_equal(found, expected)


class Seen:
    """mt.cuda_graph that remembers what it has made."""

    def __init__(self):
        self.made = []

    def __call__(self, function):
        self.made.append(mt.cuda_graph(function))
        return self.made[-1]


# ---------------------------------------------------------------- what a function takes from elsewhere

@program
def evaluation_before_there_is_an_optimizer(wrap):
    model, x, found = net(), on_gpu(made(5, 4)), []

    @wrap
    def evaluate(x):
        with mt.no_grad():
            return model(x)
    for _ in range(3):
        found.append(values(evaluate(x)))
    sgd = optim.SGD(model.parameters(), 0.5)
    for _ in range(4):
        model.zero_grad()
        model(x).sum().backward()
        sgd.step()
        found.append(values(evaluate(x)))
    return found


@program
def a_bare_leaf_moves(wrap):
    w, x, found = on_gpu(made(4, 3), requires_grad=True), on_gpu(made(5, 4)), []
    store = [w]

    @wrap
    def evaluate(x):
        with mt.no_grad():
            return x @ store[0]
    found += [values(evaluate(x)) for _ in range(3)]
    w.grad = on_gpu(made(4, 3))
    optim.SGD([w], 0.5).step()
    return found + [values(evaluate(x)) for _ in range(3)]


@program
def frozen_parameters_that_move(wrap):
    model, x, found = nn.Sequential(net(), nn.Tanh(), net(2, lambda i, o: nn.Linear(3, 2))), on_gpu(made(5, 4)), []
    for p in model[0].parameters():
        p.requires_grad_(False)

    @wrap
    def passes(x):
        model.zero_grad()
        model(x).sum().backward()
    for step in range(9):
        if step == 3:
            model.to("cpu").to("cuda")
            with mt.no_grad():
                model[0].weight[...] = model[0].weight * 3
        passes(x)
        found.append(values([p.grad for p in model[2].parameters()]))
    return found


@program
def freezing_between_calls(wrap):
    model, x, found = net(), on_gpu(made(5, 4)), []

    @wrap
    def passes(x):
        (model(x) ** 2).sum().backward()
    for step in range(16):
        model.zero_grad()
        if step % 8 == 4:
            model.weight.requires_grad_(False)
        if step % 8 == 0:
            model.weight.requires_grad_(True)
        passes(x)
        found.append(grads(model))
    return found


@program
def a_model_that_is_replaced(wrap):
    models, x, found = [net(1), net(2)], on_gpu(made(5, 4)), []
    model = models[0]

    @wrap
    def forward(x):
        return model(x)
    for step in range(12):
        model = models[step // 4 % 2]
        found.append(values(forward(x)))
    return found


@program
def a_parameter_that_is_replaced(wrap):
    model, x, found = net(), on_gpu(made(5, 4)), []

    @wrap
    def passes(x):
        model.zero_grad()
        y = model(x).sum()
        y.backward()
        return y
    for step in range(8):
        if step == 4:
            model.weight = nn.Parameter(on_gpu(made(3, 4, seed=5)))
        found += [values(passes(x)), grads(model)]
    return found


@program
def numbers_and_flags_change(wrap):
    scale, x, found = 1.0, on_gpu(made(5, 4)), []
    config = type("Config", (), {"shift": 0.0})()

    def helper(y):
        return y * scale

    @wrap
    def f(x):
        return helper(x) + config.shift
    for step in range(16):
        scale = 2.0 if step >= 4 else 1.0
        config.shift = 0.5 if step >= 8 else 0.0
        found.append(values(f(x)))
    return found


@program
def an_attribute_of_a_module_changes(wrap):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.temperature = nn.Linear(4, 3), 1.0

        def forward(self, x):
            return self.inner(x) / self.temperature

    mt.manual_seed(1)
    model, x, found = Scaled().to("cuda"), on_gpu(made(5, 4)), []

    @wrap
    def forward(x):
        return nn.Sequential(model)(x)
    for step in range(9):
        model.temperature = 1.0 if step < 4 else 3.0
        found.append(values(forward(x)))
    return found


@program(recorded=False)
def a_state_that_is_carried_on(wrap):
    class Cell:
        def __init__(self):
            self.state = on_gpu(np.zeros(3, "f4"))

        def step(self, x):
            self.state = mt.tanh(self.state * 0.5 + x)
            return self.state
    cell = Cell()
    step = wrap(cell.step)
    return [values(step(on_gpu(made(3, seed=i)))) for i in range(6)]


@program(recorded=False)
def a_state_in_a_list(wrap):
    hidden = [on_gpu(np.zeros(3, "f4"))]

    @wrap
    def step(x):
        hidden[0] = mt.tanh(hidden[0] * 0.5 + x)
        return hidden[0]
    return [values(step(on_gpu(made(3, seed=i)))) for i in range(6)]


@program
def hooks_come_and_go(wrap):
    model, x, found = net(), on_gpu(made(5, 4)), []

    @wrap
    def passes(x):
        model.zero_grad()
        y = model(x).sum()
        y.backward()
        return y
    for step in range(20):
        if step == 4:
            remove = model.weight.register_hook(lambda g: g * 2)
        if step == 8:
            remove()
        if step == 12:
            remove = model.register_forward_hook(lambda module, inputs, output: output * 3)
        if step == 16:
            remove()

            def halve(p):
                p.grad = p.grad * 0.5
            model.bias.register_post_accumulate_grad_hook(halve)
        found += [values(passes(x)), grads(model)]
    return found


@program
def batch_norm_trains_and_evaluates(wrap):
    mt.manual_seed(0)
    model, found = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm(3), nn.Linear(3, 2)).to("cuda"), []
    sgd = optim.SGD(model.parameters(), 0.1)

    def block(x):
        return model[1](model[0](x))

    @wrap
    def passes(x):
        sgd.zero_grad()
        loss = (model[2](mt.checkpoint(block)(x)) ** 2).sum()
        loss.backward()
        return loss
    for step in range(12):
        model.train(step % 4 != 3)
        found.append(values(passes(on_gpu(made(5, 4, seed=step)))))
        if model.training:
            sgd.step()
        found.append(list(model.state_dict().values()))
        if step == 7:
            model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()})
    return found


@program
def a_checkpoint_around_a_graph(wrap):
    model, norm, found = net(), nn.BatchNorm(3).to("cuda"), []
    inner = wrap(lambda x: norm(x))

    def block(x):
        return model(x) * inner(model(x).detach())
    for step in range(6):
        model.zero_grad()
        mt.checkpoint(block)(on_gpu(made(5, 4, seed=step))).sum().backward()
        found += [grads(model), values([norm.running_mean, norm.running_var])]
    return found


# ---------------------------------------------------------------- gradients

@program
def two_heads_and_their_old_gradients(wrap):
    mt.manual_seed(0)
    body, heads = nn.Linear(4, 4).to("cuda"), [nn.Linear(4, 2).to("cuda") for _ in range(2)]
    sgd = optim.SGD([p for m in (body, *heads) for p in m.parameters()], 0.1)

    def passes(head):
        def run(x):
            sgd.zero_grad()
            loss = (head(body(x)) ** 2).sum()
            loss.backward()
            return loss
        return wrap(run)
    steps, found = [passes(head) for head in heads], []
    for step in range(12):
        found.append(values(steps[step % 2](on_gpu(made(5, 4, seed=step)))))
        found.append([g for m in (body, *heads) for g in grads(m)])
        sgd.step()
    return found


@program(recorded=False)
def the_last_calls_gradient_is_read(wrap):
    model = net()
    model(on_gpu(made(5, 4))).sum().backward()

    @wrap
    def passes(x):
        before = [p.grad for p in model.parameters()]
        for p in model.parameters():
            p.grad = None
        (model(x) ** 2).sum().backward()
        return sum((p.grad * g).sum() for p, g in zip(model.parameters(), before, strict=True))
    return [values(passes(on_gpu(made(5, 4, seed=i)))) for i in range(7)]


@program
def gradients_by_inputs(wrap):
    model, found = net(), []

    @wrap
    def saliency(x):
        x = x.detach().requires_grad_()
        (model(x) ** 2).sum().backward()
        return x.grad
    for i in range(6):
        model.zero_grad()
        found.append(values(saliency(on_gpu(made(5, 4, seed=i)))))
    return found


@program
def two_arguments_two_sets_of_leaves(wrap):
    heads, found = [net(1), net(2)], []

    @wrap
    def passes(x, which):
        (mt.tanh(heads[which](x)) ** 2).sum().backward()
    for i in range(10):
        for head in heads:
            head.zero_grad()
        for which in (1, 0) if i % 2 else (0, 1):
            passes(on_gpu(made(5, 4, seed=i)), which)
        found.append([grads(head) for head in heads])
    return found


@program
def micro_batches_clipping_and_hands(wrap):
    model, found = net(), []
    adam = optim.AdamW([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.01}], 0.1)

    @wrap
    def passes(x):
        loss = (model(x) ** 2).sum()
        loss.backward()
        return loss
    for step in range(8):
        for micro in range(3):
            found.append(values(passes(on_gpu(made(5, 4, seed=step * 3 + micro)))))
        found.append(optim.clip_grad_norm_(model.parameters(), 1.0))
        if step == 4:
            model.weight.grad = on_gpu(made(3, 4))
        found.append(grads(model))
        adam.step()
        adam.zero_grad()
        found.append(list(model.state_dict().values()))
    return found


@program
def gradients_within_and_at_second_order(wrap):
    w = on_gpu(made(4), requires_grad=True)

    @wrap
    def f(x):
        w.grad = None
        inner = mt.grad(lambda v: (v ** 3).sum())(x)
        y = (w ** 3 * x).sum()
        y.backward(create_graph=True)
        penalty = (w.grad ** 2).sum()
        w.grad = None
        penalty.backward()
        return inner, penalty
    return [values([f(on_gpu(made(4, seed=i))), w.grad]) for i in range(6)]


@program
def training_by_hand(wrap):
    w = on_gpu(made(4, 3), requires_grad=True)

    @wrap
    def step(x):
        w.grad = None
        loss = ((x @ w) ** 2).sum()
        loss.backward()
        with mt.no_grad():
            w[...] = w - 0.01 * w.grad
        return loss
    return [values([step(on_gpu(made(5, 4, seed=i))), w, w.grad]) for i in range(7)]


# ---------------------------------------------------------------- arguments and results

@program
def dicts_keep_their_order(wrap):
    @wrap
    def f(batch, **more):
        first, second = batch.values()
        return {"z": first - 2 * second, "a": sum(i * v for i, v in enumerate(more.values())), "m": None}
    found = []
    for step in range(12):
        b, a = (on_gpu(made(2, seed=step + i)) for i in range(2))
        found.append(values(f({"b": b, "a": a} if step % 2 else {"a": b, "b": a}, q=a, c=b)))
    return found


@program
def odd_inputs(wrap):
    @wrap
    def f(x, y):
        return (x + y, (x > y), mt.argsort(x, 0) if x.ndim else x)
    xs = [on_gpu(np.float32(3)), on_gpu(made(0, 3)), on_gpu(made(2, 3, dtype="f8")), on_gpu(np.arange(6)[::-1]),
          on_gpu(made(3, 2)).T, on_gpu(made(2, 3).astype("f2")), on_gpu(made(2, 3) > 0), on_gpu(made(2, 6))[:, ::2],
          mt.broadcast_to(on_gpu(made(3)), (2, 3))]
    return [values(f(x, y)) for x in xs for y in (x, x * 2 if x.dtype.kind != "b" else x) for _ in range(3)]


@program
def instances_of_two_classes(wrap):
    class Base:
        scale = 2.0

        def __init__(self, seed):
            self.model = net(seed)

        @wrap
        def loss(self, x):
            return (self.model(x) ** 2).sum() * self.scale

    class Derived(Base):
        @wrap
        def loss(self, x):
            return super().loss(x) + self.shift()

        def shift(self):
            return self.offset
    trainers, found = [Base(1), Derived(2), Derived(1)], []
    for i in range(10):
        trainers[1].offset, trainers[2].offset = float(i > 5), 3.0
        found += [values(t.loss(on_gpu(made(5, 4, seed=i)))) for t in trainers]
    return found


@program
def a_callable_object_and_a_partial(wrap):
    class Step:
        def __init__(self):
            self.model, self.scale = net(), 1.0

        def __call__(self, x, power):
            return self.times(self.model(x) ** power)

        def times(self, y):
            return y * self.scale
    step, found = Step(), []
    calls = [wrap(functools.partial(step, power=2)), wrap(step.model), wrap(step.model.forward)]
    for i in range(8):
        step.scale = 1.0 if i < 4 else 5.0
        if i == 6:
            step.model.weight = nn.Parameter(on_gpu(made(3, 4)))
        found += [values(call(on_gpu(made(5, 4, seed=i)))) for call in calls]
    return found


@program
def compression_by_hooks(wrap):
    model = nn.Sequential(net(), nn.Tanh())

    @wrap
    def passes(x):
        model.zero_grad()
        model(x).sum().backward()
    found = []
    for i in range(8):
        with mt.saved_tensors_hooks(*((np.sign, lambda x: x) if i % 2 else (lambda x: x, lambda x: x))):
            passes(on_gpu(made(5, 4, seed=i)))
        found.append(grads(model))
        passes(on_gpu(made(5, 4, seed=i)))
        found.append(grads(model))
    return found


@program
def zeros_of_either_sign(wrap):
    f = wrap(lambda x, zero: (x * 0 + 1) / (x * zero))
    x = on_gpu(np.ones(2, "f4"))
    with np.errstate(all="ignore"):
        return [values(f(x, zero)) for zero in (0.0, -0.0, 0.0, -0.0) for _ in range(4)]


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_computes_the_same(name):
    wrap = Seen()
    with np.errstate(all="ignore"):
        assert_equal(PROGRAMS[name](wrap), PROGRAMS[name](lambda function: function))
    assert any(f.graphs for f in wrap.made) == (name in RECORDED) or name == "instances_of_two_classes"
