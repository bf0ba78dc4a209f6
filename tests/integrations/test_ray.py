"""Ray Train on four workers and then on two, beside the same steps on one device."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.models import gpt2, slow_devices, token_batch

ray: Any = pytest.importorskip("ray")
pytestmark = [pytest.mark.distributed, pytest.mark.deep]

STEPS = 6


def steps(model: Any, optimizer: torch.optim.Optimizer, scheduler: Any, first: int, last: int) -> Iterator[float]:
    for step in range(first, last):
        loss = model(**token_batch(step)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        yield float(loss)


def work(config: dict[str, Any]) -> None:
    import autopar
    from autopar.integrations import ray as autopar_ray

    mesh = autopar_ray.mesh(config["axes"])
    model = autopar.parallelize(gpt2(), mesh, token_batch(0), cluster=slow_devices(), timeout=120)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = autopar_ray.load(model, optimizer, scheduler=scheduler)
    losses = []
    for step, loss in enumerate(steps(model, optimizer, scheduler, found.step, config["until"]), found.step + 1):
        losses.append(loss)
        if step % 3 == 0:
            autopar_ray.report({"loss": loss}, model, optimizer, step=step, extra={"seen": step}, scheduler=scheduler)
    seen = {"first": found.step, "extra": found.extra, "losses": losses, "axes": dict(model.plan.axes)}
    rank = torch.distributed.get_rank()
    Path(f"{config['folder']}/{config['until']}-{rank}.json").write_text(json.dumps(seen))


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[None]:
    os.environ["RAY_TRAIN_V2_ENABLED"] = "1"
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])
    ray.init(
        num_cpus=5, include_dashboard=False, object_store_memory=80 * 2**20, log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"}},
    )  # fmt: skip
    yield
    ray.shutdown()


def test_a_run_goes_on_with_other_workers(cluster: None, tmp_path: Path) -> None:
    from ray.train import RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    model = gpt2()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    expected = list(steps(model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2), 0, STEPS))
    for workers, axes, first, until in ((4, {"a": 2, "b": 2}, 0, 3), (2, None, 3, STEPS)):
        result = TorchTrainer(
            work, train_loop_config={"axes": axes, "until": until, "folder": str(tmp_path)},
            scaling_config=ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 1}),
            run_config=RunConfig(name="run", storage_path=str(tmp_path / "storage")),
        ).fit()  # fmt: skip
        assert result.metrics["loss"] == pytest.approx(expected[until - 1], abs=1e-9)
        for rank in range(workers):
            found = json.loads((tmp_path / f"{until}-{rank}.json").read_text())
            assert found["losses"] == pytest.approx(expected[first:until], abs=1e-9)
            assert (found["first"], found["extra"]) == (first, {"seen": first} if first else None)
            assert found["axes"] == (axes or {"cpu": workers})


def test_outside_of_a_worker() -> None:
    from autopar.integrations.ray import mesh

    with pytest.raises(RuntimeError, match="in the function that"):
        mesh()
