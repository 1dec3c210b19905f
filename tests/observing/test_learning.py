# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Costs of kernels and exchanges learned from observed steps."""

import re
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from small_models import planned, topology

from dreamshard_planner import Checkpoint, Observation, ObservationError
from dreamshard_planner.background import _learned
from dreamshard_planner.checkpoints.choice import SHIPPED, new_file, observed_file, resolve
from dreamshard_planner.checkpoints.choice import measured as measured_costs
from dreamshard_planner.cli.diagnosis import diagnose
from dreamshard_planner.cost.collectives import CPU_BAG_BYTES, OPERATIONS, REVISION, CollectiveFit
from dreamshard_planner.cost.network import mape_2, predict_ms
from dreamshard_planner.errors import CalibrationRefused
from dreamshard_planner.measure.hardware import REFERENCE, describe_hardware
from dreamshard_planner.observing.learning import learn, observed_sets
from dreamshard_planner.observing.observation import ObservedRun, ObservedTable, RankSteps
from dreamshard_planner.planning.rater import links_of
from dreamshard_planner.workload.lookups import FeatureStatistics
from tests.cli.test_commands import run
from tests.observing.runs import (
    LOCAL_BATCH,
    MEMORY,
    STATISTICS,
    WORLD_SIZE,
    kernel,
    observation,
    observed_run,
    of_size,
    planned_run,
    rank_steps,
    with_kernels,
)
from tests.planning.test_context import model


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("DREAMSHARD_HOME", str(tmp_path))
    return tmp_path


def test_learning_corrects_what_was_observed_and_names_the_rest(home: Path) -> None:
    seen, other = observation(2), observation(5)
    for file, one in (("a.json", seen), ("b.json", replace(other, runs=other.runs[2:]))):
        one.save(home / file)
    prior = resolve("roofline", "cpu")
    command = ["learn", str(home / "a.json"), "--costs", "roofline"]
    assert "say where to, --out FILE" in run(*command, status=2).stderr.replace("\n", " ")
    out = new_file(seen.hardware, "learned")  # where it is kept if nobody says
    result = run(*command, "--out", out)
    made = resolve("auto", "cpu")
    assert made.name.endswith("-learned.safetensors") and made.metadata["learned"]["steps"] == 16
    sets = observed_sets(Observation.load(home / "b.json"))[0]
    cpu = topology(2)
    predicted = (predict_ms(one.compute_cost(cpu), sets) for one in (prior, made))
    before, after = (mape_2(ms_X2, sets.labels_ms_X2).tolist() for ms_X2 in predicted)
    assert min(before) > 0.4 and max(after) < 0.1

    said = "learned from 2 runs, 16 steps on"
    assert (
        said in result.output and "never observed, and as before: SGD, row-wise Adagrad, column_wise" in result.output
    )
    assert re.search(r": Adagrad \(forward \d+ % off, backward \d+ % off\); ", made.metadata["learned"]["said"])
    assert said in run("info", "auto").output.replace("\n", " ")
    (finding,) = (one for one in diagnose() if one.subject == "costs on cpu")
    assert "bandwidths, costs learned from 2 runs on this hardware" in finding.found
    report = planned(model(), topology=cpu, batch_size=LOCAL_BATCH).report()
    assert f"roofline (topology's {MEMORY * 1e3 / 1e9:.0f}" not in report.cost_source
    assert said[:26] in report.cost_source and any(said in note.text for note in report.notes)
    assert not any("nothing was measured" in note.text for note in report.notes)


def test_auto_takes_what_was_learned_for_its_hardware_and_threads(home: Path) -> None:
    """Its files may be learned from anywhere: on a login node, say, of a cluster of GPUs."""
    own = torch.get_num_threads()

    def told(**hardware: str | int) -> str:
        observation(1, **hardware).save(home / "seen.json")
        return " ".join(run("learn", home / "seen.json", "--force").stderr.split())

    h100 = {"device": "cuda", "name": "NVIDIA H100 80GB HBM3"}
    for hardware, shipped in ((h100, "nvidia-h100-80gb-hbm3"), ({"name": "abacus"}, "cpu")):
        assert f"corrected: {shipped}.safetensors" in told(**hardware)
        device = hardware.get("device", "cpu")
        made = resolve("auto", device, card=hardware["name"])
        assert made.name.endswith("-learned.safetensors") and made.cost is not None
        assert resolve("auto", device).name != made.name
    told(threads=8 * own)
    assert f"-{8 * own}-threads-learned" in resolve("auto", "cpu").name  # the nearest there is
    told(threads=own)
    assert f"-{own}-threads-learned" in resolve("auto", "cpu").name


def test_what_was_observed_in_earlier_runs_is_not_called_unseen(tmp_path: Path) -> None:
    made, seen = resolve("auto", "cpu"), observation(3)
    said = []
    for optimizer, kind in (("adagrad", "table_wise"), ("sgd", "row_wise"), ("sgd", "row_wise")):
        runs = tuple(with_kernels(one, optimizer=optimizer, sharding_type=kind) for one in seen.runs)
        made = learn(made, replace(seen, runs=runs), tmp_path / "learned.safetensors", force=True)
        said.append(made.metadata["learned"]["said"].rpartition("% off); ")[2])
    assert said[0].startswith("never observed, and as before: SGD, row-wise Adagrad, ") and "row_wise," in said[0]
    for later in said[1:]:  # of all that went before, not of the last alone
        assert later.startswith("never observed, and as before: row-wise Adagrad, ")
        assert " row_wise" not in later and "table_wise" not in later


def test_nothing_is_learned_from_a_training_on_reference_kernels(tmp_path: Path) -> None:
    slow = Observation({**describe_hardware("cpu", 1), "instruction_set": REFERENCE}, (planned_run(1.0, 1.0),))
    with pytest.raises(CalibrationRefused, match="slow reference kernels"):
        learn(Checkpoint.load(SHIPPED / "cpu.safetensors"), slow, tmp_path / "out.safetensors")
    assert not list(tmp_path.iterdir())


def test_learning_refuses_what_held_out_kernels_do_not_confirm(tmp_path: Path) -> None:
    out = tmp_path / "learned.safetensors"
    learn(resolve("roofline", "cpu"), observation(3), out)
    content = out.read_bytes()
    with pytest.raises(CalibrationRefused, match=r"3 runs, 24 steps \(6 kernels\): no correction reduced"):
        learn(Checkpoint.load(out), observation(3), out)
    with pytest.raises(ObservationError, match="has costs of cpu, and cuda was observed"):
        learn(resolve("auto", "cpu"), observation(2, device="cuda"), out)
    whole = observation(1)
    rank = whole.runs[0].ranks[0]
    nines = {name: FeatureStatistics(9.0) for name in STATISTICS}
    for of_rank, kind, told in (
        (replace(rank, columns={}), ObservationError, "looked nothing up, or was not trained"),
        (replace(rank, statistics=nines), ObservationError, "reads 256 ids a step, and the batches have 1,152 for it"),
        (rank, CalibrationRefused, "one kernel, which none confirms"),
    ):
        one = replace(whole, runs=(replace(whole.runs[0], ranks=(of_rank,)),))
        with pytest.raises(kind, match=told):
            learn(resolve("roofline", "cpu"), one, out)
    file = tmp_path / "one.json"
    one.save(file)
    refused = run("learn", file, "--costs", "roofline", "--out", out, status=1).stderr
    assert "stays as it was" in refused and out.read_bytes() == content


@pytest.mark.usefixtures("home")
def test_what_later_runs_contradict_is_removed() -> None:
    """A busy machine taught that kernels take five times as long, and later runs find none of that."""
    seen = observation(3)
    measured = measured_costs("cpu", int(seen.hardware["threads"]), str(seen.hardware["name"]))
    sets_ms = predict_ms(measured.compute_cost(topology(2)), observed_sets(seen)[0]).tolist()

    def runs(times: float) -> Observation:
        made = []
        for index, training in enumerate(seen.runs):
            ranks = []
            for rank, one in enumerate(training.ranks):
                ways = zip(("forward", "backward"), sets_ms[2 * index + rank], strict=True)
                slower = {f"kernel 0 {way}": (times * ms,) * 8 for way, ms in ways}
                ranks.append(replace(one, columns=one.columns | slower))
            made.append(replace(training, ranks=tuple(ranks)))
        return replace(seen, runs=tuple(made))

    file = observed_file(seen.hardware, 2)
    file.parent.mkdir(parents=True)
    assert _learned(runs(5.0), 2).name == file.name and file.exists()
    assert _learned(runs(5.0), 2).name == file.name  # which is confirmed
    assert _learned(runs(1.0), 2).digest() == measured.digest() and not file.exists()


def test_costs_learned_from_a_file_that_the_user_has_replaced_are_left_out(home: Path) -> None:
    seen, shipped, own = observation(3), resolve("auto", "cpu"), home / "checkpoints" / "mine.safetensors"
    own.parent.mkdir()
    for created in ("today", "tomorrow"):
        metadata = {**shipped.metadata, "hardware": seen.hardware, "created": created}
        replace(shipped, metadata=metadata).save(own)
        assert resolve("auto", "cpu").name == own.name
        learn(resolve("auto", "cpu"), seen, observed_file(seen.hardware, 2), force=True)
        assert resolve("auto", "cpu").name == observed_file(seen.hardware, 2).name


def test_equal_parts_of_the_same_tables_are_one_kernel(tmp_path: Path) -> None:
    """Or a level that only half a table on either rank tells would be confirmed by the other half."""
    ranks = []
    for rank, offset in enumerate([(0, 0), (0, 32)]):
        parts = tuple(ObservedTable(f"ebc.{name}", (name,), 3000, 64, offset, (3000, 32)) for name in ("f0", "f1"))
        split = replace(kernel(0, rank), sharding_type="column_wise", tables=parts[:: 1 - 2 * rank])
        lookups = sum(one.lookups for one in split.workloads(STATISTICS))
        times = {f"kernel 0 {way}": (1.0 + rank,) * 8 for way in ("forward", "backward")}
        ranks.append(replace(rank_steps(0, rank, **times, **{"kernel 0 lookups": (lookups,) * 8}), kernels=(split,)))
    twins = replace(observation(1), runs=(observed_run("a", *ranks),))
    assert observed_sets(twins)[0].labels_ms_X2.tolist() == [[1.5, 1.5]]
    with pytest.raises(CalibrationRefused, match=r"\(one kernel, .* observe another plan too"):
        learn(resolve("roofline", "cpu"), twins, tmp_path / "learned.safetensors")


def exchanged(ms: float, sent: float) -> dict[str, tuple[float, ...]]:
    """Columns of an all-to-all of outputs and one of their gradients."""
    every = {"span": ms, "bytes": sent, "calls": 1.0}
    ways = [f"outputs all_to_all {way}" for way in ("forward", "backward")]
    columns = {f"{name} {kind}": (value,) * 8 for name in ways for kind, value in every.items()}
    return columns | {"outputs span together": (2 * ms,) * 8}


def test_exchanges_get_the_bandwidth_that_was_observed(tmp_path: Path) -> None:
    def of(run: int, rank: int) -> RankSteps:
        sent, ms = (1e6, 2e6)[rank] * (run + 1), 24 + 12 * (run + 1)
        return rank_steps(run, rank, **exchanged(ms + rank, sent))

    runs = [observed_run(f"run{run}", *(of(run, rank) for rank in range(2))) for run in range(2)]
    seen = Observation(describe_hardware("cpu", 1), tuple(runs))
    made = learn(resolve("roofline", "cpu"), seen, tmp_path / "learned.safetensors")
    fits = made.metadata["collectives"]["fits"]
    prior, learned = (links_of(topology(2), one) for one in (resolve("roofline", "cpu"), made))
    sent_D = torch.tensor([1e6, 2e6], dtype=torch.float64)
    assert float(learned["all_to_all"].all_to_all_ms(sent_D)) == pytest.approx(36.0, rel=0.05)
    times = prior["all_to_all"].shared_bytes_per_ms / learned["all_to_all"].shared_bytes_per_ms
    # All-reduces, not seen, are as much slower.
    for operation in ("all_to_all", "all_reduce"):
        before, after = prior[operation], learned[operation]
        assert times == pytest.approx(before.bytes_per_ms / after.bytes_per_ms)
        assert 10 < after.latency_ms / before.latency_ms < times  # few sizes tell them apart
    assert fits["lookups"] is fits["bucketing"] is None
    assert learned["lookups"] == prior["lookups"]  # not seen: still counted
    assert learned["all_to_all"].is_measured and not learned["all_reduce"].is_measured
    assert "taken to be as much slower" in learned["all_reduce"].source
    (said,) = made.metadata["learned"]["exchanges"]
    assert said == "outputs by all_to_all: were 93 % off, are now 2 % off"
    planner = planned(model(), batch_size=LOCAL_BATCH, checkpoint=made)
    assert planner.report().collectives_source.startswith("measured with gloo on 2 ranks of one")
    # So are all-reduces that were measured elsewhere, or plans would flee to them; nothing measured gets faster.
    known = resolve("auto", "cpu")
    measured = links_of(topology(2), known)
    for rate, times in ((1e9, 10.0), (1e3, 1.0)):
        fit = asdict(CollectiveFit(0.01, rate, rate, 0.1))
        fits = known.metadata["collectives"]["fits"] | {"all_to_all": fit}
        collectives = known.metadata["collectives"] | {"fits": fits}
        of_other = replace(known, metadata=known.metadata | {"collectives": collectives})
        learned = links_of(topology(2), learn(of_other, seen, tmp_path / "learned.safetensors", force=True))
        slower = measured["all_reduce"].bytes_per_ms / learned["all_reduce"].bytes_per_ms
        assert slower > times if times > 1 else slower == pytest.approx(times)
        assert "not observed" in learned["all_reduce"].source
    # A slowdown that was taken over stays if the operation is seen once, as slow as that.
    gathered = {"span": 40.0, "bytes": 1e6, "calls": 1.0}
    more = {f"outputs all_gather forward {kind}": (value,) * 8 for kind, value in gathered.items()}
    once = replace(runs[0], ranks=tuple(replace(rank, columns=rank.columns | more) for rank in runs[0].ranks))
    exchanges_ms = [one.ms for one in once.outputs.values()]
    fits = {"all_gather": asdict(CollectiveFit(40.0 * once.outputs_ms / sum(exchanges_ms), 1e15, 1e15, 0.1))}
    all_fits = known.metadata["collectives"]["fits"] | fits
    collectives = known.metadata["collectives"] | {"fits": all_fits, "assumed": ["all_gather"]}
    of_other = replace(known, metadata=known.metadata | {"collectives": collectives})
    made = learn(of_other, replace(seen, runs=(once, runs[1])), tmp_path / "learned.safetensors", force=True)
    assert made.metadata["collectives"]["fits"]["all_gather"] == fits["all_gather"]
    assert "all_gather" in made.metadata["collectives"]["assumed"]
    one_alone = replace(seen, runs=tuple(replace(run, ranks=run.ranks[:1]) for run in runs))
    alone = learn(resolve("roofline", "cpu"), one_alone, tmp_path / "alone.safetensors", force=True)
    assert alone.metadata["collectives"] is None  # nobody knows how long it waited


LATENCY_MS, RATE, BATCHES = 10.0, 3e6, 500
"""Latency of an exchange of lookups, its bytes per millisecond, and the factor of its larger batches."""


def counted_bytes(rank: RankSteps) -> float:
    (kernel,) = rank.kernels
    return (kernel.lookup_bytes(rank.median("kernel 0 lookups")) + CPU_BAG_BYTES * kernel.bags) / WORLD_SIZE


def with_lookups(run: int, sharding_type: str = "table_wise", more_ms: float = 0.0, **columns: tuple) -> ObservedRun:
    """Return a run whose lookups take time to get to the kernels; rank 0 waits for rank 1."""
    ranks = of_size(observed_run("", *(rank_steps(run, rank) for rank in range(WORLD_SIZE))), BATCHES).ranks
    ms = LATENCY_MS + max(map(counted_bytes, ranks)) / RATE + more_ms
    told = [{"input_dist": (ms + 1 - one.rank,) * 8, "input_dist calls": (1.0,) * 8} | columns for one in ranks]
    made = (replace(one, columns=one.columns | more) for one, more in zip(ranks, told, strict=True))
    return with_kernels(observed_run(f"run{run}", *made), sharding_type=sharding_type)


def without_lookups() -> Checkpoint:
    """Collectives as they were measured before lookups were."""
    prior, fit = resolve("roofline", "cpu"), asdict(CollectiveFit(5.0, 1e7, 1e7, 0.1))
    hardware = describe_hardware("cpu", 1)
    known = {"backend": "gloo", "world_size": 2, "hardware": hardware, "fits": dict.fromkeys(OPERATIONS, fit)}
    return replace(prior, metadata={**prior.metadata, "collectives": known | {"revision": REVISION}})


def test_lookups_that_were_observed_are_in_the_cost(tmp_path: Path) -> None:
    seen = Observation(describe_hardware("cpu", 1), (with_lookups(0), with_lookups(1)))
    seen.save(tmp_path / "seen.json")
    seen = Observation.load(tmp_path / "seen.json")
    alone = replace(seen, runs=seen.runs[:1])
    made = learn(resolve("roofline", "cpu"), alone, tmp_path / "alone.safetensors", force=True)
    assert made.metadata["collectives"] is None  # no other run confirms it
    cpu = topology(2)
    for name, prior in (("roofline", resolve("roofline", "cpu")), ("measured", without_lookups())):
        made = learn(prior, seen, tmp_path / f"{name}.safetensors")
        links, before = links_of(cpu, made), links_of(cpu, prior)
        for one in seen.runs:
            moved_D = torch.tensor([counted_bytes(rank) for rank in one.ranks])
            assert float(links["lookups"].all_to_all_ms(moved_D)) == pytest.approx(one.lookups_ms, rel=0.1)
        # All else costs what it did, and nobody knows what sorting takes.
        assert replace(links["all_to_all"], source="") == replace(before["all_to_all"], source="")
        assert "bucketing" not in links
        assert links["all_to_all"].is_measured == (name == "measured")
        (said,) = made.metadata["learned"]["exchanges"]
        assert ("were not counted, are now" in said) == (name == "measured") and said.startswith("lookups: were ")
        report = planned(model(), topology=cpu, batch_size=LOCAL_BATCH, checkpoint=made).report()
        assert sum(ms for name, ms in report.collectives if name.endswith(" lookups")) > links["lookups"].latency_ms
        assert not any("lookups is not counted" in str(note) for note in report.notes)


def test_an_exchange_that_was_seen_once_counts_if_outputs_confirm_it(tmp_path: Path) -> None:
    columns = exchanged(125.0, 1e6)
    prior, cpu, plain = resolve("roofline", "cpu"), topology(2), with_lookups(0)
    before, moved_D = links_of(cpu, prior), torch.tensor([counted_bytes(rank) for rank in plain.ranks])
    predicted_ms = float(before["lookups"].all_to_all_ms(moved_D))
    for times in (1.0, 100.0):
        run = with_lookups(0, more_ms=times * predicted_ms - plain.lookups_ms, **columns)
        seen = Observation(describe_hardware("cpu", 1), (run,))
        made = learn(prior, seen, tmp_path / "learned.safetensors", force=True)
        learned = links_of(cpu, made)
        assert learned["all_to_all"].latency_ms > 50 * before["all_to_all"].latency_ms
        if times == 1.0:  # the bandwidths are nearer
            assert learned["lookups"] == before["lookups"]
        else:
            assert float(learned["lookups"].all_to_all_ms(moved_D)) == pytest.approx(times * predicted_ms, rel=0.01)
            assert made.metadata["learned"]["exchanges"][1] == "lookups: were 99 % off, are now as in the only run"
