"""Which of autopar's requirements this machine has, what is missing, and how to get it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from typing import Any

import torch
import torch.distributed
from rich.console import RenderableType

from autopar.costs.budget import KINDS
from autopar.costs.cluster import PRESETS, Cluster
from autopar.costs.known_devices import preset_for
from autopar.costs.memory import format_bytes
from autopar.ir.plan_table import figures, render
from autopar.runtime.devices import reserve_of_device

REQUIRED = ("torch", "highspy", "networkx", "numpy", "rich", "safetensors", "sympy", "typer")
OPTIONAL = {"scipy": "`autopar calibrate`", "transformers": "the demo and the benchmarks"}
OLDEST_TORCH = (2, 11)


def examine(cluster: Cluster | None = None) -> dict[str, Any]:
    """Facts as plain data; ``missing`` lists what is not installed, each with its remedy; and those of a cluster."""
    facts: dict[str, Any] = {
        "autopar": _version("autopar") or "not installed (run from its sources)",
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in (*REQUIRED, *OPTIONAL)},
        "devices": _devices(),
        "backends": _backends(),
        "cores": os.cpu_count() or 1,
        "usable_cores": _usable_cores(),
        "threads": torch.get_num_threads(),
        "presets": list(PRESETS),
        "default_budget": _default_budget(),
    }
    if cluster is not None:
        facts["cluster"] = {"name": cluster.name, "groups": _groups(cluster)}
    return {**facts, "missing": _missing(facts)}


def doctor_table(facts: dict[str, Any], width: int = 100) -> str:
    """The facts as plain text."""
    packages = ", ".join(f"{name} {version or 'missing'}" for name, version in facts["packages"].items())
    devices = [
        f"{d['name']}, {format_bytes(d['memory'])}, {'preset ' + d['preset'] if d['preset'] else 'of no preset'}"
        for d in facts["devices"]
    ]
    rows = [
        ("autopar", facts["autopar"]),
        ("python", f"{facts['python']} on {facts['platform']}"),
        ("packages", packages),
        ("GPUs", "; ".join(devices) or "none: models run on the CPU"),
        ("backends", ", ".join(facts["backends"]) or "none: models run in one process"),
        ("cores", f"{facts['usable_cores']} of {facts['cores']} usable; {facts['threads']} intra-op threads"),
        *_budget_rows(facts["default_budget"]),
        *((f"preset {name}", _preset(name)) for name in facts["presets"]),
        *((f"cluster {facts['cluster']['name']}", text) for text in facts.get("cluster", {"groups": ()})["groups"]),
    ]
    parts: list[RenderableType] = [figures(rows), ""]
    missing = facts["missing"] or ["nothing"]
    parts.append(figures(("missing" if i == 0 else "", text) for i, text in enumerate(missing)))
    return render(parts, width)


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        # Some builds of packages have no metadata; autopar without it runs from its sources.
        return "unknown version" if package != "autopar" and importlib.util.find_spec(package) else None


def _devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [{"name": p.name, "memory": p.total_memory, "preset": _preset_of(p.name, p.total_memory)} for p in found]


def _preset_of(name: str, memory: float) -> str | None:
    try:
        return preset_for(name, memory).name
    except ValueError:
        return None


def _default_budget() -> dict[str, Any]:
    """What `autopar.parallelize` would take for ``memory=None``, and what it sets aside; sizes in bytes."""
    cuda = torch.cuda.is_available()
    count = torch.cuda.device_count() if cuda else 1
    reserve = reserve_of_device(torch.device("cuda", 0) if cuda else torch.device("cpu"), {"device": count}, count)
    return {
        "of": f"each of {count} on a mesh of one axis" if cuda else "one process; n processes have an n-th each",
        "memory": reserve.memory,
        "set_aside": [term._asdict() for term in reserve.terms()],
        "budget": max(0.0, reserve.memory - reserve.total),
        "each_further_communicator": KINDS[reserve.kind].communicator,
    }


def _budget_rows(found: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("memory", f"{format_bytes(found['memory'])}, {found['of']}")]
    rows += [(f"- {t['name']}", f"{format_bytes(t['size'])}: {t['reason']}") for t in found["set_aside"]]
    further = found["each_further_communicator"]
    less = f"; {format_bytes(further)} less for each further communicator (axes, and all devices)" if further else ""
    return [*rows, ("default budget", f"{format_bytes(found['budget'])}{less}")]


def _backends() -> list[str]:
    distributed = torch.distributed
    # The functions below exist only in builds with torch.distributed.
    if not distributed.is_available():
        return []
    checks = {
        "gloo": distributed.is_gloo_available,
        "nccl": distributed.is_nccl_available,
        "mpi": distributed.is_mpi_available,
        "xccl": distributed.is_xccl_available,
    }
    return [name for name, available in checks.items() if available()]


def _usable_cores() -> int:
    # In a container fewer cores may be usable than the machine has; macOS cannot tell.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _preset(name: str) -> str:
    return _text(Cluster.preset(name))


def _text(cluster: Cluster) -> str:
    groups = f", groups of {', '.join(map(str, cluster.group_sizes))}" if cluster.group_sizes else ""
    links = " and ".join(link.name for link in cluster.links)
    return f"{cluster.device.name}, {format_bytes(cluster.device.memory)}, {links}{groups}"


def _groups(cluster: Cluster) -> list[str]:
    """A line for each group of a cluster, and for what is between them; one line where devices are of one kind."""
    if not cluster.groups:
        return [_text(cluster)]
    found = []
    for group in cluster.groups:
        links, sizes = group.levels
        speed = f" at {group.speed:g} of its speed" if group.speed != 1 else ""
        alone = Cluster(group.name, group.device, links, sizes)
        found.append(f"{group.name}: {group.nodes} nodes of {group.devices_per_node}{speed}, {_text(alone)}")
    between = [f"{' and '.join(entry.groups) or 'any two'}: {entry.link.name}" for entry in cluster.between]
    return [*found, f"between groups: {'; '.join(between) or 'the slower of their links between nodes'}"]


def _missing(facts: dict[str, Any]) -> list[str]:
    """One line for each missing requirement, with its remedy."""
    found = []
    versions = facts["packages"]
    found += [f"{name}: pip install {name}" for name in REQUIRED if versions[name] is None]
    found += [f"{name}, for {use}: pip install {name}" for name, use in OPTIONAL.items() if versions[name] is None]
    # Without the local part: 2.11.0+cu128.
    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    if release < OLDEST_TORCH:
        found.append(f"torch 2.11 or newer (this is {torch.__version__}): pip install --upgrade torch")
    if not facts["backends"]:
        found.append("torch.distributed: install a build of torch that has it, such as those on pytorch.org")
    if facts["devices"] and "nccl" not in facts["backends"]:
        found.append("NCCL, for GPUs: install a CUDA build of torch, see pytorch.org")
    for name in dict.fromkeys(d["name"] for d in facts["devices"] if d["preset"] is None):
        found.append(f"a preset of {name}: cluster= a preset or a TOML file, or autopar calibrate --base PRESET")
    if not facts["devices"]:
        found.append("a GPU: not needed to plan, to verify or for the demo")
    return found
