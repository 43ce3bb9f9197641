"""Weights averaged: over several models (soups), and over the steps of one training.

    soup = greedy_soup(states, score)     # of fine-tuned models: those that help, best first
    average = ExponentialMovingAverage(model, 0.999)
    for batch in loader.epoch(e):
        …
        optimizer.step()
        average.update()
    with average.applied():                         # the model has the average's values
        update_bn(model, images)
        evaluate(model)

Averages of weights are good where models lie in one valley of the loss: fine-tuned from one start, or steps of one
training. Between models from different starts there are mountains.

Sources: Wortsman et al. 2022, "Model soups"; Izmailov et al. 2018, "Averaging weights leads to wider optima" (SWA);
Polyak & Juditsky 1992.
"""

import math
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..autodiff.modes import no_grad
from ..autodiff.primitive import lower
from ..autodiff.writes import wrote
from ..backend import is_floating, to, to_device_of, xp, zeros_like
from ..checkpoints.loading import StoredValues, check_ungathered
from ..checkpoints.npz import read_npz
from ..nn.absent import AbsentParameterError
from ..nn.module import Module
from ..nn.norm import BatchNorm
from ..optim.settings import AT_LEAST_0, check_keys, check_settings, holds
from ..parallel.fsdp.fully_sharded import FullySharded
from ..parallel.same_model import from_rank_0
from .prune import check_whole

# ---------------------------------------------------------------- soups


def read_states(sources):
    """[state dict] of the models of a soup: each {name: NumPy array}, of a Module, of a state dict itself, of an .npz
    file (training.save_parameters), or of a checkpoint's folder (checkpoints.save), checked for damage. ValueError
    without any, where they aren't alike, and of adapters that aren't merged, or are of Modules with other alphas (a
    state dict doesn't know its own)."""
    sources = list(sources)
    check_scales(sources)
    states = [_read_state(source) for source in sources]
    if not states:
        raise ValueError("a soup needs at least one model")
    check_alike(states)
    check_adapters(states)
    return states


def _read_state(source):
    if isinstance(source, Module):
        check_whole(source, "a soup")
        return source.state_dict()
    if isinstance(source, dict):
        return source
    path = Path(source)
    if path.suffix == ".npz":
        return read_npz(path)
    return dict(StoredValues(path))


def check_alike(states):
    """ValueError, with the first difference, unless all states have the same names, shapes and dtypes."""
    first = states[0]
    for i, state in enumerate(states[1:], 1):
        if other := sorted(set(first) ^ set(state)):
            raise ValueError(f"a soup of different models: {other[0]} is in number {0 if other[0] in first else i} and "
                             f"not in number {i if other[0] in first else 0}")
        for name, value in state.items():
            if (value.shape, value.dtype) != (first[name].shape, first[name].dtype):
                raise ValueError(f"a soup of different models: {name} is {first[name].dtype} of shape "
                                 f"{first[name].shape} in number 0, {value.dtype} of shape {value.shape} in number {i}")
            if not is_floating(value.dtype) and not np.array_equal(value, first[name]):
                raise ValueError(f"{name} ({value.dtype}) differs between numbers 0 and {i}, and has no mean: make it "
                                 "equal in all")


def check_adapters(states):
    """ValueError where both matrices of an adapter (lora.py) differ: the product of their means isn't the mean of their
    products. Where one of them is the same in all states, it is."""
    def differ(name):
        return any(not np.array_equal(state[name], states[0][name]) for state in states[1:])
    for path in [name.removesuffix("lora_A") for name in states[0] if name.rpartition(".")[2] == "lora_A"]:
        if differ(path + "lora_A") and differ(path + "lora_B"):
            raise ValueError(f"a soup of adapters: lora_A and lora_B of {path.rstrip('.') or 'the model'} both differ, "
                             "and the product of their means is not the mean of their products: lora.merge(model) "
                             "first, and give the merged models' states")


def check_scales(sources):
    """ValueError where Modules multiply the products of their adapters (lora.py) by different numbers."""
    first = {}
    for i, source in enumerate(sources):
        for path, m in source.named_modules() if isinstance(source, Module) else ():
            if (adapter := getattr(m, "adapter", None)) is not None and \
                    first.setdefault(path, (i, adapter))[1].scale != adapter.scale:
                raise ValueError(f"a soup of adapters: {path or 'the model'} has {adapter} in number {i}, "
                                 f"{first[path][1]} in number {first[path][0]}: the mean of what B A is multiplied by "
                                 "other numbers isn't B A's of the means: lora.merge(model) first")


def _sum(total, state):
    """total + state, in float64; what isn't floating stays."""
    return {name: value if not is_floating(value.dtype) else value.astype(np.float64) + (total[name] if total else 0.0)
            for name, value in state.items()}


def _mean(total, count, like):
    return {name: (value / count).astype(like[name].dtype) if is_floating(value.dtype) else value.copy()
            for name, value in total.items()}


def uniform_soup(sources):
    """The mean of some models' values as a state dict. sources: what read_states takes; alike, else ValueError. Means
    are made in float64, and rounded once. BatchNorm's statistics are averaged, too: better re-estimate them, update_bn.
    """
    states = read_states(sources)
    total = {}
    for state in states:
        total = _sum(total, state)
    return _mean(total, len(states), states[0])


@dataclass(frozen=True)
class Soup:
    """What greedy_soup has made.

    state, score   the average's values and its score
    ingredients    numbers of the models in it, in the order in which they came
    scores         of each model alone
    tried          [(number, the score with it, whether it stays)], in order; print it
    """

    state: dict
    score: float
    ingredients: list
    scores: list
    tried: list

    def __str__(self):
        lines = ["model     alone  in the soup"]
        for number, score, stays in self.tried:
            lines.append(f"{number:5}  {self.scores[number]:#8.4g}  {score:#11.4g}  {'stays' if stays else 'left out'}")
        return "\n".join(lines)


def greedy_soup(sources, score):
    """The Soup to which models are added, best first, as long as its score doesn't fall.

    sources  what read_states takes; alike, else ValueError
    score    score(state dict) -> a number, the higher the better, on validation data (not on the test set). In a
             distributed run the same on all ranks

    Never worse than the best model alone, on these data. Among equal scores the earlier model comes first; one that
    leaves the soup's score as it is stays. Source: Wortsman et al. 2022, recipe 1.
    """
    states = read_states(sources)
    scores = [float(score(state)) for state in states]
    if odd := [i for i, s in enumerate(scores) if math.isnan(s)]:
        raise ValueError(f"greedy_soup: the score of model {odd[0]} is NaN, which has no order")
    order = sorted(range(len(states)), key=lambda i: -scores[i])    # which keeps the order of equal ones
    ingredients, total = order[:1], _sum({}, states[order[0]])
    best, best_score = states[order[0]], scores[order[0]]
    tried = [(order[0], best_score, True)]
    for i in order[1:]:
        larger = _sum(total, states[i])
        candidate = _mean(larger, len(ingredients) + 1, states[0])
        its_score = float(score(candidate))
        tried.append((i, its_score, its_score >= best_score))
        if its_score >= best_score:
            ingredients, total, best, best_score = [*ingredients, i], larger, candidate, its_score
    return Soup({name: value.copy() for name, value in best.items()}, best_score, ingredients, scores, tried)


# ---------------------------------------------------------------- averages over the steps of a training

class Average:
    """Base of the averages of a model's parameters and floating buffers over the steps of its training.

    model   a Module, or one in DistributedDataParallel, or fully_shard, where each rank averages its own part

    They begin with the values of now, and are kept in float32 or wider. The average is the same on all ranks, because
    the parameters are; buffers that ranks keep of their own are rank 0's. Of adapters (lora.py) A and B are averaged
    each by itself, and the average is a model of their rank: B A of the averages is the average of the products but for
    how A and B have moved together meanwhile.
    """

    def __init__(self, model):
        self.model, self.updates, self.inside = model, 0, False
        self.averages = {name: array.astype(xp.promote_types(array.dtype, xp.float32), copy=True)
                         for name, array in self._arrays().items()}

    def share(self):
        """How much of the way to the new values the average goes."""
        raise NotImplementedError

    def _arrays(self):
        """{name: array} of what is averaged, where it lives now."""
        model = self.model
        if names := getattr(model, "synchronised_buffers", ()):
            from_rank_0(model.comm, model.module, names)
        named = [(name, lower(value)) for name, value in (*model.named_parameters(), *model.named_buffers())]
        return {name: array for name, array in named if is_floating(array.dtype)}

    def _known(self):
        """_arrays. ValueError where they aren't those of which there are averages."""
        arrays = self._arrays()
        then, now = ({name: a.shape for name, a in each.items()} for each in (self.averages, arrays))
        if odd := next((name for name in {**then, **now} if then.get(name) != now.get(name)), None):
            raise ValueError(f"{type(self).__name__}: {odd} had shape {then.get(odd)} when the average was made, and "
                             f"has {now.get(odd)} now: make it of the model as it is trained")
        return arrays

    def update(self):
        """A step of the training is done: take its values in. ValueError where the model has others than it had."""
        if self.inside:
            raise RuntimeError("update() inside applied(), where the model's values are the average's own")
        arrays, share = self._known(), self.share()
        self.updates += 1
        for name, array in arrays.items():
            average = self.averages[name]
            average[...] = xp.where(xp.isnan(average), array, average + share * (array - average))

    @contextmanager
    def applied(self):
        """Inside, the model has the average's values: to evaluate it, save it, re-estimate BatchNorm's statistics. All
        that is written to the model inside is forgotten at the end: RuntimeError there where it has been cut meanwhile,
        whose parts are the average's."""
        check_ungathered(self.model)
        saved = {name: array.copy() for name, array in self._known().items()}
        self._write(self.averages)
        outer, self.inside = self.inside, True
        try:
            yield self.model
        finally:
            self.inside = outer
            try:
                self._write(saved)
            except (AbsentParameterError, ValueError) as error:
                raise RuntimeError("the model was cut inside applied(), by fully_shard or parallelize_module, and has "
                                   "parts of the average: cut it before or behind that block") from error

    def _write(self, values):
        for name, array in self._arrays().items():
            array[...] = values[name]
            wrote(array, type(self).__name__)
        if isinstance(self.model, FullySharded):
            self.model.stale = True     # stages 1 and 2: the other ranks haven't seen it

    def state_dict(self):
        """{"updates": how many, "averages": {name: NumPy array}}; a fully_shard model's: of this rank's part."""
        return {"updates": self.updates,
                "averages": {name: np.array(to(a, "cpu")) for name, a in self.averages.items()}}

    def load_state_dict(self, saved):
        """Go on from what state_dict gave. ValueError where it doesn't fit."""
        check_keys(saved, ("updates", "averages"), "an average")
        check_keys(saved["averages"], (), "an average")
        check_settings(updates=(saved["updates"], holds(AT_LEAST_0[0], saved["updates"], None), AT_LEAST_0[1]))
        mine, theirs = ({name: getattr(a, "shape", None) for name, a in arrays.items()}
                        for arrays in (self.averages, saved["averages"]))
        if odd := sorted(name for name in {**mine, **theirs} if mine.get(name) != theirs.get(name)):
            raise ValueError(f"the saved average has {odd[0]} of shape {theirs.get(odd[0])}, this model of shape "
                             f"{mine.get(odd[0])}")
        self.updates = saved["updates"]
        for name, average in self.averages.items():
            average[...] = to_device_of(saved["averages"][name], average)


class ExponentialMovingAverage(Average):
    """average ← decay · average + (1 - decay) · values, at each update(). Source: Polyak & Juditsky 1992 for averages;
    with this weight as in Tarvainen & Valpola 2017, "Mean teachers"."""

    def __init__(self, model, decay=0.999):
        if not 0 <= decay < 1:
            raise ValueError(f"ExponentialMovingAverage: decay={decay}; it must be in [0, 1)")
        self.decay = decay
        super().__init__(model)

    def share(self):
        return 1 - self.decay


class StochasticWeightAverage(Average):
    """The plain mean of the values at each update(); those it was made with don't count. Call update() at the end of
    each epoch, or of each cycle of the learning rate. Source: Izmailov et al. 2018."""

    def share(self):
        return 1 / (self.updates + 1)


@no_grad()
def update_bn(model, batches):
    """Re-estimate the running statistics of all BatchNorms, which are those of no average's activations.

    batches  iterable of inputs; in DistributedDataParallel equally many on all ranks, each rank's share of a batch

    Each becomes the plain mean over the batches of their means and (unbiased) variances, as in torch. Only BatchNorms
    are in training mode meanwhile: with dropout on they would see other variances than in evaluation. In exact mode the
    means are over all ranks' batches, each of which is a batch by itself. ValueError without a batch.
    """
    layers = [m for m in model.modules() if isinstance(m, BatchNorm)]
    if not layers:
        return
    sums = {}

    def take(layer, mean, var):
        found = xp.concatenate([mean, var, zeros_like(mean, 1) + 1]).astype(xp.float64)
        sums[id(layer)] = sums.get(id(layer), 0) + found
    modes, moves = [(m, m.training) for m in model.modules()], [layer.move for layer in layers]
    try:
        model.eval()
        for layer in layers:
            layer.training, layer.move = True, take
        for x in batches:
            model(x)
    finally:
        for m, training in modes:
            m.training = training
        for layer, move in zip(layers, moves, strict=True):
            layer.move = move
    if len(sums) < len(layers):
        raise ValueError("update_bn: no batch came to some BatchNorm: give at least one")
    for layer in layers:
        total = sums[id(layer)]
        if getattr(model, "exact", False):
            model.comm.all_reduce(total)
        n = layer.num_features
        for running, part in ((layer.running_mean, total[:n]), (layer.running_var, total[n:2 * n])):
            running[...] = part / total[-1]
            wrote(running, "update_bn")
