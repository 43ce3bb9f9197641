"""The autotuner with a clock that tests set: the fastest wins, once per kernel, sizes and device."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from minitorch_dist.kernels import autotune, build, launch
from minitorch_dist.kernels.add import ADD

from .recording import DeviceArray, RecordingDriver, fake_build

CONFIGS = ADD.configs


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """A recording GPU whose clock reads gpu.times[BLOCK, num_warps], tuning on, nothing known."""
    gpu = RecordingDriver()
    gpu.runs = []

    def milliseconds(run):
        run()
        took = gpu.times[gpu.runs[-1]]
        return took.pop(0) if isinstance(took, list) else took
    gpu.milliseconds = milliseconds
    gpu.times = {(c["BLOCK"], c["num_warps"]): 2.0 for c in CONFIGS}
    monkeypatch.setattr(launch, "_driver", gpu)
    monkeypatch.setattr(launch, "_functions", {})
    monkeypatch.setattr(build, "build", fake_build())
    monkeypatch.setattr(autotune, "_known", {})
    monkeypatch.setenv("MINITORCH_AUTOTUNE", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return gpu


def tuned(gpu, n=1000, dtype=np.float32):
    x, y, out = (DeviceArray(np.zeros(n, dtype)) for _ in range(3))

    def run(options):
        gpu.runs.append((options["BLOCK"], options["num_warps"]))
        ADD((1,), x, y, out, n, **options)
    return autotune.best(ADD, (n,), x, run)


def test_the_fastest_wins_and_is_measured_once(gpu):
    gpu.times[2048, 8] = 1.0
    assert tuned(gpu) == {"BLOCK": 2048, "num_warps": 8}
    assert len(gpu.runs) == len(CONFIGS) * (autotune.WARM_UPS + autotune.REPEATS) == len(gpu.calls)
    assert tuned(gpu) == tuned(gpu, 600) == {"BLOCK": 2048, "num_warps": 8}      # 600 and 1,000 round up to 1,024
    assert len(gpu.runs) == len(gpu.calls)


def test_the_gpu_is_busy_until_all_is_asked_for_and_its_cache_is_empty():
    """Else the events would measure the host's time between them, which is the same for every configuration."""
    log = []

    class Event:
        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("wait")
    memory = SimpleNamespace(memset_async=lambda value, size: log.append(size))
    cupy = SimpleNamespace(empty=lambda size, dtype: SimpleNamespace(data=memory), cuda=SimpleNamespace(
        Event=Event, get_elapsed_time=lambda begin, end: 2.5))
    driver = launch.CupyDriver.__new__(launch.CupyDriver)
    driver.cupy = cupy
    assert driver.milliseconds(lambda: log.append("run")) == 2.5
    assert log[-4:] == ["record", "run", "record", "wait"]
    assert min(log[:-4]) > 60 << 20 and sum(log[:-4]) > 4e12 * 100e-6       # an H200's cache; bytes it clears in 100 µs


def test_one_slow_run_decides_nothing(gpu):
    gpu.times[512, 4] = [50.0] + [1.0] * (autotune.REPEATS - 1)
    assert tuned(gpu) == {"BLOCK": 512, "num_warps": 4}


def test_what_matters_is_measured_apart(gpu):
    counts = []
    for n, dtype, name in ((1000, np.float32, "a"), (5000, np.float32, "a"), (1000, np.float16, "a"),
                           (1000, np.float32, "b")):
        gpu.device_name = name
        gpu.runs.clear()
        tuned(gpu, n, dtype)
        counts.append(len(gpu.runs))
    assert all(counts)


def test_results_outlive_the_process(gpu, monkeypatch):
    gpu.times[1024, 8] = 1.0
    tuned(gpu)
    file, = build.cache_folder().glob("tuned-*")
    said = json.loads(file.read_text())
    assert said["best"] == {"BLOCK": 1024, "num_warps": 8} and len(said["measured"]) == len(CONFIGS)
    monkeypatch.setattr(autotune, "_known", {})
    gpu.runs.clear()
    assert tuned(gpu) == {"BLOCK": 1024, "num_warps": 8} and not gpu.runs
    for text in ("", "{}", '{"best": {"BLOCK": 3}}'):       # damaged, or of another list of configurations
        file.write_text(text)
        monkeypatch.setattr(autotune, "_known", {})
        gpu.runs.clear()
        assert tuned(gpu) == {"BLOCK": 1024, "num_warps": 8} and gpu.runs


def test_a_configuration_that_cannot_run_is_passed_over(gpu):
    x = DeviceArray(np.zeros(10, np.float32))

    def run(options):
        gpu.runs.append((options["BLOCK"], options["num_warps"]))
        if options["BLOCK"] != 512 or not fits:
            raise RuntimeError("needs more shared memory")
    fits = True
    assert autotune.best(ADD, (1,), x, run)["BLOCK"] == 512
    fits = False
    with pytest.raises(RuntimeError, match="none of its configurations runs here: needs more shared memory"):
        autotune.best(ADD, (10_000,), x, run)


def test_nothing_is_measured_unasked_or_on_the_cpu(gpu, monkeypatch):
    assert autotune.best(ADD, (1,), np.zeros(1), None) == {}
    monkeypatch.delenv("MINITORCH_AUTOTUNE")
    assert tuned(gpu) == {} and not gpu.runs


def test_buckets():
    assert autotune.bucket((0, 1, 2, 3, 4, 5, 1023, 1024, 1025)) == (1, 1, 2, 4, 4, 8, 1024, 1024, 2048)
