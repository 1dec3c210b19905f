# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""``make gpu``: its commands are understood, and the checkpoint is for this device."""

import re
import shlex
from pathlib import Path

import gpu
from dreamshard_planner.checkpoints.choice import resolve, shipped
from tests.torchrun import forked


def test_scripts_know_all_options_that_the_commands_give(tmp_path: Path) -> None:
    lines = gpu.commands("cuda", 8, tmp_path, "nvidia-x", 25)
    assert list(lines) == ["tests", "kernels", "collectives", "checkpoint", "accuracy", "placements", "steps"]
    assert "collectives" not in gpu.commands("cuda", 1, tmp_path, "nvidia-x", 25)
    for line in lines.values():
        before, _, after = line.partition(".py ")
        if "compare_placements" in before or "fused_kernels" in before or "cost_accuracy" in before:
            script = Path(f"{shlex.split(before)[-1]}.py")
            known = re.findall(r'"(--[a-z-]+)"', script.read_text())
            given = re.findall(r"(?<= )--[a-z-]+", f" {after}")
            assert len(given) > 1 and set(given) <= set(known), script.name


def test_a_short_run_on_two_ranks_ends_with_a_checkpoint_for_this_device(tmp_path: Path) -> None:
    lines = gpu.commands("cpu", 2, tmp_path, "cpu", 0.1, quick=True)
    for name, script, ranks in (("collectives", "measure/collectives.py", 2), ("checkpoint", "__main__.py", 1)):
        launcher, *_, module, options = re.split(r" -m (\S+) ", lines[name])
        assert launcher and module.replace(".", "/") in f"dreamshard_planner/{script}"
        done = forked(gpu.ROOT / "dreamshard_planner" / script, *shlex.split(options), ranks=ranks)
        assert done.returncode == 0, done.stdout + done.stderr
    made = shipped(tmp_path, "cpu", "default")  # as auto looks for it
    assert made.name == "cpu.safetensors" and made.metadata["dataset"]["sets"] >= 8
    assert resolve(tmp_path / "cpu.safetensors", "cpu").cost is not None
