# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""README and docs: snippets run, commands parse, generated parts are up to date, links lead somewhere."""

import re
import runpy
import shlex
import shutil
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from packaging.requirements import Requirement
from torchrec.datasets.random import RandomRecDataset
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dreamshard_planner import TableStatistics, compare_steps
from dreamshard_planner.devices import Machine
from dreamshard_planner.environment import FBGEMM, installed
from dreamshard_planner.offline.jobs import TableSpec, read_table_list
from dreamshard_planner.search.effort import EFFORTS
from tests.cli.test_commands import parse

ROOT = Path(__file__).parent.parent
FORMATS = (ROOT / "docs" / "file_formats.md").read_text()
PAGES = {path.name: path.read_text() for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", PAGES[page], re.DOTALL | re.MULTILINE)


WITH_SNIPPETS = [page for page in PAGES if blocks(page, "python")]


def _given() -> dict[str, Any]:
    """Names that the snippets take for granted."""
    rows, lookups = [5_000, 2_000, 1_000, 500, 100, 100], [20, 5, 10, 1, 1, 2]
    features = [f"f{i}" for i in range(len(rows))]

    def model(device: str) -> EmbeddingBagCollection:
        tables = [EmbeddingBagConfig(rows[i], 32, name=f"t_{f}", feature_names=[f]) for i, f in enumerate(features)]
        made = EmbeddingBagCollection(tables=tables, device=torch.device(device))
        apply_optimizer_in_backward(RowWiseAdagrad, made.parameters(), {"lr": 0.02})
        return made

    def train_steps(model: torch.nn.Module) -> None:
        for batch in 3 * batches:
            model(batch.sparse_features).values().sum().backward()

    data = RandomRecDataset(features, 64, hash_sizes=rows, ids_per_features=lookups, manual_seed=0)
    batches = [batch for _, batch in zip(range(2), data, strict=False)]
    return {
        "some_batches": batches,
        "train_steps": train_steps,
        "local_batch_size": 64,
        "device": torch.device("cpu"),
        "model": model("meta"),
        "meta_model": model("meta"),
        "make_model": partial(model, "meta"),
        "sharders": get_default_sharders(),
        "topology": Machine(ranks_per_host=2, gpu="h100").topology(),
        "dist": dist,
    }


@pytest.mark.filterwarnings("error:HeuristicalStorageReservation:FutureWarning")
@pytest.mark.parametrize("page", WITH_SNIPPETS)
def test_snippets_of_a_page_run_one_after_the_other(
    page: str, group: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(compare_steps.__kwdefaults__, "block_seconds", 0.001)
    monkeypatch.setitem(EFFORTS, "default", EFFORTS["quick"])
    names = _given()
    for number, snippet in enumerate(blocks(page, "python")):
        exec(compile(snippet, f"{page}, snippet {number}", "exec"), names)


def test_pages_that_need_snippets_have_them() -> None:
    assert {"README.md", "plans.md", "sharding_types.md", "train_on_gpus.md"} <= set(WITH_SNIPPETS)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "bash")])
def test_commands_of_a_page_are_understood(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # lines for GPUs are parsed where there is none
    for line in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        if words := shlex.split(line, comments=True):
            _check_command(words, line)


def _check_command(words: list[str], line: str) -> None:
    program, *arguments = words
    program = program.removeprefix(".venv/bin/")
    if program == "dreamshard":
        return parse(*arguments)
    if program == "pip" or arguments[:2] == ["-m", "pip"]:
        for word in words[words.index("pip") + 2 :]:
            if "=" in word:  # a bound on a version, which what the tests run with meets
                need = Requirement(word)
                packages = FBGEMM.packages if need.name in FBGEMM.packages else (need.name,)
                assert need.specifier.contains(installed(*packages), prereleases=True), line
        return None
    if program == "make":
        makefile = (ROOT / "Makefile").read_text()
        for word in arguments:
            name, is_variable, _ = word.partition("=")
            assert re.search(rf"^{name} \?=" if is_variable else rf"^{name}:", makefile, re.MULTILINE), line
        return None
    if program in ("torchrun", "python"):
        first = next(i for i, word in enumerate(arguments) if word == "-m" or word.endswith(".py"))
        target, rest = arguments[first], arguments[first + 1 :]
        if target == "-m":
            target, *rest = rest
            if target == "dreamshard_planner":
                return parse(*rest)
            if target == "pytest":
                return None
            target = target.replace(".", "/") + ".py"
        source = (ROOT / target).read_text()
        for module in re.findall(r"^from (\w+)\.options import", source, re.MULTILINE):
            source += (ROOT / target).with_name(module).joinpath("options.py").read_text()
        for word in rest:
            assert not word.startswith("--") or _has_option(source, word.partition("=")[0]), f"{word} in {line}"
        return None
    assert program in ("cp", "mkdir"), f"nobody checks {line}"


def _has_option(source: str, option: str) -> bool:
    """Return whether a source has an option: of argparse, a parameter or a field."""
    parameter = option.removeprefix("--").replace("-", "_")
    return f'"{option}"' in source or re.search(rf"^    {parameter}: ", source, re.MULTILINE) is not None


def test_the_reference_and_what_is_never_proposed_and_carried_are_up_to_date() -> None:
    assert PAGES["cli.md"] == GENERATE["command_line"](), "run: python docs/generate.py"
    for part in ("never proposed", "states"):
        assert GENERATE["block"](part) == GENERATE[part.replace(" ", "_")](), "run: python docs/generate.py"


def test_the_report_on_the_page_is_what_its_command_prints() -> None:
    """In words and totals: processors round differently, so that rows may swap and ties go to other ranks."""
    shown, made = GENERATE["block"]("report"), GENERATE["report"]()
    assert _words(made) == _words(shown), "run: python docs/generate.py"
    assert _totals_ms(made) == pytest.approx(_totals_ms(shown), rel=0.05), "run: python docs/generate.py"
    assert min(_totals_ms(made).values()) == _totals_ms(made)["dreamshard"]


def _words(report: str) -> list[str]:
    """Its lines in any order, without numbers."""
    return sorted(re.sub(r"(?<![\w.])\d[\d,]*(?:\.\d+)?", "#", " ".join(line.split())) for line in report.splitlines())


def _totals_ms(report: str) -> dict[str, float]:
    return {plan: float(ms) for plan, ms in re.findall(r"^(\w+) +([\d.]+) +[\d.]+ +", report, re.MULTILINE)}


@pytest.mark.parametrize("page", PAGES)
def test_links_of_a_page_lead_somewhere(page: str) -> None:
    folder = ROOT if page == "README.md" else ROOT / "docs"
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        path = folder / name if name else folder / page
        assert path.exists(), target
        if page != "README.md":
            assert path.resolve().is_relative_to(folder), f"{target} is not on the site"
        if anchor:
            assert anchor in _anchors(path.read_text()), target


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_the_front_page_stays_short() -> None:
    assert len(PAGES["README.md"].splitlines()) <= 120


def test_files_on_the_page_are_read(tmp_path: Path) -> None:
    tables, statistics = blocks("file_formats.md", "json")
    (tmp_path / "t.json").write_text(tables)
    (tmp_path / "s.json").write_text(statistics)
    assert [spec.embedding_dim for spec in read_table_list(tmp_path / "t.json")] == [128, 64]
    assert TableStatistics.from_json(tmp_path / "s.json")["user_id"].batch_size == 8192


def test_every_key_of_a_table_is_on_the_page() -> None:
    section = FORMATS.split("## Lists of tables")[1].split("## Statistics")[0]
    keys = {entry.name for entry in fields(TableSpec)}
    assert set(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == keys
