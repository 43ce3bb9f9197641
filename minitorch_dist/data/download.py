"""Downloads that cannot hang: one probe of all mirrors, then a transfer that silence ends.

Being offline has many faces: no route (fails at once), a name server that doesn't answer (getaddrinfo blocks for half a
minute and takes no time limit), a network that accepts connections and sends nothing. So whatever may block runs in a
daemon thread, and the clock is watched from outside. The worst case is PROBE_SECONDS + STALL_SECONDS.
"""

import queue
import sys
import threading
import time
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

MIRRORS = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
    "https://raw.githubusercontent.com/fgnt/mnist/master/",
)
PROBE_SECONDS = 5.0   # for all mirrors together, name look-up included
STALL_SECONDS = 5.0   # without a byte, and the download is given up
CHUNK = 1024          # bytes between two signs of life: a line of 200 bytes a second is slow, not dead


class DownloadError(RuntimeError):
    """Nothing usable could be fetched; the message gives each mirror's reason."""


class Stalled(DownloadError):
    """No byte came for too long."""


def fetch(files, folder, mirrors=None, probe_seconds=PROBE_SECONDS, stall_seconds=STALL_SECONDS, say=print):
    """Download files {name: sha256} into `folder` and return the mirror that had them.

    The mirrors (default MIRRORS) are tried in the order in which they answer the probe. One that fails (HTTP error,
    broken connection, wrong checksum) gives way to the next; a stall ends it all, or else waiting would add up. A file
    appears in `folder` only when complete and verified, and stays if a later one fails.
    Raises DownloadError.
    """
    retrieve = _retriever()
    folder = Path(folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise DownloadError(f"the cache folder {folder} can't be made ({error}); "
                            f"XDG_CACHE_HOME may name another place.") from error
    mirrors = MIRRORS if mirrors is None else mirrors
    reasons = dict.fromkeys(mirrors, _silence(probe_seconds))
    for mirror in answering(mirrors, min(files), probe_seconds, reasons):
        try:
            say(f"Downloading {len(files)} files from {_host(mirror)} into {folder}")
            _fetch_all(files, mirror, folder, retrieve, stall_seconds)
            return mirror
        except Stalled as error:
            reasons[mirror] = str(error)
            break
        except (OSError, ValueError) as error:   # requests' errors are OSErrors; pooch's wrong checksum is a ValueError
            reasons[mirror] = str(error)
    raise DownloadError("\n    ".join(["no mirror could deliver.", *(f"{_host(m)}: {r}" for m, r in reasons.items())]))


def _retriever():
    """pooch.retrieve, quiet: what it would log is said by this module."""
    try:
        import pooch
    except ImportError as error:
        raise DownloadError("downloads need the package pooch: pip install 'minitorch_dist[demo]'") from error
    pooch.get_logger().setLevel("WARNING")
    return pooch.retrieve


def _host(mirror):
    return urlsplit(mirror).netloc


# ---------------------------------------------------------------- the probe

def answering(mirrors, name, seconds, reasons):
    """Yield the mirrors that have the file `name`, each as soon as it says so, until `seconds` are over.

    All are asked at once. Why another one doesn't qualify is put into `reasons` {mirror: text}.
    """
    answers = queue.Queue()
    ends = time.monotonic() + seconds
    for mirror in mirrors:
        # A thread of an executor would be waited for at exit; a daemon stuck in a name look-up is left behind.
        threading.Thread(target=lambda m=mirror: answers.put((m, _refusal(m + name, seconds))), daemon=True).start()
    for _ in mirrors:
        try:
            mirror, refusal = answers.get(timeout=max(0, ends - time.monotonic()))
        except queue.Empty:
            return
        if refusal:
            reasons[mirror] = refusal
        else:
            yield mirror


def _silence(seconds):
    return f"no answer within {seconds:g} s"


def _refusal(url, seconds):
    """None if the server at `url` has the file, else why not. Proxies in the environment are used."""
    import requests
    try:
        status = requests.head(url, timeout=seconds, allow_redirects=True).status_code
    except requests.Timeout:        # it may be heard of before `answering` gives up by itself
        return _silence(seconds)
    except requests.RequestException as error:
        return f"no connection ({type(error).__name__})"
    return None if status == 200 else f"HTTP status {status}"


# ---------------------------------------------------------------- the transfer

def _fetch_all(files, mirror, folder, retrieve, stall_seconds):
    with _progress() as progress:
        for name, sha256 in files.items():
            meter = Meter(name, progress)
            _until_silent(lambda m=meter, n=name, s=sha256: retrieve(
                mirror + n, f"sha256:{s}", fname=n, path=folder, downloader=_downloader(m, stall_seconds)),
                meter, stall_seconds)


def _downloader(meter, stall_seconds):
    import pooch
    # The socket's own time limit only clears away the abandoned thread: it must not forestall the meter's.
    return pooch.HTTPDownloader(progressbar=meter, chunk_size=CHUNK, timeout=2 * stall_seconds)


def _until_silent(transfer, meter, seconds):
    """transfer(), run in a daemon thread and given up with Stalled once the meter has been silent for `seconds`."""
    outcome = Future()

    def work():
        try:
            outcome.set_result(transfer())
        except BaseException as error:   # carried to the waiting thread, which raises it
            outcome.set_exception(error)

    threading.Thread(target=work, daemon=True).start()
    while not outcome.done():
        left = seconds - meter.silence()
        if left <= 0:
            raise Stalled(f"no byte of {meter.name} for {seconds:g} s; what is complete is kept, try again later")
        wait([outcome], timeout=left)
    return outcome.result()


class Meter:
    """The progress bar that pooch calls, which also knows when the last byte came. `progress` is rich's, or None."""

    def __init__(self, name, progress):
        self.name, self.progress = name, progress
        self.total = None   # bytes; set by pooch when the server has told
        self.task = progress.add_task(name, total=None) if progress else None
        self.last = time.monotonic()

    def silence(self):
        """Seconds since the last byte."""
        return time.monotonic() - self.last

    def update(self, count):
        self.last = time.monotonic()
        if self.progress:
            self.progress.update(self.task, advance=count, total=self.total)

    def reset(self):   # pooch resets and then counts the whole file once more, so that the bar ends full
        if self.progress:
            self.progress.reset(self.task)

    def close(self):
        pass


@contextmanager
def _progress():
    """rich's progress display on stderr, or None where rich is not installed."""
    try:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
    except ImportError:
        yield None
        return
    columns = TextColumn("{task.description:<27}"), BarColumn(), DownloadColumn(), TransferSpeedColumn()
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        yield progress
