# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""2D parallelism: the plan of one sharding group, by the topology of all ranks, under TorchRec's ``DMPCollection``.

``DMPCollection`` asserts CUDA or MTIA; the test takes that assertion, and no other, out of its ``__init__``, and the
index out of the CPUs that shards are put on (``cpu:1`` is no device of a tensor). Its all-reduce is an argument, since
gloo cannot average.
"""

import ast
import inspect
import textwrap
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mixed import parts_of
from ranks import Rank, run_on_ranks
from small_models import collection, planned, planner, table
from torch import nn
from torch.distributed.remote_device import _remote_device
from torch.distributed.tensor import DTensor
from torchrec.distributed import model_parallel
from torchrec.distributed.planner import ParameterConstraints, Topology
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm.job import EveryTypeSharder
from dreamshard_planner import (
    DistributedModelParallel,
    DreamShardError,
    DreamShardPlanner,
    ObservationError,
    ShardingGroups,
    attach_optimizers,
    load_across_plans,
    observe,
    save_across_plans,
)
from dreamshard_planner.planning.ranks import check_ranks
from dreamshard_planner.search_space.sharding_types import CW, DP, RW, TW
from tests.ways import saved_state

TYPES = {"t0": TW, "t1": RW, "t2": CW, "t3": TW}
CONSTRAINTS = {name: ParameterConstraints(sharding_types=[kind], min_partition=32) for name, kind in TYPES.items()}
WORLD = Topology(world_size=4, local_world_size=2, compute_device="cpu")
"""All ranks, and the sharding group as the host, as in the example of DMPCollection."""


class Model(nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        tables = (table(f"t{i}", 100 + i, 64) for i in range(4))
        self.bags = collection(*tables, optimizer=RowWiseAdagrad, device=device)

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        return self.bags(features).values()


class OnCpus(model_parallel.DMPCollection):
    """``DMPCollection`` without its first assertion, and with CPUs that have no index."""

    def _remap_sharding_plan(self, plan: ShardingPlan, **arguments: Any) -> None:
        super()._remap_sharding_plan(plan=plan, **arguments)
        for module in plan.plan.values():
            for parameter in module.values():
                for shard in parameter.sharding_spec.shards if parameter.sharding_spec else ():  # replicas have none
                    shard.placement = _remote_device(f"rank:{shard.placement.rank()}/cpu")


def _allow_cpus() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(model_parallel.DMPCollection.__init__)))
    body = tree.body[0].body
    dropped = next(node for node in body if isinstance(node, ast.Assert))
    assert "only supports CUDA" in ast.unparse(dropped)
    body.remove(dropped)
    names = {**vars(model_parallel), "__class__": model_parallel.DMPCollection}
    source = ast.unparse(tree).replace("super().__init__", "super(DMPCollection, self).__init__")
    exec(source, names)
    OnCpus.__init__ = names["__init__"]


def _averaging(group: list[dist.ProcessGroup]):
    def all_reduce(tensors: list[torch.Tensor]) -> None:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group[0])
            tensor /= group[0].size()

    return all_reduce


def _sharded(
    rank: Rank, planner: DreamShardPlanner, groups: ShardingGroups, replicas: list[dist.ProcessGroup]
) -> OnCpus:
    _allow_cpus()
    plan = planner.collective_plan(Model("meta"), [EveryTypeSharder()], dist.group.WORLD)
    torch.manual_seed(0)
    return OnCpus(
        module=Model("cpu"),
        device=torch.device("cpu"),
        plan=plan,
        world_size=rank.world_size,
        sharding_group_size=groups.size,
        global_pg=dist.group.WORLD,
        sharders=[EveryTypeSharder()],
        use_inter_host_allreduce=groups.use_inter_host_allreduce,
        custom_all_reduce=_averaging(replicas),
    )


def _batch(rank: Rank) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(rank.rank)
    lengths = torch.randint(1, 4, (16,), generator=generator)
    values = torch.randint(0, 100, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor([f"t{i}_f0" for i in range(4)], values, None, lengths)


def _moves(sharded: nn.Module, folder: Path) -> bool:
    """Return True if a checkpoint loads on its ranks, and whole without ranks: weights and states."""
    state = saved_state(sharded)
    values = [
        *state["model"].values(),
        *(v for of_table in state["optimizer"]["state"].values() for v in of_table.values()),
    ]
    assert all(isinstance(value, DTensor) for value in values)
    parts = [part for value in values for _, part in parts_of(value)]
    kept = [part.clone() for part in parts]
    save_across_plans(state, folder)
    for part in parts:
        part.zero_()
    load_across_plans(state, folder)
    same = all(map(torch.equal, parts, kept))
    whole = {key: torch.zeros(tuple(value.shape)) for key, value in state["model"].items()}
    sums = {f"dense.{key}": {"sum": torch.zeros(len(weights), 1)} for key, weights in whole.items()}
    load_across_plans({"model": whole, "optimizer": {"state": sums}}, folder)
    for key, value in state["model"].items():
        for (row, column), part in parts_of(value):
            same &= torch.equal(whole[key][row : row + len(part), column : column + part.shape[1]], part)
    return same and all(state["sum"].any() for state in sums.values())


def _train(rank: Rank, consecutive: bool, folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    groups = ShardingGroups(size=2, sync_interval=2, use_inter_host_allreduce=consecutive)
    made = planner(topology=WORLD, batch_size=4, sharding_groups=groups, constraints=CONSTRAINTS)
    replicas: list[dist.ProcessGroup] = []
    sharded = _sharded(rank, made, groups, replicas)
    context = sharded._default_ctx
    replicas.append(context.replica_pg)
    sharded.sync()  # the same weights to begin with
    sharded(_batch(rank)).sum().backward()
    before = [weights.clone() for of_type in context.weights_by_dtype.values() for weights in of_type]
    sharded.sync()
    after = [weights.clone() for of_type in context.weights_by_dtype.values() for weights in of_type]
    return {
        "kinds": {name: one.sharding_type for name, one in sharded.plan.plan["bags"].items()},
        "replicas": dist.get_process_group_ranks(context.replica_pg),
        "before": before,
        "after": after,
        "moves": _moves(sharded, folder),
        "bytes": sum(weights.nbytes for weights in before)
        + sum(state.nbytes for of_type in context.optimizer_tensors_by_dtype.values() for state in of_type),
        "synced_bytes": made.report().notes if rank.rank == 0 else (),
    }


def _replicate(rank: Rank) -> dict[str, Any]:
    """A step with one table replicated on all ranks, its optimizer attached."""
    warnings.simplefilter("ignore")
    groups = ShardingGroups(size=2)
    constraints = CONSTRAINTS | {"t3": ParameterConstraints(sharding_types=[DP])}
    given = {"sharding_groups": groups, "constraints": constraints, "optimizers_attached": True}
    made = planner(topology=WORLD, batch_size=4, **given)
    with pytest.raises(DreamShardError, match=r"topology has 2 ranks, and there are 4 .*DMPCollection"):
        DistributedModelParallel(Model("meta"), device=torch.device("cpu"), planner=made)
    sharded = _sharded(rank, made, groups, [])
    attached = attach_optimizers(sharded)
    with pytest.raises(ObservationError, match="2D parallelism"), observe(sharded, made):
        pass
    (replica,) = (weights for name, weights in sharded.named_parameters() if name == "bags.embedding_bags.t3.weight")
    before, batch = replica.detach().clone(), _batch(rank)
    sharded(batch).sum().backward()
    counts = torch.bincount(batch["t3_f0"].values(), minlength=len(replica)).double()
    return {"attached": attached, "before": before, "after": replica.detach().clone(), "lookups": counts}


def _job(rank: Rank, folder: Path) -> dict[str, dict[str, Any]]:
    found = {f"consecutive: {given}": _train(rank, given, folder / str(given)) for given in (False, True)}
    return found | {"replicated": _replicate(rank)}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """By rank."""
    return run_on_ranks(_job, tmp_path_factory.mktemp("groups"), world_size=4)


@pytest.mark.parametrize("consecutive", [False, True])
def test_replicas_of_a_planned_group_are_averaged(consecutive: bool, found: list[dict[str, Any]]) -> None:
    ranks = [of_rank[f"consecutive: {consecutive}"] for of_rank in found]
    assert all(one["moves"] for one in ranks)
    assert all(one["kinds"] == TYPES for one in ranks)
    assert [one["replicas"] for one in ranks] == (
        [[0, 2], [1, 3], [0, 2], [1, 3]] if consecutive else [[0, 1], [0, 1], [2, 3], [2, 3]]
    )
    for one in ranks:
        replicas = [ranks[other] for other in one["replicas"]]
        assert one["before"]
        for index, mean in enumerate(one["after"]):
            alike = [other["before"][index] for other in replicas]
            assert not torch.equal(*alike)
            torch.testing.assert_close(mean, sum(alike) / 2)
    (told,) = [note.figures for note in ranks[0]["synced_bytes"] if "sync_bytes" in note.figures]
    assert told["sync_bytes"] == max(one["bytes"] for one in ranks)


def test_replicated_tables_are_trained_by_the_ranks_of_all_groups(found: list[dict[str, Any]]) -> None:
    """Their gradients are averaged over all four ranks at once, which is what the plan counts, not over a group's."""
    ranks = [of_rank["replicated"] for of_rank in found]
    for one in ranks:
        assert one["attached"] == ("bags.embedding_bags.t3.weight",)
        torch.testing.assert_close(one["before"], ranks[0]["before"])
    gradient = sum(one["lookups"] for one in ranks) / 4  # of a sum, by row; alike in every column
    step = 0.1 * torch.where(gradient > 0, 1.0, 0.0)  # row-wise Adagrad's first: the gradient over its root mean square
    for one in ranks:
        torch.testing.assert_close(one["after"], one["before"] - step[:, None].float(), atol=1e-5, rtol=1e-5)


def in_groups(topology: Topology, **arguments: Any) -> DreamShardPlanner:
    return planned(Model("meta"), get_default_sharders(), topology=topology, batch_size=512, **arguments)


def test_the_ranks_of_a_host_that_dmp_collection_needs_are_told() -> None:
    for kind, told in (("table_row_wise", True), (RW, False)):
        constraints = {f"t{i}": ParameterConstraints(sharding_types=[kind]) for i in range(4)}
        hosts = Topology(8, "cuda", local_world_size=4)
        report = in_groups(hosts, constraints=constraints, sharding_groups=ShardingGroups(size=4)).report()
        assert any("node_group_size=2" in str(note) for note in report.notes) == told


def test_without_groups_the_plan_of_all_ranks_is_no_plan_of_one() -> None:
    all_ranks = Topology(8, "cpu")
    for ranks in (8, 4):  # all, or one group that plans
        check_ranks(4, all_ranks, ranks, in_groups=True)
    with pytest.raises(DreamShardError, match="has 16 ranks, and the planner's topology 8 in sharding groups of 4"):
        check_ranks(4, all_ranks, 16, in_groups=True)
    with pytest.raises(DreamShardError, match="4 ranks are no whole number of sharding groups of 3"):
        DreamShardPlanner(topology=Topology(4, "cpu"), sharding_groups=ShardingGroups(size=3))
    with pytest.raises(ValueError, match="sync_interval of sharding groups must be a whole number from 1, got 0"):
        ShardingGroups(size=2, sync_interval=0)


@pytest.mark.parametrize(
    "size, consecutive, hosts, inside",
    [(8, False, 4, True), (8, True, 8, False), (2, False, 1, True), (16, False, 8, True), (4, True, 4, False)],
)
def test_ranks_of_a_group_by_host_and_the_links_of_replicas(
    size: int, consecutive: bool, hosts: int, inside: bool
) -> None:
    """Two hosts have eight ranks each, one of them less memory."""
    world = Topology(16, "cuda", local_world_size=8, intra_host_bw=1e9, inter_host_bw=1e8, hbm_cap=100)
    world.devices[5].storage.hbm = 60
    groups = ShardingGroups(size=size, use_inter_host_allreduce=consecutive)
    one, count = groups.topology(world), 16 // size
    assert (one.world_size, one.local_world_size, len(one.devices)) == (size, hosts, size)
    small = 5 % size if consecutive else 5 // count
    assert [device.storage.hbm for device in one.devices] == [60 if rank == small else 100 for rank in range(size)]
    expected = 2 * (count - 1) / count / (1e9 if inside else 1e8)
    assert groups.sync_ms_per_byte(world) == (pytest.approx(expected) if count > 1 else 0)
    assert world.world_size == 16 and world.devices[0].storage.hbm == 100


def test_averaging_is_part_of_the_cost_and_weighs_less_the_rarer_it_is() -> None:
    often, seldom, alone = (
        in_groups(Topology(8, "cuda"), sharding_groups=ShardingGroups(size=size, sync_interval=interval))
        for size, interval in ((2, 1), (2, 100), (8, 1))
    )
    assert often.report().chosen.total_ms > seldom.report().chosen.total_ms
    assert often.explain().headline == often.report().verdict
    assert alone.report().averaging_ms == 0
