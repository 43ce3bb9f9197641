"""`pytest --quick`, which `make test` is: of the cases of each test one in twenty, and no test marked `thorough`. CI,
`make test-all` and pytest by itself run all of them; and who asks for tests by `-k` gets all of those.
"""

from pathlib import Path

ROOT = Path(__file__).parent
EVERY = 20
# Folders whose tests take some hundredths of a second each, and a file whose cases are looked at in no time.
WHOLE = ("autodiff/", "nn/", "optim/", "data/", "device/", "compress/", "testing/", "kernels/test_compiled.py")


def left_out(tests):
    """Those of [(name, whether it is thorough)] that a quick run leaves out, as a set of names. The name of a test's
    case ends with its parameters in brackets: the first is run, and every twentieth after it."""
    out, seen = set(), {}
    for name, thorough in tests:
        test, _, case = name.partition("[")
        number = seen[test] = seen.get(test, -1) + 1
        if thorough or case and number % EVERY and not name.startswith(WHOLE):
            out.add(name)
    return out


def asked(request, *parameters):
    """The values of these parameters in those tests of the module that will run, as tuples: for fixtures that do the
    work of many cases at once."""
    tests = [item.callspec.params for item in request.session.items
             if item.path == request.path and hasattr(item, "callspec")]
    return list(dict.fromkeys(tuple(test[name] for name in parameters) for test in tests
                              if test.keys() >= set(parameters)))


class Quick:
    """The plugin."""

    def pytest_collection_modifyitems(self, config, items):
        if config.option.keyword:
            return
        names = {item: item.path.relative_to(ROOT).as_posix() + "::" + item.nodeid.partition("::")[2]
                 for item in items}
        out = left_out([(name, item.get_closest_marker("thorough") is not None) for item, name in names.items()])
        config.hook.pytest_deselected(items=[item for item in items if names[item] in out])
        items[:] = [item for item in items if names[item] not in out]


def add_option(parser):
    parser.addoption("--quick", action="store_true", help="of each test one case in twenty, and none that takes long: "
                     "what `make test` does; make test-all runs everything")

