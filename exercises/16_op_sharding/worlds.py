"""The layers of 16.2 and 16.3 whole, in closed form, and what they would give with a mistake in them, on N ranks."""

import numpy as np

from .tables import share

# ---------------------------------------------------------------- what may stand between the ranks; lists over ranks


def same(values):
    return values


def total(values):
    return [sum(values)] * len(values)


def mean(values):
    return [sum(values) / len(values)] * len(values)


def each(names, *values):
    """[{name: value of this rank}] of lists over ranks."""
    return [dict(zip(names, of_rank, strict=True)) for of_rank in zip(*values, strict=True)]


PAIR = ("f", "f_backward", "g", "g_backward")


def pair(case, f=same, f_back=total, g=total, g_back=same):
    """The four functions of 16.2 by themselves."""
    xs, cts = ([rank[name] for rank in case] for name in ("x", "ct"))
    return each(PAIR, f(xs), f_back(cts), g(xs), g_back(cts))


# ---------------------------------------------------------------- 16.2

def mlp_whole(case):
    """{"ys", "dxs", "grads"} of one process; the derivatives by explicit sums."""
    A, a, B, b = (case[0]["whole"][name] for name in "AaBb")
    ys, dxs, grads = [], [], []
    for x, dy in zip(case[0]["xs"], case[0]["dys"], strict=True):
        t = np.tanh(np.einsum("ni,ih->nh", x, A) + a)
        slope = np.cosh(np.einsum("ni,ih->nh", x, A) + a) ** -2.0
        through = np.einsum("no,ho,nh->nh", dy, B, slope)
        ys.append(np.einsum("nh,ho->no", t, B) + b)
        dxs.append(np.einsum("nh,ih->ni", through, A))
        grads.append({"A": np.einsum("ni,nh->ih", x, through), "a": np.einsum("nh->h", through),
                      "B": np.einsum("nh,no->ho", t, dy), "b": np.einsum("no->o", dy)})
    return {"ys": ys, "dxs": dxs, "grads": grads}


def means_of_rows(model, *biases):
    """Hypothesis: the biases' gradients divided by the rows."""
    def outputs(case):
        found = model(case)
        for rank in found if "xs" in case[0] else []:
            for x, grads in zip(case[0]["xs"], rank["grads"], strict=True):
                grads.update({name: grads[name] / len(x) for name in biases})
        return found
    return outputs


def added_up(case):
    """Each backward's gradients with those of all before; of inputs of one length the last one comes first."""
    found = mlp(case)
    for rank in found if "xs" in case[0] else []:
        lengths, before = [len(x) for x in case[0]["xs"]], dict.fromkeys("AaBb", 0)
        for i in sorted(range(len(lengths)), key=lambda i: (lengths.index(lengths[i]), -i)):
            before = rank["grads"][i] = {name: g + before[name] for name, g in rank["grads"][i].items()}
    return found


def mlp_part(whole, rank, size):
    """A rank's part of {"A", "a", "B", "b"}."""
    mine = share(len(whole["a"]), rank, size)
    return {"A": whole["A"][:, mine], "a": whole["a"][mine], "B": whole["B"][mine], "b": whole["b"]}


def mlp_truth(case):
    if "ct" in case[0]:
        return pair(case)
    found, size = mlp_whole(case), len(case)
    return [{"params": mlp_part(case[0]["whole"], rank, size), "ys": found["ys"], "dxs": found["dxs"],
             "grads": [mlp_part(grads, rank, size) for grads in found["grads"]]} for rank in range(size)]


def mlp(case, f=same, f_back=total, g=total, g_back=same, bias_first=False, bias_grad=1.0, last=False, slope=None):
    """What the ranks get with other functions between them.

    bias_first  b is added before g
    bias_grad   the gradient by b is so many times too large
    last        backward goes through what the last forward has kept; "tanh": x excepted
    slope       of tanh, as a function of its value
    """
    if "ct" in case[0]:
        return pair(case, f, f_back, g, g_back)
    size = len(case)
    params = [mlp_part(case[0]["whole"], rank, size) for rank in range(size)]
    found = [{"params": p, "ys": [], "dxs": [], "grads": []} for p in params]
    passes = []
    for x in case[0]["xs"]:
        ins = f([x] * size)
        hs = [np.tanh(i @ p["A"] + p["a"]) for i, p in zip(ins, params, strict=True)]
        ys = g([h @ p["B"] + bias_first * p["b"] for h, p in zip(hs, params, strict=True)])
        for rank, y in enumerate(ys):
            found[rank]["ys"].append(y + (not bias_first) * params[rank]["b"])
        passes.append((ins, hs))
    latest = {len(x): kept for x, kept in zip(case[0]["xs"], passes, strict=True)}
    for x, kept, dy in zip(case[0]["xs"], passes, case[0]["dys"], strict=True):
        ins, hs = latest[len(x)] if last else kept
        ins = kept[0] if last == "tanh" else ins
        dys, by_x = g_back([dy] * size), []
        for rank, (p, i, h) in enumerate(zip(params, ins, hs, strict=True)):
            dz = dys[rank] @ p["B"].T * (1 - h ** 2 if slope is None else slope(h))
            by_b = (dys[rank] if bias_first else dy).sum(0) * bias_grad
            found[rank]["grads"].append({"A": i.T @ dz, "a": dz.sum(0), "B": h.T @ dys[rank], "b": by_b})
            by_x.append(dz @ p["A"].T)
        for rank, dx in enumerate(f_back(by_x)):
            found[rank]["dxs"].append(dx)
    return found


def contraction_first(case):
    """[y] if A is cut by rows: tanh of each rank's partial sum, and these added up."""
    A, a, B, b = (case[0]["whole"][name] for name in "AaBb")
    mine = [share(len(A), rank, len(case)) for rank in range(len(case))]
    return [sum(np.tanh(x[:, m] @ A[m] + a) for m in mine) @ B + b for x in case[0]["xs"]]


# ---------------------------------------------------------------- 16.3

def attention_whole(case):
    """{"ys", "dxs", "grads"} of one process: head by head, and position by position over those that it sees."""
    whole, heads = case[0]["whole"], case[0]["heads"]
    matrix, inner = whole["qkv"], len(whole["out"])
    size, found = inner // heads, {"ys": [], "dxs": [], "grads": []}
    for x, dy in zip(case[0]["xs"], case[0]["dys"], strict=True):
        joined = x @ matrix + whole["qkv_bias"]
        o, by_o, by_joined = np.zeros((len(x), inner)), dy @ whole["out"].T, np.zeros_like(joined)
        for head in range(heads):
            Q, K, V = (slice(third * inner + head * size, third * inner + (head + 1) * size) for third in range(3))
            own = slice(head * size, (head + 1) * size)
            for t in range(len(x)):
                keys, values = joined[:t + 1, K], joined[:t + 1, V]
                scores = keys @ joined[t, Q] * size ** -0.5
                p = np.exp(scores - scores.max())
                p = p / p.sum()
                o[t, own] = p @ values
                by_p = values @ by_o[t, own]
                by_s = (np.diag(p) - np.outer(p, p)) @ by_p * size ** -0.5
                by_joined[t, Q] += by_s @ keys
                by_joined[:t + 1, K] += np.outer(by_s, joined[t, Q])
                by_joined[:t + 1, V] += np.outer(p, by_o[t, own])
        found["ys"].append(o @ whole["out"] + whole["out_bias"])
        found["dxs"].append(by_joined @ matrix.T)
        found["grads"].append({"qkv": x.T @ by_joined, "qkv_bias": by_joined.sum(0), "out": o.T @ dy,
                               "out_bias": dy.sum(0)})
    return found


def by_heads(heads, inner, rank, size):
    """(columns of qkv, rows of out, heads that the rank believes to have)."""
    rows = np.arange(inner).reshape(heads, -1)[share(heads, rank, size)].ravel()
    return np.concatenate([third * inner + rows for third in range(3)]), rows, heads // size


def in_one_piece(heads, inner, rank, size):
    """qkv cut as if its columns were one kind."""
    return np.arange(3 * inner)[share(3 * inner, rank, size)], by_heads(heads, inner, rank, size)[1], heads // size


def dealt(heads, inner, rank, size):
    """Every N-th head, with the rows of out in one piece."""
    rows = np.arange(inner).reshape(heads, -1)[rank::size].ravel()
    return (np.concatenate([third * inner + rows for third in range(3)]), by_heads(heads, inner, rank, size)[1],
            heads // size)


def dealt_throughout(heads, inner, rank, size):
    """Every N-th head, everywhere."""
    columns, _, count = dealt(heads, inner, rank, size)
    return columns, columns[:len(columns) // 3], count


def inside_heads(heads, inner, rank, size):
    """All heads, and a part of the features of each."""
    rows = np.arange(inner).reshape(heads, -1)
    rows = rows[:, share(rows.shape[1], rank, size)].ravel()
    return np.concatenate([third * inner + rows for third in range(3)]), rows, heads


def size_after_heads(heads, inner, rank, size):
    """qkv read as [dim, heads, 3, size]."""
    columns = np.arange(3 * inner).reshape(heads, 3, -1)[share(heads, rank, size)].transpose(1, 0, 2).ravel()
    return columns, by_heads(heads, inner, rank, size)[1], heads // size


def attention_part(whole, columns, rows):
    return {"qkv": whole["qkv"][:, columns], "qkv_bias": whole["qkv_bias"][columns], "out": whole["out"][rows],
            "out_bias": whole["out_bias"]}


def attention_truth(case):
    if "xs" not in case[0]:
        return [{"refused": True}] * len(case)
    found, heads, inner = attention_whole(case), case[0]["heads"], len(case[0]["whole"]["out"])
    places = [by_heads(heads, inner, rank, len(case))[:2] for rank in range(len(case))]
    return [{"params": attention_part(case[0]["whole"], *place), "ys": found["ys"], "dxs": found["dxs"],
             "grads": [attention_part(grads, *place) for grads in found["grads"]]} for place in places]


def attend(q, k, v, scale, mask, axis=-1, turned=False):
    time = q.shape[1]
    seen = {"causal": np.tri(time), "none": np.ones((time, time)), "future": np.tri(time).T,
            "after": np.ones((time, time)), "next": np.tri(time, k=1), "zero": np.tri(time)}
    asking, asked = (k, q) if turned else (q, k)
    scores = asking @ asked.transpose(0, 2, 1) * scale
    scores = np.where(seen[mask], scores, 0 if mask == "zero" else -np.inf)
    exps = np.exp(scores - scores.max(axis, keepdims=True))
    weights = exps / exps.sum(axis, keepdims=True)
    weights = weights * np.tri(time) if mask == "after" else weights
    return weights @ v, weights


def attend_backward(q, k, v, weights, do):
    by_weights = do @ v.transpose(0, 2, 1)
    by_scores = weights * (by_weights - (weights * by_weights).sum(-1, keepdims=True)) * q.shape[-1] ** -0.5
    return by_scores @ k, by_scores.transpose(0, 2, 1) @ q, weights.transpose(0, 2, 1) @ do


def attention(case, places=by_heads, scale=lambda case, size: size ** -0.5, mask="causal", f_back=total, g=total,
              g_back=same, bias_first=False, bias_grad=1.0, last=False, joined=True, biased=True, **softmax):
    """What the ranks get with a mistake in it. scale(case, features of a head on a rank); last: backward goes through
    what the last forward has kept; joined: whether heads are transposed before; biased: whether qkv_bias is added;
    softmax: as in attend."""
    if "xs" not in case[0]:
        return [{"refused": True}] * len(case)
    ranks, heads, inner = len(case), case[0]["heads"], len(case[0]["whole"]["out"])
    where = [places(heads, inner, rank, ranks) for rank in range(ranks)]
    params = [attention_part(case[0]["whole"], columns, rows) for columns, rows, _ in where]
    found = [{"params": p, "ys": [], "dxs": [], "grads": []} for p in params]

    def forward(x):
        """(what each rank keeps, its part of y)."""
        kept, partial = [], []
        for p, (_, _, count) in zip(params, where, strict=True):
            q, k, v = (x @ p["qkv"] + biased * p["qkv_bias"]).reshape(len(x), 3, count, -1).transpose(1, 2, 0, 3)
            o, weights = attend(q, k, v, scale(case, q.shape[-1]), mask, **softmax)
            o = (o.transpose(1, 0, 2) if joined else o).reshape(len(x), -1)
            kept.append((x, q, k, v, weights, o))
            partial.append(o @ p["out"] + bias_first * p["out_bias"])
        return kept, partial

    for x, dy in zip(case[0]["xs"], case[0]["dys"], strict=True):
        (kept, partial), by_x, time = forward(x), [], len(x)
        if last:
            kept, _ = forward([other for other in case[0]["xs"] if len(other) == len(x)][-1])
        dys = g_back([dy] * ranks)
        for rank, (p, y, (x, q, k, v, weights, o)) in enumerate(zip(params, g(partial), kept, strict=True)):
            found[rank]["ys"].append(y + (not bias_first) * p["out_bias"])
            do = (dys[rank] @ p["out"].T).reshape(time, len(q), -1).transpose(1, 0, 2)
            by = np.stack(attend_backward(q, k, v, weights, do)).transpose(2, 0, 1, 3).reshape(time, -1)
            found[rank]["grads"].append({"qkv": x.T @ by, "qkv_bias": by.sum(0), "out": o.T @ dys[rank],
                                         "out_bias": dy.sum(0) * bias_grad})
            by_x.append(by @ p["qkv"].T)
        for rank, dx in enumerate(f_back(by_x)):
            found[rank]["dxs"].append(dx)
    return found
