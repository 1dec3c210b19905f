# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tell the results of the paper's experiment: errors on unseen tables, placements by setting, chart.

Shapes: N placements, D devices, X sets, S shards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from scipy.stats import kendalltau
from torch import Tensor

from common.output import mean_interval, table_of
from dreamshard_planner.cost.collectives import CollectiveModel
from dreamshard_planner.cost.dataset import LabelledSets
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.cost.problem import ComputeCost
from dreamshard_planner.search.starts import HEURISTICS
from paper.models import FITS, Models
from paper.networks import HEADS, PaperCostNetwork, placement_labels, sent_bytes
from paper.training import Half, Setting, labelled_placements, load_blocks, named_placement
from placements.contests import BYTES_PER_MS
from placements.placers import best_scale

Predict = Callable[[LabelledSets, Tensor], tuple[Tensor, Tensor]]
"""Sets and placements [N, D] as sets -> forward and backward milliseconds of the sets [X, 2], overall of the
placements [N]."""


def held_out_placements(half: Half, setting: Setting, count: int) -> list[list[list[str]]]:
    """Random placements of test tasks, one of each task."""
    generator = torch.Generator().manual_seed(7)
    return [
        named_placement(task, torch.randint(setting.devices, (setting.tables,), generator=generator))
        for task in half.tasks(setting, count)
    ]


@torch.no_grad()
def held_out_errors(
    models: Models, settings: Sequence[Setting], half: Half, seeds: Sequence[int], count: int, folder: Path
) -> list[dict[str, Any]]:
    """Errors of all cost networks on random placements of unseen tables, in the settings that they were trained in and
    in the others."""
    rows = []
    for setting in settings:
        sets, index_ND = _held_out(setting, half, count, held_out_blocks(folder, setting))
        collectives = CollectiveModel(setting.devices, BYTES_PER_MS)
        for name, seed, predict in _predictors(models, setting, seeds):
            row = {"setting": str(setting), "cost": name, "seed": seed}
            rows.append(row | _errors(sets, index_ND, collectives, *predict(sets, index_ND)))
        if setting == models.home:
            again, _ = _held_out(setting, half, count, held_out_blocks(folder, setting, again=True))
            overall_N = placement_labels(again, index_ND, sent_bytes(sets, setting.devices), collectives)[-1]
            row = {"setting": str(setting), "cost": "measured again", "seed": 0}
            rows.append(row | _errors(sets, index_ND, collectives, again.labels_ms_X2, overall_N))
    return rows


def held_out_blocks(folder: Path, setting: Setting, again: bool = False) -> Path:
    """Return the file of random placements of test tasks, or of their second measurement."""
    return folder / f"held-out-{setting}{'-again' if again else ''}.blocks"


def _held_out(setting: Setting, half: Half, count: int, path: Path) -> tuple[LabelledSets, Tensor]:
    return labelled_placements(half, held_out_placements(half, setting, count), load_blocks(path))


def _predictors(models: Models, setting: Setting, seeds: Sequence[int]) -> list[tuple[str, int, Predict]]:
    home, found = models.home, []
    collectives = CollectiveModel(setting.devices, BYTES_PER_MS)

    def published(network: PaperCostNetwork, sets: LabelledSets, index_ND: Tensor) -> tuple[Tensor, Tensor]:
        pooled_XR = network.pool(sets)
        sets_X2 = torch.stack([network.head_ms(name, pooled_XR) for name in HEADS[:2]], dim=-1)
        return sets_X2, network.head_ms("overall", network.pool_devices(pooled_XR[index_ND]))

    def formula(compute: ComputeCost, sets: LabelledSets, index_ND: Tensor) -> tuple[Tensor, Tensor]:
        sets_X2 = predict_ms(compute, sets)
        predicted = LabelledSets(sets.features_SF, sets.offsets_X1, sets_X2)
        return sets_X2, placement_labels(predicted, index_ND, sent_bytes(sets, setting.devices), collectives)[-1]

    def add(name: str, predict: Callable[..., tuple[Tensor, Tensor]], compute: ComputeCost) -> None:
        found.append((name, seed, partial(predict, compute)))

    for seed in seeds:
        add(f"converged<{home}", published, models.model("converged", home, seed).compute)
        if seed in models.seeds(setting, seeds):
            add("published", published, models.model("published", setting, seed).compute)
            add("default", formula, models.ours(setting, seed))
            add("linear", formula, models.linear(setting, seed))
            if setting != home and "converged" in models.kinds(setting, seed):
                add("converged", published, models.model("converged", setting, seed).compute)
        if setting != home:
            add(f"default<{home}", formula, models.ours(home, seed))
        if seed >= models.scale.ablation_seeds:
            continue
        for fit in FITS:
            add(f"fit: {fit}<{home}", published, models.fitted(fit, home, seed))
        for size in models.scale.prefixes if setting == home else ():
            add(f"published@{size}", published, models.fitted("published", home, seed, size))
            add(f"default@{size}", formula, models.ours(home, seed, size))
    return found


def _errors(
    sets: LabelledSets, index_ND: Tensor, collectives: CollectiveModel, sets_X2: Tensor, overall_N: Tensor
) -> dict[str, float]:
    """Mean absolute percentage errors and Kendall's tau, of sets that are not empty and of placements. Hours differ in
    the speed of a machine, so predictions are brought to the median of what was measured first."""
    some_X = sets.offsets_X1.diff() > 0
    label_X2, predicted_X2 = sets.labels_ms_X2[some_X], sets_X2[some_X]
    truth_N1 = placement_labels(sets, index_ND, sent_bytes(sets, collectives.world_size), collectives)[-1][:, None]
    overall_N1 = overall_N[:, None]
    forward, backward = mape_2(predicted_X2 * best_scale(predicted_X2, label_X2), label_X2).tolist()
    (overall,) = mape_2(overall_N1 * best_scale(overall_N1, truth_N1), truth_N1).tolist()
    return {
        "forward": forward,
        "backward": backward,
        "tau": float(kendalltau(predicted_X2.sum(-1), label_X2.sum(-1)).statistic),
        "overall": overall,
        "overall_tau": float(kendalltau(overall_N, truth_N1[:, 0]).statistic),
        "sets": int(some_X.sum()),
    }


def by_kind(records: Sequence[dict], setting: str) -> dict[str, np.ndarray]:
    """Measured milliseconds [seeds, tasks] of each row in one setting, NaN where infeasible."""
    chosen = [record for record in records if record["pool"] == setting]
    names = list(dict.fromkeys(name for r in chosen for name in [*r["compute_ms"], *r["infeasible"]]))
    kinds: dict[str, list[list[float]]] = {}
    for name in names:
        kinds.setdefault(name.partition("#")[0], []).append([r["overall_ms"].get(name, math.nan) for r in chosen])
    return {kind: np.array(values) for kind, values in kinds.items()}


def strongest_rule(kinds: dict[str, np.ndarray]) -> str:
    """The greedy rule with the least mean, of those that the records have: there were fewer once."""
    return min((rule for rule in HEURISTICS if rule in kinds), key=lambda rule: float(np.nanmean(kinds[rule])))


def compared(kinds: dict[str, np.ndarray], kind: str, base: str) -> tuple[float, np.ndarray]:
    """Geometric mean over tasks of ``kind`` over ``base``, and its 95 % interval; seeds are averaged first."""
    return pooled({"": kinds}, kind, base)


def pooled(tables: dict[str, dict[str, np.ndarray]], kind: str, base: str | None = None) -> tuple[float, np.ndarray]:
    """As :func:`compared`, over the tasks of all settings; ``base`` is each setting's strongest rule by default. In
    the setting that others transfer from, what is transferred is what was trained there."""
    logs = [np.zeros(0)]
    for kinds in tables.values():
        ours, theirs = (
            name if name in kinds else name.partition("<")[0] for name in (kind, base or strongest_rule(kinds))
        )
        if ours in kinds and theirs in kinds:
            logs.append(np.log(kinds[ours]).mean(0) - np.log(kinds[theirs]).mean(0))
    log_T = np.concatenate(logs)
    log_T = log_T[np.isfinite(log_T)]
    return float(np.exp(log_T.mean())), np.exp(mean_interval(log_T, np.random.default_rng(0)))


PAIRS = (
    ("default", "published"), ("default_policy", "published"), ("published_search", "published"),
    ("default", "published_search"), ("default", "default_policy"), ("published", "autoshard"),
    ("converged", "published"), ("default", "converged"), ("published<{home}", "published"),
    ("converged<{home}", "converged"), ("default<{home}", "default"),
    ("default", "torchrec"), ("published", "torchrec"), ("default", "default_shipped"),
)  # fmt: skip
"""Models that are compared, over all settings."""


def print_results(
    records: Sequence[dict], summary: dict, settings: Sequence[Setting], home: Setting, console: Console, chart: Path
) -> None:
    """Tables for people, and the chart."""
    tables = {str(setting): by_kind(records, str(setting)) for setting in settings}
    tables = {setting: kinds for setting, kinds in tables.items() if kinds}
    every = dict.fromkeys(kind for kinds in tables.values() for kind in kinds)
    for title, cell in (
        ("overall ms: mean, standard deviation over seeds, speed-up over random", _mean_cell),
        ("over the task's strongest rule (by mean), 95 % interval over tasks", _ratio_cell),
    ):
        table = table_of(title, "placer", *tables)
        for kind in every:
            table.add_row(kind, *(cell(kinds, kind) if kind in kinds else "" for kinds in tables.values()))
        console.print(table)
    for kind in (kind for kind in every if kind not in HEURISTICS):
        ratio, (low, high) = pooled(tables, kind)
        console.print(f"{kind} over the strongest rule, all settings that have it: {ratio:.3f} ({low:.3f}-{high:.3f})")
    for kind, base in PAIRS:
        kind, base = kind.format(home=home), base.format(home=home)
        ratio, (low, high) = pooled(tables, kind, base)
        console.print(f"{kind} over {base}, all settings: {ratio:.3f} ({low:.3f}-{high:.3f})")
    for setting, kinds in tables.items():
        count = next(iter(kinds.values())).shape[1]
        alone = sum(r["one_table_is_the_bottleneck"] for r in records if r["pool"] == setting)
        infeasible = {kind: int(np.isnan(v).sum()) for kind, v in kinds.items() if np.isnan(v).any()}
        console.print(
            f"{setting}: {count} tasks, strongest rule {strongest_rule(kinds)}, one table alone is the bottleneck in "
            f"{alone}; infeasible: {infeasible or 'none'}"
        )
    _print_errors(summary["errors"], console)
    if tables:
        draw(tables, summary["errors"], str(home), chart)


def _mean_cell(kinds: dict[str, np.ndarray], kind: str) -> str:
    mean_K = np.nanmean(kinds[kind], axis=1)
    ratio = compared(kinds, "random", kind)[0] - 1
    return f"{mean_K.mean():.2f} ± {mean_K.std():.2f} ({ratio:+.1%})"


def _ratio_cell(kinds: dict[str, np.ndarray], kind: str) -> str:
    ratio, (low, high) = compared(kinds, kind, strongest_rule(kinds))
    return f"{ratio:.3f} ({low:.3f}-{high:.3f})"


def _print_errors(errors: Sequence[dict[str, Any]], console: Console) -> None:
    formats = {"forward": ".1%", "backward": ".1%", "tau": ".3f", "overall": ".1%", "overall_tau": ".3f"}
    headings = ("forward", "backward", "tau of sets", "overall", "tau of placements")
    table = table_of("cost networks on random placements of unseen tables, means over seeds", "cost", *headings)
    for key in dict.fromkeys((row["setting"], row["cost"]) for row in errors):
        same = [row for row in errors if (row["setting"], row["cost"]) == key]
        table.add_row(
            ", ".join(key), *(f"{np.mean([row[name] for row in same]):{form}}" for name, form in formats.items())
        )
    console.print(table)


SHOWN = {
    "published": "tab:red", "converged": "tab:orange", "autoshard": "tab:purple", "published_search": "tab:pink",
    "default": "tab:blue", "default_shipped": "tab:cyan", "torchrec": "tab:green",
}  # fmt: skip
"""Rows of the chart, and their colours."""


def draw(tables: dict[str, dict[str, np.ndarray]], errors: Sequence[dict], home: str, path: Path) -> None:
    """Cost over the strongest rule's by setting; and final cost against the error of the cost network, PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), width_ratios=(2, 1))
    for offset, (kind, color) in enumerate(SHOWN.items()):
        positions, ratios = [], []
        for position, kinds in enumerate(tables.values()):
            if kind in kinds:
                positions.append(position + 0.1 * (offset - len(SHOWN) // 2))
                ratios.append(compared(kinds, kind, strongest_rule(kinds)))
        for position, (_, interval) in zip(positions, ratios, strict=True):
            left.plot([position] * 2, interval, color=color, linewidth=1.5)
        if ratios:
            left.plot(positions, [ratio for ratio, _ in ratios], "o", color=color, label=kind, markersize=4)
    left.axhline(1.0, color="0.3", linewidth=0.8)
    left.set_xticks(range(len(tables)), list(tables))
    left.set_ylabel("measured cost / strongest greedy rule's")
    left.set_xlabel("tables x devices")
    left.legend(fontsize=7)
    kinds = tables.get(home, {})
    for family, color in (("published", "tab:red"), ("default", "tab:blue")):
        points = [kind for kind in kinds if kind.startswith(f"{family}@")]
        rated = [[row["tau"] for row in errors if row["setting"] == home and row["cost"] == kind] for kind in points]
        ratio_of = [compared(kinds, kind, strongest_rule(kinds))[0] for kind in points]
        taus = [float(np.mean(values)) for values in rated]
        right.plot(taus, ratio_of, "o-", color=color, label=f"{family}, {home}")
        for kind, x, y in zip(points, taus, ratio_of, strict=True):
            right.annotate(kind.partition("@")[2], (x, y), fontsize=7, xytext=(3, 3), textcoords="offset points")
    right.axhline(1.0, color="0.3", linewidth=0.8)
    right.set_xlabel("tau of the cost network on unseen sets;\nnumbers: measured placements")
    right.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    plt.close(figure)
