# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""DreamShardPlanner with every sharding type on random models: valid, within memory, as constrained, repeatable, never
rated worse than its rivals, and there wherever TorchRec's planner has a plan.

``pytest tests/test_mixed_models.py --models 1000`` tries more of them.
"""

import math

import pytest
from torchrec.distributed.planner.types import ParameterConstraints, PlannerError
from torchrec.distributed.types import CacheParams
from torchrec.modules.embedding_modules import EmbeddingCollection

from dreamshard_planner import DreamShardPlanner
from dreamshard_planner.planning.infeasible import check_room
from dreamshard_planner.search_space.constraints import AllowedTypes
from dreamshard_planner.search_space.modules import ShardableTable, TableModule, table_configs
from dreamshard_planner.search_space.sharding_types import CACHING, CW, DP, GRID, RW, TWCW, TWRW, broken, inexact
from dreamshard_planner.torchrec_components.components import LEAST_GAIN
from tests.mixed_models import MixedCase, mixed_case

BLOCK = 5
SLACK = 1e-5


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "seeds" in metafunc.fixturenames:
        models = metafunc.config.getoption("models")
        blocks = [range(first, min(first + BLOCK, models)) for first in range(0, models, BLOCK)]
        metafunc.parametrize("seeds", blocks, ids=[f"{seeds[0]}-{seeds[-1]}" for seeds in blocks])


def test_random_mixed_models(seeds: range) -> None:
    planned = 0
    for seed in seeds:
        case = mixed_case(seed)
        planner = case.planner(seed=seed, effort="quick")
        try:
            plan = planner.plan(case.model, case.sharders)
        except PlannerError as error:
            check_refusal(case, planner, error, seed)
            continue
        planned += 1
        check_plan(case, planner, plan, seed)
    assert planned >= len(seeds) // 5


def check_refusal(case: MixedCase, planner: DreamShardPlanner, error: PlannerError, seed: int) -> None:
    """It says what is wrong, and TorchRec's planner finds nothing either under the same sharding types."""
    text = str(error)
    if "negative available" in text:
        return  # TorchRec's own words: the reservation leaves nothing
    assert any(f"'{kind}" in text for kind in ("bags", "weighted", "sequence")), (seed, text)
    if "no sharding type is left" in text or "which TorchRec can't mix" in text:
        return  # nothing that TorchRec could be given instead
    if "in ways that TorchRec cannot run" in text:
        return  # TorchRec plans such tables, and training then crashes: tests/distributed/test_sharding_types.py
    assert "Tables do not fit" in text, (seed, text)
    theirs = case.torchrec_plan(planner._constraints)
    if theirs is not None:  # it counts less of what data-parallel takes
        model = planner._model()
        with pytest.raises(PlannerError, match="do not fit"):
            check_room(model.rated(theirs), f"seed {seed}: TorchRec finds a plan; ours: {text}")


def check_plan(case: MixedCase, planner: DreamShardPlanner, plan, seed: int) -> None:
    options, report = planner.options, planner.report()
    check_tables(case, options, seed)
    check_memory(case, planner, options, seed)
    for option in options:
        check_ranks(case, option, seed)
    check_constraints(case, planner, options, seed)
    sharded = {(path, name): one for path, module in plan.plan.items() for name, one in module.items()}
    for option in options:
        one = sharded[option.path, option.name]
        assert (one.sharding_type, one.compute_kernel) == (option.sharding_type, option.compute_kernel), seed
        assert (one.cache_params, one.enforce_hbm) == (option.cache_params, option.enforce_hbm), seed
    assert planner.predict(options).total_ms == pytest.approx(report.chosen.total_ms, rel=1e-6), seed
    # By guessed lookups a plan has to gain that much over TorchRec's.
    kept = any("TorchRec's plan is kept" in note.text for note in report.notes)
    slack = 1 / (1 - LEAST_GAIN) - 1 if kept else SLACK
    for rival in report.rivals:
        assert report.chosen.total_ms <= rival.total_ms * (1 + slack) + 1e-9, (seed, rival.name)
    kinds = {table.name: table.sharding_type for table in report.tables}
    assert kinds == {option.fqn.removeprefix("."): option.sharding_type for option in options}, seed


def check_tables(case: MixedCase, options, seed: int) -> None:
    expected = {
        f"{path}.{name}"
        for path, module in case.model.named_children()
        for name in table_configs(module)
        if name not in case.left_out
    }
    assert len(options) == len(expected) and {option.fqn for option in options} == expected, seed


def check_memory(case: MixedCase, planner: DreamShardPlanner, options, seed: int) -> None:
    reserved = case.reservation().reserve(
        case.topology, case.batch_size, case.model, case.sharders, planner._constraints
    )
    for kind in ("hbm", "ddr", "ssd"):
        used = [0] * case.topology.world_size
        for option in options:
            for shard in option.shards:
                used[shard.rank] += getattr(shard.storage, kind)
        for rank, device in enumerate(reserved.devices):
            assert used[rank] == 0 or used[rank] <= getattr(device.storage, kind), (seed, rank, kind)


def check_ranks(case: MixedCase, option, seed: int) -> None:
    """Ranks as TorchRec runs the sharding type."""
    ranks, host = [shard.rank for shard in option.shards], case.topology.local_world_size
    where = (seed, option.fqn, option.sharding_type, ranks)
    if option.sharding_type in (RW, DP):
        assert ranks == list(range(case.topology.world_size)), where
    elif option.sharding_type in (TWRW, GRID):
        for first in range(0, len(ranks), host):
            assert ranks[first] % host == 0, where
            assert ranks[first : first + host] == list(range(ranks[first], ranks[first] + host)), where


def check_constraints(case: MixedCase, planner: DreamShardPlanner, options, seed: int) -> None:
    """Sharding types and kernels as constrained, of whole tables; nothing that TorchRec breaks, nor inexact unasked."""
    widths: dict[str, set[int]] = {}
    for option in options:
        kind, given = option.sharding_type, case.constraints.get(option.name)
        where = (seed, option.fqn, kind, option.compute_kernel)
        module = option.module[1]
        sharder = next(one for one in case.sharders if one.module_type is type(module))
        assert kind in sharder.sharding_types(case.topology.compute_device), where
        assert option.compute_kernel in sharder.compute_kernels(kind, case.topology.compute_device), where
        named = None if given is None else given.sharding_types
        assert named is None or kind in named, where
        assert case.settings["sharding_types"] is None or kind in case.settings["sharding_types"], where
        if given is not None:
            assert given.compute_kernels is None or option.compute_kernel in given.compute_kernels, where
            assert option.enforce_hbm == given.enforce_hbm, where
            sized = option.compute_kernel == CACHING and option.cache_load_factor and given.cache_params is None
            asked = CacheParams(load_factor=option.cache_load_factor) if sized else given.cache_params
            assert option.cache_params == asked, where
        owner = TableModule(option.path, module, sharder)
        table = ShardableTable(owner, option.name, option.tensor)
        facts = AllowedTypes(case.topology).facts(table, ParameterConstraints())
        assert broken(kind, facts) is None, where
        assert named is not None or not case.settings["exact_training"] or inexact(kind, facts) is None, where
        copies = case.topology.world_size if kind == DP else 1
        assert sum(math.prod(shard.size) for shard in option.shards) == copies * option.tensor.numel(), where
        if kind in (CW, TWCW) and isinstance(module, EmbeddingCollection):
            widths.setdefault(option.path, set()).update(shard.size[1] for shard in option.shards)
    assert all(len(width) == 1 for width in widths.values()), (seed, widths)
