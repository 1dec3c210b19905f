# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Tables of a rank that share a kernel, and exchanges of a topology."""

import random
from dataclasses import replace

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import BoundsCheckMode, CacheAlgorithm
from scipy.stats import kendalltau
from small_models import collection, table, topology
from torch import nn
from torchrec.distributed.embeddingbag import (
    EmbeddingBagCollectionSharder,
    ShardedEmbeddingBagCollection,
    create_sharding_infos_by_sharding_device_group,
)
from torchrec.distributed.planner.planners import to_sharding_plan
from torchrec.distributed.planner.types import ParameterConstraints, ShardingOption, Topology
from torchrec.distributed.types import CacheParams, ShardingEnv
from torchrec.modules.embedding_configs import DataType, PoolingType
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

import collectives_prior
from dreamshard_planner.checkpoints.choice import resolve
from dreamshard_planner.cost.collectives import GLOO, NCCL, CollectiveFit, CollectiveModel
from dreamshard_planner.planning.rater import FREE, links_of
from dreamshard_planner.problem.enumeration import FastEnumerator
from dreamshard_planner.problem.reader import OptionReader

META = torch.device("meta")
SHARDER_PARAMS = (
    None,
    {"cache_load_factor": 0.4, "prefetch_pipeline": True},
    {"learning_rate": 0.3, "enforce_hbm": True},
    {"use_one_tbe_per_table": True},
)


def random_tables(rng: random.Random) -> nn.Module:
    configs = [
        table(f"t{i}", dim=rng.choice((8, 16, 64)), data_type=rng.choice([DataType.FP32] * 3 + [DataType.FP16]))
        for i in range(12)
    ]
    for config in configs:
        config.pooling = rng.choice([PoolingType.SUM] * 3 + [PoolingType.MEAN])
    model = nn.ModuleDict({"sparse": collection(*configs)})
    for parameter in model.parameters():
        if optimizer := rng.choice((None, torch.optim.Adam, RowWiseAdagrad, RowWiseAdagrad)):
            apply_optimizer_in_backward(optimizer, [parameter], {"lr": rng.choice((0.1, 0.1, 0.2))})
    return model


def random_constraint(rng: random.Random) -> ParameterConstraints:
    def rarely(*values):
        return rng.choice([None] * 4 + [*values])

    cache = CacheParams(
        load_factor=rng.choice((None, 0.1, 0.3)),
        prefetch_pipeline=rng.choice((None, True, False)),
        algorithm=rarely(CacheAlgorithm.LFU),
        reserved_memory=rarely(1.0),
    )
    return ParameterConstraints(
        sharding_types=["table_wise"],
        compute_kernels=[rng.choice(("fused", "fused_uvm", "fused_uvm_caching", "fused_uvm_caching"))],
        cache_params=rng.choice((None, CacheParams(load_factor=0.3), cache)),
        output_dtype=rarely(DataType.FP16),
        enforce_hbm=rarely(True),
        stochastic_rounding=rarely(False),
        bounds_check_mode=rarely(BoundsCheckMode.IGNORE),
    )


def groups_of_torchrec(
    model: nn.Module, options: list[ShardingOption], sharder: EmbeddingBagCollectionSharder
) -> list[list[str]]:
    for option in options:
        option.shards[0].rank = 0
    sharding = to_sharding_plan(options, topology(1, device="cuda")).plan["sparse"]
    (infos,) = create_sharding_infos_by_sharding_device_group(
        model.sparse, sharding, "embedding_bags.", sharder.fused_params
    ).values()
    env = ShardingEnv.from_local(1, 0)
    made = ShardedEmbeddingBagCollection.create_embedding_bag_sharding(infos, env, META)
    return sorted(sorted(one.name for one in group.embedding_tables) for group in made._grouped_embedding_configs)


@pytest.mark.parametrize("seed", range(12))
def test_fused_groups_are_those_of_torchrec(seed: int) -> None:
    rng, gpu = random.Random(seed), topology(1, device="cuda")
    model, sharder = random_tables(rng), EmbeddingBagCollectionSharder(fused_params=SHARDER_PARAMS[seed % 4])
    constraints = {f"t{i}": random_constraint(rng) for i in range(12)}
    options = FastEnumerator(gpu, 64, constraints).enumerate(model, [sharder])
    reader = OptionReader(constraints, sharders=[sharder])
    read = reader.read(options, gpu, {"all_to_all": FREE}, with_storage=False)
    ours: dict[int, list[str]] = {}
    for option, group in zip(options, read.problem.group_P.tolist(), strict=True):
        ours.setdefault(group, []).append(option.name)
    assert sorted(map(sorted, ours.values())) == groups_of_torchrec(model, options, sharder)


@pytest.mark.parametrize(
    ("made", "source"),
    [
        (Topology(4, "cpu", local_world_size=4), "measured with gloo on 2 ranks"),
        (Topology(16, "cpu", local_world_size=8), "nothing measured"),
        (Topology(4, "cuda", local_world_size=4), "nothing measured"),
    ],
    ids=["one host", "two hosts", "another device"],
)
def test_measured_collectives_hold_for_what_they_were_measured_on(made: Topology, source: str) -> None:
    links = links_of(made, resolve("auto", "cpu"))
    known = (links["all_to_all"], links["reduce_scatter"], links["all_gather"], links["all_reduce"])
    assert all(source in model.source for model in known)
    assert (
        links["all_to_all"].world_size == made.world_size
        and links["across"].world_size == made.world_size // links["host_reduce_scatter"].world_size
    )


def test_a_fit_of_two_hosts_is_for_two_hosts() -> None:
    shipped = resolve("auto", "cpu")
    measured = {**shipped.metadata["collectives"], "hosts": 2}
    two = replace(shipped, metadata={**shipped.metadata, "collectives": measured})
    for hosts, known in ((1, False), (2, True), (3, False)):
        links = links_of(Topology(4 * hosts, "cpu", local_world_size=4), two)
        assert ("measured with gloo on 2 ranks of 2 x" in links["all_to_all"].source) == known
        assert ("measured" in links["all_reduce"].source.replace("nothing measured", "")) == known
        assert "nothing measured" in links["host_reduce_scatter"].source  # the ranks of one host are not those two


def test_what_passes_between_hosts_is_what_takes_long() -> None:
    """Two hosts of eight: eight peers of fifteen are on the other host, which all ranks of a host reach at once where
    data passes from rank to rank."""
    made = Topology(16, "cuda", local_world_size=8, intra_host_bw=400e6, inter_host_bw=10e6)
    links = links_of(made, resolve("auto", "cuda"))
    alone, rings = 10e6 * NCCL.all_to_all, 80e6 * NCCL.rings

    def ms(link: CollectiveModel) -> float:
        return float(link.all_to_all_ms(torch.full((link.world_size,), 1e6)))

    assert ms(links["all_to_all"]) == pytest.approx(8e6 / alone + NCCL.between_ms)
    assert ms(links["across"]) == pytest.approx(1e6 / alone + NCCL.between_ms)
    assert ms(links["host_all_gather"]) == pytest.approx(7e6 / (400e6 * NCCL.inside) + NCCL.inside_ms)
    assert ms(links["reduce_scatter"]) == ms(links["all_gather"]) == pytest.approx(15e6 / rings + NCCL.between_ms)
    accelerators = Topology(16, "mtia", local_world_size=8, intra_host_bw=400e6, inter_host_bw=10e6)
    assert links_of(accelerators, resolve("roofline", "mtia")) == links
    # Half of the tensor, 16e6 bytes, goes to the other host, and comes back.
    assert ms(links["all_reduce"]) == pytest.approx(16e6 / rings + NCCL.between_ms)


def test_the_processor_limits_what_cpu_ranks_exchange() -> None:
    """A host's ranks share what it copies in an all-to-all; in rings each has a rate of its own."""
    sent = torch.tensor([[1e6, 1e6, 1e6, 1e6], [4e6, 0, 0, 0]])
    for memory, copied in ((50e6, GLOO.copied_bytes_per_ms), (2e6, 2e6)):
        made = Topology(4, "cpu", local_world_size=4, intra_host_bw=400e6, ddr_mem_bw=memory)
        links = links_of(made, resolve("roofline", "cpu"))
        all_to_all, all_reduce = (
            (link.all_to_all_ms(sent) - link.latency_ms).tolist() for link in (links["all_to_all"], links["all_reduce"])
        )
        # The slowest rank sends four times as much, all together the same.
        assert all_to_all == pytest.approx([3e6 / 400e6 + 12e6 / copied, 12e6 / 400e6 + 12e6 / copied])
        assert all_reduce == pytest.approx([3e6 / GLOO.ringed_bytes_per_ms, 12e6 / GLOO.ringed_bytes_per_ms])
        model = links["all_to_all"]
        assert f"topology's {memory / 1e6:.0f} GB/s" in model.source and not model.is_measured
    two = links_of(Topology(8, "cpu", local_world_size=4, inter_host_bw=10e9), resolve("roofline", "cpu"))
    alike = torch.full((8,), 1e6)
    everywhere, inside, across = (
        (link.all_to_all_ms(alike[: link.world_size]) - link.latency_ms).item()
        for link in (two["reduce_scatter"], two["host_reduce_scatter"], two["across"])
    )
    assert (everywhere, inside) == pytest.approx((7e6 / GLOO.ringed_bytes_per_ms, 3e6 / GLOO.ringed_bytes_per_ms))
    # Four go on side by side on each of two hosts.
    assert across == pytest.approx(8e6 / (2 * GLOO.copied_bytes_per_ms), rel=0.01)


def test_the_prior_agrees_with_published_collectives() -> None:
    """Large exchanges agree in level, all in order; latencies differ by a factor of four between clouds."""
    rows = collectives_prior.published()
    pairs = [(row.predicted_ms(NCCL), row.ms) for row in rows]
    assert len(pairs) == 61 and kendalltau(*zip(*pairs, strict=True)).statistic > 0.85
    large = [(mine, ms) for row, (mine, ms) in zip(rows, pairs, strict=True) if row.size_bytes >= 2**28]
    assert len(large) == 28 and all(1 / 1.4 < mine / ms < 1.4 for mine, ms in large)


def test_lookups_are_exchanged_as_measured_and_else_like_other_all_to_alls() -> None:
    one_host, two_hosts = Topology(4, "cpu", local_world_size=4), Topology(16, "cpu", local_world_size=8)
    checkpoint = resolve("auto", "cpu")
    measured, given = links_of(one_host, checkpoint), links_of(two_hosts, checkpoint)
    assert measured["lookups"].source == measured["all_to_all"].source and measured["lookups"].world_size == 4
    # A rank sorts its own ids, whatever others do.
    id_bytes = torch.full((4,), 1e6)
    alone = CollectiveFit(**checkpoint.metadata["collectives"]["fits"]["bucketing"])
    assert float(measured["bucketing"].all_to_all_ms(id_bytes / 4)) == pytest.approx(
        1e6 / alone.shared_bytes_per_ms, rel=1e-6
    )
    # Splits, lengths and ids.
    assert given["lookups"] == replace(given["all_to_all"], latency_ms=3 * given["all_to_all"].latency_ms)
    assert "bucketing" not in given
