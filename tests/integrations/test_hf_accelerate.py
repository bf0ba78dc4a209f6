"""`Accelerator` on four ranks beside accelerate's on one device, and on two ranks after that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, RanksError, mesh_of
from tests.distributed.models import mlp, mlp_batch, slow_devices
from tests.integrations.conftest import launched

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9


class Rows(torch.utils.data.Dataset[Any]):
    """Rows of numbers."""

    def __len__(self) -> int:
        return 38

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {k: v[0] for k, v in mlp_batch(index, 1).items()}


def train(
    rank: int, count: int, folder: str, steps: int = 20, resume: bool = False, settings: dict[str, Any] | None = None,
    inputs: str = "global",
) -> tuple[list[float], dict[str, torch.Tensor]]:  # fmt: skip
    """Losses, norms, rates and metrics of each step, and the parameters at the end."""
    import accelerate
    from accelerate.utils import set_seed

    from autopar import parallelize

    with launched(rank, count):
        class_: Any = accelerate.Accelerator
        if count > 1:
            from autopar.integrations import hf_accelerate

            class_ = hf_accelerate.Accelerator
        accelerator = class_(cpu=True, gradient_accumulation_steps=2, **(settings or {}))
        set_seed(1)
        model: Any = mlp()
        if count > 1:
            given = dict(cluster=slow_devices(), inputs=inputs, timeout=WAIT)
            model = parallelize(model, mesh_of(count), mlp_batch(0, 4), **given)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
        loader: Any = torch.utils.data.DataLoader(Rows(), 4, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        assert type(accelerator.unwrap_model(model)).__name__ == "Mlp"
        if resume:
            accelerator.load_state(folder)
        found: list[float] = []
        done = 0
        while done < steps:
            for batch in loader:
                with accelerator.accumulate(model):
                    loss = model(**batch)["loss"]
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        found.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.4)))
                        done += 1
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                found += [float(accelerator.gather(loss).mean()), schedule.get_last_lr()[0]]
                if done == steps:
                    break
            if done % 10 == 0 and done < 20 and not resume:
                accelerator.save_state(folder)
        model.eval()
        rows = 0
        for batch in accelerator.prepare(torch.utils.data.DataLoader(Rows(), 8)):
            with torch.no_grad():
                out = accelerator.gather_for_metrics(model(**batch)["out"])
            rows += len(out)
            found.append(float(out.square().mean()))
        assert rows == 38
        accelerator.save_model(model, f"{folder}/model")
        state = accelerator.get_state_dict(model)
        return found, {name: tensor.clone() for name, tensor in state.items()}


def require_equal(found: Any, expected: Any) -> None:
    assert found[0] == pytest.approx(expected[0], rel=TOLERANCE)
    assert max(float((found[1][k] - v).abs().max()) for k, v in expected[1].items()) < TOLERANCE


@pytest.mark.deep
def test_a_run_goes_on_with_other_ranks(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    expected = train(0, 1, str(tmp_path / "plain"))
    for found in four.run(train, 4, str(tmp_path / "ranks")):
        require_equal(found, expected)
    rest = train(0, 1, str(tmp_path / "plain"), 10, True)
    for found in two.run(train, 2, str(tmp_path / "ranks"), 10, True):
        require_equal(found, rest)
    require_equal(train(0, 1, str(tmp_path / "ranks"), 10, True), rest)


def of_processes(rank: int, count: int) -> list[Any]:
    """What is asked of processes with the same rows: triggers of one of them, parts, gradients within no_sync."""
    from autopar import parallelize
    from autopar.integrations.hf_accelerate import Accelerator

    with launched(rank, count):
        accelerator: Any = Accelerator(cpu=True)
        found: list[Any] = [accelerator.check_trigger()]
        if rank == 1:
            accelerator.set_trigger()
        found += [accelerator.check_trigger(), accelerator.check_trigger()]
        with accelerator.split_between_processes(["a", "b", "c"]) as part:
            found.append(part)
        batch = mlp_batch(0, 4)
        model: Any = parallelize(mlp(), mesh_of(count), batch, cluster=slow_devices(), timeout=WAIT)
        model = accelerator.prepare(model)
        with accelerator.no_sync(model):
            accelerator.backward(model(**batch)["loss"])
            with accelerator.trigger_sync_in_backward(model):
                accelerator.backward(model(**batch)["loss"])
        plain = mlp()
        (2 * plain(**batch)["loss"]).backward()
        own = model.full_gradients()
        found.append(max(float((own[n] - p.grad).abs().max()) for n, p in plain.named_parameters()))
        return found


@pytest.mark.slow
def test_what_is_asked_of_processes(two: Ranks) -> None:
    for *found, apart in two.run(of_processes, 2):
        assert found == [False, True, False, ["a", "b", "c"]]
        assert apart < TOLERANCE


class Shadow:
    """An average of parameters in a list, as diffusers' ``EMAModel`` keeps it."""

    def __init__(self, parameters: Any) -> None:
        self.average, self.steps = [p.detach().clone() for p in parameters], 0

    def step(self, parameters: Any) -> None:
        self.steps += 1
        for average, parameter in zip(self.average, parameters, strict=True):
            average.sub_(0.5 * (average - parameter.detach()))

    def state_dict(self) -> dict[str, Any]:
        return {"average": self.average, "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average, self.steps = state["average"], state["steps"]


def averaged(rank: int, count: int, folder: str, resume: bool = False) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses, and averages at the end: a module's and a list, which are saved and loaded with the run."""
    import accelerate

    from autopar import Search, parallelize
    from autopar.integrations import hf_accelerate

    with launched(rank, count):
        accelerator: Any = (hf_accelerate.Accelerator if count > 1 else accelerate.Accelerator)(cpu=True)
        model: Any = mlp()
        if count > 1:
            given = dict(cluster=slow_devices(), search=Search(recipe="fsdp"), timeout=WAIT)
            model = parallelize(model, mesh_of(count), mlp_batch(0, 4), **given)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        average, shadow = torch.optim.swa_utils.AveragedModel(model), Shadow(model.parameters())
        accelerator.register_for_checkpointing(average, shadow)
        seen: list[Any] = []
        accelerator.register_load_state_pre_hook(lambda models, folder: seen.append(models[0] is model))
        if resume:
            accelerator.load_state(folder)
            assert seen == [True]
        losses = []
        for step in range(2):
            with accelerator.join_uneven_inputs([model], even_batches=False):
                loss = model(**mlp_batch(step, 4))["loss"]
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(model)
            shadow.step(model.parameters())
            losses.append(float(loss))
        if not resume:
            accelerator.save_state(folder)
        found = dict(average.module.named_parameters()) | {str(i): t for i, t in enumerate(shadow.average)}
        whole = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
        assert shadow.steps == (4 if resume else 2)
        return losses, {n: t.detach().clone() for n, t in whole.items()}


@pytest.mark.slow
def test_averages_are_saved_with_the_run(two: Ranks, tmp_path: Path) -> None:
    for resume in (False, True):
        expected = averaged(0, 1, str(tmp_path / "plain"), resume)
        for found in two.run(averaged, 2, str(tmp_path / "ranks"), resume):
            require_equal(found, expected)
    require_equal(averaged(0, 1, str(tmp_path / "ranks"), True), expected)


def test_what_does_not_go_together(four: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match="dispatch_batches lets accelerate distribute"):
        from accelerate import DataLoaderConfiguration

        configuration = DataLoaderConfiguration(dispatch_batches=True)
        four.run(train, 4, str(tmp_path), 2, False, {"dataloader_config": configuration})
