"""Downloads from a web server on this machine: what works, what fails over, what ends in time."""

import hashlib
import os
import socket
import sys
import threading
import time

import pytest

from minitorch_dist.data import download
from tests.data.mirrors import serving

pytest.importorskip("pooch")

CONTENTS = {"a.gz": os.urandom(100_000), "b.gz": os.urandom(7_000)}
FILES = {name: hashlib.sha256(content).hexdigest() for name, content in CONTENTS.items()}
PROBE, STALL = 0.6, 0.6   # seconds: the same clocks as in earnest, only shorter
IMPATIENT = {"probe_seconds": PROBE, "stall_seconds": STALL}
SLACK = 1.5               # for starting threads on a busy machine


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with serving(CONTENTS) as url:
        yield url


def fetch(folder, *mirrors, said=None, **seconds):
    """With patience, since the machine may be busy, where no test of waiting says something else."""
    return download.fetch(FILES, folder, mirrors, **{"probe_seconds": 30, "stall_seconds": 30, **seconds},
                          say=[].append if said is None else said.append)


def complete(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_success(server, tmp_path):
    said = []
    assert fetch(tmp_path / "new" / "cache", server("good"), said=said) == server("good")
    assert complete(tmp_path / "new" / "cache") == CONTENTS
    assert len(said) == 1 and "127.0.0.1" in said[0] and "cache" in said[0]


@pytest.mark.parametrize("bad", ["wrong", "cut", "gone", "missing", "mute"])
def test_the_next_mirror_takes_over(server, tmp_path, bad):
    assert fetch(tmp_path, server(bad), server("good"), probe_seconds=5) == server("good")
    assert complete(tmp_path) == CONTENTS


@pytest.mark.parametrize(("bad", "reason"), [
    ("wrong", "SHA256 hash .* does not match"),
    ("cut", "IncompleteRead|broken"),
    ("gone", "404"),
    ("missing", "HTTP status 404"),
    ("mute", "no answer within 0.6 s"),
    ("deaf", "no byte of a.gz for 0.6 s"),
    ("stall", "no byte of a.gz for 0.6 s"),
])
def test_each_failure_is_told_and_leaves_no_file(server, tmp_path, bad, reason):
    start = time.monotonic()
    with pytest.raises(download.DownloadError, match=f"(?s)127.0.0.1:.*({reason})"):
        fetch(tmp_path, server(bad), **IMPATIENT)
    assert time.monotonic() - start < PROBE + STALL + SLACK
    assert not set(complete(tmp_path)) & set(FILES)


def test_a_stall_ends_it_all(server, tmp_path):
    """Were the next mirror tried, and the one after, the waits would add up."""
    start = time.monotonic()
    with pytest.raises(download.DownloadError):
        fetch(tmp_path, *[server("deaf")] * 4, **IMPATIENT)
    assert time.monotonic() - start < PROBE + STALL + SLACK


def test_slow_is_not_stalled(server, tmp_path):
    """1.0 s for the file, with a limit of 0.6 s: it is silence that is limited."""
    start = time.monotonic()
    fetch(tmp_path, server("slow"), stall_seconds=STALL)
    assert time.monotonic() - start > 1.0
    assert complete(tmp_path) == CONTENTS


def test_a_live_mirror_does_not_wait_for_a_dead_one(server, tmp_path):
    start = time.monotonic()
    fetch(tmp_path, server("mute"), server("good"))
    assert time.monotonic() - start < 5


def test_what_is_complete_is_not_fetched_again(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(CONTENTS["a.gz"])
    fetch(tmp_path, server("good"))
    assert server.asked == ["/good/b.gz"]


def test_a_damaged_file_is_replaced(server, tmp_path):
    (tmp_path / "a.gz").write_bytes(b"damaged")
    fetch(tmp_path, server("good"))
    assert complete(tmp_path) == CONTENTS


def test_a_name_server_that_never_answers(monkeypatch, tmp_path):
    released = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: released.wait(20) and [])
    start = time.monotonic()
    try:
        with pytest.raises(download.DownloadError, match="(?s)one.invalid: no answer.*two.invalid: no answer"):
            fetch(tmp_path, "http://one.invalid/", "http://two.invalid/", **IMPATIENT)
        assert time.monotonic() - start < PROBE + SLACK
    finally:
        released.set()


def test_nothing_listens(tmp_path, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as closed:   # bound, not listening: connections are refused
        closed.bind(("127.0.0.1", 0))
        with pytest.raises(download.DownloadError, match="no connection"):
            fetch(tmp_path, f"http://127.0.0.1:{closed.getsockname()[1]}/")


def test_offline_costs_at_most_ten_seconds():
    assert download.PROBE_SECONDS + download.STALL_SECONDS <= 10


def test_several_hosts_are_known():
    assert len({download._host(mirror) for mirror in download.MIRRORS}) >= 2
    assert all(mirror.startswith("https://") and mirror.endswith("/") for mirror in download.MIRRORS)


def test_without_pooch_the_extra_is_named(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "pooch", None)
    with pytest.raises(download.DownloadError, match=r"pip install 'minitorch_dist\[demo\]'"):
        fetch(tmp_path)


def test_without_rich_there_is_no_bar_but_a_file(monkeypatch, server, tmp_path):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    fetch(tmp_path, server("good"))
    assert complete(tmp_path) == CONTENTS


def test_the_bar_goes_to_stderr_and_names_the_files(server, tmp_path, capfd):
    pytest.importorskip("rich")
    fetch(tmp_path, server("good"))
    out, err = capfd.readouterr()
    assert out == "" and "a.gz" in err and "100.0/100.0 kB" in err


def test_a_cache_that_cannot_be_made(server, tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(download.DownloadError, match="XDG_CACHE_HOME"):
        fetch(tmp_path / "file" / "cache", server("good"))


def test_a_mirror_whose_silence_requests_hears_first(server):
    """A moment earlier than the probe gives up: the words are the same."""
    assert download._refusal(server("mute") + "a.gz", 0.2) == "no answer within 0.2 s"
