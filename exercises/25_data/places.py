"""25.4 pattern place by pattern place, and what known mistakes would give; and a small run on all pieces."""

import numpy as np

from exercises.frame import demand, gives, when

LENGTH, VOCABULARY, END, BATCH, STEPS, LAST = 16, 24, 0, 12, 90, 25
WEIGHTS = [3, 1], [1, 3]        # of the run's two sources, and in its last steps
MANY = 10**12


# ---------------------------------------------------------------- cases

def cases(rng):
    found = [{"what": "part", "of": [[step, batch, rank, size] for rank in range(size) for step in (0, 1, 7)]}
             for batch, size in ((12, 4), (7, 3), (10, 4), (3, 5), (5, 1))]
    found.append({"what": "part", "of": [[10**12, 512, 3, 6], [3 * 10**9, 9, 1, 2]]})
    patterns = [0, 0, 1], [1, 0], [0, 1, 0, 2, 0, 0, 1], [2], [0, 0, 0, 1, 1, 2]
    found += [{"what": "had", "pattern": list(each), "of": [[source, count] for source in range(3) for count in (
        0, 1, 2, 3, 5, 6, 13, 14, MANY, MANY + 4)]} for each in patterns]
    phases = [[7, [0, 0, 1]], [6, [1, 0]]], [[11, [0, 1, 0, 2, 0, 0, 1]], [4, [2, 1]], [1, [0]], [9, [1, 0, 2, 1]]], [
        [20, [1, 0, 0, 1, 0]]], [[5, [0]], [8, [1, 1, 0]], [10, [2, 0, 1]]], [
        [7, [1, 0]], [5, [0]], [7, [1, 0]], [4, [1]]], [[7, [0, 0, 0, 1]], [5, [1]], [7, [1]], [4, [1, 0]]]
    for each, sizes in zip(phases, ([4, 9], [3, 2, 4], [5, 3], [3, 4, 2], [4, 3], [4, 3]), strict=True):
        found.append({"what": "where", "phases": each, "sizes": sizes,
                      "samples": rng.permutation(sum(count for count, _ in each)).tolist()})
    found[-1]["like"] = "the run before, but for the patterns"
    weights = rng.integers(1, 6, 3)
    pattern = rng.permutation(np.repeat(np.arange(3), weights)).tolist()
    long = [[MANY + int(rng.integers(99)), pattern], [MANY, [2, 1, 1]], [10**18, [0, 2]]]
    bounds = np.cumsum([count for count, _ in long]).tolist()
    samples = [0, 1, bounds[0] - 1, bounds[0], bounds[0] + 5, bounds[1] - 1, bounds[1], bounds[2] - 1]
    found.append({"what": "where", "phases": long, "sizes": [7, 12345, 10**11],
                  "samples": samples + [int(each) for each in rng.integers(0, bounds[2], 20)]})
    return [*found, run_case(rng)]


def run_case(rng):
    """Two sources of tokens, in two files each; in each of them what comes next is likely in its own way."""
    files = []
    for count in ((900, 301), (260, 130)):
        next_one = rng.permutation(np.arange(1, VOCABULARY))
        files.append([text(rng, next_one, each) for each in count])
    sizes = [sum(max(0, len(each) - 1) // LENGTH for each in source) for source in files]
    return {"what": "run", "files": files, "sizes": sizes, "length": LENGTH, "vocabulary": VOCABULARY, "end": END,
            "phases": [[(STEPS - LAST) * BATCH, WEIGHTS[0]], [LAST * BATCH, WEIGHTS[1]]], "batch": BATCH,
            "steps": STEPS, "begin": 50, "size": 5, "rate": 4.0, "seed": int(rng.integers(1 << 30))}


def text(rng, next_one, count):
    tokens = [END]
    while len(tokens) <= count:
        token = tokens[-1]
        tokens.append(END if rng.random() < 0.04 else int(next_one[token - 1]) if token and rng.random() < 0.85 else
                      int(rng.integers(1, VOCABULARY)))
    return np.array(tokens[1:], np.uint16)


# ---------------------------------------------------------------- rightly, and with mistakes

def part(step, batch, rank, size):
    """The pieces of np.array_split."""
    return step * batch + np.array_split(np.arange(batch), size)[rank]


def had(source, pattern, count):
    """Place by place of the pattern: how many samples stand there."""
    return sum(max(0, -(-(count - at) // len(pattern))) for at, other in enumerate(pattern) if other == source)


def before(source, phases, number, pattern, had):
    """Of this source in all phases before."""
    return sum(had(source, earlier, count) for count, earlier in phases[:number])


def split(source, number, size):
    return source, number // size, number % size


def where(sample, phases, sizes, had=had, before=before, split=split, late=0, pick=lambda local, sample: local, more=0,
          last=lambda sizes, source: sizes[source], all_of_it=None, first=False):
    """The keywords are the mistakes."""
    bounds = np.cumsum([0, *(count for count, _ in phases)]).tolist()
    number = max(0, sum(sample >= bound + late for bound in bounds[:-1]) - 1) if late else sum(
        sample >= bound for bound in bounds[1:-1])
    number = 0 if first else number
    local, pattern = sample - bounds[number], phases[number][1]
    source = pattern[pick(local, sample) % len(pattern)]
    found = had(source, pattern, local) + before(source, phases, number, pattern, had) + more
    if all_of_it:
        found = all_of_it(sample, source, pattern, local, bounds, number)
    return split(source, found, last(sizes, source))


def run(case, part=part, had=had, **how):
    if case["what"] == "part":
        return {"result": [part(*each) for each in case["of"]]}
    if case["what"] == "had":
        return {"result": [had(source, case["pattern"], count) for source, count in case["of"]]}
    if case["what"] == "where":
        return {"result": [list(where(sample, case["phases"], case["sizes"], had=had, **how))
                           for sample in case["samples"]], "changed": False}
    return {}


def p(text, **how):
    return gives(text, lambda case: run(case, **how))


def shares(source, pattern, count):
    return count * pattern.count(source) // len(pattern)


def shares_rounded(source, pattern, count):
    return int(np.floor(count * pattern.count(source) / len(pattern) + 0.5))


def whole_patterns(source, pattern, count):
    return count // len(pattern) * pattern.count(source)


def from_the_end(source, pattern, count):
    rest = count % len(pattern)
    return whole_patterns(source, pattern, count) + (pattern[-rest:].count(source) if rest else 0)


def behind(source, pattern, count):
    return whole_patterns(source, pattern, count) + pattern[count % len(pattern):].count(source)


def before_with(had):
    """Earlier phases counted in another way; also where 25.4's own `had` is right."""
    return lambda source, phases, number, pattern, _: before(source, phases, number, pattern, had)


def least_and_more(step, batch, rank, size):
    least, more = divmod(batch, size)
    return step * batch, least, more


def rest_lost(step, batch, rank, size):
    first, least, _ = least_and_more(step, batch, rank, size)
    return np.arange(first + rank * least, first + (rank + 1) * least)


def rest_last(step, batch, rank, size):
    first, least, more = least_and_more(step, batch, rank, size)
    return np.arange(first + rank * least, first + (rank + 1) * least + more * (rank == size - 1))


def last_ranks_more(step, batch, rank, size):
    return step * batch + np.cumsum([0, *(len(part(0, batch, size - 1 - each, size)) for each in range(size))])[
        rank] + np.arange(len(part(0, batch, size - 1 - rank, size)))


def overlapping(step, batch, rank, size):
    first, least, more = least_and_more(step, batch, rank, size)
    return np.arange(first + rank * least, first + (rank + 1) * least + (rank < more))


def by_own_length(step, batch, rank, size):
    first, least, more = least_and_more(step, batch, rank, size)
    begin = first + rank * (least + (rank < more))
    return np.arange(begin, begin + least + (rank < more))


def rounded_up(step, batch, rank, size):
    first, most = step * batch, -(-batch // size)
    return np.arange(first + min(batch, rank * most), first + min(batch, (rank + 1) * most))


def steps_of_part(step, batch, rank, size):
    """A step is as long as the rank's own part."""
    own = part(0, batch, rank, size)
    return step * len(own) + own


def others_have_more(case, got):
    """Pieces of the right lengths, and of all ranks together the whole batch."""
    of_step = {}
    for (step, batch, rank, size), piece in zip(case["of"], got["result"], strict=True):
        numbers = np.asarray(piece).tolist()
        of_step.setdefault((step, batch, size), {})[rank] = numbers
        if len(numbers) - batch // size not in (0, 1):
            return False
    return all(sum((found[rank] for rank in sorted(found)), []) == list(range(step * batch, (step + 1) * batch))
               for (step, batch, size), found in of_step.items() if len(found) == size)


SIGNATURES = [     # `where` before `had`: what is wrong with that shows in both
    when("the phases or sizes aren't what they were before the call: the next call needs them",
         lambda case, got: got.get("changed", False)),
    p("part: each rank has each size-th sample; a rank's piece is consecutive", part=lambda step, batch, rank, size:
      np.arange(step * batch + rank, (step + 1) * batch, size)),
    p("part: two ranks have one sample: who begins behind ranks that have one more begins further "
      "on", part=overlapping),
    p("part: two ranks have one sample: who begins behind ranks that have one more begins further on",
      part=by_own_length),
    p("part: what `size` doesn't divide is lost: the first batch_size % size ranks have one more", part=rest_lost),
    p("part: the last rank has all that `size` doesn't divide; the first batch_size % size ranks have one more each",
      part=rest_last),
    p("part: the last ranks have one more: it is the first", part=last_ranks_more),
    p("part: parts are rounded up, so that the last ranks have less, or nothing; they differ by one at most",
      part=rounded_up),
    p("part: parts are rounded up, so that the last ranks have some of the next step's batch, too", part=lambda step,
      batch, rank, size: step * batch + rank * -(-batch // size) + np.arange(-(-batch // size))),
    p("part: batch_size is all ranks' together: each has a whole batch", part=lambda step, batch, rank, size:
      (step * size + rank) * batch + np.arange(batch)),
    p("part: each rank has the whole batch, so that all do the same", part=lambda step, batch, rank, size:
      step * batch + np.arange(batch)),
    p("part: a step is all ranks' batch long, not as long as this rank's part", part=steps_of_part),
    p("part: step 0 begins with sample 0; the first batch is left out", part=lambda step, batch, rank, size:
      part(step + 1, batch, rank, size)),
    p("part: steps count from 0: step 0 has what lies before the first sample", part=lambda step, batch, rank, size:
      part(step - 1, batch, rank, size)),
    p("part: numbers beyond 2³¹ are cut off: they are int64", part=lambda *of: part(*of).astype(np.int32)),
    p("part: each step has the samples of the first", part=lambda step, batch, rank, size: part(0, batch, rank, size)),
    when("part: the pieces follow each other, but others have one more: the first batch_size % size ranks do",
         others_have_more),
    p("part: the ranks that have one more come first, and with rank r begin r more; behind them it is as many as these "
      "are. Here rank 0 begins too late", part=lambda step, batch, rank, size: part(step, batch, rank, size) + (
          batch % size - min(rank, batch % size))),
    p("where: all samples are counted as of the first phase", all_of_it=lambda sample, source, pattern, local, bounds,
      number: had(source, pattern, sample), first=True),
    p("where: of two phases that are equal the first one is found, and what lies between isn't counted: keep a phase's "
      "number, or go through them one by one", before=lambda source, phases, number, pattern, had: before(
          source, phases, phases.index(phases[number]), pattern, had)),
    p("where: each phase begins its sources anew: then rows come twice before others have come at all",
      before=lambda *_: 0),
    p("where: of earlier phases only the last is counted: all of them", before=lambda source, phases, number, pattern,
      had: had(source, phases[number - 1][1], phases[number - 1][0]) if number else 0),
    p("where: earlier phases are counted by this phase's pattern: each has its "
      "own", before=lambda source, phases, number,
      pattern, had: sum(had(source, pattern, count) for count, _ in phases[:number])),
    p("where: earlier phases are counted by shares, rounded down; a phase may end anywhere in its pattern",
      before=before_with(shares)),
    p("where: earlier phases are counted by shares, rounded; a phase may end anywhere in its pattern",
      before=before_with(shares_rounded)),
    p("where: of earlier phases only whole patterns are counted; a phase may end anywhere in its pattern",
      before=before_with(whole_patterns)),
    p("where: earlier phases' samples are all counted: only those of this source", before=before_with(
        lambda source, pattern, count: count)),
    p("where: a phase's first sample is taken for the last of the phase before: that has samples 0 to count - 1",
      late=1),
    p("where: a phase begins its pattern anew: here it goes on as if it had been there since sample 0",
      pick=lambda local, sample: sample),
    p("where: the samples are counted from 0 by the last phase's pattern: earlier phases had their own",
      all_of_it=lambda sample, source, pattern, local, bounds, number: had(source, pattern, sample)),
    p("where: the sample itself is counted: its place is how many came before it", more=1),
    p("where: that is the sample's number, of all sources; count those of its "
      "source", all_of_it=lambda sample, *_: sample),
    p("where: that is the sample's number in its phase, of all sources; count those of its source",
      all_of_it=lambda sample, source, pattern, local, *_: local),
    p("where: of the pattern that is begun nothing is counted: so two samples have one row", all_of_it=lambda sample,
      source, pattern, local, bounds, number: whole_patterns(source, pattern, local)),
    p("where: places begin anew when all rows have come, but it is still pass 0: the same order comes again",
      split=lambda source, number, size: (source, 0, number % size)),
    p("where: the pass is right, but the place goes on: in each pass it begins with "
      "0", split=lambda source, number, size:
      (source, number // size, number)),
    p("where: when all rows have come the next pass begins, with place 0: here places go on beyond the source's size",
      split=lambda source, number, size: (source, 0, number)),
    p("where: passes count from 0: how many times the source has been gone through before", split=lambda source, number,
      size: (source, number // size + 1, number % size)),
    p("where: pass and place have changed places", split=lambda source, number, size: (
        source, number % size, number // size)),
    p("where: a pass ends one row too late: a source of n rows has places 0 to n - "
      "1", split=lambda source, number, size:
      split(source, number, size + 1)),
    p("where: each source has its own size: here all have the first's", last=lambda sizes, source: sizes[0]),
    p("where: each source has its own size: here all have all sources' "
      "together", last=lambda sizes, source: sum(sizes)),
    gives("where: passes begin with 0 in each phase, though places go on", lambda case: run(case, before=lambda source,
          phases, number, pattern, had: before(source, phases, number, pattern, had) % case["sizes"][source])),
    when("where: right but for huge numbers: a / b is a float, with 16 digits at most; // and divmod are exact",
         lambda case, got: max(case["samples"]) >= 10**16),
    when("where: two runs with equal counts, and what was found of the one is given for the other: their patterns "
         "differ", lambda case, got: "like" in case),
    p("had: of the pattern that is begun nothing is counted: its first count % len(pattern) places "
      "are", had=whole_patterns),
    p("had: the shares, rounded down; but the pattern says which of the first few samples it is: count these",
      had=shares),
    p("had: the shares, rounded; but the pattern says which of the first few samples it is: count these",
      had=shares_rounded),
    p("had: the shares, rounded; but the pattern says which of the first few samples it is: count these",
      had=lambda source, pattern, count: round(count * pattern.count(source) / len(pattern))),
    p("had: sample number `count` is counted, too: of the first `count` the last is number count - 1",
      had=lambda source, pattern, count: had(source, pattern, count + 1)),
    p("had: of the pattern that is begun the last places are counted: it is its first ones", had=from_the_end),
    p("had: of the pattern that is begun the places behind are counted: it is its first ones", had=behind),
    p("had: all samples are counted: those of this source only", had=lambda source, pattern, count: count),
    p("had: the pattern is counted as if it had come only once: how often has it come?", had=lambda source, pattern,
      count: pattern[:count].count(source)),
    p("had: a whole pattern has each source as often as it stands there, not as long as it is",
      had=lambda source, pattern, count: count // len(pattern) * len(pattern) + pattern[:count % len(pattern)].count(
          source)),
    p("had: only the pattern that is begun is counted: how often has it come "
      "before?", had=lambda source, pattern, count:
      pattern[:count % len(pattern)].count(source)),
]


# ---------------------------------------------------------------- the run

def in_run(holds):
    return lambda case, got: case["what"] != "run" or holds(case, got)


def each_once(case, got):
    """Whether of each source all rows come before one comes again."""
    for source, size in enumerate(case["sizes"]):
        rows = [row for other, row in got["rows"] if other == source]
        passes = [rows[at:at + size] for at in range(0, len(rows), size)]
        if not all(len(set(each)) == len(each) and 0 <= min(each) <= max(each) < size for each in passes):
            return False
    return len(got["rows"]) == case["steps"] * case["batch"]


DEMANDS = [
    demand("right, but in a run rows of a source come again before all have come", in_run(each_once)),
    demand(lambda case, got: f"right, but a run that {case['size']} ranks take up at step {case['begin']} isn't the "
                             f"same: "
           f"a loss is {np.abs(np.subtract(got['later'], got['losses'][case['begin']:])).max():.1e} off",
           in_run(lambda case, got: np.allclose(got["later"], got["losses"][case["begin"]:], rtol=1e-9, atol=0))),
]
