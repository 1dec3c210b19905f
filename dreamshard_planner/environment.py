# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The libraries that have to be there already: torch, FBGEMM and TorchRec, and what is to be said of those found.

Pip is not asked for them. FBGEMM comes as two packages with one module, and TorchRec's metadata asks for the one with
CUDA: naming either would put it over the CPU build of an environment that works.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

from dreamshard_planner.errors import MissingLibraryError

FBGEMM_OF_TORCH = {(2, 13): (1, 8)}
"""Releases that were tried together; FBGEMM is built for one release of torch, which its metadata does not say."""
TORCHREC_RELEASES = ((1, 6), (1, 9))
"""The oldest and the newest that were tried."""


class EnvironmentWarning(UserWarning):
    """A library is missing, or of a release that was not tried."""


@dataclass(frozen=True)
class Library:
    """One module and the packages that bring it."""

    name: str
    module: str
    packages: tuple[str, ...]

    def releases(self) -> dict[str, str]:
        """Version by name of what is installed of the packages."""
        return {package: release for package in self.packages if (release := installed(package))}

    def described(self) -> str:
        """All of :meth:`releases` in words."""
        return " and ".join(f"{package} {release}" for package, release in self.releases().items())


TORCH = Library("torch", "torch", ("torch",))
FBGEMM = Library(
    "FBGEMM", "fbgemm_gpu", ("fbgemm-gpu", "fbgemm-gpu-cpu", "fbgemm-gpu-nightly", "fbgemm-gpu-nightly-cpu")
)
TORCHREC = Library("torchrec", "torchrec", ("torchrec", "torchrec-cpu", "torchrec-nightly"))
LIBRARIES = (TORCH, FBGEMM, TORCHREC)


def installed(*packages: str) -> str | None:
    """Version of the first of some packages that is installed, None where none is."""
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


def how_to_install(library: Library) -> str:
    """Commands for an environment that lacks it, and may have the others."""
    if library is TORCH:
        return f"pip install 'torch>={_text(min(FBGEMM_OF_TORCH))}'"
    if library is FBGEMM:
        torch = _release(installed(*TORCH.packages))
        pin = f"=={_text(FBGEMM_OF_TORCH[torch])}.0" if torch in FBGEMM_OF_TORCH else ""
        return f"pip install fbgemm-gpu{pin}, or without a GPU pip install fbgemm-gpu-cpu{pin}"
    return (
        f"pip install --no-deps 'torchrec{torchrec_bounds()}' && "
        "pip install tensordict torchmetrics==1.0.3 tqdm pyre-extensions"
    )


def torchrec_bounds() -> str:
    """As requirements write them."""
    low, (major, minor) = TORCHREC_RELEASES
    return f">={_text(low)},<{major}.{minor + 1}"


def untried(library: Library) -> str:
    """What was tried instead of what is installed; empty if that is it."""
    release = _release(installed(*library.packages))
    torch = _release(installed(*TORCH.packages))
    if library is TORCHREC:
        low, high = TORCHREC_RELEASES
        return "" if release and low <= release <= high else f"tried are {_text(low)} to {_text(high)}"
    if library is TORCH or torch not in FBGEMM_OF_TORCH:  # one remark on the pair is enough
        tried = FBGEMM_OF_TORCH if library is TORCH else FBGEMM_OF_TORCH.values()
        return "" if release in tried else f"tried are {', '.join(map(_text, tried))}"
    matching = FBGEMM_OF_TORCH[torch]
    return "" if release == matching else f"torch {_text(torch)} was tried with {_text(matching)}"


def problems() -> list[str]:
    """Of all libraries, as sentences; without importing any."""
    found = []
    for library in LIBRARIES:
        if not _is_there(library.module):
            found.append(f"{library.name} is not installed: {how_to_install(library)}")
        elif tried := untried(library):
            found.append(f"{library.described() or f'{library.name} of unknown version'} has not been tried: {tried}")
    return found


def warn_of_problems(stacklevel: int) -> None:
    """One warning for all of them."""
    if found := problems():
        text = (
            f"dreamshard_planner works with torch, FBGEMM and TorchRec. {'. '.join(found)}. See also: dreamshard doctor"
        )
        warnings.warn(text, EnvironmentWarning, stacklevel=stacklevel + 1)


def explained(error: Exception) -> MissingLibraryError | None:
    """What a failed import means if it was of one of the libraries."""
    if isinstance(error, ModuleNotFoundError):
        for library in LIBRARIES:
            if (error.name or "").partition(".")[0] == library.module:
                text = f"dreamshard_planner needs {library.name}, which is not installed: {how_to_install(library)}"
                return MissingLibraryError(text, name=error.name)
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _release(text: str | None) -> tuple[int, int] | None:
    """Major and minor."""
    match = re.match(r"(\d+)\.(\d+)", text or "")
    return (int(match[1]), int(match[2])) if match else None


def _text(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))
