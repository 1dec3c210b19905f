# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The libraries that have to be there already, torch, FBGEMM and TorchRec, and problems of those found.

Pip is not asked for them. FBGEMM comes as two packages with one module, and TorchRec's metadata asks for the one with
CUDA: naming either would put it over the CPU build of an environment that works.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
import warnings
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path

from dreamshard_planner.errors import MissingLibraryError

Release = tuple[int, int]
"""Major and minor."""
FBGEMM_OF_TORCH = {(2, minor): (1, minor - 5) for minor in range(11, 15)}
"""Releases that fit; FBGEMM is built for one release of torch, which its metadata does not say."""


class EnvironmentWarning(UserWarning):
    """A library is missing, or of a release that was not tried."""


@dataclass(frozen=True)
class Library:
    """One module and the packages that bring it."""

    name: str
    module: str
    packages: tuple[str, ...]
    accepted: tuple[Release, Release]
    """Oldest and newest accepted release."""

    def releases(self) -> dict[str, str]:
        """Return the version of each installed package."""
        return {package: release for package in self.packages if (release := installed(package))}

    def described(self) -> str:
        """Return all of :meth:`releases` in words."""
        return " and ".join(f"{package} {release}" for package, release in self.releases().items())

    def release(self) -> Release | None:
        """Return the release of the first installed package; None if none is installed, or for an unknown version."""
        match = re.match(r"(\d+)\.(\d+)", installed(*self.packages) or "")
        return (int(match[1]), int(match[2])) if match else None

    def bounds(self) -> str:
        """Return the accepted releases as requirements write them."""
        low, (major, minor) = self.accepted
        return f">={_text(low)},<{major}.{minor + 1}"


TORCH = Library("torch", "torch", ("torch",), ((2, 11), (2, 14)))
FBGEMM = Library(
    "FBGEMM",
    "fbgemm_gpu",
    ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu"),
    ((1, 6), (1, 9)),
)
TORCHREC = Library("torchrec", "torchrec", ("torchrec", "torchrec-cpu", "torchrec-nightly"), ((1, 6), (1, 9)))
LIBRARIES = (TORCH, FBGEMM, TORCHREC)


def installed(*packages: str) -> str | None:
    """Return the version of the first of some packages that is installed, or None."""
    for package in packages:
        with suppress(PackageNotFoundError):
            return version(package)
    return None


def how_to_install(library: Library) -> str:
    """Return the commands that install a release that fits the others, after the reason against the installed one."""
    reason, torch = library.releases() and untried(library), TORCH.release()
    if library is TORCH:
        commands = f"pip install 'torch{TORCH.bounds()}'"
    elif library is TORCHREC:
        also = "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
        commands = f"pip install --no-deps 'torchrec{TORCHREC.bounds()}' && {also}"
    else:
        fitting, also = torch or TORCH.accepted[1], ""
        if fitting not in FBGEMM_OF_TORCH:
            fitting = TORCH.accepted[1]
            reason = library.releases() and f"no accepted release fits torch {installed(*TORCH.packages)}"
        if fitting != torch:
            also = f"torch=={_text(fitting)}.* "
        pin = f"=={_text(FBGEMM_OF_TORCH[fitting])}.0"
        commands = f"pip install {also}fbgemm-gpu{pin}, or without a GPU pip install {also}fbgemm-gpu-cpu{pin}"
    return f"{reason}: {commands}" if reason else commands


def untried(library: Library) -> str:
    """Name the releases that are accepted; empty if the installed one is among them."""
    release, torch, (low, high) = library.release(), TORCH.release(), library.accepted
    if library is FBGEMM and torch and torch in FBGEMM_OF_TORCH:
        fitting = FBGEMM_OF_TORCH[torch]
        return "" if release == fitting else f"torch {_text(torch)} goes with {_text(fitting)}"
    return "" if release and low <= release <= high else f"accepted are {_text(low)} to {_text(high)}"


def warn_of_problems(stacklevel: int) -> None:
    """Warn once of the problems of all libraries, without importing any."""
    found = []
    for library in LIBRARIES:
        if not _is_there(library.module):
            found.append(f"{library.name} is not installed: {how_to_install(library)}")
        elif tried := untried(library):
            found.append(f"{library.described() or f'{library.name} of unknown version'} has not been tried: {tried}")
    if found:
        text = (
            f"dreamshard_planner works with torch, FBGEMM and TorchRec. {'. '.join(found)}. See also: dreamshard doctor"
        )
        warnings.warn(text, EnvironmentWarning, stacklevel=stacklevel + 1)


def explained(error: Exception) -> MissingLibraryError | None:
    """Explain an ImportError of a required library; None for other errors."""
    if not isinstance(error, ModuleNotFoundError):
        return None
    module = (error.name or "").partition(".")[0]
    library = next((one for one in LIBRARIES if one.module == module), None)
    if library is None:
        return None
    text = f"dreamshard_planner needs {library.name}, which is not installed: {how_to_install(library)}"
    if error.name != module and library.releases():
        text = f"{library.described()} has no {error.name}; {how_to_install(library)}"
    return MissingLibraryError(text, name=error.name)


def torch_library(name: str) -> Path | None:
    """Return the path of one of torch's shared libraries, without importing torch."""
    spec = find_spec("torch") if _is_there("torch") else None
    path = Path(spec.origin).parent / "lib" / name if spec and spec.origin else None
    return path if path and path.exists() else None


def load_libc10_first() -> None:
    """Load torch's libc10 for all libraries of this process, if torch is not imported yet.

    libtorch of torch 2.14 exports a second copy of cpuinfo that is never filled. FBGEMM's CPU library finds that copy
    first, sees a CPU without any instruction set, and runs its reference kernels.
    """
    if "torch" not in sys.modules and (libc10 := torch_library("libc10.so")):
        with suppress(OSError):  # importing torch explains it
            ctypes.CDLL(str(libc10), ctypes.RTLD_GLOBAL)


def of_child(**more: str) -> dict[str, str]:
    """Return the environment of a ``python -P`` that imports what this process imports, from the same places."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _text(release: Release) -> str:
    return ".".join(map(str, release))
