"""No old answers: whatever a function reads may change between calls; and random numbers are drawn anew."""

import collections
import functools
import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import minitorch_dist as mt
from minitorch_dist import backend, nn, optim
from minitorch_dist.flat import FlatBuffer

from .programs_table import Programs, grad

program = Programs()
X = np.random.default_rng(0).standard_normal((5, 4))
scale = 2.0
shift = np.ones(4)


def net(*more, seed=3):
    mt.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 3, dtype=np.float64), nn.Tanh(), *more)


def all_grads(model):
    return [np.zeros(0) if p.grad is None else p.grad.numpy().copy() for p in model.parameters()]


@program
def training_and_evaluation(wrap):
    model = wrap(net(nn.BatchNorm(3, dtype=np.float64), nn.Dropout(0.5)))
    results = []
    for mode in (True, False, False, True, False, True):
        model.train(mode)
        results.append(model(mt.tensor(X)))
    return results + [dict(model.named_buffers())]


@program
def a_part_is_set_to_evaluation(wrap):
    model = net(nn.Dropout(0.5))
    f = wrap(model)
    results = [f(mt.tensor(X))]
    model[2].training = False
    return results + [f(mt.tensor(X)), f(mt.tensor(X))]


@program
def a_closure_variable(wrap):
    factor = 1.5

    def f(x):
        return mt.exp(x) * factor
    g, results = wrap(f), []
    for factor in (1.5, -2.0, 3, True, None or 0.0, -0.0):      # noqa: B007
        results += grad(g, X)
    return results


@program
def a_closure_array_in_place_and_another(wrap):
    weights = np.arange(4.0)

    def f(x):
        return mt.exp(x) * weights
    g = wrap(f)
    results = [*grad(g, X)]
    weights[1] = -7
    results += grad(g, X)
    weights = np.ones(4)
    return results + [*grad(g, X)]


@program
def globals_(wrap):
    global scale, shift

    def f(x):
        return mt.exp(x) * scale + shift
    g, results = wrap(f), []
    for scale, shift in ((2.0, np.ones(4)), (3.0, np.ones(4)), (3.0, np.arange(4.0))):      # noqa: B007
        results += grad(g, X)
    shift[2] = 50
    return results + [*grad(g, X)]


def helper(x):
    return mt.exp(x) * scale


@program
def a_global_of_a_function_that_is_called(wrap):
    global scale, helper
    g, results, old = wrap(lambda x: helper(x) - 1.0), [], helper
    for scale in (2.0, 4.0):        # noqa: B007
        results += grad(g, X)
    helper = lambda x: mt.sin(x)    # noqa: E731
    results += grad(g, X)
    helper = old
    return results


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.factor, self.kind, self.inner = 2.0, "exp", nn.Linear(4, 4, dtype=np.float64)
        self.register_buffer("offset", np.zeros(4))

    def forward(self, x):
        return getattr(mt, self.kind)(self.inner(x)) * self.factor + self.offset


@program
def attributes_of_a_module(wrap):
    mt.manual_seed(1)
    model = Scaled()
    f = wrap(model)
    results = [*grad(f, X)]
    for name, value in (("factor", 3.0), ("kind", "tanh"), ("factor", -1), ("offset", np.arange(4.0)),
                        ("inner", nn.Linear(4, 4, dtype=np.float64))):
        setattr(model, name, value)
        results += grad(f, X)
    model.offset[...] = 9.0
    return results + [*grad(f, X)]


@program
def a_parameter_is_changed_in_place(wrap):
    model = net()
    f = wrap(model)
    results = [*grad(f, X)]
    model[0].weight.data[...] *= 2
    results += grad(f, X)
    with mt.no_grad():
        model[0].bias[1] = 5.0
    results += grad(f, X)
    model.load_state_dict({name: np.cos(p.numpy()) for name, p in model.named_parameters()})
    return results + [*grad(f, X)]


@program
def a_parameter_is_another(wrap):
    model = net()
    f = wrap(model)
    results = [*grad(f, X)]
    model[0].weight = nn.Parameter(np.ones((3, 4)))
    results += [*grad(f, X), *all_grads(model)]
    model[0].weight.data = np.full((3, 4), 0.5)
    return results + [*grad(f, X), *all_grads(model)]


@program
def parameters_move_into_a_flat_buffer(wrap):
    model = net()
    f = wrap(model)
    results = [*grad(f, X)]
    flat = FlatBuffer(list(model.parameters()))
    results += [*grad(f, X), *all_grads(model)]
    flat.params[...] *= 2
    return results + [*grad(f, X), *all_grads(model)]


@program
def training_steps(wrap):
    model = net(nn.Linear(3, 2, dtype=np.float64))
    optimizer, loss = optim.Adam(model.parameters(), lr=0.1), wrap(lambda x: mt.mean(mt.square(model(x))))
    results = []
    for _ in range(4):
        optimizer.zero_grad()
        value = loss(mt.tensor(X))
        value.backward()
        optimizer.step()
        results.append(value)
    return results + [p.numpy() for p in model.parameters()]


@program
def frozen_and_thawed(wrap):
    model = net(nn.Linear(3, 2, dtype=np.float64))
    f, results = wrap(model), []
    for flag in (True, False, True):
        model[0].weight.requires_grad_(flag)
        model.zero_grad()
        results += [*grad(f, X), *all_grads(model)]
    for p in model.parameters():
        p.requires_grad_(False)
    y = f(mt.tensor(X))
    return results + [y, np.array(y.requires_grad)]


@program
def without_gradients(wrap):
    model = net()
    results = []
    for order in ((False, True, False), (True, False, True)):
        f = wrap(model)
        for off in order:
            with (mt.no_grad() if off else mt.enable_grad()):
                y = f(mt.tensor(X, requires_grad=True))
            results += [y, np.array(y.requires_grad)]
    y = f(mt.tensor(X))
    y.sum().backward()
    return results + all_grads(model)


@program
def arguments_of_all_kinds(wrap):
    def f(x, y=None, *more, factor=1.0, how="exp", flag=False, table=None):
        out = getattr(mt, how)(x) * factor
        out = out if y is None else out + y
        for z in more:
            out = out * z
        for key in table or {}:
            out = out - table[key] if key == "a" else out / table[key]
        return -out if flag else out
    g, x = wrap(f), mt.tensor(X)
    results = []
    for args, options in (((x,), {}), ((x, None), {}), ((x, x), {}), ((x, 2.0), {}), ((x, 2), {}), ((x, True), {}),
                          ((x, 3.0), {}), ((x, x, x), {}), ((x, x, 2.0, x), {}), ((x,), {"factor": 0.0}),
                          ((x,), {"factor": -0.0}), ((x,), {"factor": 7.0}), ((x,), {"how": "tanh"}),
                          ((x,), {"flag": True}), ((x,), {"y": x}), ((x,), {"factor": x}), ((x,), {"factor": 1}),
                          ((x,), {"table": {"a": 2.0, "b": 3.0}}), ((x,), {"table": {"b": 3.0, "a": 2.0}}),
                          ((x,), {"table": {"b": 2.0, "a": 3.0}}), ((x,), {"factor": np.float64(2)}),
                          ((x,), {"factor": np.float32(2)}), ((x,), {"factor": float("nan")})):
        for _ in range(2):
            y = g(*args, **options)
            results += [y, np.signbit(y.numpy())]
    return results


@program
def shapes_and_dtypes(wrap):
    f, results = wrap(lambda x: mt.softmax(x * 2.0) + x.shape[0]), []
    for shape in ((5, 4), (4, 5), (1, 1), (5, 4), (3, 2, 2)):
        for dtype in (np.float64, np.float32):
            x = np.arange(np.prod(shape), dtype=dtype).reshape(shape) / 7
            results += [*grad(f, x), f(x), f(mt.tensor(x))]
    return results


@program
def the_same_tensor_twice(wrap):
    f, x, y = wrap(lambda a, b: mt.exp(a) * b), mt.tensor(X, requires_grad=True), mt.tensor(X[::-1].copy())
    results = []
    for a, b in ((x, x), (x, y), (y, x), (y, y), (x, x)):
        out = f(a, b)
        x.grad = None
        if out.requires_grad:
            out.sum().backward()
            results.append(x.grad.numpy())
        results.append(out)
    return results


@program
def an_objects_attributes_and_methods(wrap):
    class Thing:
        factor = 2.0

        def __init__(self):
            self.offset = 1.0

        def scaled(self, x):
            return mt.exp(x) * self.factor + self.offset
    thing = Thing()
    f, g = wrap(lambda x: thing.scaled(x)), wrap(thing.scaled)
    results = [*grad(f, X), *grad(g, X)]
    thing.offset = 5.0
    results += [*grad(f, X), *grad(g, X)]
    Thing.factor = 3.0
    results += [*grad(f, X), *grad(g, X)]
    thing.factor = 7.0      # now its own
    return results + [*grad(f, X), *grad(g, X)]


@program
def numbers_in_lists_and_dicts(wrap):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.options = {"by": 2.0, "powers": [1, 2]}

        def forward(self, x):
            return mt.exp(x) * self.options["by"] + x ** self.options["powers"][1] + self.shift(x)

        def shift(self, x):
            return x * self.shifts[0]
    settings, model, thing = {"by": 2.0, "inner": ({"offsets": [1.0, 3.0]},)}, Scaled(), SimpleNamespace(by=[4.0])
    model.shifts = (0.5, 0.25)

    def f(x, names=["by"]):     # noqa: B006
        return x * settings[names[0]] + settings["inner"][0]["offsets"][-1] * thing.by[0]

    def keys(x):
        return sum(x * len(key) for key in settings)
    functions = [wrap(function) for function in (f, keys, model, lambda x: model(x) * 2.0)]
    changes = (lambda: settings.update(by=5.0), lambda: settings["inner"][0]["offsets"].append(7.0),
               lambda: thing.by.insert(0, -2.0), lambda: model.options.update(by=-1.0),
               lambda: model.options["powers"].__setitem__(1, 3), lambda: setattr(model, "shifts", (9.0,)),
               lambda: settings.update(longer=settings.pop("by"), by=0.0),
               lambda: f.__defaults__[0].insert(0, "longer"))
    results = [grad(function, X) for function in functions]
    for change in changes:
        change()
        results += [grad(function, X) for function in functions]
    return results


@program
def attributes_of_a_modules_class(wrap):
    class Doubling(nn.Module):
        factor = 2.0

        def forward(self, x):
            return x * self.factor
    f = wrap(Doubling())
    results = [*grad(f, X)]
    Doubling.factor = 3.0
    return results + [*grad(f, X)]


@program
def partials_and_defaults(wrap):
    by = np.ones(4)

    def f(x, by=by, power=2):
        return (x * by) ** power
    part = functools.partial(f, power=3)
    g, h, results = wrap(f), wrap(part), []
    results += [*grad(g, X), *grad(h, X)]
    by[1] = 4.0
    results += [*grad(g, X), *grad(h, X)]
    f.__defaults__ = (np.full(4, 2.0), 1)
    return results + [*grad(g, X), *grad(h, X)]


@program
def hooks_of_modules(wrap):
    model = net()
    f, results = wrap(model), []
    results += grad(f, X)
    handle = model[0].register_forward_hook(lambda module, inputs, output: output * 3.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")     # it may run uncompiled
        results += grad(f, X)
    handle.remove()
    return results + [*grad(f, X)]


@program
def random_numbers(wrap):
    model = wrap(net(nn.Dropout(0.5)))
    results = [model(mt.tensor(X)) for _ in range(3)]
    assert len({r.numpy().tobytes() for r in results}) == 3
    for step in range(2):
        for rows in ((0, 3), (3, 5)):
            with backend.random_scope(1, step, 5, rows):
                results += [model(mt.tensor(X[slice(*rows)])), model(mt.tensor(X[slice(*rows)]))]
    mt.manual_seed(9)
    results.append(model(mt.tensor(X)))
    return results + [mt.randn(3)]      # the stream stands where eager's stands


@program
def a_list_of_layers(wrap):
    layers = [nn.Linear(4, 4, dtype=np.float64), nn.Linear(4, 4, dtype=np.float64)]

    def f(x):
        for layer in layers:
            x = mt.tanh(layer(x))
        return x
    g = wrap(f)
    results = [*grad(g, X)]
    layers.append(nn.Linear(4, 2, dtype=np.float64))
    results += grad(g, X)
    layers[0] = nn.Linear(4, 4, dtype=np.float64)
    results += grad(g, X)
    layers[1].weight.data[...] = 0.25
    return results + [*grad(g, X)]


@pytest.mark.parametrize("name", program)
def test_programs(name):
    program.check(name)


@pytest.mark.parametrize("name", ["training_and_evaluation", "training_steps", "random_numbers", "shapes_and_dtypes"])
def test_programs_in_c(name):
    program.check(name, "c")


def test_one_graph_for_one_state():
    """What hasn't changed isn't captured again; and what has been before is known still."""
    times = collections.deque()     # what stands in it is seen by nobody

    def f(x, factor):
        times.append(1)
        return mt.exp(x) * factor
    g = mt.compile(f, emit="numpy")
    for factor in (1.0, 1.0, 2.0, 1.0, 2.0):
        g(mt.tensor(X), factor)
    assert len(times) == 2 and len(g.variants) == 2


def test_values_that_were_kept_say_so():
    kept = collections.deque()      # what stands in it is seen by nobody

    def f(x):
        y = mt.exp(x)
        kept.append(y)
        return y * 2.0
    g = mt.compile(f, emit="numpy")
    g(mt.tensor(X))
    uses = (lambda y: y + 1.0, mt.exp, lambda y: y[0], lambda y: y.sum(), lambda y: y @ y.T, mt.softmax, mt.max,
            lambda y: y.sum().backward(), lambda y: y.numpy() + 1.0, float, bool, repr, lambda y: y.tolist())
    for use in uses:
        with pytest.raises(RuntimeError, match="kept and used after"):
            use(kept[0])
