"""How the answers of this chapter are called."""

import importlib.util
from pathlib import Path

import numpy as np


def neighbour(name):
    """A module of this folder."""
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ahead = neighbour("stepwise").ahead        # 25.5

# ---------------------------------------------------------------- 25.1


class File:
    """Tokens on disk: counts those that are read, and remembers whether more were asked for than there are."""

    def __init__(self, tokens):
        self.tokens, self.dtype, self.read, self.beyond = tokens, tokens.dtype, 0, False

    def __len__(self):
        return len(self.tokens)

    def __getitem__(self, key):
        found = np.array(self.tokens[key])
        self.read += found.size
        if isinstance(key, slice) and key.stop is not None:
            self.beyond |= key.stop > len(self) or (key.start or 0) < 0
        return found


def read(learner, inputs, run):
    """Each of the file's functions. Of an IndexError, which may be asked for, its name and its text."""
    file, length = run.module, inputs["length"]
    if inputs["what"] == "row_bounds":
        return {"result": file.row_bounds(list(inputs["counts"]), length)}
    if inputs["what"] == "place":
        rows = inputs["rows"].copy()
        try:
            files, firsts = file.place(inputs["bounds"].copy(), length, rows)
        except IndexError as error:
            return {"files": "IndexError", "firsts": "IndexError", "error": str(error)}
        return {"files": files, "firsts": firsts}
    files, rows = [File(tokens.copy()) for tokens in inputs["files"]], inputs["rows"].copy()
    names = "inputs", "targets", "documents"
    try:
        found = dict(zip(names, learner(files, length, rows, inputs["end"]), strict=True))
    except IndexError as error:
        found = dict.fromkeys(names, "IndexError") | {"error": str(error)}
    except Exception:
        if not any(each.beyond for each in files):
            raise
        found = {}
    if beyond := any(each.beyond for each in files):
        found = dict.fromkeys(names)
    return found | {"beyond": beyond, "read": sum(each.read for each in files),
                    "changed": not np.array_equal(rows, inputs["rows"]) or not all(
                        np.array_equal(each.tokens, tokens) for each, tokens in zip(files, inputs["files"],
                                                                                    strict=True))}


# ---------------------------------------------------------------- 25.2

class Endless(Exception):
    """A walk that goes round and round."""


def counted(mixed_up, most):
    """mixed_up, for so many calls."""
    calls = iter(range(most))

    def counts(half, key):
        if next(calls, None) is None:
            raise Endless
        return mixed_up(half, key)
    return counts


def order(learner, inputs, run):
    """Each of the file's functions. Of a walk that doesn't end the result is None: other cases tell why it doesn't."""
    name = "places" if inputs["what"] == "order" else "numbers"
    given, keys, endless = inputs[name].copy(), inputs["keys"].copy(), False
    if name == "numbers":
        found = run.module.cipher(given, int(inputs["bits"]), keys)
    else:
        mixed_up = run.module.mixed_up
        run.module.mixed_up = counted(mixed_up, len(keys) * (400 + 2 * given.size))
        try:
            found = learner(given, int(inputs["n"]), keys)
        except Endless:
            found, endless = None, True
        run.module.mixed_up = mixed_up
    return {"result": found, "endless": endless, "changed": not (
        np.array_equal(given, inputs[name]) and np.array_equal(keys, inputs["keys"]))}


# ---------------------------------------------------------------- 25.3

def turns(learner, inputs, run):
    """Twice, as two ranks would."""
    weights = list(inputs["weights"])
    found, again = learner(weights), learner(list(inputs["weights"]))
    return {"result": found, "again": again, "changed": weights != inputs["weights"]}


# ---------------------------------------------------------------- 25.4

def where(learner, inputs, run):
    """Each of the file's functions, or a training run."""
    file, what = run.module, inputs["what"]
    if what == "part":
        pieces = [file.part(*each) for each in inputs["of"]]
        return {"result": [piece if len(piece) else np.zeros(0, np.int64) for piece in pieces]}
    if what == "had":
        return {"result": [file.had(source, list(inputs["pattern"]), count) for source, count in inputs["of"]]}
    if what == "run":
        try:
            return train(learner, inputs, run)
        except Outside:
            return {}
    found, changed = [], False
    for sample in inputs["samples"]:
        given = [[count, list(pattern)] for count, pattern in inputs["phases"]], list(inputs["sizes"])
        found.append(list(learner(sample, *given)))
        changed |= given != (inputs["phases"], inputs["sizes"])
    return {"result": found, "changed": changed}


class Outside(Exception):
    """A sample that the run doesn't have, or a place that a source doesn't have: other cases tell why."""


def train(learner, inputs, run):
    """A model that guesses each token from the one before, trained on all pieces together: {"losses": [of each step],
    on one rank; "later": the same of several ranks that begin later, from the same parameters; "rows":
    [[source, row] of each sample]; "bits": [[per token of each source's rows] before each step]}."""
    read, order, turns = (run.earlier[name] for name in ("read", "order", "turns"))
    phases = [(count, [int(i) for i in turns(list(weights))]) for count, weights in inputs["phases"]]
    sizes, length, batch, rows = inputs["sizes"], inputs["length"], inputs["batch"], {}

    def keys(source, number):
        return np.random.default_rng([inputs["seed"], source, number]).integers(0, 2**64, 12, np.uint64)

    def tokens(source, numbers):
        files = [File(each) for each in inputs["files"][source]]
        return read(files, length, np.array(numbers, np.int64), inputs["end"])

    def of_rank(step, rank, size):
        """(inputs, targets) of a rank's samples, one below the other."""
        found = [np.empty((2, 0, length), np.int64)]
        for sample in run.module.part(step, batch, rank, size):
            if not 0 <= sample < sum(count for count, _ in phases):
                raise Outside
            source, number, place = learner(int(sample), [(count, list(pattern)) for count, pattern in phases],
                                                list(sizes))
            if not 0 <= place < sizes[source]:
                raise Outside
            row = int(order(np.array([place], np.int64), sizes[source], keys(source, number))[0])
            rows[int(sample)] = [source, row]
            found.append(np.stack(tokens(source, [row])[:2]))
        return np.concatenate(found, 1)

    def losses_and_slopes(table, both):
        """(sum of the losses, how many, slopes of the sum)."""
        before, then = both[:, both[1] >= 0]
        log_probs = table[before] - np.log(np.exp(table[before]).sum(1, keepdims=True))
        slopes, change = np.zeros_like(table), np.exp(log_probs)
        change[np.arange(len(then)), then] -= 1
        np.add.at(slopes, before, change)
        return -log_probs[np.arange(len(then)), then].sum(), len(then), slopes

    def steps(table, first, size):
        for step in range(first, inputs["steps"]):
            parts = [losses_and_slopes(table, of_rank(step, rank, size)) for rank in range(size)]
            loss, count, slopes = (sum(each) for each in zip(*parts, strict=True))
            yield loss / count, table
            table = table - inputs["rate"] * slopes / count

    everything = [np.stack(tokens(source, range(size))[:2]) for source, size in enumerate(sizes)]
    losses, tables = zip(*steps(np.zeros((inputs["vocabulary"],) * 2), 0, 1), strict=True)
    later = [loss for loss, _ in steps(tables[inputs["begin"]], inputs["begin"], inputs["size"])]
    bits = [[loss / count / np.log(2) for loss, count, _ in (losses_and_slopes(table, both) for both in everything)]
            for table in tables]
    return {"losses": list(losses), "later": later, "rows": [rows[sample] for sample in sorted(rows)], "bits": bits}
