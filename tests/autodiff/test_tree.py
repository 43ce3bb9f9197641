"""Nested tuples, lists and dicts, taken apart and put together again."""

from collections import Counter, OrderedDict, defaultdict

from minitorch_dist.autodiff.tree import flatten


def test_trees_keep_the_kind_of_their_dicts():
    for tree in (Counter(b=1, a=2), OrderedDict(b=1, a=2), defaultdict(list, b=[1], a=[2, 3])):
        leaves, rebuild = flatten(tree)
        again = rebuild([2 * leaf for leaf in leaves])
        assert type(again) is type(tree) and again["a"] in (4, [4, 6]) and len(again) == 2
        leaves, rebuild = flatten(tree, order=list)
        assert list(rebuild(leaves).items()) == list(tree.items())
    assert defaultdict(list, a=1).default_factory is flatten(defaultdict(list, a=1))[1]([1]).default_factory
