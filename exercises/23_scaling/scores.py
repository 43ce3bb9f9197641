"""23.5: its cases, another way to the same, and the known mistakes."""

import numpy as np

from exercises.frame import demand, gives, when

SAMPLES = (1, 2, 2), (2, 0, 3), (3, 1, 1), (0, 2, 3), (2, 2, 1), (4, 1, 0)      # of each of three ranks, by case


# ---------------------------------------------------------------- cases

def drawn(rng, samples, time, dim, heads, kv_heads, size):
    """The arrays of a case, normal."""
    return {"x": rng.standard_normal((samples, time, dim)), "w_q": rng.standard_normal((dim, heads * size)),
            "w_k": rng.standard_normal((dim, kv_heads * size)), "heads": heads}


def telling(rng, *sizes, make=drawn):
    """One in which some heads are above the threshold and others below it, and in which what isn't looked at, a sign,
    and which key is whose make a difference to a head that is clipped."""
    while True:
        case = make(rng, *sizes)
        right = greatest(case)
        case["threshold"] = float(np.sort(right)[len(right) // 2 - 1] * 1.1)
        above, below = right > 1.1 * case["threshold"], right < 0.95 * case["threshold"]
        others = [greatest(case, **wrong) for wrong in ({"seen": everything}, {"seen": earlier}, {"value": np.abs})]
        if case["threshold"] > 0 and above.sum() > 1 and below.any() and all(
                (abs(other - right)[above] > 0.05 * right[above]).any() for other in others):
            return case


def quarters(rng, *sizes):
    """Of float32, in which products and sums of such numbers are exact."""
    return {name: (np.round(4 * value) / 4).astype(np.float32) if hasattr(value, "astype") else value
            for name, value in drawn(rng, *sizes).items()}


def odd(rng):
    """One position; three heads: inf; far below 0; above."""
    x, w_k = rng.uniform(0.5, 1.5, (5, 1, 4)), rng.uniform(0.5, 1.5, (4, 6))
    w_q = np.concatenate([np.full((4, 2), np.inf), -5 * w_k[:, 2:4], 3 * w_k[:, 4:]], 1)
    case = {"x": x, "w_q": w_q, "w_k": w_k, "heads": 3}
    return case | {"threshold": float(greatest(case)[2] / 2)}


def cases(rng, ranks):
    found = [telling(rng, 5, 5, 7, 4, 4, 3), telling(rng, 5, 4, 10, 6, 2, 4),
             telling(rng, 5, 6, 5, 3, 1, 4, make=quarters), odd(rng), telling(rng, 5, 3, 6, 6, 3, 2)]
    low = telling(rng, 5, 4, 6, 3, 3, 2)
    found.append(low | {"threshold": 3 * float(greatest(low).max())})     # nothing is above it
    return [[case | {"x": part} for part in np.split(case["x"], np.cumsum(counts[:ranks - 1]))]
            for case, counts in zip(found, SAMPLES, strict=True)]


# ---------------------------------------------------------------- another way to the same

def causal(t, s, time):
    return s <= t


def everything(t, s, time):
    return True


def earlier(t, s, time):
    return s < t


def later(t, s, time):
    return s >= t


def of_last(t, s, time):
    return t == time - 1


def side_by_side(w, head, size):
    return w[:, head * size:(head + 1) * size]


def interleaved(w, head, size):
    return w[:, head::w.shape[1] // size]


def in_order(head, heads, kv_heads):
    return head // (heads // kv_heads)


def in_turn(head, heads, kv_heads):
    return head % kv_heads


def greatest(mine, seen=causal, value=lambda s: s, over=lambda size, dim: size ** 0.5, columns=side_by_side,
             key_of=in_order, best=max):
    """Of a rank's samples: float64 (heads,), head by head and pair by pair. best: of the samples' greatest."""
    heads, size = mine["heads"], mine["w_q"].shape[1] // mine["heads"]
    kv_heads, found = mine["w_k"].shape[1] // size, []
    for head in range(heads):
        w_q, w_k = columns(mine["w_q"], head, size), columns(mine["w_k"], key_of(head, heads, kv_heads), size)
        of_samples = []
        for sample in mine["x"]:
            q, k = sample.astype(float) @ w_q, sample.astype(float) @ w_k
            pairs = [float(value(q[t] @ k[s])) / over(size, sample.shape[1]) for t in range(len(q))
                     for s in range(len(k)) if seen(t, s, len(k))]
            of_samples.append(max(pairs, default=-np.inf))
        found.append(best(of_samples) if of_samples else -np.inf)
    return np.array(found)


def ratios(s, threshold):
    """γ of each head."""
    return np.array([threshold / one if threshold < one < np.inf else 1.0 for one in s])


def shared_out(gamma, heads, kv_heads):
    """What queries and keys are multiplied by."""
    return (gamma ** 0.5, gamma ** 0.5) if heads == kv_heads else (gamma, np.ones(kv_heads))


def run(case, find=greatest, together=lambda own, rank: np.max(own, 0), gamma=ratios, share=shared_out,
        told=lambda s, threshold: s):
    """The outputs of all ranks."""
    own, found = [find(mine) for mine in case], []
    for rank, mine in enumerate(case):
        with np.errstate(all="ignore"):
            s, heads = together(own, rank), mine["heads"]
        size = mine["w_q"].shape[1] // heads
        with np.errstate(all="ignore"):
            of_q, of_k = share(gamma(s, mine["threshold"]), heads, mine["w_k"].shape[1] // size)
            found.append({"w_q": mine["w_q"] * np.repeat(of_q, size), "w_k": mine["w_k"] * np.repeat(of_k, size),
                          "scores": np.asarray(told(s, mine["threshold"]), float), "dtypes": [
                              *(str(mine[name].dtype) for name in ("w_q", "w_k")), "float64"],
                          "changed": [], "views": []})
    return found


# ---------------------------------------------------------------- mistakes

def by(sentence, **wrong):
    return gives(sentence, lambda case: run(case, lambda mine: greatest(mine, **wrong)))


def also(sentence, **wrong):
    return gives(sentence, lambda case: run(case, **wrong))


def above_0(own, rank):
    return np.maximum(np.max(own, 0), 0)


def added(own, rank):
    return np.sum(own, 0)


def per_rank(own, rank):
    return np.mean(own, 0)


def least(own, rank):
    return np.min(own, 0)


def of_layer(s, threshold):
    return np.full(len(s), ratios([max(s)], threshold)[0])


def of_loudest(s, threshold):
    return np.where(ratios(s, threshold) < 1, threshold / max(s[np.isfinite(s)], default=np.inf), 1.0)


def always(s, threshold):
    return threshold / s


def always_but_inf(s, threshold):
    return np.array([threshold / one if np.isfinite(one) and one > 0 else 1.0 for one in s])


def of_inf(s, threshold):
    return np.where(s > threshold, threshold / s, 1.0)


def upside_down(s, threshold):
    return 1 / ratios(s, threshold)


def both(gamma, heads, kv_heads):
    return (gamma, gamma) if heads == kv_heads else (gamma, np.ones(kv_heads))


def queries_only(gamma, heads, kv_heads):
    return gamma, np.ones(kv_heads)


def keys_only(gamma, heads, kv_heads):
    return (np.ones(heads), gamma) if heads == kv_heads else (gamma, np.ones(kv_heads))


def root_of_queries(gamma, heads, kv_heads):
    return gamma ** 0.5, np.ones(kv_heads)


def half_where_shared(gamma, heads, kv_heads):
    return (gamma ** 0.5, gamma ** 0.5) if heads == kv_heads else (gamma ** 0.5, np.ones(kv_heads))


def least_of_group(gamma, heads, kv_heads):
    return gamma ** 0.5, gamma.reshape(kv_heads, -1).min(1) ** 0.5


def last_of_group(gamma, heads, kv_heads):
    return gamma ** 0.5, gamma.reshape(kv_heads, -1)[:, -1] ** 0.5


def first_of_group(gamma, heads, kv_heads):
    return gamma ** 0.5, gamma.reshape(kv_heads, -1)[:, 0] ** 0.5


def product_of_group(gamma, heads, kv_heads):
    return gamma ** 0.5, gamma.reshape(kv_heads, -1).prod(1) ** 0.5


def several(case):
    return len(case) > 1


def swapped(case):
    return [rank | {"w_q": rank["w_k"], "w_k": rank["w_q"]} for rank in run(case)]


def dtypes(case):
    return [case[0][name].dtype.name for name in ("w_q", "w_k")]


SIGNATURES = [
    when(lambda case, got: "clip_scores changed what it was given: "
         f"{', '.join(next(rank['changed'] for rank in got if rank['changed']))}; the weights are to be new arrays",
         lambda case, got: any(rank["changed"] for rank in got)),
    when(lambda case, got: f"{' and '.join(next(rank['views'] for rank in got if rank['views']))} is the array that "
         "was given: who trains on writes into it, and what you returned changes; return a new one",
         lambda case, got: any(rank["views"] for rank in got)),
    gives("each rank clips by its own samples: the ranks' weights part, and no all-reduce of a later step brings them "
          "together again. The greatest of all ranks' scores is wanted",
          lambda case: run(case, together=lambda own, rank: own[rank]) if several(case) else None),
    gives("the ranks' greatest scores were added up; the greatest of them is wanted: all_reduce(…, \"max\")",
          lambda case: run(case, together=added) if several(case) else None),
    gives("the mean of the ranks' greatest scores: most ranks don't have the sample that matters",
          lambda case: run(case, together=per_rank) if several(case) else None),
    gives("the least of the ranks' greatest scores: the greatest is wanted",
          lambda case: run(case, together=least) if several(case) else None),
    also("one factor for all heads, that of the loudest: the others did nothing wrong", gamma=of_layer),
    also("one factor for all heads above the threshold, that of the loudest: each has its own, τ / its s",
         gamma=of_loudest),
    also("queries and keys are both multiplied by γ, and so scores by γ²: √γ each", share=both),
    also("where heads have keys of their own the queries' weights alone are multiplied: scores are right, but queries "
         "shrink and keys grow on; √γ for each of both", share=queries_only),
    also("where heads have keys of their own the keys' weights alone are multiplied: √γ for each of both",
         share=keys_only),
    also("where heads share a key the queries are multiplied by √γ alone, and scores are √γ times what they were; the "
         "key stays, so that it takes all of γ", share=half_where_shared),
    also("the queries are multiplied by √γ, and the keys by nothing: scores are √γ times what they were",
         share=root_of_queries),
    *(also("a key that several heads share was multiplied as well: it changes the scores of heads that did nothing "
           "wrong, and twice those of others. Multiply the queries by γ, and leave it", share=share)
      for share in (least_of_group, last_of_group, first_of_group, product_of_group)),
    *(also("heads below the threshold are multiplied, too, up to it: γ is 1 for them", gamma=gamma)
      for gamma in (always, always_but_inf)),
    also("a head whose score is inf has γ = 0, and its weights become 0 or nan: nothing mends it any more, and nobody "
         "learns that the training has diverged. It stays as it is", gamma=of_inf),
    also("γ upside down: s / threshold makes scores larger still", gamma=upside_down),
    by("later positions are counted as well: position t looks at 0 to t", seen=everything),
    by("positions look at later ones, in place of earlier ones: s ≤ t", seen=later),
    by("a position looks at itself, too", seen=earlier),
    by("the greatest absolute value: a score far below 0 makes a weight of softmax 0, and does no harm", value=np.abs),
    by("scores aren't divided by √size", over=lambda size, dim: 1),
    by("scores are divided by √dim; a head's queries have `size` features", over=lambda size, dim: dim ** 0.5),
    by("scores are divided by size; it is its root", over=lambda size, dim: size),
    by("a head's columns lie side by side: head h has columns h·size to (h+1)·size, not every heads-th",
       columns=interleaved),
    by("which key is whose: the first heads/kv_heads heads have the first key, then the next ones the second; not in "
       "turn", key_of=in_turn),
    by("the mean of the samples' greatest scores: one sample is enough to do harm", best=lambda found: np.mean(found)),
    by("the least of the samples' greatest scores: one sample is enough to do harm", best=min),
    by("the scores of the last position's queries alone: all are looked at", seen=of_last),
    also("the greatest of no scores, or of scores that are all below 0, isn't 0: begin with -inf", together=above_0),
    also("the factors are returned in the scores' place", told=ratios),
    gives("w_k is returned in w_q's place, and w_q in w_k's", swapped),
    also("the scores that are returned are those after the clip: who looks at them wants to know how large they were",
         told=np.minimum),
    when(lambda case, got: f"w_q and w_k come as {' and '.join(dtypes(case))}, and go as "
         f"{' and '.join(got[0]['dtypes'][:2])}: a model's weights keep their dtypes",
         lambda case, got: any(rank["dtypes"][:2] != dtypes(case) for rank in got)),
    when(lambda case, got: f"the scores come as {got[0]['dtypes'][2]}; float64 is wanted, whatever the weights are",
         lambda case, got: any(rank["dtypes"][2] != "float64" for rank in got)),
]


def calls(got):
    return max(len(rank.calls) for rank in got)


DEMANDS = [
    demand(lambda case, got: f"the right weights, but with {calls(got)} all-reduces: one takes all heads",
           lambda case, got: calls(got) <= 1),
    demand(lambda case, got: f"the right weights, but {got[0].calls[0]['bytes']:,} bytes were handed to the all-reduce:"
           f" a float64 of each of {case[0]['heads']} heads is enough",
           lambda case, got: all(call["bytes"] <= 8 * case[0]["heads"] for rank in got for call in rank.calls)),
]
