"""A backward pass in two parts: the cotangent of one leaf, at once, and those of all others when there is time.

    halves = InputFirst(y, x)
    send(halves.input(cotangent))       # x's, which somebody waits for
    …
    halves.weights()                    # the other leaves' .grad, their hooks, what comes at the end of backward

                  linear       tanh       linear
             x ─────┬────────────────────────┬───── y       input(): from y along this line to x
                    W                        W              weights(): down from it, where ops have kept a cotangent

No op is asked twice for the same cotangent, and no product is done twice (but for one of a loss by tiles; see
SEPARATE). All sums are added up in the order in which `run` would add them, so that gradients have the bits of one
pass. Between the parts there are, of ops on the line that have branches, what they need for these and a cotangent of
the size of their output; all else is freed.

Source: Qi et al. 2023, "Zero bubble pipeline parallelism".
"""

from . import reverse
from .primitive import Primitive, lower, state
from .reverse import (
    check_backward,
    check_cotangent,
    check_stale,
    count_uses,
    destination,
    finish_leaf,
    fit,
    one_pass,
    run_hooks,
)
from .saved import FREED, Packed
from .tensor import count_kept
from .writes import log

INPUT, WEIGHTS = "input gradient", "weight gradients"       # what timelines call the parts

# The fused ops that make each cotangent by itself: they are asked for the input's now, for the others later (of
# linear_gelu GELU's slope is then made twice, by elements, and of linear_cross_entropy the logits once more, a product:
# what it would keep otherwise is as large as its weight, per micro-batch). All other ops that make their cotangents
# together (batch norm, compiled functions, checkpointed segments, functions with a rule by hand) are asked once, and
# what they give for the weights is kept.
SEPARATE = {"linear", "linear_gelu", "linear_cross_entropy", "all_gather_matmul", "conv", "layer_norm", "rms_norm"}


class InputFirst:
    """The backward pass from `output` (a Tensor), of which x's cotangent comes first. x: a leaf, or None."""

    def __init__(self, output, x):
        if output.node is None:
            raise RuntimeError("InputFirst: no gradient reaches the output")
        if x is not None and not x.is_leaf:
            raise RuntimeError(f"InputFirst: x is the result of {x.node.primitive.name!r}; it must be a leaf")
        self.root, self.x = output.node, None if x is None else x.node
        self.left = count_uses([(self.root, None)])         # of each node: how many uses haven't passed it anything yet
        self.order = in_order(self.root, self.left)
        self.ahead = leading_to(self.x, self.order)
        self.kept = None        # after input(): {node: (its cotangent, or else those of its parents)}

    def input(self, cotangent):
        """x's cotangent, an array, from the output's; None where none reaches it. No other leaf hears of this."""
        if self.kept is not None:
            raise RuntimeError("InputFirst: input() a second time; what it needs is freed after the first")
        cotangent = lower(cotangent)
        check_cotangent(cotangent, self.root.shape, self.root.dtype)
        self.kept, self.partial, found = {}, {self.root: cotangent}, {}
        with one_pass(INPUT):
            if self.root is self.x:
                finish_leaf(self.x, self.partial.pop(self.x), False, False, found, ())
            for node in self.order:
                if node in self.ahead:
                    self._pass_to_input(node, found)
        self.order = [node for node in self.order if node in self.kept or node not in self.ahead]
        return found.get(self.x)

    def _pass_to_input(self, node, found):
        ct = hooked(node, self.partial.pop(node, None))
        here = [parent in self.ahead for parent in node.parents]
        later = [parent is not None and not h for parent, h in zip(node.parents, here, strict=True)]
        together = any(later) and asked_once(node, here, later)
        gs = cotangents(node, ct, [h or (together and w) for h, w in zip(here, later, strict=True)])
        self._pass_on(node, gs, here, found)
        if not any(later):
            node.saved = FREED
            return
        if together:
            gs, node.saved = [g if w else None for g, w in zip(gs, later, strict=True)], FREED
        else:
            gs, read = None, node.primitive.read(later)
            if node.saved.__class__ is Packed:
                node.saved.keep(read)
            else:
                node.saved = tuple([value if r else None for value, r in zip(node.saved, read, strict=True)])
        if state.counting:
            count_kept(gs or getattr(ct, "parts", (ct,)))
        self.kept[node] = None if together else ct, gs

    def weights(self, before=()):
        """The rest: as Tensor.backward leaves it on all leaves but x. RuntimeError before input(), or twice. before: as
        backward_from's."""
        if self.kept is None or self.order is None:
            raise RuntimeError("InputFirst: weights() goes on from what input() has kept, once: "
                               f"{'it has done so' if self.kept is not None else 'call input(cotangent) before'}")
        order, self.order = self.order, None
        with one_pass(WEIGHTS):
            for leaf, ct in before:
                if self.left.get(leaf):
                    self.partial[leaf] = ct
                else:
                    finish_leaf(leaf, ct, False, False, None, ())
            if self.root.primitive is None and self.root is not self.x:
                finish_leaf(self.root, self.partial.pop(self.root), False, False, None, ())
            for node in order:
                self._pass_to_weights(node)

    def _pass_to_weights(self, node):
        here = [parent is not None and parent not in self.ahead for parent in node.parents]
        if node in self.ahead:
            ct, gs = self.kept.pop(node)
        else:
            ct, gs = hooked(node, self.partial.pop(node, None)), None
        if gs is None:
            gs = cotangents(node, ct, [h and (p in self.partial or self.left[p] > 1 or destination(p))
                                       for p, h in zip(node.parents, here, strict=True)])
        self._pass_on(node, gs, here, None)
        node.saved = FREED

    def _pass_on(self, node, gs, here, into):
        """A node's cotangents to those of its parents that are `here`; a leaf's last contribution finishes it."""
        partial = self.partial
        for i, (parent, g) in enumerate(zip(node.parents, gs, strict=True)):
            if not here[i]:
                continue
            owned = node.primitive.fresh[i]
            if parent in partial:
                owned = g is not None
                g = partial.pop(parent) + g if owned else partial.pop(parent)
            self.left[parent] -= 1
            if g is None:
                continue
            if self.left[parent] or parent.primitive is not None:
                partial[parent] = g
            else:
                finish_leaf(parent, g, owned, False, into, ())


def in_order(root, uses):
    """All nodes above the leaves in the order in which `run` comes to them, which depends on no value."""
    left, ready, order = dict(uses), [root] if root.primitive is not None else [], []
    while ready:
        node = ready.pop()
        order.append(node)
        for parent in node.parents:
            if parent is not None:
                left[parent] -= 1
                if not left[parent] and parent.primitive is not None:
                    ready.append(parent)
    return order


def leading_to(x, order):
    """x, and those of the nodes through which it reaches the output; order: users first."""
    found = {x} - {None}
    for node in reversed(order):
        if any(parent in found for parent in node.parents):
            found.add(node)
    return found


def asked_once(node, here, later):
    """Whether an op makes all its cotangents together, or would look twice at something that costs something to look
    at: packed by hooks, it may lie elsewhere."""
    primitive = node.primitive
    if not (primitive.pulls or (isinstance(primitive, Primitive) and primitive.name in SEPARATE)):
        return True
    if node.saved.__class__ is not Packed:
        return node.saved.__class__ is not tuple
    return any(map(all, zip(node.saved.elsewhere(), primitive.read(here), primitive.read(later), strict=True)))


def cotangents(node, ct, wanted):
    """For each parent its cotangent, None where it isn't wanted or there is none: an op's part in `run`."""
    saved = node.saved if node.saved.__class__ is tuple else node.saved.open(node, wanted)
    if log.newest > node.date:
        check_stale(node, saved)
    pulls = node.primitive.pulls or node.primitive.cotangents(node, saved, ct, wanted)
    found = []
    for parent, pull, w in zip(node.parents, pulls, wanted, strict=True):
        g = None
        if w and ct is not None:
            g = ct if pull is None else pull(ct, saved)
            if state.anomaly:
                check_backward(node, ct, g)
            if g is not None and (g.shape != parent.shape or g.dtype != parent.dtype):
                g = fit(g, parent)
        found.append(g)
    return found


def hooked(node, ct):
    """A complete cotangent, after the hooks on its tensor."""
    return run_hooks(node, ct) if reverse.hooked and ct is not None else ct
