"""Tests that run aside: in a second pytest, of low priority, while this one runs the others, which mostly wait: for
ranks, for limits, for signals. Aside is only what measures no time and has no limit below 20 s.

This pytest gives the other the names of its tests, comes to them last, and takes the other's reports for its own.
"""

import contextlib
import os
import pickle
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
# What the other runs, in this order, and what this one begins with: checks with limits of a second run beside tests of
# one process.
ASIDE = ("kernels/", "compiler/", "nn/", "optim/", "parallel/", "device/", "checkpoints/")
FIRST = "exercises/"
AT_LEAST = 1000       # tests aside, and others: below that a second process gains nothing
NICE = 5              # of the scale from 0 to 19: a quarter or a third of the time of a process of usual priority
LOOK_EVERY = 0.05     # seconds
END_SECONDS = 20      # for the other to end
END = "end"           # of what is told of a test
VARIABLE = "MINITORCH_TESTS_ASIDE"      # in the other's environment: the folder where the two meet


def place(item):
    """The number of the entry in ASIDE that a test belongs to; None: it isn't run aside."""
    name = item.path.relative_to(ROOT).as_posix() + "::" + item.name
    return next((number for number, entry in enumerate(ASIDE) if name.startswith(entry)), None)


def can_be(config):
    """Whether nothing has been asked for that two processes can't give."""
    asked = config.option
    return hasattr(os, "nice") and not (asked.usepdb or asked.trace or asked.collectonly or asked.setupshow
                                        or asked.capture == "no" or hasattr(config, "workerinput"))     # of xdist


class Here:
    """The plugin of the pytest that was started by hand."""

    def __init__(self, config):
        self.config, self.process = config, None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        if changing := [item.nodeid for item in items if " at 0x" in item.nodeid]:
            raise pytest.UsageError(f"{changing[0]}: an address is in its name, so that another process has another "
                                    "name for it: give its parameters ids")
        aside = sorted((item for item in items if place(item) is not None), key=place)
        others = [item for item in items if place(item) is None]
        if min(len(aside), len(others)) >= AT_LEAST and can_be(self.config):
            others.sort(key=lambda item: not item.path.is_relative_to(ROOT / FIRST))
            items[:] = others + aside
            self.begin([item.nodeid for item in aside])

    def begin(self, names):
        self.names, self.folder = set(names), Path(tempfile.mkdtemp(prefix="aside-"))
        (self.folder / "names").write_text("\n".join(names))
        (self.folder / "reports").touch()
        self.reports = open(self.folder / "reports", "rb")
        asked, root = self.config.option, self.config.rootpath
        arguments = ["--rootdir", str(root), "--tb", asked.tbstyle, "-p", "no:cacheprovider"]
        for flag, values in (("-p", asked.plugins), ("-W", asked.pythonwarnings), ("-o", asked.override_ini)):
            arguments += [flag + value for value in values or ()]
        files = sorted({name.partition("::")[0] for name in names})
        with open(self.folder / "said", "w") as said:
            self.process = subprocess.Popen([sys.executable, "-m", "pytest", *arguments, *files], cwd=root,
                                            env=os.environ | {VARIABLE: str(self.folder)}, stdin=subprocess.DEVNULL,
                                            stdout=said, stderr=said, start_new_session=True)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item):
        if self.process is None or item.nodeid not in self.names:
            return None
        item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
        for hook, told in self.told(item.nodeid):
            if hook == "pytest_warning_recorded":
                item.ihook.pytest_warning_recorded.call_historic(kwargs=told)
            else:
                report = self.config.hook.pytest_report_from_serializable(config=self.config, data=told)
                item.ihook.pytest_runtest_logreport(report=report)
        item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
        return True

    def told(self, name):
        """[(hook, what it is told)] of a test: the tests come in the order of the names."""
        found = []
        while not found or found[-1][0] != END:
            ended = self.process.poll() is not None
            size = int.from_bytes(self.peeked(8), "little")
            record = self.peeked(8 + size)[8:]
            if size and len(record) == size:
                self.reports.seek(8 + size, os.SEEK_CUR)
                of, *told = pickle.loads(record)
                if of != name:
                    self.fail(f"tells of {of}, where it should of {name}")
                found.append(told)
            elif ended:
                self.fail(f"has ended with status {self.process.returncode} before it told of {name}")
            else:
                time.sleep(LOOK_EVERY)
        return found[:-1]

    def fail(self, what):
        said = (self.folder / "said").read_text(errors="replace")[-5000:]
        pytest.exit(f"the pytest aside {what}; it said:\n{said}", returncode=pytest.ExitCode.INTERNAL_ERROR)

    def peeked(self, size):
        place = self.reports.tell()
        found = self.reports.read(size)
        self.reports.seek(place)
        return found

    def pytest_unconfigure(self):
        if self.process is not None:
            if self.process.poll() is None:       # where this one ends early: the other ends its ranks
                self.process.send_signal(signal.SIGINT)
            try:
                self.process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
            self.reports.close()
            shutil.rmtree(self.folder, ignore_errors=True)


class There:
    """The plugin of the other: runs those tests alone, and tells of them."""

    def __init__(self, config, folder):
        self.config, self.folder, self.parent = config, folder, os.getppid()
        self.names = {name: number for number, name in enumerate((folder / "names").read_text().split("\n"))}
        self.reports = open(folder / "reports", "ab")
        del os.environ[VARIABLE]
        os.nice(NICE)
        signal.signal(signal.SIGINT, signal.default_int_handler)    # also where a shell has it ignored
        with contextlib.suppress(OSError):      # where Linux weighs sessions, not processes
            Path("/proc/self/autogroup").write_text(str(NICE))

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        items[:] = sorted((item for item in items if item.nodeid in self.names),
                          key=lambda item: self.names[item.nodeid])

    def pytest_runtest_logreport(self, report):
        data = self.config.hook.pytest_report_to_serializable(config=self.config, report=report)
        self.tell(report.nodeid, "pytest_runtest_logreport", data)

    def pytest_warning_recorded(self, warning_message, when, nodeid, location):
        if when == "runtest":
            warning_message.source = None       # whatever it is from
            self.tell(nodeid, "pytest_warning_recorded", {"warning_message": warning_message, "when": when,
                                                          "nodeid": nodeid, "location": location})

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item):
        result = yield
        self.tell(item.nodeid, END, None)         # behind the warnings
        if os.getppid() != self.parent:
            shutil.rmtree(self.folder, ignore_errors=True)
            pytest.exit("whoever asked for these tests is gone")
        return result

    def tell(self, name, hook, told):
        record = pickle.dumps((name, hook, told))
        self.reports.write(len(record).to_bytes(8, "little") + record)
        self.reports.flush()


def plugin(config):
    folder = os.environ.get(VARIABLE)
    return There(config, Path(folder)) if folder else Here(config)
