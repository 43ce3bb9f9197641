"""24.1 piece by piece, and what known mistakes would give."""

import bisect

import numpy as np

from exercises.frame import demand, gives, when

NAMES = "tokens", "targets", "documents", "positions"
FILL = {"tokens": 0, "targets": -100, "documents": -1, "positions": 0}
PICTURE = {"rows": 24, "length": 32, "vocabulary": 29}


# ---------------------------------------------------------------- cases

def documents(rng, lengths, high=50):
    return [rng.integers(high, size=n) for n in lengths]


def cases(rng):
    lengths = [[7, 0, 3, 12, 1, 6, 2, 11, 21, 5, 16, 4], [9, 9, 3, 8, 4, 9, 5, 2, 2, 6, 10]]
    of_text = [{"documents": documents(rng, rng.permutation(each)), "length": length}
               for each, length in zip(lengths, (5, 8), strict=True)]
    of_text += [{"documents": documents(rng, each), "length": length} for each, length in (
        ([4, 1, 3, 2], 1), ([], 4), ([1, 0], 4), (rng.integers(2, 30, 40).tolist(), 13))]
    of_text[2]["documents"] = [(65535 - each).astype(np.uint16) for each in of_text[2]["documents"]]     # as GPT-2's
    found = [{"what": "pieces", **case} for case in of_text]
    sizes = [[3, 5, 1, 4, 2, 2, 5, 3], [2, 4, 6, 4, 7, 3, 5, 3, 6, 1, 1], [4, 4, 4], [10, 1, 12, 9], [16, 14, 9, 1],
             rng.integers(1, 21, 150).tolist(), rng.integers(1, 9, 30).tolist(), []]
    found += [{"what": "best_fit", "sizes": each, "length": length}
              for each, length in zip(sizes, (5, 9, 4, 20, 24, 20, 12, 3), strict=True)]
    found += [{"what": "pack", **case} for case in of_text]
    for row in ([[0, 0, 1, 1, 1], [0, 1, 2, -1, -1], [-1] * 5], [[0, 0, 0]], [[0], [0]], [[*range(299), -1]]):
        found.append({"what": "visible", "documents": np.array(row)})
    lengths = np.minimum(2 + rng.gamma(1.1, 11.0, PICTURE["rows"]), 75).astype(int).tolist()
    return [*found, {"what": "pack", "picture": 1, "seed": int(rng.integers(1 << 30)), "length": PICTURE["length"],
                     "documents": documents(rng, [*lengths, 40], PICTURE["vocabulary"])}]


# ---------------------------------------------------------------- rightly, and with mistakes

def cut(document, length):
    """[(start, stop)] of one."""
    pairs = np.arange(max(len(document) - 1, 0))
    return [(int(each[0]), int(each[-1]) + 1) for each in np.split(pairs, pairs[length::length]) if len(each)]


def longest_first(sizes):
    return sorted((-size, i) for i, size in enumerate(sizes))


def fullest(rooms, size):
    """Of [(room, row)] in order: the index of the row to take, or None."""
    at = bisect.bisect_left(rooms, (size, -1))
    return at if at < len(rooms) else None


def fitted(sizes, length, order=longest_first, choose=fullest):
    """Rows by a list of rooms that stays sorted."""
    rows, rooms = [], []
    for _, piece in order(sizes):
        at = choose(rooms, sizes[piece])
        room, row = (length, len(rows)) if at is None else rooms.pop(at)
        if at is None:
            rows.append([])
        rows[row].append(piece)
        bisect.insort(rooms, (room - sizes[piece], row))
    return rows


def written(piece, document, number, start, stop):
    """{name: what stands at the piece's positions}."""
    return {"tokens": document[start:stop], "targets": document[start + 1:stop + 1], "documents": number,
            "positions": np.arange(stop - start)}


def looks(same, i, j):
    return same & (i >= j)


def visible(numbers, how=looks):
    i, j = np.indices((numbers.shape[1],) * 2)
    return np.stack([how(row[i] == row[j], i, j) for row in numbers]) if len(numbers) else np.zeros(
        (0, *i.shape), bool)


def run(case, cut=cut, fit=fitted, write=written, see=looks, fill=None, after=None, by_document=False):
    """The outputs of one case; the keywords are the mistakes."""
    if case["what"] == "visible":
        return {"result": visible(case["documents"], see)}
    if case["what"] == "best_fit":
        return {"result": fit(case["sizes"], case["length"]), "changed": False}
    texts, length = [text.astype(np.int64) for text in case["documents"]], case["length"]
    pieces = [(i, *each) for i, text in enumerate(texts) for each in cut(text, length)]
    if case["what"] == "pieces":
        return {"result": pieces}
    rows = fit([stop - start for _, start, stop in pieces], length)
    if any(p >= len(pieces) for row in rows for p in row) or any(
            sum(pieces[p][2] - pieces[p][1] for p in row) > length for row in rows):
        return None     # writing these would raise
    found = {name: np.full((len(rows), length), (FILL | (fill or {}))[name]) for name in NAMES}
    for r, row in enumerate(rows):
        at = 0
        for number, p in enumerate(row):
            i, start, stop = pieces[p]
            for name, values in write(p, texts[i], i if by_document else number, start, stop).items():
                found[name][r, at:at + (stop - start if np.isscalar(values) else len(values))] = values
            at += stop - start
    if after:
        after(found)
    return {**found, "visible": visible(found["documents"], see), "changed": False}


# ---------------------------------------------------------------- mistakes

def p(text, **how):
    return gives(text, lambda case: run(case, **how))


def of_tokens(document, length):
    return [(start, min(start + length, len(document))) for start in range(0, len(document), length)]


def rest_first(document, length):
    pairs = max(len(document) - 1, 0)
    begins = [0] * bool(pairs % length) + list(range(pairs % length, pairs, length))
    return list(zip(begins, [*begins[1:], pairs], strict=False))


def overlapping(document, length):
    """A piece begins with the last token of the one before, which is that one's last target: that's right; here it is
    the target before it."""
    pairs = max(len(document) - 1, 0)
    return [(start, min(start + length, pairs)) for start in range(0, pairs, max(length - 1, 1))]


def one_off(document, length):
    """Each piece gives up the pair over its end."""
    return [(start, min(start + length, len(document)) - 1) for start in range(0, len(document), length)
            if min(start + length, len(document)) - start > 1]


def evenly(document, length):
    pairs = np.arange(max(len(document) - 1, 0))
    return [(int(e[0]), int(e[-1]) + 1) for e in np.array_split(pairs, -(-len(pairs) // length) or 1) if len(e)]


def empty_rest(document, length):
    """A piece begins at the last token, where there is no pair left."""
    pairs = len(document) - 1
    return [(start, min(start + length, pairs)) for start in range(0, len(document), length)]


def at_least_one(document, length):
    return cut(document, length) or [(0, 0)]


def as_given(sizes):
    return [(size, i) for i, size in enumerate(sizes)]


def shortest_first(sizes):
    return sorted((size, i) for i, size in enumerate(sizes))


def ties_reversed(sizes):
    return sorted(((size, i) for i, size in enumerate(sizes)), reverse=True)


def first_fit(rooms, size):
    return min((i for i, (room, _) in enumerate(rooms) if room >= size), key=lambda i: rooms[i][1], default=None)


def worst_fit(rooms, size):
    return min((i for i, (room, _) in enumerate(rooms) if room >= size), key=lambda i: (-rooms[i][0], rooms[i][1]),
               default=None)


def next_fit(rooms, size):
    return max((i for i in range(len(rooms))), key=lambda i: rooms[i][1], default=None) if rooms and max(
        rooms, key=lambda r: r[1])[0] >= size else None


def last_tie(rooms, size):
    at = fullest(rooms, size)
    return None if at is None else max(i for i, (room, _) in enumerate(rooms) if room == rooms[at][0])


def with_room_left(rooms, size):
    return fullest(rooms, size + 1)


def new_rows(rooms, size):
    return None


def chosen(choose):
    return lambda sizes, length: fitted(sizes, length, choose=choose)


def ordered(order, choose=fullest):
    return lambda sizes, length: fitted(sizes, length, order, choose)


def by_positions_in_order(sizes, length):
    order = [i for _, i in longest_first(sizes)]
    return [[order.index(i) for i in row] for row in fitted(sizes, length)]


def sizes_in_rows(sizes, length):
    return [[sizes[i] for i in row] for row in fitted(sizes, length)]


def in_given_order(sizes, length):
    return [sorted(row) for row in fitted(sizes, length)]


def writes(**changes):
    """A mistake of what is written, name by name: f(document, number, start, stop, piece)."""
    def write(piece, document, number, start, stop):
        return written(piece, document, number, start, stop) | {
            name: f(document, number, start, stop, piece) for name, f in changes.items()}
    return write


def last_ignored(document, number, start, stop, piece):
    found = document[start + 1:stop + 1].copy()
    found[-1:] = -100
    return found


def last_ignored_at_end(document, number, start, stop, piece):
    found = document[start + 1:stop + 1].copy()
    if stop == len(document) - 1:
        found[-1:] = -100
    return found


def across(found):
    """Targets are the row's tokens, moved by one."""
    found["targets"][:, :-1] = found["tokens"][:, 1:]
    found["targets"][:, -1:] = -100


def across_not_padding(found):
    across(found)
    found["targets"][found["documents"] == -1] = -100


def running(found):
    found["positions"][:] = np.arange(found["positions"].shape[1])


def running_to_padding(found):
    running(found)
    found["positions"][found["documents"] == -1] = 0


def padding_counts_on(found):
    """Positions of padding as if it were a piece."""
    for numbers, positions in zip(found["documents"], found["positions"], strict=True):
        positions[numbers == -1] = np.arange((numbers == -1).sum())


def over_rows(found):
    """One number after another, over all rows."""
    before = 0
    for numbers in found["documents"]:
        many = numbers.max(initial=-1) + 1
        numbers[numbers >= 0] += before
        before += many


def padding_before(found):
    for numbers, *others in zip(*(found[name] for name in ("documents", *NAMES)), strict=True):
        gap = int((numbers == -1).sum())
        for each in others:
            each[:] = np.roll(each, gap)


SIGNATURES = [
    when("pack: tokens below 0: 16 bits with a sign end at 32,767, without one, as files have them, at 65,535",
         lambda case, got: case["what"] == "pack" and case["documents"][0].dtype == np.uint16 and np.min(
             got["tokens"]) < 0),
    when(lambda case, got: f"the {'sizes' if case['what'] == 'best_fit' else 'documents'} aren't what they were before "
         "the call: work on a copy", lambda case, got: got.get("changed", False)),
    p("a document of n tokens is n - 1 pairs: the last token has no next one, and belongs to no piece", cut=of_tokens),
    p("each piece gives up a pair: the target of its last token is the first of the next piece, which is known",
      cut=one_off),
    p("a document that is too long is dropped: it is cut", cut=lambda d, length: cut(d, length) if len(d) <= length + 1
      else []),
    p("the rest of a document that is too long is lost", cut=lambda d, length: [each for each in cut(d, length) if
                                                                          each[1] - each[0] == length or not each[0]]),
    p("the rest of a document that is too long is lost", cut=lambda d, length: cut(d, length)[:1]),
    p("the rest stands at the beginning of a document: full pieces first, from its beginning on", cut=rest_first),
    p("a long document is cut into equal pieces: full ones, and a rest", cut=evenly),
    p("a pair stands in two pieces: the next one starts where this one stops", cut=overlapping),
    p("a piece of no pairs begins at a document's last token, where the ones before it have all pairs: pieces begin at "
      "0, length, 2 · length … below n - 1", cut=empty_rest),
    p("a document of fewer than two tokens has become a piece of no pairs", cut=at_least_one),
    p("pieces go in the order in which they are given: the longest must go first, while there are rows with room for "
      "it (a short one fits nearly everywhere)", fit=ordered(as_given)),
    p("the shortest goes first: then the long ones find no room", fit=ordered(shortest_first)),
    p("of equal pieces the last goes first: sorting with reverse=True keeps their order, sorting and then reversing "
      "turns it", fit=ordered(ties_reversed)),
    p("first fit: the first row with room is taken; asked for is the one that has the least room of those",
      fit=chosen(first_fit)),
    p("worst fit: the row with the most room is taken, which a longer piece might have needed; take the one that is "
      "left with the least", fit=chosen(worst_fit)),
    p("next fit: only the last row is looked at. Earlier ones have room as well", fit=chosen(next_fit)),
    p("first fit, and in the order given: the longest first, and of all rows with room for it the fullest",
      fit=ordered(as_given, first_fit)),
    p("next fit, and in the order given: that is one document after another, without cutting; the longest first, and "
      "look at all rows", fit=ordered(as_given, next_fit)),
    p("of rows with equally little room the last is taken; the first is asked for", fit=chosen(last_tie)),
    p("a piece that fills a row to the last position fits, too: room >= size", fit=chosen(with_room_left)),
    p("one piece per row: that is what packing is to avoid", fit=chosen(new_rows)),
    p("rows hold places in the sorted order: asked for are numbers of the pieces, as in sizes",
      fit=by_positions_in_order),
    p("rows hold sizes: asked for are the numbers of the pieces", fit=sizes_in_rows),
    p("in a row the pieces are sorted by number: they stand in the order in which they came into it",
      fit=in_given_order),
    p("a target crosses a border: behind a document's last pair comes another document, which doesn't follow from it. "
      "And the last target of a row, or of a piece, is known, though it isn't in the row", after=across_not_padding),
    p("targets are the row's tokens moved by one: they cross the borders between documents, and padding is predicted",
      after=across),
    p("a piece's last target is IGNORED: it is known, the document's next token", write=writes(targets=last_ignored)),
    p("a document's last target is IGNORED: its last token is only there for that",
      write=writes(targets=last_ignored_at_end)),
    p("targets are the tokens themselves: the next ones are asked for", write=writes(
        targets=lambda d, n, start, stop, piece: d[start:stop])),
    p("every piece begins with its document's first token: from `start` on", write=writes(
        tokens=lambda d, n, start, stop, piece: d[:stop - start],
        targets=lambda d, n, start, stop, piece: d[1:stop - start + 1])),
    p("targets of padding are 0, which is a token: they would be learned. IGNORED", fill={"targets": 0}),
    p("targets of padding are -1: what is ignored is IGNORED, -100", fill={"targets": -1}),
    p("padding has the number of a document, 0: positions of that one would look at it, and it at them",
      fill={"documents": 0}),
    p("tokens of padding are IGNORED: an embedding has no such row. 0", fill={"tokens": -100}),
    p("tokens of padding are -1: an embedding would take its last row. 0", fill={"tokens": -1}),
    p("documents have their number in the list; asked for is their place in the row, 0, 1, 2 …", write=writes(
        documents=lambda d, n, start, stop, piece: piece)),
    p("documents have their number in the list of documents; asked for is their piece's place in the row, 0, 1, 2 …",
      by_document=True),
    p("documents are numbered on from row to row: each row begins with 0", after=over_rows),
    p("documents are numbered from 1: from 0", write=writes(documents=lambda d, n, start, stop, piece: n + 1)),
    p("all of a row has the number 0: documents would look at each other", write=writes(
        documents=lambda d, n, start, stop, piece: 0)),
    p("positions run on through the row: each piece's begin with 0, as if it stood alone", after=running_to_padding),
    p("positions run on through the row, and through padding: each piece's begin with 0", after=running),
    p("positions of a piece that is no document's beginning go on from the piece before: a model doesn't see that one, "
      "so they begin with 0", write=writes(positions=lambda d, n, start, stop, piece: np.arange(start, stop))),
    p("positions count from 1: from 0", write=writes(positions=lambda d, n, start, stop, piece: np.arange(
        stop - start) + 1)),
    p("positions of padding are 0", after=padding_counts_on),
    p("padding stands before the documents: behind them", after=padding_before),
    p("visible: later positions are seen: a target stands one position later, so it would be copied",
      see=lambda same, i, j: same),
    p("visible: other documents are seen: only those positions with the same number", see=lambda same, i, j: i >= j),
    p("visible: queries and keys have changed places: [i, j] is whether i sees j, and j may not be later",
      see=lambda same, i, j: same & (i <= j)),
    p("visible: a position sees itself, too", see=lambda same, i, j: same & (i > j)),
    p("visible: everything earlier, or of the same document: both must hold", see=lambda same, i, j: same | (i >= j)),
    p("visible: these are the ones that must not be seen", see=lambda same, i, j: ~(same & (i >= j))),
    gives("visible: padding sees nothing, so that its softmax is nan: let it look at padding",
          lambda case: unseen(case)),
    gives("visible: 8 bits are too few, a row may have more than 256 pieces: then those 256 apart look alike, and "
          "padding like one of them", lambda case: {"result": visible(case["documents"].astype(np.uint8))}
          if case["what"] == "visible" else run(case)),
    when("of equal pieces others go first: the one that stands first in sizes does. Python's sort keeps the order of "
         "what is equal, np.argsort only with kind='stable'", lambda case, got: only_equal_ones_differ(case, got)),
]


def only_equal_ones_differ(case, got):
    """Rows that are right but for which of equally long pieces is where."""
    right = run(case)
    if case["what"] == "best_fit":
        return [[case["sizes"][i] for i in row] for row in got["result"]] == [
            [case["sizes"][i] for i in row] for row in right["result"]]
    return case["what"] == "pack" and np.array_equal(got["documents"], right["documents"]) and all(
        np.array_equal(np.sort(got[name], None), np.sort(right[name], None)) for name in ("tokens", "targets"))


def unseen(case):
    """Padding sees nothing."""
    found = run(case)
    numbers = case["documents"] if case["what"] == "visible" else found.get("documents")
    if numbers is None:
        return found
    name = "result" if case["what"] == "visible" else "visible"
    return found | {name: found[name] & (numbers != -1)[:, :, None]}


def kinds(got, names):
    """The dtypes of those outputs that are there and have numbers in them."""
    arrays = {name: np.asarray(got[name]) for name in names if name in got}
    return {name: array.dtype for name, array in arrays.items() if array.size}


DEMANDS = [
    demand(lambda case, got: "right, but the four arrays must be int64: " + ", ".join(
        f"{name} {dtype}" for name, dtype in kinds(got, NAMES).items()),
        lambda case, got: set(kinds(got, NAMES).values()) <= {np.dtype(np.int64)}),
    demand("visible: right, but as numbers: bool, by which NumPy selects. Numbers would be taken for indexes",
           lambda case, got: set(kinds(got, {"pack": ["visible"], "visible": ["result"]}.get(
               case["what"], [])).values()) <= {np.dtype(bool)}),
]
