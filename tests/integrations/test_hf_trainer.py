"""`transformers.Trainer` on four ranks beside the same on one device, and on two ranks after that."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, slow_devices
from tests.integrations.conftest import launched

pytest.importorskip("accelerate")
pytestmark = pytest.mark.distributed

TOLERANCE, OF_LOGS = 1e-9, 1e-6
"""Of parameters in float64; of logs, which transformers adds up in float32."""


class Tokens(torch.utils.data.Dataset[Any]):
    """Rows of tokens, of which some are no targets, and a column that no model takes."""

    def __init__(self, rows: int = 20) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index >= self.rows:
            raise IndexError(index)
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        labels = ids.clone()
        labels[: index % 7] = -100
        return {"input_ids": ids, "labels": labels, "row": index}


def summed(logits: torch.Tensor, labels: torch.Tensor, num_items_in_batch: Any = None, **_: Any) -> torch.Tensor:
    """Transformers' loss, which it computes in float32, in the model's own dtype."""
    targets = nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].flatten()
    total = nn.functional.cross_entropy(logits.flatten(0, 1), targets, reduction="sum")
    return total / ((targets != -100).sum() if num_items_in_batch is None else num_items_in_batch)


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"right": float(right.sum()), "rows": float(len(prediction.predictions))}


def train(
    rank: int, count: int, folder: str, base: str = "Trainer", until: int = 20, resume: bool = False,
    change: Callable[[dict[str, Any], dict[str, Any]], None] | None = None, recipe: str | None = None,
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:  # fmt: skip
    """The log, and the parameters at the end."""
    import transformers

    from autopar import Search, parallelize

    transformers.utils.logging.disable_progress_bar()
    with launched(rank, count):
        more = {"ddp_backend": "gloo"} if count > 1 else {}
        settings: dict[str, Any] = dict(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            gradient_accumulation_steps=2, max_steps=until, learning_rate=1e-2, max_grad_norm=0.4, logging_steps=1,
            eval_strategy="steps", eval_steps=10, save_steps=10, report_to=[], disable_tqdm=True, seed=3,
            warmup_steps=4, include_num_input_tokens_seen="all", logging_nan_inf_filter=False, **more,
        )  # fmt: skip
        given: dict[str, Any] = dict(train_dataset=Tokens(), eval_dataset=Tokens(6), compute_metrics=accuracy)
        model: Any = gpt2()
        model.loss_function, model.loss_type = summed, "ForCausalLM"
        if change is not None:
            change(settings, given)
        class_ = given.pop("class", getattr(transformers, base))
        args = given.pop("args", transformers.TrainingArguments)(**settings)
        if count > 1:
            from autopar.integrations.hf_trainer import WholeBatches

            class_ = type(class_.__name__, (WholeBatches, class_), {})
            search = Search(recipe=recipe)
            model = parallelize(model, mesh_of(count), cluster=slow_devices(), search=search, timeout=WAIT)
        trainer = class_(model=model, args=args, **given)
        trainer.train(resume_from_checkpoint=resume or None)
        log = [{k: v for k, v in entry.items() if not _is_time(k)} for entry in trainer.state.log_history]
        return log, model.full_state_dict() if count > 1 else model.state_dict()


def _is_time(name: str) -> bool:
    # Nor the mean loss, which is of the steps since the run was started or resumed.
    return name.endswith(("_runtime", "_per_second", "_time", "train_loss"))


def require_equal(found: Any, expected: Any) -> None:
    (log, state), (wanted, values) = found, expected
    assert [sorted(e) for e in log] == [sorted(e) for e in wanted]
    for entry, other in zip(log, wanted, strict=True):
        assert entry == pytest.approx(other, rel=OF_LOGS)
    assert state.keys() == values.keys()
    assert max(float((state[k] - v).abs().max()) for k, v in values.items()) < TOLERANCE


@pytest.mark.deep
def test_a_run_goes_on_with_other_ranks(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    """Losses, norms, rates and metrics of 20 steps; a checkpoint of four ranks on two, and on one without autopar."""
    expected = train(0, 1, str(tmp_path / "plain"))
    assert len([e for e in expected[0] if "loss" in e]) == 20
    folder = str(tmp_path / "ranks")
    for found in four.run(train, 4, folder):
        require_equal(found, expected)
    (tmp_path / "ranks" / "checkpoint-20").rename(tmp_path / "away")
    for found in two.run(train, 2, folder, "Trainer", 20, True, None, "fsdp"):
        require_equal(found, expected)
    (tmp_path / "ranks" / "checkpoint-20").rename(tmp_path / "of two")
    require_equal(train(0, 1, folder, resume=True), expected)
    assert not os.environ.get("WORLD_SIZE")


def translate(rank: int, count: int, folder: str) -> list[Any]:
    """Losses of a small T5 in bfloat16, and what it generates; its rows come from workers of rank 0's seeds."""
    import transformers
    from transformers import T5Config, T5ForConditionalGeneration

    from autopar import parallelize

    with launched(rank, count):
        torch.manual_seed(0)
        config = T5Config(
            vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=1, num_heads=2, dropout_rate=0.0,
            decoder_start_token_id=0, pad_token_id=0, eos_token_id=1,
        )  # fmt: skip
        model: Any = T5ForConditionalGeneration(config)
        class_: Any = transformers.Seq2SeqTrainer
        if count > 1:
            from autopar.integrations import hf_trainer

            class_ = hf_trainer.Seq2SeqTrainer
            model = parallelize(model, mesh_of(count), cluster=slow_devices(), timeout=WAIT)
        args = transformers.Seq2SeqTrainingArguments(
            folder, use_cpu=True, max_steps=3, per_device_train_batch_size=4, per_device_eval_batch_size=4,
            predict_with_generate=True, generation_max_length=6, learning_rate=1e-2, logging_steps=1, report_to=[],
            disable_tqdm=True, save_strategy="no", bf16=True, **({"ddp_backend": "gloo"} if count > 1 else {}),
        )  # fmt: skip
        trainer = class_(model=model, args=args, train_dataset=Tokens(), eval_dataset=Tokens(6))
        trainer.train()
        found = trainer.predict(Tokens(6))
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return [losses, found.metrics["test_loss"], found.predictions.tolist()]


@pytest.mark.deep
def test_generation_and_bfloat16(four: Ranks, tmp_path: Path) -> None:
    losses, loss, tokens = translate(0, 1, str(tmp_path))
    for found in four.run(translate, 4, str(tmp_path)):
        assert found[0] == pytest.approx(losses, rel=2e-3)
        assert found[1] == pytest.approx(loss, rel=2e-3)
        assert found[2] == tokens


def refused(rank: int, count: int, folder: str) -> list[str]:
    import transformers
    from torch.nn.parallel import DistributedDataParallel

    from autopar import parallelize
    from autopar.integrations.hf_trainer import Trainer

    errors: list[str] = []
    with launched(rank, count):
        mesh, batch = mesh_of(count), {"input_ids": torch.zeros(4, 16, dtype=torch.long)}
        model = parallelize(gpt2(), mesh, cluster=slow_devices(), timeout=WAIT)
        local = parallelize(gpt2(), mesh, batch, inputs="local", cluster=slow_devices(), timeout=WAIT)

        class Other(Tokens):
            def __getitem__(self, index: int) -> dict[str, Any]:
                return super().__getitem__((index + rank) % 20)

        def trained(model: Any, data: Any = None, **settings: Any) -> None:
            settings = {"per_device_train_batch_size": 4, "max_steps": 1, **settings}
            args = transformers.TrainingArguments(
                folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, **settings
            )
            Trainer(model=model, args=args, train_dataset=data or Tokens()).train()

        for attempt in (
            lambda: trained(model, train_sampling_strategy="batch_rebalance"),
            lambda: trained(model, torch_compile=True),
            lambda: trained(model, accelerator_config={"dispatch_batches": True}),
            lambda: trained(local),
            lambda: trained(gpt2()),
            lambda: trained(model, Other()),
            lambda: DistributedDataParallel(model),
        ):
            try:
                attempt()
                errors.append("none")
            except Exception as e:
                errors.append(f"{type(e).__name__}: {e}")
    return errors


@pytest.mark.deep
def test_what_does_not_go_together(four: Ranks, tmp_path: Path) -> None:
    expected = (
        "ValueError: train_sampling_strategy=",
        "ValueError: accelerate (dynamo_backend, torch_compile) cannot compile",
        "ValueError: dispatch_batches lets accelerate distribute",
        "ValueError: the model takes each rank's own part of a batch",
        "TypeError: model must be what autopar.parallelize() returned",
        "RankError: the batch's contents differ",
        "AutoparError: a parallelized model is distributed already",
    )
    for found in four.run(refused, 4, str(tmp_path)):
        assert [e.startswith(start) for e, start in zip(found, expected, strict=True)] == [True] * 7, found


def smoothed(settings: dict[str, Any], given: dict[str, Any]) -> None:
    settings["label_smoothing_factor"] = 0.1


def own_function(settings: dict[str, Any], given: dict[str, Any]) -> None:
    given["compute_loss_func"] = lambda outputs, labels, num_items_in_batch=None: summed(
        outputs["logits"], labels, num_items_in_batch
    )


def overridden(settings: dict[str, Any], given: dict[str, Any]) -> None:
    """As TRL's trainers do."""
    import transformers

    class Own(transformers.Trainer):  # type: ignore[misc]
        loss_is_scaled_for_ga = False

        def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
            labels = inputs.pop("labels")
            outputs = model(**inputs)
            loss = summed(outputs.logits, labels)
            return (loss, outputs) if return_outputs else loss

    given["class"] = Own


def best(settings: dict[str, Any], given: dict[str, Any]) -> None:
    from transformers import EarlyStoppingCallback

    settings.update(load_best_model_at_end=True, metric_for_best_model="eval_loss", greater_is_better=True)
    settings.update(eval_steps=2, save_steps=2, save_total_limit=2)
    given["callbacks"] = [EarlyStoppingCallback(early_stopping_patience=1)]


def masked(settings: dict[str, Any], given: dict[str, Any]) -> None:
    """Random numbers in the collator, from the default generator, and on rank 0 alone elsewhere."""

    def collate(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        ids = torch.stack([row["input_ids"] for row in rows])
        labels = ids.masked_fill(torch.rand(ids.shape) < 0.3, -100)
        return {"input_ids": ids, "labels": labels}

    given["data_collator"] = collate
    settings["remove_unused_columns"] = False


def streamed(settings: dict[str, Any], given: dict[str, Any]) -> None:
    class Stream(torch.utils.data.IterableDataset[Any]):
        def __iter__(self) -> Any:
            return iter(Tokens()[i] for i in range(20))

    given["train_dataset"] = Stream()


def checkpointed(settings: dict[str, Any], given: dict[str, Any]) -> None:
    settings["activation_checkpointing"] = True


def by_length(settings: dict[str, Any], given: dict[str, Any]) -> None:
    settings["train_sampling_strategy"] = "group_by_length"


def without_clipping(settings: dict[str, Any], given: dict[str, Any]) -> None:
    settings.update(max_grad_norm=0.0, optim="sgd", gradient_accumulation_steps=3)


CHANGES = (
    smoothed, own_function, overridden, best, masked, streamed, checkpointed, by_length, without_clipping,
)  # fmt: skip


@pytest.mark.deep
@pytest.mark.parametrize("change", CHANGES, ids=lambda f: f.__name__)
def test_what_users_change(four: Ranks, tmp_path: Path, change: Any) -> None:
    expected = train(0, 1, str(tmp_path / "plain"), until=6, change=change)
    for found in four.run(train, 4, str(tmp_path / "ranks"), "Trainer", 6, False, change):
        require_equal(found, expected)


class Around(nn.Module):
    """As a library has it around a network: it changes the batch, and computes the loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": (self.inner(2 * x) - y).square().mean()}


def test_a_model_around_a_parallel_one(tmp_path: Path) -> None:
    """Such as sentence-transformers'."""
    import transformers

    from autopar import parallelize
    from autopar.integrations.hf_trainer import Trainer

    def inner() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()

    rows = [{"x": torch.randn(8).double(), "y": torch.randn(4).double()} for _ in range(8)]

    def trained(kind: Any, model: nn.Module, folder: str) -> Any:
        args = transformers.TrainingArguments(str(tmp_path / folder), use_cpu=True, report_to=[], disable_tqdm=True,
            per_device_train_batch_size=4, max_steps=3, save_steps=2, learning_rate=1e-2)  # fmt: skip
        kind(model=model, args=args, train_dataset=rows).train()
        saved = [torch.load(tmp_path / folder / "checkpoint-2" / "optimizer.pt")["state"]]
        return [*model.state_dict().values(), *(t for s in saved[0].values() for t in s.values())]

    expected = trained(transformers.Trainer, Around(inner()), "plain")
    found = trained(Trainer, Around(parallelize(inner(), None)), "parallel")
    for a, b in zip(found, expected, strict=True):
        assert (a - b).abs().max() < TOLERANCE
    beside = Around(parallelize(inner(), None))
    beside.other = nn.Linear(4, 4)
    with pytest.raises(TypeError, match="all of its parameters in one such module, got a Around"):
        trained(Trainer, beside, "beside")


def waits(rank: int, count: int, folder: str) -> list[Any]:
    """Whether files are there once a rank goes on, though rank 0 takes its time; and errors of rank 0 alone."""
    import time

    import transformers

    from autopar import parallelize
    from autopar.integrations.hf_accelerate import Accelerator
    from autopar.integrations.hf_trainer import WholeBatches

    class Slow(transformers.Trainer):  # type: ignore[misc]
        fails = False

        def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
            if self.fails and rank == 0:
                raise OSError("No space left on device")
            super()._save(output_dir, state_dict)
            self.late(Path(str(output_dir)) / "late")

        def _save_checkpoint(self, model: Any, trial: Any) -> None:
            super()._save_checkpoint(model, trial)
            self.late(Path(folder) / "late")

        def late(self, path: Path) -> None:
            if rank == 0:
                time.sleep(0.5)
                path.touch()

    with launched(rank, count):
        torch.manual_seed(0)
        model = Around(parallelize(nn.Linear(8, 4), mesh_of(count), cluster=slow_devices(), timeout=WAIT))
        rows = [{"x": torch.randn(8), "y": torch.randn(4)} for _ in range(8)]
        args = transformers.TrainingArguments(
            folder, use_cpu=True, ddp_backend="gloo", report_to=[], disable_tqdm=True, max_steps=1, save_steps=1,
            per_device_train_batch_size=4,
        )  # fmt: skip
        trainer = type("Trainer", (WholeBatches, Slow), {})(model=model, args=args, train_dataset=rows)
        trainer.train()
        found: list[Any] = [(Path(folder) / "late").exists()]
        trainer.save_model(f"{folder}/model")
        found.append((Path(folder) / "model" / "late").exists())
        accelerator = Accelerator(cpu=True)
        state = accelerator.prepare(model)
        accelerator.register_save_state_pre_hook(lambda *_: trainer.late(Path(folder) / "state"))
        accelerator.save_state(f"{folder}/states")
        found.append((Path(folder) / "state").exists())
        seen = folder if rank == 0 else f"{folder}/of another machine"
        trainer.state.best_model_checkpoint = f"{seen}/checkpoint-1"
        try:
            trainer._load_best_model()
        except Exception as e:
            found.append(f"{type(e).__name__}: {e}")
        trainer.fails, args.output_dir = True, f"{folder}/{rank}"
        for attempt in (
            lambda: trainer.save_model(f"{folder}/full"),
            lambda: type(trainer)(model=model, args=args, train_dataset=rows),
            lambda: accelerator.save_state(args.output_dir),
        ):
            try:
                attempt()
            except Exception as e:
                found.append(f"{type(e).__name__}: {e}")
        return found if state is model else []


@pytest.mark.slow
def test_ranks_go_on_when_files_are_there(two: Ranks, tmp_path: Path) -> None:
    first, second = two.run(waits, 2, str(tmp_path))
    full = "OSError: No space left on device"
    best = "RankError: files of the best checkpoint: rank 1 has (), rank 0 has ('model.safetensors',)"
    assert first.pop(3).startswith(best)
    assert second.pop(3).startswith(best)
    assert first[:4] == [True, True, True, full]
    assert second[:4] == [True, True, True, f"RankError: rank 0 failed at Trainer.save_model(): {full}"]
    for found in (first, second):
        said = [e.partition(";")[0].replace(str(tmp_path), "") for e in found[4:]]
        assert said == [
            f"RankError: {n}: rank 1 has /1, rank 0 has /0" for n in ("output_dir", "the folder of save_state()")
        ]
