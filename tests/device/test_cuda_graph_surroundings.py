"""Programs in which what a function takes from elsewhere changes: with cuda_graph the same numbers as without."""

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim

from .graph_programs import Programs, grads, net, values
from .test_cuda_graphs import gpu, made, on_gpu  # noqa: F401

program = Programs()


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
            handle = model.weight.register_hook(lambda g: g * 2)
        if step == 8:
            handle.remove()
        if step == 12:
            handle = model.register_forward_hook(lambda module, inputs, output: output * 3)
        if step == 16:
            handle.remove()

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


@pytest.mark.parametrize("name", program)
def test_a_program_computes_the_same(name):
    assert program.check(name)
