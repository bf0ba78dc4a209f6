"""What does a plan gain that knows of several kinds of devices? By the simulator, beside plans that do not.

A GPT of 6.7B on mixes of A100, H100, H800, H20 and L4, in nodes of 8: the best plan as if all devices were the slowest,
the plan that is searched for the devices that there are, and that one's number of stages cut evenly, as if all devices
were the slowest, where each stage takes as long as its own devices do, in the best order of the kinds.
With ``--shares``: no stages, data parallelism between nodes and sharded parameters within each, in equal shares of the
batch and in searched ones.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

HIDDEN, HEADS, LAYERS, BATCH, TOKENS = 4096, 32, 32, 128, 2048

ETHERNET = """
[[between]]
[between.link]
name = "200G between kinds"
bandwidth = 25e9
latency = 1e-5
"""

# As their vendor is reported to state them: H800 is an H100 with less NVLink, H20 one with less arithmetic.
H800_H20 = """
[[groups]]
name = "h800"
nodes = 2
devices_per_node = 8
[groups.device]
name = "NVIDIA H800 SXM"
memory = 80e9
bandwidth = 3.35e12
units = 132
launch = 4e-6
host = 1e-5
efficiency = 0.75
streaming = 0.8
ramp = 128
fused = 0.64
flops = {float32 = 67e12, bfloat16 = 989e12}
[[groups.links]]
name = "NVLink 4, 400 GB/s"
bandwidth = 200e9
latency = 3.4e-6
[[groups.links]]
name = "InfiniBand NDR"
bandwidth = 50e9
latency = 9.6e-6
[[groups]]
name = "h20"
nodes = 2
devices_per_node = 8
[groups.device]
name = "NVIDIA H20"
memory = 96e9
bandwidth = 4e12
units = 78
launch = 4e-6
host = 1e-5
efficiency = 0.75
streaming = 0.8
ramp = 128
fused = 0.64
flops = {float32 = 44e12, bfloat16 = 148e12}
[[groups.links]]
name = "NVLink 4"
bandwidth = 450e9
latency = 3.4e-6
[[groups.links]]
name = "InfiniBand NDR"
bandwidth = 50e9
latency = 9.6e-6
"""


def _presets(*groups: tuple[str, int, float]) -> str:
    return "".join(
        f'[[groups]]\nname = "{name} {i}"\npreset = "{name}"\nnodes = {nodes}\nspeed = {speed}\n'
        for i, (name, nodes, speed) in enumerate(groups)
    )


CASES = {
    "a100 + h100": (_presets(("a100-80gb", 2, 1.0), ("h100", 2, 1.0)), 4),
    "h800 + h20": (H800_H20, 4),
    "a100 + h100 + l4": (_presets(("a100-80gb", 1, 1.0), ("h100", 2, 1.0), ("l4", 1, 1.0)), 4),
    "h100, one node at 0.6": (_presets(("h100", 3, 1.0), ("h100", 1, 0.6)), 4),
}
"""Groups of each cluster, and its nodes of 8."""


def main() -> None:
    """Plan each case in the three ways."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--schedule", default="1f1b", help="the schedule of pipelines; 'search' for any")
    parser.add_argument("--microbatches", type=int, default=32)
    parser.add_argument("--shares", action="store_true", help="shares of the batch between nodes in place of stages")
    parser.add_argument("--json", action="store_true", help="a JSON object for each case")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    warnings.simplefilter("ignore")
    for case in options.case or CASES:
        if options.shares:
            print(json.dumps(shares(case)), flush=True)
            continue
        found = measure(case, options.schedule, options.microbatches)
        if options.json:
            print(json.dumps(found), flush=True)
            continue
        print(
            f"{case}: as the slowest {found['slowest_s']:.3f} s, cut evenly {found['even_s']:.3f} s, searched "
            f"{found['step_s']:.3f} s (bound {found['bound_s']:.3f}), {found['layers']}",
            flush=True,
        )


def measure(case: str, schedule: str, microbatches: int) -> dict[str, Any]:
    """A case's cluster, its step in the three ways, and what is where."""
    import torch
    from gpt import GPT, batch_of

    from autopar.compiler import default_memory, program_to_plan, solve
    from autopar.costs.cluster import Cluster
    from autopar.search.options import Search

    torch.set_num_threads(1)
    text, nodes = CASES[case]
    cluster, axes = Cluster.from_toml(f'name = "{case}"\n{text}{ETHERNET}'), {"node": nodes, "gpu": 8}
    pins = {"stages": "search", "microbatches": microbatches, "virtual": 1, "schedule": schedule}
    search = Search(pins={name: value for name, value in pins.items() if value != "search" or name == "stages"})
    model, batch = GPT(HIDDEN, HEADS, LAYERS, TOKENS, 51200, dtype=torch.bfloat16), batch_of(BATCH, TOKENS)
    program = program_to_plan(model, batch, search=search)
    memory, start = default_memory(cluster, axes), time.process_time()
    alike = replace(cluster, groups=(), between=())
    slowest = solve(program, axes, alike, memory=memory, search=search, factored=True)
    between = time.process_time()
    plan = solve(program, axes, cluster, memory=memory, search=search, factored=True)
    return {
        "case": case,
        "slowest_s": slowest.predicted.step_seconds,
        "slowest_stages": len(slowest.stages),
        "even_s": even(program, plan, alike, memory, search),
        "step_s": plan.predicted.step_seconds,
        "bound_s": plan.certificate.lower_bound,
        "axes": dict(plan.axes),
        "schedule": None if plan.pipeline is None else plan.pipeline.schedule,
        "layers": [f"{len([m for m in s.modules if m[-1].isdigit()])} on {s.group}" for s in plan.stages],
        "peak_GiB": sum(plan.predicted.peak_bytes.values()) / 2**30,
        "planned_s": [round(between - start, 1), round(time.process_time() - between, 1)],
    }


def shares(case: str) -> dict[str, Any]:
    """A case's step in equal shares of the batch, and in those that are searched, in as many microbatches."""
    import torch
    from gpt import GPT, batch_of

    from autopar.compiler import default_memory, program_to_plan, solve
    from autopar.costs.cluster import Cluster
    from autopar.search.options import Search

    torch.set_num_threads(1)
    text, nodes = CASES[case]
    cluster, axes = Cluster.from_toml(f'name = "{case}"\n{text}{ETHERNET}'), {"node": nodes, "gpu": 8}
    model, batch = GPT(HIDDEN, HEADS, LAYERS, TOKENS, 51200, dtype=torch.bfloat16), batch_of(BATCH, TOKENS)
    search = Search(roles={"node": "data", "gpu": "shard"}, pins={"recompute": "search", "shares": {"node": "search"}})
    program = program_to_plan(model, batch, search=search)
    memory, start = default_memory(cluster, axes), time.process_time()
    plan = solve(program, axes, cluster, memory=memory, search=search)
    pins = {"recompute": "search", "microbatches": plan.microbatches}
    alike = solve(program, axes, cluster, memory=memory, search=replace(search, pins=pins))
    assert plan.shares is not None
    return {
        "case": case,
        "even_s": alike.predicted.step_seconds,
        "step_s": plan.predicted.step_seconds,
        "bound_s": plan.certificate.lower_bound,
        "shares": plan.shares.counts,
        "planned_s": round(time.process_time() - start, 1),
    }


def even(program: Any, found: Any, alike: Any, memory: Any, search: Any) -> float:
    """Seconds of as many stages as a plan has, cut for devices that are alike, on those of its cluster."""
    from autopar.compiler import solve
    from autopar.search.microbatch.split import microbatch_program
    from autopar.search.pipeline.stage_devices import devices_along
    from autopar.search.pipeline.stage_peak import cut_again

    if found.pipeline is None:  # all devices do the same, and wait for the slowest
        return float(found.predicted.step_seconds)
    axes, axis = dict(found.axes), found.pipeline.axis
    pins = {**search.pins, "stages": axes[axis], "stage_axis": axis, "microbatches": found.microbatches}
    plan = solve(program, axes, alike, memory=memory, search=replace(search, pins=pins))
    devices = devices_along(replace(found.cluster, axis_links={}), axes, axis)
    part = microbatch_program(program, plan.microbatches, deterministic=False)
    kinds = [[c for c, own in enumerate(devices.groups) if own == kind] for kind in dict.fromkeys(devices.groups)]
    found = []
    for order in itertools.permutations(kinds):
        own = replace(
            plan, cluster=devices.whole, pipeline=replace(plan.pipeline, places=tuple(itertools.chain(*order)))
        )
        cut, _, actions = cut_again(own, part, devices, overlap=plan.overlap)
        found.append(cut.seconds(actions))
    return min(found)


if __name__ == "__main__":
    main()
