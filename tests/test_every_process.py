# Copyright (c) the dreamshard_planner authors. BSD-3-Clause licence, see LICENSE.
"""Plans, reports and hashes do not depend on the process, its hash seed or its number of threads."""

import os
import subprocess
import sys

PRINT = """
import sys, torch, warnings
warnings.simplefilter("ignore")
torch.set_num_threads(int(sys.argv[1]))
from tests.mixed_models import mixed_case
from tests.planning.test_context import made, topology
on_cpus, on_gpus = made()[0], made(topology=topology(device="cuda"))[0]
print(on_cpus.hash_planner_context_inputs_str(), on_gpus.hash_planner_context_inputs())
for seed in (12, 13, 19):
    case = mixed_case(seed)
    planner = case.planner()
    try:
        planner.plan(case.model, case.sharders)
    except Exception as error:
        print(type(error).__name__, error)
        continue
    print([(o.fqn, o.sharding_type, o.compute_kernel, [s.rank for s in o.shards]) for o in planner.options])
    print(planner.report())
"""


def test_the_same_plans_and_hashes_in_every_process() -> None:
    outputs = set()
    for hash_seed, threads in (("0", "1"), ("1", "2")):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        result = subprocess.run(
            [sys.executable, "-c", PRINT, threads], env=environment, capture_output=True, text=True, check=False
        )
        assert result.returncode == 0, result.stderr
        outputs.add(result.stdout)
    (output,) = outputs
    assert len(output.split()[0]) == 64 and "milliseconds" in output
