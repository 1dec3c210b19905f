# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Reports of a plan say which one it is, what it costs, by which source, and why there is none."""

import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_models import SHARDERS, collection, planned, planner, small_model, table, topology
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel
from torchrec.distributed.planner.types import PlannerError

from dreamshard_planner import DreamShardError, FeatureStatistics, JsonPlanLoader, StatisticsError, TableStatistics
from dreamshard_planner.errors import InputWarning
from dreamshard_planner.plans.report import Report, ReportEntry, TableEntry


@pytest.fixture(scope="module")
def report() -> Report:
    return planned(small_model()).report()


def test_report_says_what_and_why(report: Report) -> None:
    assert len(report.chosen.rank_ms) == 2
    assert report.chosen.total_ms == pytest.approx(max(report.chosen.rank_ms) + report.chosen.collectives_ms)
    names = {rival.name for rival in report.rivals}
    assert names >= {"torchrec", "size_greedy", "dim_greedy", "lookup_greedy", "size_lookup_greedy", "policy"}
    assert "network (cpu.safetensors, measured on" in report.cost_source
    text = str(report)
    assert "dreamshard" in text and report.cost_source in text
    assert report.to_dict()["chosen"]["total_ms"] == report.chosen.total_ms
    (line,) = [line for line in text.splitlines() if "the fullest" in line]
    assert re.fullmatch(r"DDR: .* with [\d.]+ KiB of the [\d.]+ GiB that the storage reservation leaves\.", line), line
    with pytest.raises(KeyError, match="size_greedy"):
        report.rival("nobody")


def test_report_is_of_the_plan_that_callbacks_made() -> None:
    def all_on_rank_0(plan: list) -> list:
        for option in plan:
            option.shards[0].rank = 0
        return plan

    made = planned(small_model(), callbacks=[all_on_rank_0])
    report = made.report()
    assert report.chosen.rank_ms[0] > 0 and report.chosen.rank_ms[1] == 0
    assert {table.ranks for table in report.tables} == {(0,)}
    assert all(entry.used_bytes[0] > 0 and entry.used_bytes[1] == 0 for entry in report.memory)
    assert sum(ms for _, ms in report.collectives) == pytest.approx(report.chosen.collectives_ms)
    assert report.rivals and report.candidates
    assert made.saved_plan().report().memory == report.memory
    assert any("callbacks moved tables" in note.text for note in report.notes)


def two_tables(optimizer: type[torch.optim.Optimizer] | None = None) -> nn.Module:
    return nn.ModuleDict({"sparse": collection(table("t0"), table("t1", 5000), optimizer=optimizer)})


def test_report_after_callbacks_changed_kernels() -> None:
    def to_host(plan: list) -> list:
        for option in plan:
            option.compute_kernel = "fused_uvm"
        return plan

    whole = {"topology": topology(device="cuda"), "sharding_types": ["table_wise"]}
    kept, changed = (planner(callbacks=given, **whole) for given in (None, [to_host]))
    for made in (kept, changed):
        made.plan(two_tables(), SHARDERS)
    report = changed.report()
    assert report.chosen.total_ms > kept.report().chosen.total_ms and report.rivals == kept.report().rivals
    assert set(report.sharding_types) == {"table_wise fused_uvm"} and "DDR" in {memory.kind for memory in report.memory}
    assert any("callbacks changed options after they were placed" in note.text for note in report.notes)

    def split(plan: list) -> list:
        plan[0].sharding_type = "row_wise"
        return plan

    made = planner(callbacks=[split])
    assert made.plan(two_tables(), SHARDERS).plan["sparse"]["t0"].sharding_type == "row_wise"
    with pytest.raises(DreamShardError, match="(?s)callbacks changed .* cost is not known: table 'sparse.t0'"):
        made.report()


def test_report_says_why_there_is_none() -> None:
    made = planner(topology=topology(memory=1000))
    with pytest.raises(DreamShardError, match="no report: plan first, on this rank"):
        made.report()
    with pytest.raises(PlannerError):
        made.plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="(?s)no report: the last plan failed, PlannerError: .*iB are missing"):
        made.report()
    for model, sharders in ((nn.Linear(2, 2), SHARDERS), (small_model(), [])):  # as TorchRec plans them
        assert made.plan(model, sharders).plan == {}
    with pytest.raises(DreamShardError, match="no report: the last planned module has no table"):
        made.report()
    with pytest.raises(StatisticsError):
        failing = planner(statistics=TableStatistics({"nobody": FeatureStatistics(1.0)}))
        failing.plan(small_model(), SHARDERS)
    with pytest.raises(DreamShardError, match="the last plan failed, StatisticsError: .*'nobody'"):
        failing.report()


def test_a_search_that_is_cut_short_and_batches_larger_than_measured_are_noted(report: Report) -> None:
    hasty = planned(small_model(), search_seconds=1e-6, batch_size=131_072).report()
    many = "more samples per batch than measured (262,144 against"
    for text in ("cut short", "fits was found in time to compare", many):
        assert text in str(hasty) and text not in str(report)


def test_optimizers_whose_kernels_are_unknown_are_noted(tmp_path: Path) -> None:
    adam, adagrad, sgd = torch.optim.Adam, torch.optim.Adagrad, torch.optim.SGD
    for optimizer, device, said in ((adam, "cpu", 1), (adagrad, "cpu", 0), (sgd, "cpu", 0), (adam, "cuda", 0)):
        model = two_tables(optimizer)
        made = planned(model, topology=topology(device=device))
        made.save_plan(tmp_path / "plan.json")
        again = planned(model, topology=topology(device=device), plan_loader=JsonPlanLoader(tmp_path / "plan.json"))
        for report in (made.report(), again.report()):
            notes = [note for note in report.notes if "costed as with row-wise Adagrad" in note.text]
            assert len(notes) == said and all("sparse.t0, sparse.t1" in note.text for note in notes)


def test_a_model_without_optimizers_is_planned_as_sgd_with_a_warning(tmp_path: Path) -> None:
    """Its plan's file is of no use to the model that has another optimizer."""
    text = "no optimizer was found in the backward of 2 table.s. .sparse.t0, sparse.t1.*SGD is assumed"
    bare, trained = two_tables(), two_tables(torch.optim.Adagrad)
    made = planner()
    with pytest.warns(InputWarning, match=text):
        made.plan(bare, SHARDERS)
    assert re.search(text, str(made.report()))
    made.save_plan(tmp_path / "plan.json")
    with pytest.raises(PlannerError, match="optimizer of table 'sparse.t0' exact_sgd -> exact_adagrad"):
        planner(plan_loader=JsonPlanLoader(tmp_path / "plan.json")).plan(trained, SHARDERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error", InputWarning)
        made.plan(trained, SHARDERS)
    assert "no optimizer" not in str(made.report())


def test_a_row_shows_torchrec_s_planner_as_most_run_it() -> None:
    """The row is the plan that TorchRec makes of the same options if it knows no lookups, at the costs of the true
    ones."""
    lookups = {f"t{i}_f0": FeatureStatistics(factor) for i, factor in enumerate((60.0, 1.0, 60.0, 1.0))}
    model = collection(*(table(f"t{i}", 4_000, dim) for i, dim in enumerate((64, 60, 56, 52))))
    gpus = {"topology": topology(device="cuda"), "sharding_types": ["table_wise"]}
    told, untold = planner(statistics=TableStatistics(lookups), **gpus), planner(**gpus)
    for made in (told, untold):
        made.plan(model, SHARDERS)
    names = [rival.name for rival in untold.report().rivals]
    assert "torchrec" in names and "torchrec_default" not in names
    whole = {f"t{i}": ParameterConstraints(["table_wise"]) for i in range(4)}
    theirs = EmbeddingShardingPlanner(topology(device="cuda"), constraints=whole).plan(model, SHARDERS)
    row = told.report().rival("torchrec_default")
    assert row.total_ms == pytest.approx(told.predict(theirs).total_ms, rel=1e-6)
    assert row.total_ms > told.report().chosen.total_ms
    gain = 1 - told.report().chosen.total_ms / row.total_ms
    assert f"{gain:.1%} less than TorchRec's default plan" in str(told.report()).splitlines()[0]
    observed = replace(told.report(), embedding_share=0.35).headline
    assert observed.endswith(f"Embeddings are about 35% of your step; the plan saves {gain:.0%} of them.")


def entry(rank_ms: tuple[float, ...], collectives_ms: float) -> ReportEntry:
    return ReportEntry("dreamshard", max(rank_ms) + collectives_ms, collectives_ms, rank_ms, (0.0,) * len(rank_ms))


def whole(name: str, rank: int, alone_ms: float) -> TableEntry:
    return TableEntry(name, "table_wise", "fused", (rank,), (alone_ms,))


def blocks(shard_ms: tuple[float, ...]) -> TableEntry:
    return TableEntry("rows", "row_wise", "fused", tuple(range(len(shard_ms))), shard_ms)


@pytest.mark.parametrize(
    ("rank_ms", "collectives_ms", "tables", "said"),
    [
        ((1.0, 1.0), 7.0, [whole("a", 0, 1.0)], "Bottleneck: collectives, 88% of 8.000 ms (all-to-all: 7.000 ms)"),
        ((9.0, 1.0), 1.0, [whole("a", 0, 8.0), whole("b", 1, 1.0)], "Bottleneck: table 'a' (table_wise), 8.000 of the"),
        ((2.0, 2.0), 1.0, [whole("a", 0, 2.0), whole("b", 1, 2.0)], "Bottleneck: compute, 67% of 3.000 ms, on level"),
        ((9.0, 1.0), 1.0, [blocks((8.0, 0.5))], "Bottleneck: table 'rows' (row_wise), 8.000 of the 9.000 ms"),
        ((3.0, 2.0), 1.0, [whole(f"a{i}", 0, 0.5) for i in range(6)], "Bottleneck: rank 0, 20% above the mean"),
        ((3.0,), 0.0, [whole("a", 0, 3.0)], "Bottleneck: compute, 100% of 3.000 ms, on one rank"),
        ((0.0, 0.0), 0.0, [], "Nothing to compute"),
    ],
    ids=["collectives", "table", "block", "level", "rank", "alone", "nothing"],
)
def test_the_verdict_names_the_bottleneck(rank_ms, collectives_ms, tables, said) -> None:
    nothing = {"rivals": (), "memory": (), "cost_source": "", "collectives_source": "", "candidates": 0, "reshards": 0}
    sent = (("all-to-all", collectives_ms),)
    report = Report(chosen=entry(rank_ms, collectives_ms), collectives=sent, tables=tuple(tables), **nothing)
    assert report.verdict.startswith(said), report.verdict
    averaged = replace(report, averaging_ms=0.6 * (max(rank_ms) + collectives_ms)).verdict
    assert averaged.startswith("Bottleneck: averaging replicas, 60% of" if max(rank_ms) else said), averaged


def test_reports_begin_with_the_verdict_and_the_assumptions() -> None:
    made = planned(small_model(), batch_size=None)
    report = made.report()
    first, second, _, fourth, fifth, *_ = str(report).splitlines()
    assert first.startswith(f"Predicted: {report.chosen.total_ms:.3f} ms of embedding work per training step, ")
    assert first.endswith(f"Confidence: {report.confidence}.") and second == f"{report.verdict}."
    assert "one lookup per sample is assumed for 9 of 9 features (t0_f0, t1_f0, t1_f1, ...)" in fourth
    assert "a local batch of 512 samples is assumed" in fifth
    lookups = report.notes[0]
    assert lookups.code == "assumption" and lookups.figures["features"] == 9
    assert lookups.figures["one_ms"] == pytest.approx(report.chosen.total_ms, rel=1e-6)
    features = [feature for table in made.saved_plan().inputs.tables.values() for feature in table.features]
    many = TableStatistics(dict.fromkeys(features, FeatureStatistics(10.0)))
    told = planned(small_model(), batch_size=512, statistics=many)
    assert told.predict(made.options).total_ms == pytest.approx(lookups.figures["ten_ms"], rel=1e-6)
    assert [note for note in told.report().notes if note.code == "assumption"] == []
    given = {"constraints": {"t1": ParameterConstraints(pooling_factors=[1.5])}}
    some = planned(small_model(), statistics=TableStatistics({"t0_f0": FeatureStatistics(3.0)}), **given)
    (note,) = [note for note in some.report().notes if note.code == "assumption"]
    assert "6 of 9 features (t2_f0," in note.text


@pytest.mark.parametrize(("batch_size", "noted"), [(64, False), (128, False), (256, True), (1, True)])
def test_statistics_of_batches_of_another_size_are_noted(batch_size: int, noted: bool) -> None:
    counted = TableStatistics({"t_f0": FeatureStatistics(2.0, (1.0, *[0.0] * 16), batch_size=16)})
    made = planned(collection(table("t")), statistics=counted, batch_size=batch_size)
    texts = [note.text for note in made.report().notes if note.code == "assumption"]
    assert any(text.startswith("statistics were counted in batches of 16 samples") for text in texts) == noted


@pytest.mark.parametrize(("rows", "cost_source"), [(1000, "roofline"), (10, "auto"), (1_000_000, "auto")])
def test_ten_lookups_cost_no_less_than_one(rows: int, cost_source: str) -> None:
    """The network's error exceeds the cost of nearly empty kernels."""
    few = planned(collection(table("t", rows, 4)), cost_source=cost_source, batch_size=8).report()
    (note,) = [note for note in few.notes if "1 of 1 features" in note.text]
    one_ms, ten_ms = note.figures["one_ms"], note.figures["ten_ms"]
    assert ten_ms >= one_ms > 0 and note.text.endswith("tell") == (ten_ms <= one_ms * 1.001)


def test_a_policy_that_can_play_no_plan_has_no_row() -> None:
    """An action places all slices of a table on ranks of their own."""
    slices = ParameterConstraints(sharding_types=["column_wise"], min_partition=4)
    report = planned(collection(table("t", dim=20)), constraints={"t": slices}).report()
    assert len(report.tables[0].ranks) == 5 and "policy" not in {rival.name for rival in report.rivals}


def test_host_memory_of_gpus_is_an_assumption_where_tables_lie_there() -> None:
    told = []
    for rows in (10_000, 100_000_000):
        gpus = Topology(2, "cuda", hbm_cap=10**10, local_world_size=2)
        made = planned(collection(table("t0", rows, 64)), topology=gpus)
        told.append([note.text for note in made.report().notes if "host memory are assumed" in note.text])
    assert told[0] == [] and "256.00 GiB on a host; 1 table(s) lie there (t0)" in told[1][0]


def test_estimates_of_torchrec_are_judged_by_their_parts() -> None:
    """The estimate of a rank is compute and collectives together; here collectives are most of it."""
    gpus = Topology(4, "cuda", local_world_size=2)
    rows = {f"t{i}": ParameterConstraints(sharding_types=["row_wise"]) for i in range(3)}
    model = collection(*(table(name, 100_000, 128) for name in rows))
    given = {"batch_size": 4096, "constraints": rows, "cost_source": "torchrec"}
    made = planned(model, topology=gpus, **given)
    report = made.report()
    assert report.chosen.total_ms == pytest.approx(NoopPerfModel(gpus).rate(made.options), rel=1e-12)
    perfs = [option.shards[report.chosen.slowest].perf for option in made.options]
    sent_ms = sum(perf.fwd_comms + perf.bwd_comms for perf in perfs)
    share = f"{sent_ms / report.chosen.total_ms:.0%} of {report.chosen.total_ms:.3f} ms"
    assert sent_ms > report.chosen.total_ms / 2 and report.verdict.startswith(f"Bottleneck: collectives, {share}")
    assert sum(report.estimate_ms.values()) == pytest.approx(report.chosen.total_ms, rel=1e-12)
    assert "fwd_comms" in str(report) and "compute and collectives per rank" in str(report)
    fast = Topology(4, "cuda", local_world_size=4, intra_host_bw=1e12)
    made = planned(model, topology=fast, **given)
    assert made.report().verdict.startswith("Bottleneck: compute, 60% of")
