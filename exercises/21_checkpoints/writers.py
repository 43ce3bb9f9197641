"""21.4: in which order what must happen, and what known mistakes look like."""

import numpy as np

from exercises.frame import demand

FULL = "{}: step {}: the disk is full"
SCRIPTS = {     # {step: what its write raises}, what is called, what it raises, which steps are written
    "of the next save": ({1: "OSError"}, [1, 2, 3, "wait"], ["", 1, "", ""], [3]),
    "of wait, which is no Exception": ({1: "SystemExit"}, [1, "wait", 2, "wait"], ["", 1, "", ""], [2]),
    "of wait": ({1: "MemoryError"}, [1, "wait", "wait", 2, "wait"], ["", 1, "", "", ""], [2]),
    "of two": ({1: "OSError", 3: "OSError"}, [1, 2, 3, 4, 5, "wait"], ["", 1, "", 3, "", ""], [5]),
}
SAVES = 4


def state(rng):
    return {"w": rng.normal(0, 1, (3, 2)).astype(np.float32), "step": 7,
            "adam": {"m": rng.normal(0, 1, 5), "updates": 3,
                     "more": [rng.integers(0, 99, 4), 0.5, {"slow": rng.normal(0, 1, 4)}]}}


def cases(rng):
    return [{"what": "beside", "state": state(rng)}, {"what": "one", "state": state(rng), "saves": SAVES},
            *({"what": "fails", "which": which, "state": state(rng), "script": script, "steps": list(kinds),
               "raised": list(kinds.values())} for which, (kinds, script, _, _) in SCRIPTS.items()),
            {"what": "two", "state": state(rng)}, {"what": "late", "state": state(rng)}]


def happened(call, what):
    name = call if call == "wait" else f"save {call}"
    return f"{name} raises {what}" if what else f"{name} returns"


def right(case):
    """What is called, and what comes of it: {"calls", "written"}."""
    kinds, script, outcomes, written = SCRIPTS[case["which"]]
    said = [step and FULL.format(kinds[step], step) for step in outcomes]
    return {"calls": [happened(*pair) for pair in zip(script, said, strict=True)], "written": written}


def of(what, sentence, holds):
    """A demand on the cases of this kind."""
    return demand(sentence, lambda case, got: case["what"] != what or holds(case, got))


def changed(case, got):
    """Which items of the state aren't written as they were when save was called: their names."""
    (_, there), before = got["written"][0], case["state"]
    try:
        values = {"w": (there["w"], before["w"]), "adam.m": (there["adam"]["m"], before["adam"]["m"]),
                  "adam.more[0]": (there["adam"]["more"][0], before["adam"]["more"][0]),
                  "adam.more[2].slow": (there["adam"]["more"][2]["slow"], before["adam"]["more"][2]["slow"])}
        found = [name for name, (now, then) in values.items() if not np.array_equal(now, then)]
        found += [f"{name}, which is {now.dtype} and was {then.dtype}" for name, (now, then) in values.items()
                  if np.asarray(now).dtype != then.dtype]
        return (found + ["step"] * (there["step"] != before["step"])
                + ["adam.more"] * (len(there["adam"]["more"]) != len(before["adam"]["more"]))
                + ["adam.updates"] * (there["adam"]["updates"] != before["adam"]["updates"]))
    except (KeyError, TypeError, IndexError):
        return ["its form"]


def steps(got):
    return [step for step, _ in got["written"]]


def errors(calls):
    return [call for call in calls if " raises " in call]


def raised(calls):
    """{what came out of them}."""
    return {call.split(" raises ")[1] for call in errors(calls)}


def listed(case, got):
    """Lines: what was called, what happened, what should."""
    rows = zip(right(case)["calls"], got["calls"], strict=False)
    return "\n" + "\n".join(f"  {then}" + (f"     right would be: {now}" if now != then else "") for now, then in rows)


def each_try(calls):
    """Lines: what happened, in order."""
    return "".join(f"\n  {', '.join(of_try)}" for of_try in calls)


def fails_demand(sentence, holds):
    return of("fails", lambda case, got: f"step {case['steps'][0]} couldn't be written, and {sentence}"
              + listed(case, got), holds)


def same_calls(case, got):
    return got["calls"] == right(case)["calls"]


DEMANDS = [
    of("beside", lambda case, got: f"no failure anywhere, and {errors(got['calls'])[0]}",
       lambda case, got: not errors(got["calls"])),
    of("beside", "what was saved is never written", lambda case, got: got["beside"]),
    of("beside", "write is called more than once for one save", lambda case, got: len(got["beside"]) == 1),
    of("beside", "write runs in the thread that trains: save returns when all is written, and training stands still "
                 "until then", lambda case, got: got["beside"] == [True]),
    of("beside", "save starts a thread, and waits for it: training stands still as long as without one",
       lambda case, got: got["early"]),
    of("beside", "the thread copies the state: until it has got to that, the next step has overwritten some of it. "
                 "save copies, and then starts the thread", lambda case, got: not got["others"]),
    of("beside", "wait returns before the write has ended: who leaves the program then has no checkpoint",
       lambda case, got: got["waited"] and steps(got)),
    of("beside", lambda case, got: "what was written isn't what it was when save was called: "
                                   f"{', '.join(changed(case, got))}. The run goes on meanwhile, and changes it: "
                                   "copy everything, in whatever it lies",
       lambda case, got: steps(got) == [1] and not changed(case, got)),
    of("one", lambda case, got: f"no failure anywhere, and {errors(got['calls'])[0]}",
       lambda case, got: not errors(got["calls"])),
    of("one", lambda case, got: f"the write of step {got['together'][0]} begins before the one before it has ended: "
                                "two at once take each other's disk, and as many copies of the state are in memory",
       lambda case, got: not got["together"]),
    of("one", lambda case, got: f"of {case['saves']} saves those of steps {', '.join(map(str, steps(got)))} were "
                                "written: a save that comes while another one is being written waits for it; it isn't "
                                "left out", lambda case, got: set(steps(got)) == set(range(1, case["saves"] + 1))),
    of("one", lambda case, got: f"save {got['unwaited'][0]} returns while the one before it is still being written: "
                                "states queue up, and each is a copy in memory. Wait first",
       lambda case, got: not got["unwaited"]),
    of("one", lambda case, got: f"the steps were written in the order {', '.join(map(str, steps(got)))}",
       lambda case, got: steps(got) == sorted(steps(got))),
    of("one", "a write has the values of a later save: each has a copy of its own",
       lambda case, got: all(step == value for step, value in got["written"])),
    fails_demand("nobody hears of it: an exception in a thread ends that thread, and no other. Keep it, and raise it "
                 "in the next save or wait", lambda case, got: errors(got["calls"])),
    fails_demand("it comes out more than once: what was raised must be forgotten",
                 lambda case, got: len(errors(got["calls"])) <= len(errors(right(case)["calls"]))),
    fails_demand("the error that comes out is another one: raise the one that write met",
                 lambda case, got: raised(got["calls"]) <= raised(right(case)["calls"])),
    fails_demand("the save that raises writes all the same: who hears the error doesn't know that",
                 lambda case, got: not {int(call.split()[1]) for call in errors(got["calls"])
                                        if call.startswith("save")} & set(got["written"])),
    fails_demand("the error doesn't come out where it should", same_calls),
    of("fails", lambda case, got: f"after an error was heard, steps {got['written']} were written, and should be "
                                  f"{right(case)['written']}: the Writer can be used again", lambda case, got:
       got["written"] == right(case)["written"]),
    of("two", "two Writers take turns, and hear each other's errors, or wait for each other: what one remembers "
              "belongs to it, not to the class or the file", lambda case, got:
       got == {"apart": True, "written": [[], [1, 2]],
               "calls": [["save 1 returns", f"save 2 raises {FULL.format('OSError', 1)}", "wait returns"],
                         ["save 1 returns", "wait returns", "save 2 returns", "wait returns"]]}),
    of("late", lambda case, got: "a write fails while it is waited for, and who waits doesn't hear of it: look for the "
                                 "error when the thread has ended, not before" + each_try(got["calls"]),
       lambda case, got: got["calls"] == [["save 1 returns", f"{what} raises {FULL.format('OSError', 1)}",
                                           "wait returns"] for what in ("wait", "save 2")]),
]
