"""21.1: which finds after a crash are right, and what the others come from."""

import numpy as np

from exercises.frame import demand

NAMES = ("rank-0", "rank-1", "rank-10")
DIGITS = ("rank-11", "rank-1", "st", "1st")      # in front of a 1 or 11, or behind it, two of them are the same
LARGE = 1500         # bytes that are seen when a save leaves them behind


def one(rng, step, sizes, names=NAMES):
    """A checkpoint; bytes other than 0."""
    return {"step": step, "files": {name: rng.integers(1, 256, size).astype(np.uint8)
                                    for name, size in zip(names, sizes, strict=False)}}


def cases(rng):
    """Each saves several times; `again`: what the program saves when it begins again after a crash, on fewer ranks."""
    def size():
        return int(rng.integers(200, 400))
    numbers = [[0, 4], [9, 10, 100]]
    sizes = [[[size()], [size(), 0, LARGE + size()]],
             [[size(), size(), 0], [size(), size(), size()], [size(), size()]]]
    agains = [[(4, 2), (5, 1)], [(10, 2), (55, 1), (100, 1), (101, 2)]]
    alike = {"saves": [one(rng, step, [size() for _ in DIGITS], DIGITS) for step in (1, 11)], "again": []}
    return [*({"saves": [one(rng, step, of) for step, of in zip(steps, many, strict=True)],
               "again": [one(rng, step, [size() for _ in range(ranks)]) for step, ranks in again]}
              for steps, many, again in zip(numbers, sizes, agains, strict=True)), alike]


def allowed(row):
    new = {str(row["new"])}
    return new if row["done"] else new | {"nothing" if row["old"] is None else str(row["old"])}


def bad(got, which=lambda row: True):
    """The rows that mustn't be, of which the least is lost first; those of second lives only if there are no others."""
    found = [row for row in got["rows"] if row["found"] not in allowed(row)]
    found = [row for row in found if not row["life"]] or found
    return sorted((row for row in found if which(row)), key=lambda row: len(row["lost"]))


def shown(row):
    """Lines under a sentence: where it died, what was on the disk, what was read."""
    when = "after save had returned" if row["done"] else f"after call {row['number']} of save, {row['call']}"
    begun = f"  a program that begins again, and finds {row['life'] or 'nothing'}\n" if row["life"] else ""
    disk = ", ".join(f"{name} ({size} bytes)" for name, size in row["disk"].items()) or "no file"
    return (f"\n{begun}  died     {when}\n  lost     {'; '.join(row['lost']) or 'nothing'}\n  on disk  {disk}\n"
            f"  latest   {row['found']}; right would be {' or '.join(sorted(allowed(row)))}")


def told(got, which, sentence):
    row = bad(got, which)[0]
    text = sentence(row) if callable(sentence) else sentence
    return f"{'begun again after a crash: ' if row['life'] else ''}{text}{shown(row)}"


def no(sentence, which):
    """A demand that no row is bad and such."""
    return demand(lambda case, got: told(got, which, sentence), lambda case, got: not bad(got, which))


def kind(*kinds):
    return lambda row: row["found"].split(":")[0].split(" ")[0] in kinds


def lost(row, what):
    return any(text.startswith(what) for text in row["lost"])


def nothing_lost(row):
    return not row["lost"]


def step_of(row):
    """Which step a torn or mixed find is said to be of."""
    return row["found"].split("step ")[1].split(" ")[0].rstrip(",")


def both(*conditions):
    return lambda row: all(condition(row) for condition in conditions)


def by_names(row):
    """Whether no bytes were lost."""
    return bool(row["lost"]) and not any(text.startswith(("bytes", "all")) for text in row["lost"])


def by_bytes(row):
    return lost(row, "bytes of")


def by_removals(row):
    return by_names(row) and all(text.startswith("remove") for text in row["lost"])


def returned(row):
    return row["done"]


def not_returned(row):
    return not row["done"]


def at_rest(row):
    return returned(row) and nothing_lost(row)


def of_the_old(row):
    return row["found"].startswith(("torn", "mixed")) and step_of(row) == str(row["old"])


def undecided(row):
    """Whether the call that decides was lost, and nothing that it builds upon."""
    return lost(row, "rename") and not lost(row, "create")


def file_lost(row):
    return next(text.split("bytes of ")[1].split(":")[0] for text in row["lost"] if text.startswith("bytes of"))


def written_over(row):
    return (f"the old checkpoint is written over: where the program dies, step {row['old']} is damaged, and step "
            f"{row['new']} isn't there yet. Write the new one under other names")


DEMANDS = [
    no("step 0 was saved, and latest gives None: 0 is a step like any other, and None says that there is none",
       both(at_rest, kind("nothing"), lambda row: row["new"] == 0)),
    no(lambda row: f"nobody crashed, save({row['new']}) has returned, and latest {row['found']}: what latest gives is "
                   "not what save was given", both(at_rest, kind("raises", "strange", "torn", "mixed", "nothing"))),
    no(lambda row: f"save({row['new']}) has returned, step {row['old']} is on the disk as well, and latest takes that: "
                   "the newest is the one with the greatest number (as text 9 is greater than 10)",
       both(returned, lambda row: by_removals(row) or nothing_lost(row), lambda row: row["found"] == str(row["old"]))),
    no(lambda row: f"save has returned, and step {row['new']} is lost with the bytes of {file_lost(row)}: that file "
                   "was never synced (fsync), and what it holds was in memory only", both(returned, by_bytes)),
    no(lambda row: f"save has returned, and when the power fails the disk doesn't know what it has been told last: "
                   f"{row['lost'][-1]}. Names are safe after fsync_folder only",
       both(returned, by_names, lambda row: row["found"] in ("nothing", str(row["old"])))),
    no(written_over, both(nothing_lost, of_the_old, kind("torn"))),
    no(lambda row: f"several files, and one after the other becomes the new one: {row['found']}. One call must decide "
                   "for all of them", both(nothing_lost, kind("mixed"))),
    no(written_over, of_the_old),
    no(lambda row: f"for a while there is no checkpoint at all: step {row['old']} is gone before step {row['new']} "
                   "counts. What is old goes last", both(not_returned, nothing_lost, kind("nothing"))),
    no(lambda row: f"nothing was lost, and still: {row['found']}. latest takes what isn't finished: a checkpoint "
                   "counts when all of it is there, by one last call", both(nothing_lost, kind("torn"))),
    no(lambda row: f"latest {row['found']}, although nothing was lost: what a save has left that died must not stop it",
       both(nothing_lost, kind("raises"))),
    no(lambda row: f"the old checkpoint is removed before the new one is safe: {row['lost'][-1]} was lost, the removal "
                   "wasn't. Between a call that decides and a removal there must be an fsync_folder",
       both(not_returned, by_names, undecided)),
    no(lambda row: f"step {row['new']} counts already, and the names of its files aren't safe: {row['lost'][-1]}. The "
                   "disk writes names in any order: fsync_folder before the call that decides, too", by_names),
    no(lambda row: f"the new checkpoint has its name before its bytes: {row['lost'][-1]}. A name may be on the disk "
                   "sooner than the bytes behind it: fsync each file before the call that makes it count", by_bytes),
    no(lambda row: f"that is wrong: {row['found']}", lambda row: True),
    demand(lambda case, got: f"right, but when the first save has returned, {too_much(got, first=True)}. There was "
                             "none before: have the bytes become longer, as text, or does something stay behind?",
           lambda case, got: not too_much(got, first=True)),
    demand(lambda case, got: f"right, but when save has returned, {too_much(got)}. The one before is no longer needed",
           lambda case, got: not too_much(got)),
    demand(lambda case, got: f"right, but when save has returned, {too_much(got, True)}. A save that died has left "
                             "some of it, and nobody else will take it away",
           lambda case, got: not too_much(got, True)),
    *(demand(lambda case, got, life=life, end=end: f"right, but when save has returned, {stays(got, life)}. {end}",
             lambda case, got, life=life: not stays(got, life))
      for life, end in ((False, "When the new one counts, all of the one before goes"),
                        (True, "What a save has left that died must go as well"))),
]


def stays(got, life):
    """What of another checkpoint the rows `left` still have: words, or nothing."""
    for row in got["left"]:
        if row["life"] == life and row["old"]:
            return (f"{', '.join(row['old'])} still holds bytes of another checkpoint than that of step {row['step']}: "
                    f"there are {', '.join(row['names'])}")
        if row["life"] == life and row["more"] > 0:
            return (f"the disk has more names than after the same save on an empty disk, by {row['more']}: there are "
                    f"{', '.join(row['names'])}")
    return ""


def too_much(got, life=False, first=False):
    """What of the rows `left` has too many bytes: words, or nothing. first: of the one after the first save alone."""
    for row in got["left"][:1 if first else None]:
        if row["bytes"] > 1.5 * row["of it"] + 600 and row["life"] == life:
            return (f"there are {row['bytes']:,} bytes on the disk, of which the checkpoint of step {row['step']} "
                    f"needs {row['of it']:,}: {', '.join(row['names'])}")
    return ""


def table(got):
    """[((number, call), {finds})] of the last save of a first life, for the picture."""
    rows = [row for row in got["rows"] if not row["life"]]
    calls = {}
    for row in rows:
        if row["new"] == rows[-1]["new"]:
            call = "save has returned" if row["done"] else row["call"]
            calls.setdefault((row["number"], call), set()).add(row["found"])
    return list(calls.items())
