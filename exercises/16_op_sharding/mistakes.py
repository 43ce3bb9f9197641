"""What goes wrong in the layers of 16.2 and 16.3: (sentence, what is different in worlds.py)."""

from exercises.frame import when
from exercises.frame.comparing import same

from . import worlds

BETWEEN = [      # (sentence, what stands in place of f and g)
    ("the gradient by x isn't summed: every rank has that of its own part of the layer, and x went into all parts",
     {"f_back": worlds.same}),
    ("g doesn't sum: y is one rank's share of the last product's contraction", {"g": worlds.same}),
    ("g's backward sums, and all gradients behind it are {ranks}.000 times too large: the gradient by a sum is the "
     "gradient by each addend, and every rank has it already", {"g_back": worlds.total}),
    ("the mean of the ranks' parts, {ranks}.000 times too small: they are addends, of one layer on the same samples. "
     "Data parallel is another thing", {"g": worlds.mean}),
    ("the mean over the ranks, in f_backward: what the ranks have are addends of one gradient",
     {"f_back": worlds.mean}),
    ("f and g are mixed up: f passes forward and sums backward, g sums forward and passes backward",
     {"f": worlds.total, "f_back": worlds.same, "g": worlds.same, "g_back": worlds.total}),
    ("the bias of the output is added on every rank before the sum: in y it is there {ranks} times",
     {"bias_first": True}),
    ("the gradient by the output's bias is {ranks}.000 times too large: every rank knows it, and it was summed over "
     "them", {"bias_grad": "N"}),
    ("the gradient by the output's bias is {ranks}.000 times too small: every rank has all of the bias, and so all of "
     "its gradient, though it may have added an N-th of it only", {"bias_grad": "1/N"}),
]

PLACES = [
    ("qkv is cut as one piece: the columns of the queries lie before those of the keys, and these before the values', "
     "so the first rank has queries for keys. Cut each of the three", worlds.in_one_piece),
    ("the heads are in the wrong order: a rank's columns of qkv are every N-th head, and its rows of out belong to the "
     "heads that lie beside each other", worlds.dealt),
    ("every N-th head on a rank: that is a layer as well, but rank 0 has the first heads, in order",
     worlds.dealt_throughout),
    ("every head is cut, and each rank takes the softmax of partial scores: a score is the sum over all features of a "
     "head, and exp(u + v) isn't exp(u) + exp(v). Leave heads whole", worlds.inside_heads),
    ("the columns of qkv read as [heads, 3, size]: they are [3, heads, size], all queries first",
     worlds.size_after_heads),
]

SCALES = [
    ("scores divided by the root of all of this rank's features: √size is that of one head",
     lambda case, size: (len(case[0]["whole"]["out"]) / len(case)) ** -0.5),
    ("scores divided by the root of all heads' features: √size is that of one head",
     lambda case, size: len(case[0]["whole"]["out"]) ** -0.5),
    ("scores divided by √dim: √size was asked for, the features of one head",
     lambda case, size: case[0]["whole"]["qkv"].shape[0] ** -0.5),
    ("scores aren't divided by √size", lambda case, size: 1.0),
    ("scores are divided by size; asked for is its root", lambda case, size: 1 / size),
]

MASKS = [
    ("no mask: every position sees those that come after it", "none"),
    ("the mask is upside down: position t sees t and what comes after it", "future"),
    ("every position sees the next one too: np.tri(time, k=1) has a diagonal too many", "next"),
    ("what may not be seen has the score 0, and exp(0) is 1: -inf becomes 0", "zero"),
    ("the mask comes after the softmax: the weights of what may be seen don't add up to 1 any more. Scores that may "
     "not be seen are -inf before it", "after"),
]

FORWARD = [     # told by y, whatever backward makes of it
    *((text, {"scale": scale}) for text, scale in SCALES), *((text, {"mask": mask}) for text, mask in MASKS),
    ("the softmax goes along the wrong axis: the weights of what one position sees add up to 1, the last axis",
     {"axis": 1}),
    ("qkv_bias isn't added to x times qkv", {"biased": False}),
    ("keys and queries are exchanged: position t asks with its query, q[t] · k[u]", {"turned": True}),
    ("the heads' outputs, [heads, time, size], were reshaped without a transpose: that mixes positions with heads",
     {"joined": False}),
]


def last_alone(truth):
    """Signature: of several forwards under way all y are right, and the gradients of the last one."""
    def holds(case, got):
        last = len(case[0].get("xs", ())) - 1
        return last > 0 and all(
            same(x, y, 1e-8) for rank, right in zip(got, truth(case), strict=True)
            for x, y in [*zip(rank["ys"], right["ys"], strict=True), (rank["dxs"][last], right["dxs"][last]),
                         *((rank["grads"][last][name], grad) for name, grad in right["grads"][last].items())])
    return when("of several forwards under way the last one's gradients are right, the others' aren't: something that "
                "backward takes is the last one's. All of it belongs into `kept`, and nothing into self", holds)
