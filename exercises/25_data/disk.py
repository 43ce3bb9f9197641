"""25.1 from a list of all rows, and what known mistakes would give."""

import numpy as np

from exercises.frame import demand, gives, when

IGNORED = -100
NAMES = "inputs", "targets", "documents"
PICTURE = {"length": 24, "rows": 12}


# ---------------------------------------------------------------- cases

def text(rng, count, end, dtype, high, often):
    """A file's tokens, with ends among them."""
    return np.where(rng.random(count) < often, end, rng.integers(1, high, count)).astype(dtype)


def cases(rng):
    counts = [([9, 8, 1, 0, 5, 13, 4], 4), ([0, 0, 7, 6, 1, 2, 12, 3], 3), ([5], 4), ([4, 3, 2, 0], 1), ([6, 3], 9),
              (rng.integers(0, 60, 9).tolist() + [21, 20, 0, 41], 10), ([2**14, 10**5, 7], 1024)]
    found = [{"what": "row_bounds", "counts": each, "length": length} for each, length in counts]
    for each, length in (*counts[:4], counts[5]):
        rows = len(table(each, length))
        found.append({"what": "place", "counts": each, "length": length, "bounds": bounds_of(table(each, length), each),
                      "rows": rng.permutation(np.append(np.arange(rows), rng.integers(rows, size=2)))})
    found += [{**found[len(counts)], "rows": rows} for rows in (
        np.array([[0, 6], [3, 2]]), np.zeros(0, np.int64), np.array([-1]), np.array([2, 7, 1]), np.array([-7, 3]),
        np.array([0, 6, 40]))]
    for each, length, dtype, often in ((counts[0][0], 4, np.uint16, 0.3), (counts[1][0], 3, np.int64, 0.5),
                                       (counts[5][0], 10, np.uint16, 0.25), ([60, 0, 41, 40], 20, np.uint32, 0.15)):
        end, rows = int(rng.choice([0, 300])), len(table(each, length))
        files = [text(rng, count, end, dtype, 300, often) for count in each]
        asked = rng.permutation(np.append(np.arange(rows), rng.integers(rows, size=2)))
        for tokens in files:        # a document that is no more than its end
            tokens[:3] = [7, end, end][:len(tokens)]
        found.append({"what": "read", "files": files, "length": length, "rows": asked, "end": end})
    found.append({**found[-1], "rows": np.zeros(0, np.int64)})
    counts, length = rng.integers(60, 130, 4).tolist(), PICTURE["length"]
    rows = np.sort(rng.choice(len(table(counts, length)), min(PICTURE["rows"], len(table(counts, length))), False))
    return [*found, {"what": "read", "files": [text(rng, count, 0, np.uint16, 300, 0.09) for count in counts],
                     "length": length, "rows": rows, "end": 0}]


# ---------------------------------------------------------------- rightly, and with mistakes

def listed(first_tokens):
    """All rows, [(file, first)], by a rule for one file: (count, length) -> its rows' first tokens."""
    return lambda counts, length: [(i, first) for i, count in enumerate(counts)
                                   for first in first_tokens(count, length)]


def every(count, length):
    return [first for first in range(0, count, length) if first + length < count]


table = listed(every)


def bounds_of(rows, counts):
    return np.array([0, *(sum(i <= file for i, _ in rows) for file in range(len(counts)))])


def taken(files, file, first, length):
    """A row's tokens; None beyond the file's end."""
    found = np.asarray(files[file], np.int64)[first:first + length + 1]
    return found if len(found) == length + 1 and first >= 0 else None


def learnt(both, end, length):
    inputs, ends = both[:, :-1], both[:, :-1] == end
    return {"inputs": inputs, "targets": np.where(ends, IGNORED, both[:, 1:]),
            "documents": np.cumsum(np.pad(ends, ((0, 0), (1, 0)))[:, :-1], 1)}


def run(case, table=table, bounds=bounds_of, at=None, refuses=True, take=taken, learn=learnt, asked=lambda rows: rows,
        arranged=lambda places: places, raw=False):
    """The outputs of one case; the keywords are the mistakes. at: (row, list, bounds, counts, length) -> (file, first).
    raw: first tokens are the list's, where a right `place` would make others of its bounds."""
    length, counts = case["length"], case.get("counts") or [len(file) for file in case["files"]]
    rows = table(counts, length)
    if case["what"] == "row_bounds":
        return {"result": bounds(rows, counts)}
    if case["what"] == "place":
        rows, bounds = listed(every)(counts, length), bounds_of
    first_rows, numbers = bounds(rows, counts), asked(case["rows"])
    if bounds is not bounds_of:
        rows = rows[:max(0, int(first_rows[-1]))]
    if case["what"] == "read" and not raw:
        at = at or beyond
    if refuses and numbers.size and not 0 <= numbers.min() <= numbers.max() < len(rows):
        found = dict.fromkeys(("files", "firsts") if case["what"] == "place" else NAMES, "IndexError")
        return found if case["what"] == "place" else found | {"beyond": False, "changed": False}
    places = [at(int(row), rows, first_rows, counts, length) if at else rows[row] for row in numbers.ravel()]
    places = arranged(places)
    if case["what"] == "place":
        return {name: np.array([each[k] for each in places], np.int64).reshape(numbers.shape)
                for k, name in enumerate(("files", "firsts"))}
    both = []
    for file, first in places:
        if not -len(counts) <= file < len(counts):
            return dict.fromkeys(NAMES, "IndexError") | {"beyond": False, "changed": False}
        both.append(take(case["files"], file, first, length))
        if both[-1] is None:
            return dict.fromkeys(NAMES) | {"beyond": True, "changed": False}
    found = learn(np.array(both, np.int64).reshape(len(both), length + 1), case["end"], length)
    return {name: found[name] for name in NAMES} | {"beyond": False, "changed": False}


def p(sentence, **how):
    return gives(sentence, lambda case: run(case, **how))


def together(counts, length):
    """Rows of all files as one."""
    ends = np.cumsum(counts)
    return [(i, first - int(ends[i]) + counts[i]) for first in range(0, max(0, int(ends[-1]) - length), length)
            for i in [int(np.searchsorted(ends, first, side="right"))]]


def across(files, file, first, length):
    """A row that goes on in the next file."""
    every = np.concatenate([np.asarray(each, np.int64) for each in files])
    start = sum(len(each) for each in files[:file]) + first
    return every[start:start + length + 1] if start + length < len(every) else None


def negative(rows, counts):
    """A file without tokens takes a row away."""
    return np.cumsum([0, *(sum(i == file for i, _ in rows) - (count == 0) for file, count in enumerate(counts))])


def without_leading(rows, counts):
    return bounds_of(rows, counts)[1:]


def without_last(rows, counts):
    return bounds_of(rows, counts)[:-1]


def per_file(rows, counts):
    return np.diff(bounds_of(rows, counts))


def left_side(row, rows, bounds, counts, length):
    file = int(np.searchsorted(bounds, row, side="left")) - 1 if row else 0
    return file, (row - int(bounds[file])) * length


def left_side_unguarded(before):
    """The same where row 0 isn't looked at, by so many files before the one that searchsorted gives."""
    def at(row, rows, bounds, counts, length):
        file = int(np.searchsorted(bounds, row, side="left")) - before
        return file, (row - int(bounds[file])) * length
    return at


def next_file(row, rows, bounds, counts, length):
    file, first = rows[row]
    return file + 1, first


def place_of(change):
    """change: (file, first, row, counts, length) -> (file, first)"""
    return lambda row, rows, bounds, counts, length: change(*rows[row], row, counts, length)


further_apart = place_of(lambda file, first, row, counts, length: (file, first // length * (length + 1)))


def apart(count, length):
    return range(0, count - length, length + 1)


def empty_ones(row, rows, bounds, counts, length):
    """The first file that begins at the row, where it isn't the last."""
    file = rows[row][0]
    return int(np.flatnonzero(bounds == bounds[file])[0]), rows[row][1]


def from_the_end(row, rows, bounds, counts, length):
    """Numbers below 0 count from the end, as in a list."""
    return rows[row] if row < len(rows) else (len(counts), (row - len(rows)) * length)


def beyond(row, rows, bounds, counts, length):
    """searchsorted's, of any number."""
    file = int(np.searchsorted(bounds, row, side="right")) - 1
    return file, (row - int(bounds[file])) * length


def half_refused(low):
    """What a place gives that refuses numbers below 0 only (low), or above the last only."""
    def outputs(case):
        if case["what"] == "place" and case["rows"].size:
            refused = case["rows"].min() < 0 if low else case["rows"].max() >= case["bounds"][-1]
            return run(case, at=beyond, refuses=bool(refused))
        return run(case)
    return outputs


def learns(**changes):
    """A mistake in what a row teaches, name by name: f(both, ends, right) -> array."""
    def learn(both, end, length):
        right = learnt(both, end, length)
        return right | {name: f(both, both == end, right) for name, f in changes.items()}
    return learn


def is_end_of(both, ends):
    return np.where(ends[:, 1:], IGNORED, both[:, 1:])


def running(both, ends, right):
    """Documents numbered on from row to row, as they are read."""
    before = np.cumsum(ends[:, :-1].sum(1)) - ends[:, :-1].sum(1)
    return right["documents"] + before[:, None]


def shifted(both, ends, right):
    """A row of which only `length` tokens are read."""
    return np.concatenate([np.where(ends[:, :-1], IGNORED, both[:, 1:])[:, :-1], np.full((len(both), 1), IGNORED)], 1)


def bordered(both, ends, right):
    """The position behind an end is ignored."""
    found = both[:, 1:].copy()
    found[:, 1:][ends[:, :-2]] = IGNORED
    return found


def swapped(both, end, length):
    ends = both[:, 1:] == end
    return {"inputs": both[:, 1:], "targets": np.where(ends, IGNORED, both[:, :-1]),
            "documents": np.cumsum(ends, 1) - ends}


def written_through(both, ends, right):
    found = both.copy()
    found[:, 1:][ends[:, :-1]] = IGNORED
    return found[:, :-1]


def filled(value):
    return lambda both, ends, right: np.where(ends[:, :-1], value, both[:, 1:])


SIGNATURES = [
    when("the files' tokens, or the rows that are asked for, aren't what they were before the call",
         lambda case, got: got.get("changed", False)),
    p("a file of n tokens has (n - 1) // length rows: with n // length the last row's last target is missing, where n "
      "is a multiple of length", table=listed(lambda n, length: range(0, n // length * length, length))),
    p("a file's rest has become a row: what doesn't fill a row, with the token behind it, is left",
      table=listed(lambda n, length: range(0, max(0, n - 1), length))),
    p("a file's rest has become a row: what doesn't fill a row, with the token behind it, is left",
      table=listed(lambda n, length: range(0, n, length))),
    p("rows don't overlap: a row's last target is the first token of the next row, so that every token is learned; "
      "rows begin at 0, length, 2 · length …", table=listed(apart)),
    gives("rows don't overlap: a row's last target is the first token of the next row, so that every token is learned; "
          "rows begin at 0, length, 2 · length …", lambda case: run(case, at=further_apart) if case["what"] == "place"
          else run(case, table=listed(apart), raw=True)),
    p("each file's last row is missing", table=listed(lambda n, length: range(0, n - 2 * length, length))),
    p("rows at each token: they begin at 0, length, 2 · length …",
      table=listed(lambda n, length: range(0, max(0, n - length)))),
    p("rows go on from file to file: what is behind a file's end comes from elsewhere; each file has rows of its own",
      table=together, take=across, raw=True),
    p("rows go on from file to file: what is behind a file's end comes from elsewhere; each file has rows of its own",
      table=together, raw=True),
    p("a file without tokens has -1 rows, for (0 - 1) // length is -1: none has fewer than 0", bounds=negative),
    p("row_bounds begins with 0: file 0's rows begin there, so there is one bound more than files",
      bounds=without_leading),
    p("the last bound is missing: how many rows there are", bounds=without_last),
    p("these are the numbers of rows of each file; bounds are their sums, from 0 on", bounds=per_file),
    p("off by one at the files' bounds: row bounds[i] is the first of file i, not the last of the file before",
      at=left_side),
    *(p("searchsorted from the left: it finds the first bound that isn't below the row; wanted is the last one that "
        "isn't above it", at=left_side_unguarded(before)) for before in (1, 0)),
    p("the file's number is one too high: searchsorted counts the bounds up to the row, of which bounds[0] is one",
      at=next_file),
    p("of files that begin at the same row the first is taken; those before the last have no rows", at=empty_ones),
    p("a row's first token is counted through all files' rows: in its file, begin with the file's first row",
      at=place_of(lambda file, first, row, counts, length: (file, row * length))),
    p("a row's first token is counted through all files' tokens: it is a place in its own file",
      at=place_of(lambda file, first, row, counts, length: (file, sum(counts[:file]) + first))),
    gives("files and first tokens have changed places", lambda case: run(case) | ({
        "files": run(case)["firsts"], "firsts": run(case)["files"]} if case["what"] == "place" else {})),
    p("that is the row's number in its file; its first token is `length` times as far from the beginning",
      at=place_of(lambda file, first, row, counts, length: (file, first // length))),
    p("rows begin length + 1 tokens apart, so that some lie beyond the file's end: the last token of one is the "
      "first of the next", at=further_apart),
    p("a row's first token is one too far: what was the target of the row before is this row's first input",
      at=place_of(lambda file, first, row, counts, length: (file, first + 1))),
    gives("row bounds[-1] has a place: the last row is bounds[-1] - 1, since they count from 0", lambda case: run(
        case, at=beyond, refuses=not (case["what"] == "place" and case["rows"].size and case["rows"].min() >= 0
                                      and case["rows"].max() == case["bounds"][-1]))),
    gives("rows below 0 have a place: raise IndexError, or the last file is read where nobody wants it",
          half_refused(False)),
    gives("rows from bounds[-1] on have a place: the last row is bounds[-1] - 1; raise IndexError for more",
          half_refused(True)),
    p("rows that aren't there have a place: below 0, and from bounds[-1] on, raise "
      "IndexError", at=beyond, refuses=False),
    p("rows that aren't there have a place: NumPy counts numbers below 0 from the end; raise IndexError",
      at=from_the_end, refuses=False),
    when("rows that aren't there have a place, the last file's perhaps: raise IndexError, below 0 as from bounds[-1]",
         lambda case, got: case["what"] == "place" and case["rows"].size and isinstance(got.get("files"), np.ndarray)
         and not 0 <= case["rows"].min() <= case["rows"].max() < case["bounds"][-1]),
    when("what is empty has a row that isn't there: of no rows, none is outside",
         lambda case, got: not case["rows"].size and "IndexError" in got.values()),
    p("targets are the inputs: they are the next tokens", learn=learns(
        targets=lambda both, ends, right: np.where(ends[:, :-1], IGNORED, both[:, :-1]))),
    p("inputs and targets have changed places: the targets are the next tokens", learn=swapped),
    p("inputs and targets are views of one array: IGNORED, written into the targets, has come into the inputs, too",
      learn=learns(inputs=written_through)),
    p("a row's last target is IGNORED: it is the token behind the row, which is read for that",
      learn=learns(targets=shifted)),
    p("behind an end stands the next document's first token, which nobody can know from this one: IGNORED where the "
      "input is an end", learn=learns(targets=lambda both, ends, right: both[:, 1:])),
    p("targets that are an end are ignored: that a document ends here is to be learned; what comes behind an end isn't",
      learn=learns(targets=lambda both, ends, right: is_end_of(both, ends))),
    p("targets that are an end are ignored, beside those behind one: that a document ends here is to be learned",
      learn=learns(targets=lambda both, ends, right: np.where(ends[:, 1:], IGNORED, right["targets"]))),
    p("ignored is the target one position behind an end: it is the end's own", learn=learns(targets=bordered)),
    p("a target that doesn't count is 0: that is a token; IGNORED is none", learn=learns(targets=filled(0))),
    p("a target that doesn't count is -1: it is IGNORED, by which the loss knows it", learn=learns(targets=filled(-1))),
    p("a target that doesn't count is the end: it is IGNORED, by which the loss knows it", learn=lambda both, end,
      length: learnt(both, end, length) | {"targets": np.where(both[:, :-1] == end, end, both[:, 1:])}),
    p("inputs are ignored, too: the model reads an end as any token", learn=learns(
        inputs=lambda both, ends, right: np.where(ends[:, :-1], IGNORED, both[:, :-1]))),
    p("an end is counted to the document behind it: it is of the document that it ends", learn=learns(
        documents=lambda both, ends, right: np.cumsum(ends[:, :-1], 1))),
    p("documents are numbered by targets: a document's last token before its end is counted to the next", learn=learns(
        documents=lambda both, ends, right: np.cumsum(ends[:, 1:], 1))),
    p("documents are numbered from 1: a row begins with 0", learn=learns(
        documents=lambda both, ends, right: right["documents"] + 1)),
    p("documents are numbered on from row to row: each row begins with 0", learn=learns(documents=running)),
    p("documents are counted down the rows, not along each: axis=1", learn=learns(
        documents=lambda both, ends, right: np.cumsum(ends[:, :-1], 0) - ends[:, :-1])),
    p("documents says where ends are: asked for is how many of the row ended before", learn=learns(
        documents=lambda both, ends, right: ends[:, :-1].astype(np.int64))),
    p("rows are all of document 0: then tokens look into other documents", learn=learns(
        documents=lambda both, ends, right: 0 * right["documents"])),
    when(lambda case, got: f"IGNORED has become {np.max(got['targets']):,}: without a sign there is no room for "
                           f"-100, and in "
         "a file's dtype there is no sign", lambda case, got: np.max(got["targets"]) in (2**16 - 100, 2**32 - 100)),
    p("rows come sorted: they are asked for in an order, which is the shuffled one", asked=np.sort),
    p("rows come file by file: they are asked for in an order, which is the shuffled one",
      arranged=lambda places: sorted(places, key=lambda place: place[0])),
    p("rows that are asked for twice come once", asked=np.unique),
    when(lambda case, got: "a row is read beyond the end of its file: a row's last target lies in the file, too",
         lambda case, got: got.get("beyond", False)),
    when(lambda case, got: f"an IndexError, though these rows are there: {got['error']}",
         lambda case, got: "error" in got),
]

DEMANDS = [
    demand(lambda case, got: "right, but the three arrays must be int64: " + ", ".join(
        f"{name} {np.asarray(got[name]).dtype}" for name in NAMES) + ". In a file's own dtype IGNORED has no room",
        lambda case, got: case["what"] != "read" or all(np.asarray(got[name]).dtype == np.int64 for name in NAMES)),
    demand(lambda case, got: f"right, but {got['read']:,} tokens were read for {len(case['rows'])} rows of "
           f"{case['length']}, which take {len(case['rows']) * (case['length'] + 1):,}: read file[first:stop] once for "
           "each row. A file is larger than memory",
           lambda case, got: case["what"] != "read" or got["read"] <= len(case["rows"]) * (case["length"] + 1)),
]
