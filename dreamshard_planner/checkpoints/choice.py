# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""The checkpoint to plan with: the user's own before those that ship, and notes on the origin of its costs.

The user's own are in ``DREAMSHARD_HOME/checkpoints`` if that variable is set, else in ``checkpoints`` in the user's
data folder for this package (``~/.local/share/dreamshard_planner`` on Linux). A file's metadata, not its name, tell its
hardware.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import platformdirs
import torch

from dreamshard_planner import devices
from dreamshard_planner.checkpoints.checkpoint import Checkpoint
from dreamshard_planner.cost.collectives import MeasuredOn
from dreamshard_planner.devices import card_of
from dreamshard_planner.errors import CheckpointError, FileError
from dreamshard_planner.measure.hardware import REFERENCE, describe_hardware, library_versions, reference_kernels
from dreamshard_planner.support.formatting import brief

if TYPE_CHECKING:
    from torchrec.distributed.planner.types import Topology

    from dreamshard_planner.policy.network import Policy

logger = logging.getLogger(__name__)

SHIPPED = Path(__file__).parent
VARIABLE = "DREAMSHARD_HOME"
OBSERVED = "-observed.safetensors"
"""End of the names of checkpoints that trainings teach by themselves."""
FEW_TASKS = 20
"""Fewest validation tasks of a real training; ``--quick`` has four."""


def resolve(
    checkpoint: str | Path | Checkpoint,
    compute_device: str,
    threads: int | None = None,
    card: str | None = None,
    ranks: int | None = None,
) -> Checkpoint:
    """Return the checkpoint to plan with.

    ``"auto"`` takes costs that trainings on this hardware have taught by themselves, if they correct the checkpoint of
    :func:`measured`, and else that one.

    Args:
        checkpoint: a :class:`Checkpoint`, a path, ``"roofline"`` or ``"auto"``.
        compute_device: ``cpu`` or ``cuda``.
        threads: of a rank, to choose among the user's own. Default: this process's.
        card: the driver's name of the GPU, or the processor's name. Default: the one that this process sees.
        ranks: of the training, to choose among observed ones, of which the nearest counts; None for the fewest.

    Raises:
        CheckpointError: the file cannot be read; for ``"auto"``, any of the user's own cannot, since plans would use
            other costs than the user measured.
    """
    if checkpoint == "auto":
        threads = threads or torch.get_num_threads()
        made = measured(compute_device, threads, card)
        return _observed(made, compute_device, threads, card, ranks or 1) or made
    if checkpoint == "roofline":
        return shipped("roofline")
    return checkpoint if isinstance(checkpoint, Checkpoint) else Checkpoint.load(checkpoint)


def resolve_for(topology: Topology, checkpoint: str | Path | Checkpoint) -> Checkpoint:
    """Return the checkpoint for the devices of a topology; see :func:`resolve`."""
    return resolve(checkpoint, topology.compute_device, card=card_of(topology), ranks=topology.world_size)


def prior_policy() -> Policy:
    """Return the policy that ships, trained on costs by bandwidths: the start of every other training."""
    return shipped("roofline").policy


def _observed(origin: Checkpoint, compute_device: str, threads: int, card: str | None, ranks: int) -> Checkpoint | None:
    """Return the checkpoint that trainings have taught by themselves from ``origin``; None if there is none.

    A file that cannot be read is logged, and left out: the user has not made it.
    """
    if not (paths := [*folder().glob(f"{compute_device}-*{OBSERVED}")]):
        return None  # without asking for the card, which may start CUDA
    hardware = described_here(compute_device, card, threads)
    name = re.compile(place(hardware, "([1-9][0-9]*)") + re.escape(OBSERVED))
    known = {int(found[1]): path for path in paths if (found := name.fullmatch(path.name))}
    if not known:
        return None
    path = known[min(known, key=lambda taught: (abs(math.log(taught / ranks)), taught))]
    try:
        made = Checkpoint.load(path)
    except CheckpointError as error:
        logger.warning("costs that trainings have taught are left out: %s", error)
        return None
    learned = made.known.learned
    if learned.source != origin.name or learned.digest not in ("", origin.digest()):
        return None  # the user has measured anew
    return replace(made, why=f"{made.name}, in {path.parent}, was learned from trainings on {hardware['name']}")


def measured(compute_device: str, threads: int, card: str | None) -> Checkpoint:
    """Return the user's own checkpoint measured on the processor or card that is planned for.

    Without any, return the one that ships for that card or for CPUs, or the roofline model; arguments and errors as of
    :func:`resolve`.
    """
    why, own = "", list[Checkpoint]()
    try:
        own = [Checkpoint.load(path) for path in files()]
    except OSError as error:  # such as another user's home, in which this one cannot have kept anything
        why = f"{folder()}, for your own, cannot be read ({error.strerror})"
    except CheckpointError as error:
        raise CheckpointError(
            f"{error}; checkpoint='auto' looks at all that you keep there: remove the file, or name a checkpoint"
        ) from error

    def fit(one: Checkpoint) -> tuple[float, int, str]:
        """Rank a checkpoint: the nearest in threads, which count on CPUs, then the newest."""
        measured = one.known.hardware.threads if compute_device == "cpu" else threads
        return -abs(math.log(measured / threads)), (folder() / one.name).stat().st_mtime_ns, one.name

    if alike := [one for one in own if one.known.hardware.device == compute_device]:
        here = card or hardware_here(compute_device)  # may ask for the card, which starts CUDA
        best = max((one for one in alike if here and one.known.hardware.name == here), key=fit, default=None)
        if best is not None:
            origin = f"is one of your own checkpoints, in {folder()}, and was measured on what is here, {here}"
            return replace(best, why=f"{best.name} {origin}")
        why = f"none of your own in {folder()} was measured on {here or 'a card that is here'}"
    if card is None and compute_device == "cuda":
        card = hardware_here("cuda")
    made = shipped(compute_device, card)
    return replace(made, why=f"{made.name} ships: {why}") if why else made


def measured_name(compute_device: str, card: str | None) -> str:
    """Return the file name of a device's measured checkpoint: ``cpu``, or the card's name."""
    return _slug((compute_device != "cpu" and card) or compute_device)


@cache
def shipped(compute_device: str, card: str | None = None) -> Checkpoint:
    """Return the checkpoint that ships for a device, such as ``nvidia-h200.safetensors``, else ``roofline``."""
    measured = SHIPPED / f"{measured_name(compute_device, card)}.safetensors"
    return Checkpoint.load(measured if measured.is_file() else SHIPPED / "roofline.safetensors")


def hardware_here(device: str) -> str | None:
    """Return the name of this machine's processor (``cpu``) or card (``cuda``), if there is one."""
    if device == "cuda":
        found = devices.read_card()
        return None if found is None else found.name
    return str(describe_hardware(device, 1)["name"])


def home() -> Path:
    """Return the user's folder for this package, which may be missing."""
    given = os.path.expanduser(os.environ.get(VARIABLE, ""))
    return Path(given or platformdirs.user_data_path("dreamshard_planner", appauthor=False))


def folder() -> Path:
    """Return the folder of the user's own checkpoints, which may be missing."""
    return home() / "checkpoints"


def place(hardware: Mapping[str, Any], ranks: int | str) -> str:
    """Return the name of everything observed on described hardware by as many ranks of a training, with libraries on
    which it holds."""
    releases = (f"{name} {_release(hardware.get(name))}" for name in ("torch", "fbgemm"))
    return f"{_named(hardware, *releases)}-{ranks}-ranks"


def observed_file(hardware: Mapping[str, Any], ranks: int) -> Path:
    """Return the checkpoint that trainings on described hardware by as many ranks teach by themselves."""
    return folder() / f"{place(hardware, ranks)}{OBSERVED}"


def described_here(device: str, name: str | None, threads: int) -> dict[str, Any]:
    """Describe a named processor or card, by default the one that is here, with threads of a rank and this
    environment's libraries, for :func:`place`."""
    found = {"device": device, "name": name or hardware_here(device) or "unknown", "threads": threads}
    return {**found, **library_versions()}


def files() -> list[Path]:
    """Return the user's own checkpoints in order of names, none that trainings taught by themselves.

    Raises:
        OSError: the folder cannot be read.
    """
    try:
        names = sorted(os.listdir(folder()))
    except FileNotFoundError:
        return []
    own = (name for name in names if not name.startswith(".") and not name.endswith(OBSERVED))
    return [folder() / name for name in own if name.endswith(".safetensors")]


def _slug(text: str) -> str:
    """Return a text for file names: lower case, with dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def _named(hardware: Mapping[str, Any], *more: str) -> str:
    """Return device, name, threads on CPUs, and more, for file names."""
    threads = f"{hardware.get('threads', 1)} threads" if hardware["device"] == "cpu" else ""
    return _slug(" ".join([hardware["device"], hardware["name"], threads, *more]))


def new_file(hardware: Mapping[str, Any], how: str = "") -> Path:
    """Return the path for a checkpoint measured on some hardware, and make the folder.

    Args:
        hardware: as :func:`~dreamshard_planner.measure.hardware.describe_hardware` returns it.
        how: ``calibrated`` or ``learned`` for a corrected checkpoint, which must not replace its origin.

    Raises:
        FileError: the folder cannot be made; or device or name are missing.
    """
    if not (hardware.get("device") and hardware.get("name")):
        raise FileError(
            f"no name for a checkpoint of hardware that is not told ({brief(dict(hardware))}): say where to"
        )
    try:
        folder().mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FileError(
            f"{folder()}: the folder of your checkpoints cannot be made: {error.strerror}; set {VARIABLE}"
        ) from error
    return folder() / f"{_named(hardware, how)}.safetensors"


def checkpoint_notes(checkpoint: Checkpoint, topology: Topology, uses_network: bool = True) -> tuple[str, ...]:
    """Return notes on a plan for a topology with a checkpoint; ``uses_network`` if its costs were used, not only its
    policy."""
    known, notes = checkpoint.known, [checkpoint.why] if checkpoint.why else []
    if known.validation.tasks is not None and known.validation.tasks < FEW_TASKS:
        notes.append(f"{checkpoint.name} was made with --quick, to try the flow: its policy is of no use for planning")
    if topology.compute_device == "cpu" and (slow := reference_kernels()):
        notes.append(slow)
    if uses_network and checkpoint.has_costs:
        if known.learned.runs:
            notes.append(f"costs were {known.learned.said}")
        elif known.calibration.checked:
            notes.append(f"costs were checked with {known.calibration.checked}")
        notes += _other_libraries(known.hardware, topology.compute_device)
    return tuple(notes)


def learned_from(checkpoint: Checkpoint) -> str:
    """Return a text on costs that trainings on this hardware taught; empty for other costs."""
    runs, error = checkpoint.known.learned.runs, checkpoint.known.learned.error
    off = "" if error is None else f", {100 * error:.0f} % off"
    return f"costs learned from {runs} run{'s' * (runs > 1)} on this hardware{off}" if runs else ""


def confidence(checkpoint: Checkpoint, topology: Topology, uses_network: bool = True) -> str:
    """Tell how far to trust the milliseconds of a plan: the hardware that was measured, and the held-out error;
    ``uses_network`` if the checkpoint's costs were used, not only its policy."""
    known, planned = checkpoint.known, topology.compute_device
    device, name = known.hardware.device, known.hardware.name
    if not uses_network or not checkpoint.has_costs:
        return "nothing was measured on such a device: trust the order of plans, not their milliseconds"
    if device != planned:
        return f"measured on {device} ({name}): costs say little of {planned}"
    here = hardware_here("cpu") if device == "cpu" else card_of(topology) or hardware_here("cuda")
    if here is not None and here != name:
        kind = "CPU" if device == "cpu" else "card"
        return f"measured on another {kind}, {name}: absolute times may be several times off; observe and learn"
    error = known.calibration.error
    if error is None and known.validation.network_mape is not None:
        error = sum(known.validation.network_mape) / 2
    off = "" if error is None else f", {100 * error:.0f} % off"
    return learned_from(checkpoint) or f"measured on this hardware{off}"


def _other_libraries(measured: MeasuredOn, compute_device: str) -> list[str]:
    """Return a note if kernels were measured with other releases or instructions than this process has."""
    if measured.device != compute_device:
        return []
    here = describe_hardware("cpu", 1)
    fields = ["torch", "fbgemm"]
    if compute_device == "cpu" and here.get("instruction_set") != REFERENCE:  # which has a note of its own
        fields.append("instruction_set")
    there = {name: was for name in fields if (was := getattr(measured, name)) and name in here}
    differing = [name for name, was in there.items() if _release(was) != _release(here[name])]
    if not differing:
        return []
    then, now = (", ".join(f"{name.replace('_', ' ')} {of[name]}" for name in differing) for of in (there, here))
    return [f"costs were measured with {then}; this environment has {now}"]


def _release(version: object) -> str:
    """Return major and minor of a version; other text unchanged."""
    return ".".join(str(version).split(".")[:2])
