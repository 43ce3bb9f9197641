"""21.3: what lies where, element by element, and what known mistakes give."""

import numpy as np

from exercises.frame import demand, gives, when

from . import training

NAMES = ("w", "b", "w.m", "scale")
# In the second row is whatever a note may lose of a dtype: the sign, the bytes' order, floats of 16 bits
DTYPES = ("<i8", "<f4", "<f8", "<f4"), ("u1", ">f4", "i1", "<f2")


# ---------------------------------------------------------------- cases

def cases(rng, ranks):
    found = [questions(rng), *(travel(rng, i, *one) for i, one in enumerate((
        (4, 3, None), (2, 5, None), (7, 2, None), (3, 3, "missing"), (3, 3, "short"), (3, 3, "silent"),
        (3, 3, "unknown"))))]
    return [[case] * ranks for case in (*found, training.draw(rng))]


def questions(rng):
    """What has which rank of: fewer elements than ranks, an array without elements, padding, an exact fit."""
    lines = [((10, 3), 3), ((5, 7, 2), 4), ((2, 1), 5), ((4, 4), 2), ((3, 0, 6), 2), ((1, 1, 1), 3), ((6,), 4),
             (tuple(int(n) for n in rng.integers(3, 30, 3)), 3)]
    return {"what": "cut", "questions": [
        {"names": list(NAMES[:len(sizes)]), "sizes": list(sizes), "rank": rank, "ranks": ranks}
        for sizes, ranks in lines for rank in range(ranks)]}


def travel(rng, number, writers, readers, harm):
    """Arrays of several dtypes, cut somewhere by those who write, elsewhere by those who read."""
    sizes = {"scale": 1} | {name: int(rng.integers(18, 30)) for name in NAMES[:3]}
    arrays = {name: values(rng, size, np.dtype(dtype)) for (name, size), dtype in
              zip(sizes.items(), DTYPES[number == 1], strict=True)}
    case = {"what": "travel", "number": number, "arrays": arrays, "harm": harm, "hurt": writers - 1,
            "writers": intervals(rng, sizes, writers), "readers": intervals(rng, sizes, readers)}
    if harm is None:
        case["readers"].append([["w.m", 5, 5], ["w", 1, sizes["w"] - 1]])     # nothing, and nearly all of one
        case["writers"].append([])      # more ranks than elements
    else:       # of the last array several have a part. The first reader meets what is wrong, the others don't
        case["writers"] = intervals(rng, sizes, writers, last=6)
        case["readers"] = [[[name, 0, size] for name, size in sizes.items()], case["writers"][-2], []]
        case["readers"][0] += [["w.v", 0, 3]] * (harm == "unknown")
        case["readers"] += [case["writers"][-1]] * (harm == "silent")
    return case


def values(rng, size, dtype):
    """Of an integer dtype numbers from all of its range, with sign and without."""
    if dtype.kind == "f":
        return (rng.normal(0, 1, size) + 3 * (size == 1)).astype(dtype)
    return rng.integers(np.iinfo(dtype).min, np.iinfo(dtype).max, size, dtype.newbyteorder("=")).astype(dtype)


def intervals(rng, sizes, ranks, last=0):
    """The line of all arrays, cut at any places; each rank's [[name, start, stop]], the last array first.

    last  how many elements the last rank has, if not 0
    """
    line = [(name, i) for name, size in sizes.items() for i in range(size)]
    cuts = sorted(rng.choice(np.arange(4, len(line) - 3, 3), ranks - 1, replace=False).tolist())
    if last:
        cuts[-1] = len(line) - last
    found = []
    for start, stop in zip([0, *cuts], [*cuts, len(line)], strict=True):
        part = line[start:stop]
        found.append([[name, min(i for n, i in part if n == name), max(i for n, i in part if n == name) + 1]
                      for name in sizes if any(n == name for n, _ in part)][::-1])
    return found


# ---------------------------------------------------------------- truth

def truth(case):
    if case[0]["what"] == "training" or case[0].get("harm"):
        return [{}] * len(case)
    if case[0]["what"] == "cut":
        return [{"cuts": [owned(**one) for one in case[0]["questions"]]}] * len(case)
    return travelled(case, lambda one, name, start, stop: one["arrays"][name][start:stop])


def owned(names, sizes, rank, ranks, each=lambda total, ranks: -(-total // ranks), last_too=False, line=True):
    """Element by element: whose is it?"""
    found, at, total = [], 0, sum(sizes)
    for name, size in zip(names, sizes, strict=True):
        share = each(total, ranks) if line else each(size, ranks)
        mine = []
        for i in range(size):
            place = at + i if line else i
            of = place // share if share else ranks
            mine += [i] * ((min(of, ranks - 1) if last_too else of) == rank)
        if mine:
            found.append([name, mine[0], mine[-1] + 1])
        at += size
    return found


def travelled(case, fetch):
    """{"read"} of each rank; fetch(case, name, start, stop)."""
    one, n = case[0], len(case)
    return [{"read": {str(j): [fetch(one, *wanted) for wanted in one["readers"][j]]
                      for j in range(rank, len(one["readers"]), n)}} for rank in range(n)]


# ---------------------------------------------------------------- mistakes: cut

def every(case, change=lambda found, one: found, **how):
    if case[0]["what"] != "cut":
        return None
    return [{"cuts": [change(owned(**one, **how), one) for one in case[0]["questions"]]}] * len(case)


def on_the_line(found, one):
    at = dict(zip(one["names"], np.cumsum([0, *one["sizes"]]).tolist(), strict=False))
    return [[name, start + at[name], stop + at[name]] for name, start, stop in found]


def uneven(one):
    """As np.array_split cuts it: the first ones have one more."""
    names = [(name, i) for name, size in zip(one["names"], one["sizes"], strict=True) for i in range(size)]
    sizes = [len(names) // one["ranks"] + (r < len(names) % one["ranks"]) for r in range(one["ranks"])]
    start = sum(sizes[:one["rank"]])
    part = names[start:start + sizes[one["rank"]]]
    return [[name, min(i for n, i in part if n == name), max(i for n, i in part if n == name) + 1]
            for name in one["names"] if any(n == name for n, _ in part)]


def padded(found, one):
    """Padding as if it were the last array's."""
    each = -(-sum(one["sizes"]) // one["ranks"])
    begin = sum(one["sizes"][:-1])
    last = one["names"][-1]
    start, stop = max(one["rank"] * each - begin, 0), (one["rank"] + 1) * each - begin
    return [row for row in found if row[0] != last] + ([[last, start, stop]] if start < stop else [])


def with_empty(found, one):
    """Each array, also those of which there is nothing, with start = stop: at what place is open."""
    return len(found) == len(one["names"]) and any(start >= stop for _, start, stop in found)


def c(sentence, **how):
    return gives(sentence, lambda case: every(case, **how))


def has_empty(case, got):
    return case[0]["what"] == "cut" and any(start >= stop for one in got[0]["cuts"] for _, start, stop in one)


# ---------------------------------------------------------------- mistakes: load

def files(one):
    """Per writer (bytes of its file, [(name, start, stop, at)])."""
    found = []
    for pieces in one["writers"]:
        data, rows = b"", []
        for name, start, stop in pieces:
            rows.append((name, start, stop, len(data)))
            data += one["arrays"][name][start:stop].tobytes()
        found.append((data, rows))
    return found


def fetching(begin=lambda at, lo, first, size: at + (lo - first) * size, place=lambda lo, start: lo - start,
             which=lambda pieces: pieces):
    """fetch as the solution does it, with places for mistakes; what isn't written is 0."""
    def fetch(one, name, start, stop):
        like = one["arrays"][name]
        out = np.zeros(stop - start, like.dtype)
        pieces = [(data, first, last, at) for data, rows in files(one) for n, first, last, at in rows
                  if n == name and max(start, first) < min(stop, last)]
        for data, first, last, at in which(pieces):
            lo, hi = max(start, first), min(stop, last)
            where = begin(at, lo, first, like.itemsize)
            values = np.frombuffer(data[where:where + (hi - lo) * like.itemsize], like.dtype)
            to = place(lo, start)
            out[to:to + len(values)] = values[:max(0, len(out) - to)]
        return out
    return fetch


def travels(case, fetch):
    return travelled(case, fetch) if case[0]["what"] == "travel" and not case[0]["harm"] else None


def t(sentence, **how):
    return gives(sentence, lambda case: travels(case, fetching(**how)))


def shifted(one, name, start, stop):
    """The array's elements from 0 on, as many as are wanted."""
    return one["arrays"][name][:stop - start]


def in_native_order(one, name, start, stop):
    """The bytes, read in the order that this machine's own arrays have."""
    part = one["arrays"][name][start:stop]
    return part.view(part.dtype.newbyteorder("="))


def wrong_dtype(case, got):
    """Whether some dtype isn't that which was written. The order of bytes is free: np.concatenate makes it native."""
    one = case[0]
    return one["what"] == "travel" and any(
        np.asarray(array).dtype.newbyteorder("=") != one["arrays"][name].dtype.newbyteorder("=")
        for rank in got for j, read in rank["read"].items()
        for array, (name, _, _) in zip(read, one["readers"][int(j)], strict=True))


WRONG_DTYPE = ("an array comes back in another dtype than it was written in: the notes must say it, with its sign, and "
               "each array has its own")
SIGNATURES = [
    c("stop is the last element: it is the one behind it",
      change=lambda found, one: [[n, a, b - 1] for n, a, b in found]),
    when("pieces without elements are in the list: of which a rank has nothing, it has no piece", has_empty),
    c("the line is divided rounding down: the last elements are nobody's", each=lambda total, ranks: total // ranks),
    c("the line is divided rounding down, and the last rank has the rest: all intervals are equally long, and the line "
      "is padded", each=lambda total, ranks: max(total // ranks, 1), last_too=True),
    c("the line is divided rounding down, and the last rank has the rest: all intervals are equally long, and the line "
      "is padded", each=lambda total, ranks: total // ranks, last_too=True),
    gives("the first ranks have one element more, as np.array_split cuts: here the line is padded, and all have as "
          "many", lambda case: None if case[0]["what"] != "cut" else
          [{"cuts": [uneven(one) for one in case[0]["questions"]]}] * len(case)),
    c("each array is cut by itself: all arrays are one line, and that is cut", line=False),
    c("start and stop are counted from the line's first element: they are from the array's", change=on_the_line),
    c("the padding is counted as the last array's: it is nobody's", change=padded),
    c("the arrays are in the reverse order", change=lambda found, one: found[::-1]),
    c("an exact fit is padded by one more each: rounding up is -(-n // ranks)",
      each=lambda total, ranks: total // ranks + 1),
    when(WRONG_DTYPE, lambda case, got: wrong_dtype(case, got)),
    when("two ranks write a file of the same name: the folder is one for all, and the last one's stays",
         lambda case, got: len(set(got[0]["files"])) < len(got[0]["files"])),
    when(lambda case, got: "nothing is missing and nothing too short, and still: "
         f"{next(text for rank in got for text in rank['raised'].values())}. Is a place in the whole array taken for "
         "one in the file?", lambda case, got: any(rank["raised"] for rank in got)),
    gives("the order of an array's bytes is lost: of '<f4' and of '>f4' dtype.name is float32, and dtype.str tells "
          "them apart", lambda case: travels(case, in_native_order)),
    t("the place in the file is counted in elements, not in bytes", begin=lambda at, lo, first, size: at + lo - first),
    t("each piece is read from the file's beginning: several lie behind one another, and the note must say where",
      begin=lambda at, lo, first, size: (lo - first) * size),
    t("each piece is read from its own beginning: what is wanted may begin later in it",
      begin=lambda at, lo, first, size: at),
    t("elements are looked for where they are in the whole array: the file has a piece of it only",
      begin=lambda at, lo, first, size: at + lo * size),
    t("every overlap is written to the beginning of the result", place=lambda lo, start: 0),
    t("of several files that hold a part only the first is read", which=lambda pieces: pieces[:1]),
    t("of several files that hold a part only the last is read", which=lambda pieces: pieces[-1:]),
    gives("what comes is as long as it should be, but from the array's beginning: start is ignored",
          lambda case: travels(case, shifted)),
    t("overlaps go to where they are in the whole array, not in what is wanted", place=lambda lo, start: lo),
]


# ---------------------------------------------------------------- demands

def of_travels(predicate, harm=None):
    return lambda case, got: case[0]["what"] != "travel" or case[0]["harm"] != harm or predicate(case[0], got)


def bytes_of(one, j):
    return sum((stop - start) * one["arrays"][name].itemsize for name, start, stop in one["readers"][int(j)])


def read_too_much(one, got):
    return next(((j, n, bytes_of(one, j)) for rank in got for j, n in rank["bytes"].items() if n != bytes_of(one, j)),
                None)


def written(one, got):
    return sum(rank["written"] for rank in got), sum(array.nbytes for array in one["arrays"].values())


def raised(got):
    """{reader: what it raised, or None}."""
    return {j: text for rank in got for j, text in (dict.fromkeys(rank["read"]) | rank["raised"]).items()}


HURT, NOT_HURT = "0", ("1", "2")
WORDS = {"missing": lambda one, got: [got[0]["file"]], "short": lambda one, got: [got[0]["file"]],
         "silent": lambda one, got: [name for name, _, _ in one["writers"][one["hurt"]]],
         "unknown": lambda one, got: ["w.v"]}


def another_error(got):
    """What a reader raised that isn't a CheckpointError: the drive writes its type before it."""
    kind = (raised(got)[HURT] or "").split(":")[0]
    return kind.isidentifier() and kind.endswith("Error")


def trained(case):
    return case[0]["what"] == "training"


def apart(case, got):
    right = training.of_library(case[0])
    return max(np.abs(np.subtract(rank["losses"], right[:len(rank["losses"])])).max() for rank in got)


def harmed(harm, what):
    """The demands on one kind of damage. what: words."""
    def words(case, got):
        return " or ".join(WORDS[harm](case[0], got))
    return [
        demand(f"{what}, and a rank that needs it reads on: part of what it gives was never read. Count what came",
               of_travels(lambda one, got: raised(got)[HURT] is not None, harm)),
        demand(lambda case, got: f"{what}: {raised(got)[HURT]}. A CheckpointError is asked for, that says which one",
               of_travels(lambda one, got: not another_error(got), harm)),
        demand(lambda case, got: f"{what}, and the error is “{raised(got)[HURT]}”: whoever reads it must know that "
                                 f"it's {words(case, got)}", of_travels(
                                     lambda one, got: any(word in raised(got)[HURT] for word in WORDS[harm](one, got)),
                                     harm)),
        demand(lambda case, got: f"{what}, and a rank that needs nothing of it raises, too: it could go on",
               of_travels(lambda one, got: not any(raised(got)[j] for j in NOT_HURT), harm)),
    ]


SILENT = "one rank's note is missing, so that nobody knows where a part of the arrays lies"
DEMANDS = [
    demand(WRONG_DTYPE, of_travels(lambda one, got: not wrong_dtype([one], got))),
    demand(lambda case, got: "right, but reader {} has read {:,} bytes, and wants {:,}: read from the first element "
                             "that is wanted to the last, not whole pieces or files".format(
                                 *read_too_much(case[0], got)),
           of_travels(lambda one, got: not read_too_much(one, got))),
    demand(lambda case, got: "right, but {:,} bytes were written, where all arrays have {:,}: each rank writes what it "
                             "has, as it is".format(*written(case[0], got)),
           of_travels(lambda one, got: written(one, got)[0] <= written(one, got)[1])),
    *harmed("missing", "a file is missing"),
    *harmed("short", "a file is too short"),
    *harmed("silent", SILENT),
    demand(f"{SILENT}, and a rank that needs just this part reads on: nothing of what it gives was ever read",
           of_travels(lambda one, got: raised(got)["3"] is not None, "silent")),
    *harmed("unknown", "an array is wanted that nobody has written"),
    demand(lambda case, got: "all right by itself, but not in a training run: "
                             f"{next(rank['failed'] for rank in got if 'failed' in rank)}",
           lambda case, got: not trained(case) or not any("failed" in rank for rank in got)),
    demand(lambda case, got: "all right by itself, but a run of ZeRO that is killed and resumed with it leaves the "
                             f"library's curve, by {apart(case, got):.1g}",
           lambda case, got: not trained(case) or apart(case, got) < 1e-9),
]
