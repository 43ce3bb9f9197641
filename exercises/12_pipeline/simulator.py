"""What a schedule does in time: every stage does its steps in order, each as soon as what it needs is there."""

FORWARD, BACKWARD = 1, 2      # units of time


def best_end(stages, micro_batches):
    """No flushed schedule of one stage per rank is over earlier: the first forward must reach the last stage, which
    has m of both to do, and the last backward must come back."""
    return (stages + micro_batches - 1) * (FORWARD + BACKWARD)


def play(rows):
    """(spans, stuck): spans[stage] = [(begin, end, kind, micro-batch)], and {stage: the step for which it waits for
    ever}. The rows are complete."""
    done, spans, stuck = {}, [[] for _ in rows], {}
    moved = True
    while moved:
        moved, stuck = False, {}
        for stage, row in enumerate(rows):
            while len(spans[stage]) < len(row):
                kind, k = row[len(spans[stage])]
                needs = [("F", stage - 1, k)] * (stage > 0) if kind == "F" else (
                    [("F", stage, k)] + [("B", stage + 1, k)] * (stage < len(rows) - 1))
                if not all(need in done for need in needs):
                    stuck[stage] = f"{kind}{k}"
                    break
                free = spans[stage][-1][1] if spans[stage] else 0
                begin = max([free, *(done[need] for need in needs)])
                done[kind, stage, k] = begin + (FORWARD if kind == "F" else BACKWARD)
                spans[stage].append((begin, done[kind, stage, k], kind, k))
                moved = True
    return spans, stuck


def end_of(rows):
    """When the last stage is through; None where they wait for ever."""
    spans, stuck = play(rows)
    return None if stuck else max(row[-1][1] for row in spans)


def live(row):
    """The greatest number of micro-batches that have gone forward and not yet back."""
    held = most = 0
    for kind, _ in row:
        held += 1 if kind == "F" else -1
        most = max(most, held)
    return most


def warm_up(row):
    """How many forwards come before the first backward."""
    return next((i for i, (kind, _) in enumerate(row) if kind == "B"), len(row))


def order(row, kind):
    return [k for step, k in row if step == kind]
