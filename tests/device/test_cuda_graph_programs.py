"""Programs that somebody might write, with cuda_graph and without: the same numbers, call after call, or an error."""

import functools

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import nn, optim
from minitorch_dist.qk_clip import QKClip

from .graph_programs import Programs, grads, net, values
from .test_cuda_graphs import gpu, made, on_gpu  # noqa: F401

program = Programs()


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


@program
def scores_are_noted_and_clipped(wrap):
    mt.manual_seed(0)
    model = nn.GPT(7, 6, layers=2, heads=2, dim=8).to("cuda")
    sgd, clip, found = optim.SGD(model.parameters(), 0.1), QKClip(model, 0.005), []

    @wrap
    def passes(tokens):
        sgd.zero_grad()
        loss = (model(tokens) ** 2).sum()
        loss.backward()
        return loss
    for step in range(8):
        tokens = np.random.default_rng(step).integers(0, 7, (3, 6))
        found.append(values(passes(mt.tensor(tokens, device="cuda"))))
        sgd.step()
        scores = clip.step()
        found.append([scores.clipped, list(scores.values())])
    assert any(clipped for clipped, _ in found[1::2])
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


@pytest.mark.parametrize("name", program)
def test_a_program_computes_the_same(name):
    assert program.check(name) or name == "instances_of_two_classes"
