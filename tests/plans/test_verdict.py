# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""What a report begins with: what holds the step up, and what it assumes that nobody said."""

from __future__ import annotations

import pytest
from small_models import SHARDERS, collection, planner, small_model, table, topology
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.planner.perf_models import NoopPerfModel

from dreamshard_planner import DreamShardPlanner, FeatureStatistics, TableStatistics
from dreamshard_planner.plans.notes import Note
from dreamshard_planner.plans.report import ReportEntry, TableEntry, verdict
from tests.counted import counted


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
    text = verdict(entry(rank_ms, collectives_ms), tables, [("all-to-all", collectives_ms)])
    assert text.startswith(said), text
    averaged = verdict(entry(rank_ms, collectives_ms), tables, (), averaging_ms=0.6 * (max(rank_ms) + collectives_ms))
    assert averaged.startswith("Bottleneck: averaging replicas, 60% of" if max(rank_ms) else said), averaged


@pytest.mark.parametrize("batch_sizes", [None, [16]])
def test_features_that_were_counted_in_smaller_batches_are_named(batch_sizes: list[int] | None) -> None:
    parts = [counted({f"t{i}_f0": ([1] * n, range(n))}, n) for i, n in ((0, 64), (2, 16))]
    made = planner(
        statistics=TableStatistics.merge(parts), constraints={"t2": ParameterConstraints(batch_sizes=batch_sizes)}
    )
    made.plan(small_model(), SHARDERS)
    told = [note.text for note in made.report().notes if "were counted in smaller batches" in note.text]
    assert len(told) == (batch_sizes is None) and all("1 of them (t2_f0)" in text for text in told)


def test_reports_begin_with_the_verdict_and_the_assumptions() -> None:
    planner = DreamShardPlanner(topology=topology(), stats=[], debug=False)
    planner.plan(small_model(), SHARDERS)
    report = planner.report()
    first, second, third, *_ = str(report).splitlines()
    assert first == f"{report.verdict}."
    assert "one lookup per sample is assumed for 9 of 9 features (t0_f0, t1_f0, t1_f1, ...)" in second
    assert "a local batch of 512 samples is assumed" in third
    lookups = report.notes[0]
    assert lookups.code == "assumption" and lookups.figures["features"] == 9
    assert lookups.figures["one_ms"] == pytest.approx(report.chosen.total_ms, rel=1e-6)
    features = [feature for table in planner.saved_plan().inputs.tables.values() for feature in table.features]
    many = TableStatistics(dict.fromkeys(features, FeatureStatistics(10.0)))
    told = DreamShardPlanner(topology=topology(), batch_size=512, statistics=many, stats=[], debug=False)
    told.plan(small_model(), SHARDERS)
    assert told.predict(planner.options).total_ms == pytest.approx(lookups.figures["ten_ms"], rel=1e-6)
    assert [note for note in told.report().notes if note.code == "assumption"] == []


def test_only_what_nobody_said_is_assumed() -> None:
    statistics = TableStatistics({"t0_f0": FeatureStatistics(3.0)})
    constraints = {"t1": ParameterConstraints(pooling_factors=[1.5])}
    planner = DreamShardPlanner(
        topology=topology(), batch_size=64, statistics=statistics, constraints=constraints, stats=[], debug=False
    )
    planner.plan(small_model(), SHARDERS)
    (note,) = [note for note in planner.report().notes if note.code == "assumption"]
    assert "6 of 9 features (t2_f0," in note.text


def test_more_memory_than_there_is_is_an_assumption() -> None:
    """128 GiB for each of many ranks of one host, which no machine that runs this has for its CPUs."""
    planner = DreamShardPlanner(
        topology=Topology(512, "cpu", local_world_size=512),
        batch_size=64,
        stats=[],
        debug=False,
        sharding_types=("table_wise",),
    )
    planner.plan(collection(table("t0", 100)), SHARDERS)
    assert any("128.00 GiB of host memory are assumed for every rank" in note.text for note in planner.report().notes)


def test_host_memory_of_gpus_is_an_assumption_where_tables_lie_there() -> None:
    told = []
    for rows in (10_000, 100_000_000):
        planner = DreamShardPlanner(topology=Topology(2, "cuda", hbm_cap=10**10, local_world_size=2), batch_size=64)
        planner.plan(collection(table("t0", rows, 64)), SHARDERS)
        told.append([note.text for note in planner.report().notes if "host memory are assumed" in note.text])
    assert told[0] == [] and "256.00 GiB on a host; 1 table(s) lie there (t0)" in told[1][0]


def test_codes_are_known() -> None:
    with pytest.raises(ValueError, match="got 'whatever'"):
        Note("whatever", "text")


def test_estimates_of_torchrec_are_judged_by_their_parts() -> None:
    """The estimate of a rank is compute and collectives together; here collectives are most of it."""
    gpus = Topology(4, "cuda", local_world_size=2)
    rows = {f"t{i}": ParameterConstraints(sharding_types=["row_wise"]) for i in range(3)}
    model = collection(*(table(name, 100_000, 128) for name in rows))
    made = DreamShardPlanner(
        topology=gpus, batch_size=4096, constraints=rows, cost_source="torchrec", stats=[], debug=False
    )
    made.plan(model, SHARDERS)
    report = made.report()
    assert report.chosen.total_ms == pytest.approx(NoopPerfModel(gpus).rate(made.options), rel=1e-12)
    perfs = [option.shards[report.chosen.slowest].perf for option in made.options]
    sent_ms = sum(perf.fwd_comms + perf.bwd_comms for perf in perfs)
    share = f"{sent_ms / report.chosen.total_ms:.0%} of {report.chosen.total_ms:.3f} ms"
    assert sent_ms > report.chosen.total_ms / 2 and report.verdict.startswith(f"Bottleneck: collectives, {share}")
    (parts,) = [note.figures for note in report.notes if "fwd_comms_ms" in note.figures]
    assert sum(parts.values()) == pytest.approx(report.chosen.total_ms, rel=1e-12)
    assert "fwd_comms" in str(report) and "compute and collectives per rank" in str(report)
    fast = Topology(4, "cuda", local_world_size=4, intra_host_bw=1e12)
    made = DreamShardPlanner(
        topology=fast, batch_size=4096, constraints=rows, cost_source="torchrec", stats=[], debug=False
    )
    made.plan(model, SHARDERS)
    assert made.report().verdict.startswith("Bottleneck: compute, 60% of")
