"""What a schedule of 12.1 must be: rules, each of which says what breaks it. rule(name, case, rows) is a sentence for
the learner, or None."""

from . import simulator

GPIPE, ALTERNATING = "gpipe", "one_forward_one_backward"


def called(name, case):
    return f"{name}({case['stages']}, {case['micro_batches']})"


def steps(row):
    return " ".join(f"{kind}{k}" for kind, k in row)


def well_formed(name, case, rows):
    strange = [kind for row in rows for kind, _ in row if kind not in ("F", "B")] if isinstance(rows, list) else []
    if isinstance(rows, list) and len(rows) == case["stages"] and not strange:
        return None
    what = f"a list of {len(rows)}" if isinstance(rows, list) else f"{rows}"
    if strange:
        what += f" with a step called {strange[0]!r}"
    return (f"{called(name, case)} is {what}: it must be a list of {case['stages']} lists, one per stage, of pairs "
            "(\"F\", k) or (\"B\", k)")


def known(name, case, rows):
    """No micro-batch that there isn't."""
    count = case["micro_batches"]
    for stage, row in enumerate(rows):
        for kind, k in row:
            if not 0 <= k < count:
                few = " (fewer micro-batches than stages: the warm-up ends when there are no more)"
                return (f"{called(name, case)}: stage {stage} does {kind}{k}, and the micro-batches are 0 to "
                        f"{count - 1}{few * (count < case['stages'])}")
    return None


def none_again(name, case, rows):
    for stage, row in enumerate(rows):
        again = next((step for i, step in enumerate(row) if step in row[:i]), None)
        if again:
            return (f"{called(name, case)}: stage {stage} does {steps([again])} {row.count(again)} times, and a "
                    f"micro-batch counts once: {steps(row)}")
    return None


def none_missing(name, case, rows):
    for stage, row in enumerate(rows):
        lost = {kind: [k for k in range(case["micro_batches"]) if [kind, k] not in row] for kind in "FB"}
        if lost["F"]:
            return (f"{called(name, case)}: micro-batch {lost['F'][0]} is lost: stage {stage} never does "
                    f"F{lost['F'][0]} ({steps(row)})")
        if lost["B"]:
            return (f"{called(name, case)}: stage {stage} never does {', '.join(f'B{k}' for k in lost['B'])} "
                    f"({steps(row)}): after the last forward the backwards are still to come that the warm-up has put "
                    "off")
    return None


def forward_first(name, case, rows):
    for stage, row in enumerate(rows):
        for i, (kind, k) in enumerate(row):
            if kind == "B" and ["F", k] not in row[:i]:
                return (f"{called(name, case)}: stage {stage} does B{k} before F{k}: nothing is there yet to go back "
                        f"through ({steps(row)})")
    return None


def one_order(name, case, rows):
    """In different orders the stages wait for each other: for ever, or at least longer."""
    end = simulator.end_of(rows)
    if end is not None and end <= simulator.best_end(len(rows), case["micro_batches"]):
        return None
    for kind, word in (("F", "forwards"), ("B", "backwards")):
        first = simulator.order(rows[-1], kind)
        for stage, row in enumerate(rows):
            if simulator.order(row, kind) != first:
                return (f"{called(name, case)}: stage {stage} does its {word} in the order "
                        f"{' '.join(map(str, simulator.order(row, kind)))}, and the last stage in the order "
                        f"{' '.join(map(str, first))}: a stage waits while what it could do is there")
    return None


def upside_down(name, case, rows):
    best = simulator.best_end(len(rows), case["micro_batches"])
    if simulator.end_of(rows) is None and simulator.end_of(rows[::-1]) == best:
        return (f"{called(name, case)}: the stages are listed from the last to the first: rows[0] is stage 0, which "
                "has the first layers and must do the most forwards before a gradient comes back")
    return None


def nobody_stuck(name, case, rows):
    stuck = simulator.play(rows)[1]
    if not stuck:
        return None
    return (f"{called(name, case)}: the stages wait for each other for ever, "
            + ", ".join(f"stage {stage} before {step}" for stage, step in stuck.items())
            + ": a stage must have done enough forwards for the ones behind it before it waits for a gradient")


def all_forwards_first(name, case, rows):
    for stage, row in enumerate(rows):
        if simulator.warm_up(row) < case["micro_batches"]:
            return (f"{called(name, case)}: stage {stage} goes back before all its forwards are through ({steps(row)}):"
                    " that isn't GPipe")
    return None


def too_slow(name, case, rows):
    end, best = simulator.end_of(rows), simulator.best_end(len(rows), case["micro_batches"])
    if end <= best:
        return None
    work, stages = 3 * case["micro_batches"], case["stages"]
    return (f"{called(name, case)} takes {end} units of time (a forward 1, a backward 2), and {best} are enough: "
            f"a bubble of {100 * (1 - work / end):.0f} %, in place of (p-1)/(m+p-1) = "
            f"{100 * (stages - 1) * 3 / best:.0f} %")


# ---------------------------------------------------------------- 1F1B

def limits(case):
    return [min(case["micro_batches"], case["stages"] - stage) for stage in range(case["stages"])]


def telling(case):
    """Whether there are micro-batches enough to see how long the warm-up is."""
    return 2 < case["stages"] < case["micro_batches"]


def holds_too_much(case, rows):
    """[stage] that hold more micro-batches than they may."""
    return [stage for stage, (row, most) in enumerate(zip(rows, limits(case), strict=True))
            if simulator.live(row) > most]


def in_disguise(name, case, rows):
    if telling(case) and all(simulator.warm_up(row) == case["micro_batches"] for row in rows):
        return (f"{called(name, case)} is GPipe again: all stages do all forwards first, and hold "
                f"{case['micro_batches']} micro-batches. A stage must go back as soon as a gradient can be there")
    return None


def same_for_all(name, case, rows):
    warm = {simulator.warm_up(row) for row in rows}
    if telling(case) and len(warm) == 1 and holds_too_much(case, rows):
        return (f"{called(name, case)}: all stages do {warm.pop()} forwards before the first backward. The last stage "
                "can go back after one; each stage before it must wait for one more")
    return None


def last_waits(name, case, rows):
    if telling(case) and holds_too_much(case, rows) == [len(rows) - 1]:
        return (f"{called(name, case)}: the last stage begins {steps(rows[-1][:3])}, and holds "
                f"{simulator.live(rows[-1])} micro-batches: its own output is all that it needs to go back at once, "
                "F0 B0")
    return None


def warm_up_by_one(name, case, rows):
    if not telling(case):
        return None
    warm, wanted = [simulator.warm_up(row) for row in rows], limits(case)
    more = [min(case["micro_batches"], n + 1) for n in wanted]
    fewer = [max(1, n - 1) for n in wanted]
    if warm == more != wanted and holds_too_much(case, rows):
        return (f"{called(name, case)}: one forward too many before the first backward: stage 0 does {warm[0]}, and "
                f"holds {simulator.live(rows[0])} micro-batches where {wanted[0]} are enough")
    if warm == fewer != wanted and simulator.end_of(rows) > simulator.best_end(len(rows), case["micro_batches"]):
        return (f"{called(name, case)}: one forward too few before the first backward: stage 0 does {warm[0]}, then "
                f"waits while {wanted[0]} forwards could be under way, and the batch takes "
                f"{simulator.end_of(rows)} units of time in place of "
                f"{simulator.best_end(len(rows), case['micro_batches'])}")
    return None


def too_much(name, case, rows):
    for stage in holds_too_much(case, rows):
        return (f"{called(name, case)}: stage {stage} holds {simulator.live(rows[stage])} micro-batches at once, and "
                f"{limits(case)[stage]} are enough ({steps(rows[stage])}): after the warm-up one backward and one "
                "forward by turns")
    return None


LEGAL = [well_formed, known, none_again, none_missing, forward_first]
RULES = {GPIPE: [*LEGAL, all_forwards_first, one_order],
         ALTERNATING: [*LEGAL, in_disguise, one_order, upside_down, nobody_stuck, same_for_all, last_waits,
                       warm_up_by_one, too_much, too_slow]}
