"""Several ranks: one of NCCL whose waits come late, four that the device emulates, and four processes over Gloo."""

from __future__ import annotations

import copy
import itertools
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.gpu_parts.setting import MODELS, Row, Setting, difference, step

WORLD = 4
WAIT = 60.0
"""Seconds that a rank waits for the others, in every wait."""
EXACT = 1e-9
"""Of float64, by a tensor's norm."""
LIMIT = 360.0
"""Seconds that all four may take."""


@contextmanager
def group(backend: str, rank: int, world: int, file: Path) -> Iterator[None]:
    """A process group that meets in a file."""
    dist.init_process_group(
        backend, init_method=f"file://{file}", rank=rank, world_size=world, timeout=timedelta(seconds=WAIT)
    )
    try:
        yield
    finally:
        dist.destroy_process_group()


def late_waits(setting: Setting) -> list[Row]:
    """Collectives of one rank that are waited for after other work, as emitted graphs do; and a mesh of one device."""
    c10d, size = torch.ops._c10d_functional, 1 << (10 if setting.small else 24)
    rows: list[Row] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        group("nccl" if setting.cuda else "gloo", 0, 1, Path(folder) / "store"),
    ):
        name = dist.group.WORLD.group_name
        x = torch.randn(size, device=setting.device)
        started = {
            "all_reduce": c10d.all_reduce(x, "sum", name),
            "all_gather": c10d.all_gather_into_tensor(x, 1, name),
            "reduce_scatter": c10d.reduce_scatter_tensor(x, "sum", 1, name),
            "all_to_all": c10d.all_to_all_single(x, [size], [size], name),
        }
        work = x.clone()
        for _ in range(20):
            work = work * 1.01  # between the beginning of a collective and its wait
        for kind, result in started.items():
            error = difference({kind: c10d.wait_tensor(result)}, {kind: x})
            rows.append({"check": f"{kind}, a late wait", "passed": error == 0, "error": error, "tolerance": 0.0})
        rows.append(_on_mesh(setting, (1,), "fsdp"))
    return rows


def _on_mesh(setting: Setting, sizes: tuple[int, ...], recipe: str) -> Row:
    """Loss and gradients of a model on a mesh of this process's group against eager."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    model, batch = setting.example("encoder")
    loss, expected = step(copy.deepcopy(model), batch)
    mesh = init_device_mesh(setting.device.type, sizes, mesh_dim_names=tuple("abc"[: len(sizes)]))
    parallel = parallelize(model, mesh, batch, timeout=WAIT, search=Search(recipe=recipe))
    found = parallel(**batch)
    found.backward()
    own = {name: g for name, g in parallel.full_gradients().items() if g is not None}
    error = max(difference({"loss": found.detach()}, {"loss": loss}),
                difference({n: g.to(setting.device) for n, g in own.items()}, expected))  # fmt: skip
    sent = sum(parallel.plan.predicted.communication_bytes.values())
    return {
        "check": _named(sizes, recipe), "passed": error <= 1e-4, "error": error, "tolerance": 1e-4,
        "sent_mib": sent / 2**20,
    }  # fmt: skip


def _named(sizes: tuple[int, ...], recipe: str) -> str:
    return f"a mesh of {' x '.join(map(str, sizes))}, {recipe}"


def emulated(setting: Setting) -> list[Row]:
    """Random plans of small models for four devices, whose graphs run one after the other on this one, in float64."""
    from autopar.verify.verify import verify

    rows: list[Row] = []
    for name, seed in itertools.product(MODELS, range(1 if setting.small else 3)):
        model, batch = Setting(setting.device, small=True).example(name)
        report = verify(model, batch, {"a": 2, "b": 2}, plan="random", seed=seed)
        rows.append({"check": f"{name}, plan {seed}", "passed": report.max_error <= EXACT,
                     "error": report.max_error, "tolerance": EXACT})  # fmt: skip
    return rows


def gloo(setting: Setting) -> list[Row]:
    """Four processes: recipes on a line and on a square. Gloo is for CPUs, and NCCL wants a GPU for each process.

    Raises:
        RuntimeError: a process failed or did not end in time.
    """
    if setting.cuda:
        return [{"check": "four processes", "passed": None, "note": "needs four GPUs: see `emulated`"}]
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(_member, args=(setting, folder, results), nprocs=WORLD, join=False)
        assert context is not None
        deadline = time.monotonic() + LIMIT
        try:
            while not context.join(timeout=0.5):
                if time.monotonic() > deadline:
                    raise RuntimeError(f"{WORLD} processes are not done after {LIMIT:.0f} s")
        finally:
            for process in context.processes:
                if process.is_alive():
                    process.kill()
    return list(results.get())


def _member(rank: int, setting: Setting, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    rows: list[Row] = []
    with group("gloo", rank, WORLD, Path(folder) / "store"):
        # The search would replicate a model as small as a test's: recipes communicate in any case.
        for sizes, recipe in (((WORLD,), "fsdp"), ((2, WORLD // 2), "megatron"), ((2, WORLD // 2), "random")):
            try:
                rows.append(_on_mesh(setting, sizes, recipe))
            except Exception:  # what one mesh cannot do is no reason not to try the other
                note = traceback.format_exc().splitlines()[-1]
                rows.append({"check": _named(sizes, recipe), "passed": False, "note": note})
    if rank == 0:
        results.put(rows)
