"""µP, the maximal update parametrisation: what was tuned on a narrow model is right for a wide one.

    base  = nn.GPT(vocabulary, length, dim=64)              # on which the learning rate was found
    model = nn.GPT(vocabulary, length, dim=1024)            # the same, but wider
    widths = mup.scale(model, base)                         # in place: initial values, constants
    print(widths)
    …                                                       # parallelize_module, DistributedDataParallel, fully_shard
    optimizer = widths.optimizer(optim.AdamW, model, lr=3e-3, weight_decay=0.1)     # base's best

A step of Adam moves each weight by about lr, whatever its gradient. The changes of a row of n weights are in line with
the n inputs that caused them, so they add up: the output moves by n · lr, and a wide model's best rate is a small one's
divided by the width. Which weights this holds for is a matter of which sides of the matrix grow. With fan-in grown
a-fold, and fan-out b-fold:

    kind      grows             such as                     initial values    lr of Adam    lr of SGD
    fixed     neither           an output's bias            1                 1             1
    vector    its one side      biases, norms               1                 1             b
    input     fan-out           embeddings, first layers    1                 1             b
    hidden    both              all between                 1/√a              1/a           b/a
    output    fan-in            last layers, routers        1/a               1/a           1/a

are the factors, beside what base has: of the root mean square of its initial values, and of its learning rates. That
holds however the initial values depend on the width by themselves (1/√fan-in, or 0.02 at any): both models' are
measured. And two constants change: attention's scores are multiplied by 1/size instead of 1/√size, beside base's; and
where a GPT's output layer is its embedding, logits are multiplied by 1/a, for the matrix has an embedding's values and
rate. A model of base's own widths stays what it is, to the bit.

Nothing else is different from any other model: values, numbers, groups of an optimizer. So it goes with all forms of
parallelism, as the factors are those of whole matrices, which are measured before they are cut.

Weight decay is torch's, lr · weight_decay of a weight per step, and is divided by what the rate is multiplied by: so
a weight shrinks by as much at any width, as in the authors' own package. What Adam and Adagrad add to the gradient
instead can't be scaled so: take AdamW. Gradients get smaller with the width, and eps doesn't: take one that is small
beside them.

Source: Yang et al. 2022, "Tensor Programs V: tuning large neural networks by zero-shot hyperparameter transfer",
tables 3 (fixed to output; there both sides of a hidden matrix grow alike, and SGD's factor is 1) and 8 (tied weights),
definition 4.1 (attention).
"""

from dataclasses import dataclass
from math import inf, prod, sqrt

import numpy as np

from ..autodiff.primitive import lower
from ..autodiff.tensor import Tensor
from ..backend import to
from ..nn import init
from ..nn.attention import MultiHeadAttention
from ..nn.moe import Experts
from ..nn.norm import LayerNorm, RMSNorm
from ..nn.transformer import GPT, Embedding
from ..tables import aligned
from .adagrad import Adagrad
from .adam import Adam, AdamW
from .lion import Lion
from .sgd import SGD


@dataclass(frozen=True)
class Rule:
    """The table's line: exponents of (a, b)."""

    init: tuple
    adam: tuple
    sgd: tuple


RULES = {
    "fixed": Rule(init=(0, 0), adam=(0, 0), sgd=(0, 0)),
    "vector": Rule(init=(0, 0), adam=(0, 0), sgd=(0, 1)),
    "input": Rule(init=(0, 0), adam=(0, 0), sgd=(0, 1)),
    "hidden": Rule(init=(-0.5, 0), adam=(-1, 0), sgd=(-1, 1)),
    "output": Rule(init=(-1, 0), adam=(-1, 0), sgd=(-1, 0)),
}
LIKE = {SGD: "sgd", Adam: "adam", AdamW: "adam", Adagrad: "adam", Lion: "adam"}      # how their rates go
L2 = Adam, Adagrad      # weight decay is added to a gradient that is divided by its own size then


@dataclass(frozen=True)
class Width:
    """How a parameter has grown.

    shape, base      its shape, and base's
    fan_in, fan_out  how many times
    init             what its initial values were multiplied by
    """

    shape: tuple
    base: tuple
    fan_in: float
    fan_out: float
    init: float = 1.0

    @property
    def kind(self):
        """The name of its rule."""
        if len(self.shape) < 2:
            return "fixed" if self.fan_out == 1 else "vector"
        return {(False, False): "fixed", (False, True): "input", (True, False): "output", (True, True): "hidden"}[
            self.fan_in != 1, self.fan_out != 1]

    def factor(self, of):
        """Beside base: of "init", "adam" or "sgd"."""
        a, b = getattr(RULES[self.kind], of)
        return self.fan_in ** a * self.fan_out ** b


@dataclass(frozen=True)
class Widths:
    """What `scale` has found and done. Its text is a table.

    parameters  {name: Width}
    constants   {path of a module, and its attribute: value} of those that aren't base's
    """

    parameters: dict
    constants: dict

    def groups(self, params, optimizer, lr, weight_decay=0.0):
        """Groups for an optimizer, one per learning rate and weight decay: those of the whole model, some of them empty
        where a pipeline's stage has none of theirs, so that checkpoints fit.

        params        a module of the same names, as it is cut or wrapped, or (name, tensor) pairs. Those that are
                      frozen are left out
        optimizer     the class: SGD, Adam, AdamW, Adagrad or Lion
        lr            base's
        weight_decay  base's, of matrices; vectors have none

        ValueError for a name that `scale` hasn't seen, as adapters have; TypeError for another class.
        """
        if optimizer not in LIKE:
            raise TypeError(f"mup: how rates of {getattr(optimizer, '__name__', optimizer)} go with the width isn't "
                            f"known: take {', '.join(each.__name__ for each in LIKE)}")
        keys = {name: (width.factor(LIKE[optimizer]), weight_decay if len(width.shape) > 1 else 0.0)
                for name, width in self.parameters.items()}
        groups = {(factor, decay): {"params": [], "lr": lr * factor, "weight_decay": decay / factor}
                  for factor, decay in keys.values()}
        for name, p in params.named_parameters() if hasattr(params, "named_parameters") else params:
            if not p.requires_grad:
                continue
            name = name if p.leaf.tied is None else p.leaf.tied.name    # of a stage's copy: in the whole model
            if name not in keys:
                raise ValueError(f"mup: scale() hasn't seen {name}, and knows {', '.join([*self.parameters][:4])} …: "
                                 "what was added since, as adapters are, wants an optimizer of its own")
            factor, decay = keys[name]
            if decay and factor != 1 and optimizer in L2:
                raise ValueError(f"mup: weight_decay={weight_decay} of {optimizer.__name__}, which is added to the "
                                 "gradient, means something else at each width: take AdamW")
            groups[keys[name]]["params"].append(p)
        return list(groups.values())

    def optimizer(self, optimizer, params, lr, weight_decay=0.0, **settings):
        """An optimizer of such groups; settings: the others that its class takes."""
        return optimizer(self.groups(params, optimizer, lr, weight_decay), lr=lr, **settings)

    def __str__(self):
        rows = [("parameter", "shape", "base", "kind", "initial", "Adam's lr", "SGD's lr")]
        rows += [(name, _sides(w.shape), _sides(w.base), w.kind, f"{w.init:.4g}", f"{w.factor('adam'):.4g}",
                  f"{w.factor('sgd'):.4g}") for name, w in self.parameters.items()]
        return "\n".join([*aligned(rows, left=4), *(f"{name} = {value:.4g}" for name, value in self.constants.items())])


def _sides(shape):
    return "×".join(map(str, shape)) or "1"


def scale(model, base):
    """Make `model` the µP of a wider `base`, in place, before it is trained. Returns Widths.

    model  with its initial values, whole: before parallelize_module, a wrapper, an optimizer, adapters; the same on all
           ranks. A checkpoint that is to go on is loaded afterwards, as the constants are no part of its state
    base   alike in all but its widths, with initial values too, of which only the size counts. (A Linear's classes,
           tokens or experts are a side like any other: as many in both.)

    ValueError unless both have the same parameters, all of them to be trained, with as many axes; for one that starts
    from zeros here and not in base; where a module other than GPT uses one parameter in two places of different kinds.
    RuntimeError for a model that is cut or wrapped.
    """
    _check(model, base)
    narrow, owners, found = dict(base.named_parameters()), _owners(model), {}
    for name, p in model.named_parameters():
        grown = {_grown(module, tuple(p.shape), tuple(narrow[name].shape)) for module in owners[id(p)]}
        if len(grown) > 1:
            raise ValueError(f"mup: {name} stands in {len(grown)} modules, for one of which it is fan-in that grows, "
                             "and for another fan-out: give each a parameter of its own")
        width = Width(tuple(p.shape), tuple(narrow[name].shape), *grown.pop())
        found[name] = Width(width.shape, width.base, width.fan_in, width.fan_out,
                            _initial(name, width, lower(p), lower(narrow[name])))
    for name, p in model.named_parameters():
        if found[name].init != 1:
            values = lower(p)
            values *= found[name].init
    return Widths(found, _constants(model, base))


def _check(model, base):
    params, narrow = dict(model.named_parameters()), dict(base.named_parameters())
    if odd := sorted(params.keys() ^ narrow.keys()):
        raise ValueError(f"mup: only one of model and base has {', '.join(odd[:4])}: base must be the same model, "
                         "but narrower")
    if odd := [name for name in params if len(params[name].shape) != len(narrow[name].shape)]:
        raise ValueError(f"mup: {odd[0]} is {tuple(params[odd[0]].shape)} in the model and "
                         f"{tuple(narrow[odd[0]].shape)} in base: they must have as many axes")
    if frozen := [name for name, p in params.items() if isinstance(p, Tensor) and not p.requires_grad]:
        raise ValueError(f"mup: {', '.join(frozen[:4])} are frozen, and scale() is for models that are trained from "
                         "their beginning: call it first, and freeze or add adapters afterwards")
    if cut := [name for name, p in params.items() if not isinstance(p, Tensor) or p.leaf.flat is not None
               or p.leaf.part_of is not None or p.leaf.piece_of is not None]:
        raise RuntimeError(f"mup: {', '.join(cut[:4])} is cut, wrapped or in an optimizer already: call scale() "
                           "before, with the whole model")


def _owners(model):
    """{id of a parameter: [the modules that have it]}."""
    owners = {}
    for module in model.modules():
        for p in module._parameters.values():
            owners.setdefault(id(p), []).append(module)
    return owners


def _grown(module, shape, base):
    """How many times fan-in and fan-out of a module's parameter have grown."""
    (fan_in, fan_out), (narrow_in, narrow_out) = _fans(module, shape), _fans(module, base)
    return fan_in / narrow_in, fan_out / narrow_out


def _fans(module, shape):
    if len(shape) < 2 or isinstance(module, (LayerNorm, RMSNorm)):      # which may be over several axes
        return 1, prod(shape)
    if isinstance(module, Embedding):       # of (rows, dim) it gives one row, however many there are
        return 1, shape[1]
    if isinstance(module, Experts):         # (experts, in, out)
        return shape[1:]
    return init.fans(shape)


def _initial(name, width, values, narrow):
    """What to multiply initial values by."""
    if width.kind == "fixed":
        return 1.0
    now, wanted = _size(values), _size(narrow) * width.factor("init")
    if now == wanted:
        return 1.0
    if not (0 < now < inf and 0 < wanted < inf):
        raise ValueError(f"mup: {name} starts with values of the root mean square {now:.4g}, and {_size(narrow):.4g} "
                         "in base: give both one initialiser, without NaN, and zeros in both or in neither")
    return wanted / now


def _size(values):
    """The root mean square."""
    return sqrt(np.mean(np.square(to(values, "cpu"), dtype=np.float64)))


def _constants(model, base):
    """Set the constants that depend on the width; {name: value} of those that aren't base's."""
    narrow, constants = dict(base.named_modules(remove_duplicate=False)), {}
    for path, module in model.named_modules():
        prefix, other = f"{path}." if path else "", narrow.get(path)
        if isinstance(module, MultiHeadAttention):
            module.scale = other.scale
            if module.size != other.size:
                module.scale = (1 / sqrt(other.size) if other.scale is None else other.scale) * other.size / module.size
                constants[f"{prefix}scale"] = module.scale
        elif isinstance(module, GPT):
            module.output_multiplier = other.output_multiplier
            grown = module.embed.weight.shape[1] / other.embed.weight.shape[1]
            if module.head is None and grown != 1:
                module.output_multiplier = (1.0 if other.output_multiplier is None else other.output_multiplier) / grown
                constants[f"{prefix}output_multiplier"] = module.output_multiplier
    return constants
