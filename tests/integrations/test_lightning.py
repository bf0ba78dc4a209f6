"""Lightning's trainer on four ranks beside the same on one device, and on two ranks after that."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, RanksError
from tests.distributed.models import slow_devices
from tests.integrations.conftest import launched

pytest.importorskip("lightning")
pytestmark = pytest.mark.distributed

TOLERANCE = 1e-9


class Rows(torch.utils.data.Dataset[Any]):
    """Which of four numbers is the largest."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        x = torch.randn(16, generator=torch.Generator().manual_seed(index), dtype=torch.float64)
        return x, int(x[:4].argmax())


def module() -> Any:
    import lightning
    import torchmetrics

    class Classifier(lightning.LightningModule):  # type: ignore[misc]
        """Computes the loss outside of the model, as Lightning's own examples do."""

        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4)).double()
            self.right = torchmetrics.SumMetric()
            self.losses: list[float] = []

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.cross_entropy(self.net(x), y)
            self.losses.append(float(loss))
            return loss

        def validation_step(self, batch: Any, number: int) -> None:
            x, y = batch
            scores = self.net(x)
            self.log("loss", nn.functional.cross_entropy(scores, y), sync_dist=True)
            self.log("rows", float(len(x)), reduce_fx="sum", sync_dist=True)
            self.right.update((scores.argmax(-1) == y).sum())
            self.log("right", self.right)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5)
            return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    return Classifier()


def train(
    rank: int, count: int, folder: str, resume: str | None = None, options: dict[str, Any] | None = None
) -> tuple[list[float], dict[str, float], dict[str, torch.Tensor]]:
    """Losses, metrics of the last validation, and the checkpoint of the last step."""
    import lightning
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with launched(rank, count):
        settings: dict[str, Any] = {"devices": count}
        if count > 1:
            from autopar.integrations.lightning_strategy import AutoparStrategy

            settings["strategy"] = AutoparStrategy(cluster=slow_devices(), timeout=WAIT, **(options or {}))
        callbacks = [
            ModelCheckpoint(folder, "{step}", every_n_train_steps=10, save_top_k=-1),
            EarlyStopping("loss", patience=50),
        ]
        trainer = lightning.Trainer(
            accelerator="cpu", max_steps=20, accumulate_grad_batches=2, gradient_clip_val=0.1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=callbacks, **settings,
        )  # fmt: skip
        lightning.seed_everything(1, verbose=False)
        own = module()
        batches = torch.utils.data.DataLoader(Rows(), 8, shuffle=True)
        rows = torch.utils.data.DataLoader(Rows(), 12)
        trainer.fit(own, batches, rows, ckpt_path=resume, weights_only=False)
        (metrics,) = trainer.validate(own, rows, verbose=False)
        saved = torch.load(f"{folder}/step=20.ckpt", weights_only=False)
        return own.losses, metrics, saved["state_dict"]


def require_equal(found: Any, expected: Any) -> None:
    (losses, metrics, state), (wanted, values, tensors) = found, expected
    assert losses == pytest.approx(wanted, abs=TOLERANCE)
    assert metrics == pytest.approx(values, rel=1e-6)  # which Lightning adds up in float32
    assert state.keys() == tensors.keys()
    assert max(float((state[k] - v).abs().max()) for k, v in tensors.items()) < TOLERANCE


@pytest.mark.deep
def test_a_run_goes_on_with_other_ranks(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    expected = train(0, 1, str(tmp_path / "plain"))
    assert expected[1]["rows"] == 40
    folder = tmp_path / "ranks"
    for found in four.run(train, 4, str(folder)):
        require_equal(found, expected)
    half = str(folder / "step=10.ckpt")
    # Lightning does not save in which order a loader shuffles, so the rest is compared with the rest on one device.
    rest = train(0, 1, str(tmp_path / "rest"), half)
    assert len(rest[0]) == 17  # of 34 batches: two a step, and the last of an epoch alone
    for found in two.run(train, 2, str(tmp_path / "rest of two"), half):
        require_equal(found, rest)


def tuned(rank: int, count: int, folder: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Batch size and learning rate that the tuner finds, its losses, and those of a run after it."""
    import lightning
    from lightning.pytorch.tuner import Tuner

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with launched(rank, count):
        settings: dict[str, Any] = {"devices": count}
        if count > 1:
            from autopar.integrations.lightning_strategy import AutoparStrategy

            settings["strategy"] = AutoparStrategy(cluster=slow_devices(), timeout=WAIT)
        trainer = lightning.Trainer(
            accelerator="cpu", max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False,
            enable_checkpointing=False, default_root_dir=folder, **settings,
        )  # fmt: skip
        lightning.seed_everything(1, verbose=False)

        class Tuned(type(module())):  # type: ignore[misc]
            batch_size, lr = 1, 1e-3

            def train_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(Rows(), self.batch_size, shuffle=True)

            def val_dataloader(self) -> Any:
                return torch.utils.data.DataLoader(Rows(), 20)

            def configure_optimizers(self) -> Any:
                return torch.optim.AdamW(self.parameters(), lr=self.lr)

        own = Tuned()
        size = Tuner(trainer).scale_batch_size(own, steps_per_trial=1, max_trials=3, init_val=2)
        found = Tuner(trainer).lr_find(own, num_training=4, early_stop_threshold=None, update_attr=False)
        own.lr = 1e-2
        trainer.fit(own)
        state = trainer.strategy.lightning_module_state_dict()
        assert not list(Path(folder).glob(".*"))  # what the tuner saves meanwhile
        return [size, own.batch_size, *found.results["loss"], *own.losses], {k: v.clone() for k, v in state.items()}


def test_the_tuner(two: Ranks, tmp_path: Path) -> None:
    expected, values = tuned(0, 1, str(tmp_path))
    assert expected[:2] == [8, 8]
    for found, state in two.run(tuned, 2, str(tmp_path)):
        assert found == pytest.approx(expected, abs=TOLERANCE)
        assert max(float((state[k] - v).abs().max()) for k, v in values.items()) < TOLERANCE


def test_layers_outside_of_the_module(four: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RanksError, match=r"parameter 'net\.0\.weight' of Classifier is outside"):
        four.run(train, 4, str(tmp_path), None, {"module": "net.2"})
