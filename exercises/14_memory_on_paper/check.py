"""What the answers of chapter 14 are tried with, and the mistakes that are known."""

import math

import numpy as np

from exercises.frame import Check, gives, when

from . import layers
from .jobs import (
    ARRAYS,
    STAGES,
    by_doubling,
    by_nodes,
    by_stages,
    changed,
    planned,
    results,
    same_job,
    search,
    total,
    training_days,
    weigh,
    without,
    without_the_limit,
)
from .layers import activations

GPT3 = {"sequence": 2048, "hidden": 12288, "heads": 96, "layers": 96}        # Brown et al. 2020
MT_NLG = {"sequence": 2048, "hidden": 20480, "heads": 128, "layers": 105}    # Smith et al. 2022


def times(factor, truth):
    """A hypothesis: every number of the truth times the factor."""
    def scaled(value):
        return {name: factor * number for name, number in value.items()} if isinstance(value, dict) else factor * value
    return lambda case: results(scaled(truth(case)["result"]))


UNITS = [(2 ** -30, "the numbers are GiB; asked for are bytes"), (1e-9, "the numbers are GB; asked for are bytes"),
         (8, "the numbers are bits; asked for are bytes")]


def units(truth):
    """Signatures of right numbers in a wrong unit."""
    return [gives(sentence, times(factor, truth)) for factor, sentence in UNITS]


# ---------------------------------------------------------------- 14.1


class BytesPerRank(Check):
    exercise = "14.1"
    signatures = [
        *units(weigh),
        gives("the optimizer has 8 bytes per parameter here: its 32-bit copy of the parameters is forgotten, or m and "
              "v are counted in 16 bits. Adam holds 4 + 4 + 4, the copy and two means",
              lambda case: weigh(case, without(1))),
        gives("the optimizer has 4 bytes per parameter here: Adam holds 4 + 4 + 4, a 32-bit copy of the parameters, m "
              "and v", lambda case: weigh(case, without(2))),
        gives("the gradients are counted in 32 bits: in mixed precision backward computes in 16 bits, 2 bytes each",
              lambda case: weigh(case, [ARRAYS[0], ("gradients", 4, 2), *ARRAYS[2:]])),
        gives("the parameters are counted in 32 bits: those that forward uses are of 16; the 32-bit copy is the "
              "optimizer's", lambda case: weigh(case, [("parameters", 4, 3), *ARRAYS[1:]])),
        gives("the parameters are never divided here: stage 3 divides them too",
              lambda case: weigh(case, changed(parameters=4))),
        gives("the parameters are divided at stage 2 already: it divides the optimizer's arrays and the gradients, and "
              "the parameters come with stage 3", lambda case: weigh(case, changed(parameters=2))),
        gives("stage 1 divides everything here: it divides the optimizer's arrays only, the gradients come with stage "
              "2, the parameters with stage 3", lambda case: weigh(case, changed(parameters=1, gradients=1))),
        gives("parameters and gradients have changed places: the gradients are divided from stage 2 on, the parameters "
              "with stage 3 only", lambda case: weigh(case, changed(parameters=2, gradients=3))),
        gives("the stages are off by one: at stage 0 nothing is divided", lambda case: weigh(
            case, changed(parameters=2, gradients=1, optimizer=0))),
        gives("the stages are off by one: stage 1 divides the optimizer's arrays already", lambda case: weigh(
            case, changed(parameters=4, gradients=3, optimizer=2))),
        gives("only what a stage adds is divided: stage 2 divides the optimizer's arrays too, and stage 3 all three",
              lambda case: weigh(case, [(name, size, stage if stage == case["stage"] else 4)
                                        for name, size, stage in ARRAYS])),
        gives("only the optimizer's arrays are ever divided: stage 2 divides the gradients too, and stage 3 all three "
              "(an elif behind `if stage >= 1` is never reached)",
              lambda case: weigh(case, changed(parameters=4, gradients=4))),
        gives("of the optimizer's arrays only m and v are divided: its 32-bit copy of the parameters is one of them",
              lambda case: weigh(case, [*ARRAYS[:2], ("optimizer", 4, 4), *ARRAYS[3:]])),
        gives("nothing is divided: these are the bytes of stage 0 at every stage",
              lambda case: weigh(case | {"stage": 0})),
        gives("everything is divided, also at stage 0", lambda case: weigh(case | {"stage": 3})),
        gives("the division loses the remainder: // drops up to a parameter's worth of bytes on every rank; asked for "
              "is the mean, with its fraction", lambda case: weigh(case, shares=lambda n, ranks: n // ranks)),
        *(gives("rounded to whole bytes: asked for is the mean over the ranks, with its fraction",
                lambda case, way=way: results({name: float(way(number)) for name, number in
                                               weigh(case)["result"].items()})) for way in (math.floor, math.ceil)),
        gives("these are the bytes of all ranks together; asked for are those of one",
              lambda case: results({name: number * case["ranks"] for name, number in weigh(case)["result"].items()})),
    ]

    def cases(self, rng, ranks):
        sizes = [(7_500_000_000, 64), (10 ** 12, 1024), (int(rng.integers(1000, 2000)) * 7 + 1, 7),
                 (int(rng.integers(10 ** 6, 10 ** 7)), 1), (7_500_000_000, 7)]
        return [{"parameters": n, "ranks": r, "stage": stage} for n, r in sizes for stage in STAGES]

    def truth(self, case):
        return weigh(case)

    def picture(self, runs, path):
        from exercises.frame.pictures import COLORS, canvas, save
        figure, axes = canvas(1, 2)
        for ax, start in zip(axes, (0, 4), strict=True):
            case, bottom = runs[1][start][0], np.zeros(4)
            for part, color in zip(("parameters", "gradients", "optimizer"), COLORS, strict=False):
                heights = np.array([runs[1][start + stage][1]["result"][part] / 1e9 for stage in STAGES])
                ax.bar(STAGES, heights, bottom=bottom, color=color, label=part)
                bottom += heights
            for stage, height in zip(STAGES, bottom, strict=True):
                label = f"{height:,.{1 if height < 1000 else 0}f}"
                ax.text(stage, height * 1.01, label, ha="center", va="bottom", size=9)
            ax.set(xticks=STAGES, xticklabels=["0", "1\noptimizer", "2\n+ gradients", "3\n+ parameters"],
                   title=f"{case['parameters'] / 1e9:,g} billion parameters on {case['ranks']:,} ranks")
            ax.yaxis.set_major_formatter("{x:,.0f}")
            ax.tick_params(axis="x", labelsize=8)
        axes[0].set_ylabel("GB on each rank")
        axes[0].set_xlabel("stage of ZeRO")
        axes[1].set_xlabel("stage of ZeRO")
        axes[0].legend(frameon=False)
        save(figure, path)
        totals = [sum(runs[1][stage][1]["result"].values()) / 1e9 for stage in STAGES]
        return (f"7.5 billion parameters on 64 ranks: {', '.join(f'{t:.1f}' for t in totals[:3])} and {totals[3]:.1f} "
                "GB on each, as in figure 1 of the ZeRO paper")


# ---------------------------------------------------------------- 14.2


def messages(case):
    """Bytes of one reduce-scatter or all-gather: a ring's N − 1 messages, one by one."""
    return sum(2 * case["parameters"] / case["ranks"] for _ in range(case["ranks"] - 1))


def send(case, once=None, all_reduce=(2, 0, 0, 0), reduce_scatter=(0, 1, 1, 1), all_gather=(0, 1, 1, 2)):
    """The right bytes; the keywords are those of one half of an all-reduce, and how many of each a stage takes."""
    once, stage = messages(case) if once is None else once, case["stage"]
    return results({"all_reduce": all_reduce[stage] * once, "reduce_scatter": reduce_scatter[stage] * once,
                    "all_gather": all_gather[stage] * once})


class BytesSent(Check):
    exercise = "14.2"
    signatures = [
        gives("the all-reduce is counted once: it is a reduce-scatter and then an all-gather",
              lambda case: send(case, all_reduce=(1, 0, 0, 0))),
        gives("stage 3 gathers once here: the parameters that forward has let go of must come again for backward, so "
              "3ψ in all instead of 2ψ", lambda case: send(case, all_gather=(0, 1, 1, 1))),
        gives("stage 3 gathers three times here: after the update nobody gathers, since the next forward does",
              lambda case: send(case, all_gather=(0, 1, 1, 3))),
        gives("stage 1 all-reduces the gradients here: a rank needs the sum for its own share only, and a "
              "reduce-scatter gives it that for half the bytes",
              lambda case: send(case, all_reduce=(2, 2, 0, 0), reduce_scatter=(0, 0, 1, 1))),
        gives("stages 1 and 2 all-reduce the gradients here: a rank needs the sum for its own share only, and a "
              "reduce-scatter gives it that for half the bytes",
              lambda case: send(case, all_reduce=(2, 2, 2, 0), reduce_scatter=(0, 0, 0, 1))),
        gives("stage 3 reduces the gradients twice here: the parameters come twice, the gradients leave once",
              lambda case: send(case, reduce_scatter=(0, 1, 1, 2))),
        gives("one message of 1/N of the data is counted: a ring takes N − 1 of them, one per step",
              lambda case: send(case, 2 * case["parameters"] / case["ranks"])),
        gives("stage 2 gathers twice here: its parameters are kept, and gathered once, after the update",
              lambda case: send(case, all_gather=(0, 1, 2, 2))),
        gives("stages 1 and 2 gather twice here: the parameters are kept, and gathered once, after the update",
              lambda case: send(case, all_gather=(0, 2, 2, 2))),
        gives("rounded to whole bytes: asked for is the mean over the ranks, with its fraction",
              lambda case: send(case, messages(case) // 1)),
        *(gives("the division loses the remainder, // in the size of one message: asked for is the mean over the "
                "ranks, with its fraction", lambda case, each=each: send(case, each(case["parameters"], case["ranks"])))
          for each in (lambda n, ranks: 2 * n // ranks * (ranks - 1), lambda n, ranks: 2 * (n // ranks) * (ranks - 1))),
        gives("nobody gathers the updated parameters at stages 1 and 2: each rank has updated its own share only",
              lambda case: send(case, all_gather=(0, 0, 0, 2))),
        gives("stage 0 reduces and gathers as the others here: name it by its collective, all_reduce",
              lambda case: send(case, all_reduce=(0, 0, 0, 0), reduce_scatter=(1, 1, 1, 1), all_gather=(1, 1, 1, 2))),
        *units(send),
        gives("the elements are counted, not the bytes: gradients and parameters travel in 16 bits, 2 bytes each",
              lambda case: send(case, messages(case) / 2)),
        gives("4 bytes for each element: gradients and parameters travel in 16 bits",
              lambda case: send(case, 2 * messages(case))),
        gives("a rank sends N − 1 messages of 1/N of the data, so (N − 1)/N of it and not all of it: its own share it "
              "has (on one rank: nothing)", lambda case: send(case, 2 * case["parameters"])),
        gives("N times too much: each of the N − 1 messages of a ring is 1/N of the data, not all of it; and asked for "
              "is what one rank sends, not all together", lambda case: send(case, case["ranks"] * messages(case))),
        when("only stage 0 all-reduces: at all others a rank needs the sum of the gradients for its own share only, "
             "and a reduce-scatter gives it that for half the bytes",
             lambda case, got: case["stage"] > 0 < got["result"]["all_reduce"]),
    ]

    def cases(self, rng, ranks):
        sizes = [(7_500_000_000, 64), (int(rng.integers(10 ** 6, 10 ** 7)), int(rng.integers(3, 9))),
                 (int(rng.integers(10 ** 6, 10 ** 7)), 2), (int(rng.integers(10 ** 6, 10 ** 7)), 1),
                 (1000, 7), (7_500_000_000, 7)]      # of the first 1714.3 bytes
        return [{"parameters": n, "ranks": r, "stage": stage} for n, r in sizes for stage in STAGES]

    def truth(self, case):
        return send(case)


# ---------------------------------------------------------------- 14.3

class ActivationBytes(Check):
    exercise = "14.3"
    signatures = [
        *units(lambda case: activations(case)),
        gives("everything is counted in 32 bits: activations are of 16 here, and masks of 8",
              lambda case: activations(case, lambda name, size: 2 * size)),
        gives("dropout's masks are counted with 2 bytes for each element: a mask is a byte (34 becomes 36, and 5 "
              "becomes 6)", lambda case: activations(case, lambda name, size: 2)),
        gives("the pairs are counted once for all heads: every head has a table of its own, sequence × sequence",
              layers.one_head),
        gives("attention's part grows with sequence here: it is one number for every pair of positions, so with its "
              "square", layers.linear_pairs),
        gives("with full recomputation the pairs don't come back here: the layer under way computes all again that was "
              "let go of, what belongs to pairs of positions too", layers.pairs_stay_away),
        gives("the pairs are forgotten: with 2,048 positions and 96 heads they are 70 % of a layer",
              lambda case: activations(case, heads=0)),
        gives("only what all layers keep is counted (as in the paper's table): when backward is in a layer, what that "
              "layer computes again is there too", layers.paper),
        gives("the layer that is computed again is counted whole, and its input, which was kept, twice", layers.twice),
        gives("nothing is kept with full recomputation here: then backward would begin every layer at the tokens. Each "
              "layer's input stays", layers.nothing_kept),
        gives("selective recomputation keeps the wrong part here: what belongs to pairs of positions is let go, what "
              "grows with sequence · batch · hidden stays", layers.pairs_kept),
        gives("one layer too many: what the layer under way computes again is added to all that is kept, less what "
              "of that layer is kept", layers.one_more),
        gives("these are the bytes of one layer", lambda case: activations(case, layers=1)),
        gives("the pairs are counted for one sample: every sample of the batch has tables of its own",
              layers.pairs_of_one_sample),
        gives("the pairs are counted once for each feature: a pair of positions has one number in each head, however "
              "wide the head is", lambda case: activations(case, heads=case["hidden"])),
        gives("5 · heads · sequence // hidden cuts the fraction off", layers.pairs_floored),
        gives("a layer's input is counted with one byte for each element: it is of 16 bits",
              lambda case: activations(case, lambda name, size: 1 if name == "checkpoint" else size)),
        gives("the batch is left out", lambda case: activations(case, batch=1)),
        gives("with full recomputation only the pairs come back here: the layer under way computes all again that was "
              "let go of, what grows with sequence · batch · hidden too", layers.pairs_come_back),
        *(when(lambda case, got, table=table, each=each: f"{layers.counted(case, got, table)} bytes for each {each} "
               f"here; README's table of what a layer keeps has {layers.added(table)}",
               lambda case, got, table=table: layers.counted(case, got, table))
          for table, each in ((layers.FEATURES, "position and feature"), (layers.PAIRS, "head and pair of positions"))),
        when("recompute makes no difference here", lambda case, got: case["recompute"] != "none" and math.isclose(
            float(got["result"] or 0), activations(case | {"recompute": "none"})["result"], rel_tol=1e-9)),
    ]

    def cases(self, rng, ranks):
        a = int(rng.integers(3, 9))
        width = int(rng.choice([3, 4, 6, 7, 8]))     # 5 · sequence is no multiple of it
        own = {"sequence": width * int(rng.integers(9, 12)) + 1, "hidden": a * width, "heads": a,
               "layers": int(rng.integers(3, 9))}
        return [{**sizes, "batch": batch, "recompute": recompute}
                for sizes, batch in ((GPT3, 1), (MT_NLG, 2), (own, 5), (own | {"layers": 1}, 3))
                for recompute in ("none", "selective", "full")]

    def truth(self, case):
        return activations(case)

    def picture(self, runs, path):
        from exercises.frame.pictures import COLORS, canvas, save
        figure, ax = canvas(size=(8.6, 3.6))
        names, heights = ("none", "selective", "full"), [got["result"] / 2 ** 30 for _, got in runs[1][:3]]
        ax.barh(names[::-1], heights[::-1], color=COLORS[:3])
        for place, height in zip((2, 1, 0), heights, strict=True):
            ax.text(height + 2, place, f"{height:,.0f} GiB", va="center",
                    bbox={"color": "white", "pad": 1})
        ax.axvline(80, color="#888888", ls="--", lw=1)
        ax.text(80, 2.45, " a device of 80 GiB", size=9, color="#666666", va="bottom")
        ax.set(xlabel="activations of GPT-3, one sample of 2,048 tokens [GiB]", ylabel="recomputed",
               xlim=(0, 1.15 * max(heights)))
        save(figure, path)
        return (f"GPT-3's 96 layers leave {heights[0]:,.0f} GiB behind for one sample; {heights[1]:,.0f} without the "
                f"pairs, {heights[2]:,.0f} with the layers' inputs alone")


# ---------------------------------------------------------------- 14.4


class Plan(Check):
    exercise = "14.4"
    integers = ("result",)
    signatures = [
        gives("a device's memory is cut to whole GiB: 5.75 are 5.75", lambda case: planned(
            case | {"memory_gib": int(case["memory_gib"])})),
        *(gives(f"stage {passed} is passed over: try 0, 1, 2 and 3, in this order",
                lambda case, passed=passed: planned(case, choose=lambda good: min(s for s in good if s != passed)))
          for passed in (1, 2)),
        when(lambda case, got: f"there is a plan, with {planned(case)['result']['devices']:,} devices: with enough of "
                               "them all that is divided becomes as small as one likes, so the search needs no end",
             lambda case, got: got["result"] is None),
        gives("a GiB is 2³⁰ bytes, not 10⁹: 80 GiB are 85.9 GB", lambda case: planned(case, gib=1e9)),
        gives("the activations are forgotten: the model has only what they leave", lambda case: planned(case, taken=0)),
        gives("the activations are divided among the devices here: each has its own samples, and their activations",
              without_the_limit),
        gives("nodes are cut up: the devices come in whole nodes", lambda case: planned(case, per_node=1)),
        gives("rounded down: on that many devices it doesn't fit by a little", lambda case: planned(
            case, rounded=math.floor)),
        gives("what takes just the memory that there is, fits: at most, not less than",
              lambda case: search(case, by_nodes, lambda taken, left: taken < left)),
        gives("the number of nodes is doubled until it fits: half of them may be too many. Add node by node",
              lambda case: search(case, by_doubling)),
        gives("the lowest stage of all is taken, on as many devices as that one needs; asked for is the smallest "
              "number of devices on which any stage fits", lambda case: search(case, by_stages)),
        gives("the highest stage that fits (which is 3, always) instead of the lowest: a lower one sends less",
              lambda case: planned(case, choose=max)),
        gives("stage 0 is never tried: where all fits undivided, that is the lowest stage",
              lambda case: planned(case, choose=lambda good: min(stage for stage in good if stage))),
        gives("2 operations per parameter and token are those of forward; backward takes 4 more",
              lambda case: same_job(case, lambda case, n: training_days(case, n, 4 if case["recompute"] else 2))),
        gives("computing everything again in backward is a second forward: 8 operations per parameter and token, not 6",
              lambda case: same_job(case, lambda case, n: training_days(case, n, 6))),
        gives("8 operations per parameter and token are those with recomputation, which not every job does: else 6",
              lambda case: same_job(case, lambda case, n: training_days(case, n, 8))),
        gives("the devices are taken at their peak: they do the share `utilization` of it",
              lambda case: same_job(case, lambda case, n: training_days(case, n, used=1))),
        gives("utilization is on the wrong side: it makes what the devices could do less, and the days more",
              lambda case: same_job(case, lambda case, n: training_days(case, n, used=1 / case["utilization"]))),
        gives("the days are those of a single device",
              lambda case: same_job(case, lambda case, n: training_days(case, 1))),
        gives("these are hours; asked for are days", lambda case: same_job(
            case, lambda case, n: 24 * training_days(case, n))),
        gives("these are seconds; asked for are days", lambda case: same_job(
            case, lambda case, n: 86400 * training_days(case, n))),
        when("where the activations alone fill the memory, no number of devices helps: None",
             lambda case, got: planned(case)["result"] is None),
    ]

    def cases(self, rng, ranks):
        a100 = {"memory_gib": 80, "per_node": 8, "flops": 312e12}
        gpt3 = a100 | {"parameters": 175_000_000_000, "tokens": 300_000_000_000, "utilization": 0.45, "recompute": True,
                       "activations": 30e9}
        edge = a100 | {"parameters": 2 ** 30 * 8, "tokens": 10 ** 9, "utilization": 0.4, "recompute": False,
                       "memory_gib": 8, "per_node": 4, "activations": 0}
        cases = [gpt3, gpt3 | {"parameters": 10 ** 12, "activations": 20e9},
                 gpt3 | {"parameters": 10 ** 12, "memory_gib": 8, "per_node": 4, "activations": 4e9},   # 3,488 devices
                 gpt3 | {"parameters": 70_000_000_000, "tokens": 1_400_000_000_000, "recompute": False},
                 edge,                                          # takes just the memory of 16 devices
                 edge | {"parameters": 2 ** 30 * 2, "memory_gib": 11}, edge | {"parameters": 2 ** 30, "memory_gib": 7},
                 edge | {"parameters": 2 ** 30, "memory_gib": 5.75},      # stage 2 takes 5.5 GiB, on four devices
                 edge | {"parameters": 10 ** 6, "per_node": 1},           # fits on one device as it is
                 edge | {"parameters": 10 ** 6},                          # so does this one, but four are a node
                 edge | {"parameters": 10 ** 12, "activations": 7.6e9},   # 16,164 devices
                 edge | {"parameters": 10 ** 15, "activations": 8 * 2 ** 30 - 13e6, "per_node": 10 ** 6},  # 1,231 nodes
                 edge | {"parameters": 1, "per_node": 1, "activations": 8 * 2 ** 30 - 1},       # one byte is left
                 edge | {"activations": 8 * 2 ** 30}, edge | {"activations": 9e9},
                 edge | {"parameters": int(rng.integers(3e9, 9e9)), "memory_gib": int(rng.integers(20, 40)),
                         "per_node": int(rng.integers(2, 7)), "activations": float(rng.integers(1e9, 5e9)),
                         "recompute": True}]
        return cases

    def truth(self, case):
        return planned(case)

    def picture(self, runs, path):
        from exercises.frame.pictures import COLORS, canvas, save
        case, got = runs[1][1]
        figure, ax = canvas()
        for stage, color in zip(STAGES, COLORS, strict=False):
            ax.loglog(got["ranks"], np.array(got["model"][stage]) / 2 ** 30, color=color, lw=2, label=f"stage {stage}")
        left = case["memory_gib"] - case["activations"] / 2 ** 30
        ax.axhline(left, color="#888888", ls="--", lw=1)
        ax.text(1, 0.93 * left, f"{left:.0f} of {case['memory_gib']} GiB: what the activations leave", size=9, va="top",
                color="#666666")
        plan = got["result"]
        ax.plot(plan["devices"], total(case["parameters"], plan["devices"], plan["stage"]) / 2 ** 30, "*", ms=18,
                color=COLORS[4], mec="white")
        ax.annotate(f"{plan['devices']} devices, stage {plan['stage']}", (plan["devices"], left), xytext=(8, 10),
                    textcoords="offset points", size=10)
        ax.set(xlabel="devices", ylabel="GiB on each", title=f"{case['parameters'] / 1e9:,g} billion parameters")
        ax.legend(frameon=False)
        save(figure, path)
        return (f"10¹² parameters fit on {plan['devices']} devices at stage {plan['stage']}; on "
                f"{case['tokens'] / 1e9:g} billion tokens they train for {plan['days'] / 365:.1f} years")
