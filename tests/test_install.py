# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Shipped files, and an installation that leaves torch, FBGEMM and TorchRec unchanged."""

import configparser
import email
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import venv
import zipfile
from collections.abc import Iterator
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType

import pytest

from dreamshard_planner import EnvironmentWarning, MissingLibraryError, __version__, environment
from dreamshard_planner.cli import diagnosis
from dreamshard_planner.cli.diagnosis import diagnose
from dreamshard_planner.measure.hardware import REFERENCE, describe_hardware, instruction_set

ROOT = Path(__file__).parent.parent
NOT_SHIPPED = (".*", "__pycache__", "*.egg-info", "build", "dist", "results", "data")
SITE = Path(distribution("torch").locate_file(""))
DATA = ("py.typed", "checkpoints/cpu.safetensors", "checkpoints/roofline.safetensors", "workload/data/*.json")


def run(python: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run an environment's Python without this checkout on its path."""
    surroundings = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PIP_FIND_LINKS")}
    surroundings |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1", "PIP_NO_CACHE_DIR": "1"}
    return subprocess.run(
        [python, *arguments], cwd=python.parent, env=surroundings, capture_output=True, text=True, check=True
    )


def packages_of(python: Path) -> set[str]:
    """Names and versions of all that an environment has, its own and the tests' libraries."""
    (own,) = (python.parents[1] / "lib").glob("python*/site-packages")
    return {path.stem for folder in (own, python.parents[2] / "site") for path in folder.glob("*.dist-info")}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A source archive of this checkout and a wheel made of that archive."""
    folder = tmp_path_factory.mktemp("built")
    checkout = folder / "checkout"
    checkout.mkdir()
    for path in ROOT.iterdir():
        if path.name == "dreamshard_planner":
            shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif path.is_dir() and not path.name.startswith("."):
            shutil.copytree(path, checkout / path.name, ignore=shutil.ignore_patterns(*NOT_SHIPPED))
        elif path.is_file() and path.name != ".git":
            shutil.copy(path, checkout)
    build = "import sys, setuptools.build_meta as b; print(b.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", build, folder], cwd=checkout, capture_output=True, check=True)
    (archive,) = folder.glob("*.tar.gz")
    command = ("wheel", "--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", folder, archive)
    run(Path(sys.executable), "-m", "pip", *command)
    (wheel,) = folder.glob("*.whl")
    return {"archive": archive, "wheel": wheel}


@pytest.fixture
def python(tmp_path: Path) -> Iterator[Path]:
    """Python of a new environment with the tests' libraries, FBGEMM by its name for GPUs, and without this package."""
    site = tmp_path / "site"
    site.mkdir()
    for path in SITE.iterdir():
        if path.name.startswith("fbgemm_gpu") and path.suffix == ".dist-info":
            renamed = site / f"fbgemm_gpu-{distribution('torchrec').version}.dist-info"
            shutil.copytree(path, renamed)
            text = (path / "METADATA").read_text()
            (renamed / "METADATA").write_text(re.sub("(?m)^Name: .*$", "Name: fbgemm-gpu", text, count=1))
        elif "dreamshard" not in path.name and path.suffix != ".pth" and path.name != "__pycache__":
            (site / path.name).symlink_to(path)
    venv.create(tmp_path / "venv", with_pip=False)
    (own,) = (tmp_path / "venv" / "lib").glob("python*/site-packages")
    (own / "libraries.pth").write_text(f"{site}\n")
    yield tmp_path / "venv" / "bin" / "python"


def test_archive_and_wheel_hold_the_package_and_its_data(built: dict[str, Path]) -> None:
    wheel = set(zipfile.ZipFile(built["wheel"]).namelist())
    with tarfile.open(built["archive"]) as archive:
        shipped = {name.partition("/")[2] for name in archive.getnames()}
    package = {str(path.relative_to(ROOT)) for path in (ROOT / "dreamshard_planner").rglob("*.py")}
    package |= {str(path.relative_to(ROOT)) for data in DATA for path in (ROOT / "dreamshard_planner").glob(data)}
    assert len(package) > 80 and {name for name in wheel if ".dist-info/" not in name} >= package
    assert shipped >= package | {"CHANGELOG.md", "LICENSE", "README.md", "docs/get_started.md", "tests/conftest.py"}
    assert not [name for name in wheel if name.startswith(("tests", "benchmarks", "examples"))]


def test_metadata_asks_for_none_of_the_three_and_tells_the_version_once(built: dict[str, Path]) -> None:
    with zipfile.ZipFile(built["wheel"]) as wheel:
        metadata = email.message_from_bytes(wheel.read(f"dreamshard_planner-{__version__}.dist-info/METADATA"))
    assert metadata["Version"] == __version__
    names = {re.match(r"[\w-]+", need)[0] for need in metadata.get_all("Requires-Dist")}
    assert "numpy" in names and not [name for name in names if name.startswith(("torch", "fbgemm"))]
    assert metadata.get_all("Project-URL")
    assert __version__ not in (ROOT / "setup.cfg").read_text()


def test_version_and_changelog_and_the_python_that_is_asked_for_agree() -> None:
    releases = re.findall(r"(?m)^## (\S+)", (ROOT / "CHANGELOG.md").read_text())
    assert releases[0] == "Unreleased" and releases[1] == __version__
    assert all(re.fullmatch(r"\d+\.\d+\.\d+", release) for release in releases[1:])
    setup = configparser.ConfigParser()
    setup.read(ROOT / "setup.cfg")
    least = setup["options"]["python_requires"].removeprefix(">=")
    assert f"Programming Language :: Python :: {least}\n" in setup["metadata"]["classifiers"]
    assert tomllib.loads((ROOT / "ruff.toml").read_text())["target-version"] == f"py{least.replace('.', '')}"
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["python_version"] == least


def test_installing_changes_nothing_else(built: dict[str, Path], python: Path) -> None:
    before = packages_of(python)
    assert {name.partition("-")[0] for name in before} >= {"torch", "torchrec", "fbgemm_gpu"}
    report = python.parent / "report.json"
    run(python, "-m", "pip", "install", "--no-index", "--report", report, built["wheel"])
    assert [entry["metadata"]["name"] for entry in json.loads(report.read_text())["install"]] == ["dreamshard_planner"]
    assert packages_of(python) == before | {f"dreamshard_planner-{__version__}"}
    quiet = "import warnings; warnings.simplefilter('error'); import dreamshard_planner as d; print(d.__file__)"
    assert str(python.parent.parent) in run(python, "-c", quiet).stdout
    assert __version__ in run(python, python.parent / "dreamshard", "--version").stdout


HIDE = """
import sys, warnings

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import dreamshard_planner
print(*(f"{warning.category.__name__} at {warning.filename}: {warning.message}" for warning in caught))
warnings.simplefilter("ignore")
try:
    dreamshard_planner.DreamShardPlanner
except ImportError as error:
    print(f"{type(error).__name__}: {error}")
from dreamshard_planner.cli import main
sys.argv[1:] = ["plan", "--tables", "mlperf_dlrm_dcnv2", "--gpus-per-node", "8", "--batch-size", "8"]
main()
"""


def test_import_says_what_is_missing_and_how_to_install_it() -> None:
    ended, command = subprocess.run([sys.executable, "-c", HIDE], capture_output=True, text=True), "pip install 'torch"
    assert ended.returncode == 1
    warned, raised = ended.stdout.strip().splitlines()
    assert warned.startswith("EnvironmentWarning at <string>: ") and f"torch is not installed: {command}" in warned
    assert raised.startswith("MissingLibraryError: ") and command in raised
    assert ended.stderr.startswith("error: ") and command in ended.stderr and "Traceback" not in ended.stderr


def releases(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(package: str) -> str:
        if package not in given:
            raise environment.PackageNotFoundError(package)
        return given[package]

    given = {"torch": "2.13.0", "fbgemm-gpu": "1.8.0", "torchrec": "1.8.0"}
    given |= {name.replace("_", "-"): text for name, text in versions.items()}
    monkeypatch.setattr(environment, "version", version)


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        ({"torchrec": "2.0.0"}, "torchrec 2.0.0 has not been tried: accepted are 1.6 to 1.9"),
        ({"torchrec": "1.6.1rc3"}, None),
        ({"torch": "2.14.1", "fbgemm_gpu": "1.9.0"}, None),
        ({"torch": "2.15.0", "fbgemm_gpu": "1.9.0"}, "torch 2.15.0 has not been tried: accepted are 2.11 to 2.14"),
        ({"torch": "2.12.0"}, "fbgemm-gpu 1.8.0 has not been tried: torch 2.12 goes with 1.7"),
        ({"torchrec": "nightly"}, "torchrec nightly has not been tried"),
    ],
)
def test_untried_releases_are_told_once_and_fail_nothing(
    monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder, versions: dict[str, str], said: str | None
) -> None:
    releases(monkeypatch, **versions)
    environment.warn_of_problems(stacklevel=1)
    told = [str(warning.message) for warning in recwarn if warning.category is EnvironmentWarning]
    assert len(told) == (said is not None) and (said is None or said in told[0])
    notes = [finding for finding in diagnose() if finding.subject in ("torch", "FBGEMM", "torchrec")]
    assert [finding.verdict for finding in notes].count("note") == (said is not None)


@pytest.mark.parametrize(
    ("versions", "module", "advice"),
    [
        (
            {"torch": "2.15.0", "fbgemm_gpu": "1.9.0"},
            "fbgemm_gpu",
            "no accepted release fits torch 2.15.0: pip install torch==2.14.* fbgemm-gpu==1.9.0",
        ),
        ({"torch": "2.12.1"}, "fbgemm_gpu", "torch 2.12 goes with 1.7: pip install fbgemm-gpu==1.7.0"),
        ({"torchrec": "1.5.1"}, "torchrec", "accepted are 1.6 to 1.9: pip install --no-deps 'torchrec>=1.6,<1.10'"),
        ({"torch": "2.9.0"}, "torch", "accepted are 2.11 to 2.14: pip install 'torch>=2.11,<2.15'"),
    ],
)
def test_libraries_that_do_not_load_are_told_with_their_release_and_the_one_that_fits(
    monkeypatch: pytest.MonkeyPatch, versions: dict[str, str], module: str, advice: str
) -> None:
    def broken(name: str) -> ModuleType:
        if name.partition(".")[0] == module:
            raise OSError("undefined symbol")
        return importlib.import_module(name)

    releases(monkeypatch, **versions)
    monkeypatch.setattr(diagnosis, "import_module", broken)
    (finding,) = [finding for finding in diagnose() if finding.verdict in diagnosis.PREVENTS_PLANNING]
    assert finding.verdict == "broken" and finding.advice.startswith(advice)
    assert finding.found.endswith(": OSError: undefined symbol") and "none" not in finding.found


def test_foreign_import_errors_stay_as_they_are() -> None:
    assert environment.explained(ModuleNotFoundError("x", name="tensordict")) is None
    assert environment.explained(OSError("torch")) is None
    error = environment.explained(ModuleNotFoundError("x", name="torchrec.distributed"))
    assert isinstance(error, MissingLibraryError) and isinstance(error, ImportError)
    missing = environment.explained(ModuleNotFoundError("x", name="torchrec"))
    assert "pip install --no-deps 'torchrec" in str(missing)


NEW_PYTHON = """
from dreamshard_planner import DreamShardPlanner
import sys, torch, torch.distributed as dist
assert "torch.distributed.optim" in sys.modules  # see planner.py
assert not torch.cuda.is_initialized() and not dist.is_initialized()
from dreamshard_planner.measure.hardware import instruction_set
print(instruction_set())
"""


def test_import_starts_nothing_and_preloading_gives_a_new_python_the_fast_kernels() -> None:
    """Commands load the library first, as these tests do; the linker preloads it for a Python that does not."""
    surroundings = {**os.environ, "LD_PRELOAD": str(environment.torch_library("libc10.so"))}
    command = [sys.executable, "-W", "ignore", "-c", NEW_PYTHON]
    preloaded = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=True)
    assert instruction_set() == preloaded.stdout.strip() == describe_hardware("cpu", 1).get("instruction_set", "")
    assert instruction_set() != REFERENCE
