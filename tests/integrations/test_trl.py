"""TRL's trainers, which put a forward of their own on the model, on two ranks beside the same on one device."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytest.importorskip("accelerate")


def test_accelerates_functions_leave_values_as_they_are() -> None:
    """A trainer's module has imported them by name."""
    import sys

    from accelerate.utils import gather, gather_object

    from autopar.integrations.hf_trainer import _gather_nothing

    module: Any = SimpleNamespace(gather=gather, own=gather_object, other=len)
    sys.modules["a_trainers_module"] = module
    try:
        _gather_nothing(type("Trainer", (), {"__module__": "a_trainers_module"}))
        assert module.other is len
        assert module.gather((1, 2)) == (1, 2)
        assert module.own is not gather_object
        assert module.own("a") == "a"
    finally:
        del sys.modules["a_trainers_module"]


def test_every_rank_writes_reference_log_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a dataset in memory each looks for them in a folder of its own."""
    import accelerate

    from autopar.integrations.hf_accelerate import Accelerator
    from autopar.integrations.hf_trainer import WholeBatches

    class Base:
        accelerator = Accelerator(cpu=True)

        def _precompute_ref_logps(self, dataset: str, name: str) -> tuple[str, str, bool]:
            return dataset, name, self.accelerator.is_main_process

    class Trainer(WholeBatches, Base): ...

    monkeypatch.setattr(accelerate.Accelerator, "is_main_process", property(lambda _: False))
    assert object.__new__(Trainer)._precompute_ref_logps("rows", name="train") == ("rows", "train", True)
    assert not Base.accelerator.is_main_process


def test_a_loss_within_the_models_forward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """As `DistillationTrainer`'s, which also calls the teacher there."""
    import sys

    from autopar.integrations.hf_trainer import WholeBatches

    class DistillationTrainer:
        def __init__(self) -> None:
            self._forward_redirection = object()

    DistillationTrainer.__module__ = "trl.trainer.distillation_trainer"
    monkeypatch.setitem(sys.modules, DistillationTrainer.__module__, SimpleNamespace())
    with pytest.raises(ValueError, match=r"^DistillationTrainer runs its whole loss.* use GKDTrainer"):
        type("Trainer", (WholeBatches, DistillationTrainer), {})()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=60, n_embd=16, n_inner=32, n_layer=2, n_head=2, n_positions=64, pad_token_id=0,
                        bos_token_id=2, eos_token_id=3, attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0)  # fmt: skip
    return GPT2LMHeadModel(config)


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "bos_token": "[CLS]", "eos_token": "[SEP]"}
    words = {word: i for i, word in enumerate([*special.values(), *(f"w{i}" for i in range(56))])}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=made, **special)


def text(numbers: random.Random, count: int) -> str:
    return " ".join(f"w{numbers.randrange(55)}" for _ in range(count))


def train(name: str, folder: str, parallel: bool) -> list[float]:
    """Losses and norms of two steps."""
    import trl
    from datasets import Dataset

    from autopar.integrations.hf_trainer import WholeBatches
    from autopar.parallelize import parallelize

    def on_mesh(model: nn.Module) -> nn.Module:
        return parallelize(model, mesh_of(2), cluster=slow_devices(), timeout=WAIT) if parallel else model

    numbers = random.Random(0)
    rows = [{"prompt": text(numbers, 4), "completion": " " + text(numbers, 4)} for _ in range(8)]
    pairs = [{"prompt": r["prompt"], "chosen": r["completion"], "rejected": " " + text(numbers, 3)} for r in rows]
    kind, config = getattr(trl, f"{name}Trainer"), getattr(trl, f"{name}Config")
    own = {
        "SFT": {"train_dataset": Dataset.from_list(rows)},
        "DPO": {"train_dataset": Dataset.from_list(pairs), "ref_model": on_mesh(gpt2())},
        "GRPO": {
            "train_dataset": Dataset.from_list([{"prompt": r["prompt"]} for r in rows]),
            "reward_funcs": lambda completion_ids, **_: [float(ids[0] % 5) for ids in completion_ids],
        },
    }[name]
    more = {"num_generations": 4, "max_completion_length": 4, "beta": 0.0} if name == "GRPO" else {"max_length": 16}
    args = config(output_dir=folder, per_device_train_batch_size=4, max_steps=2, logging_steps=1, report_to=[],
                  use_cpu=True, learning_rate=1e-2, save_strategy="no", bf16=False, gradient_checkpointing=False,
                  disable_tqdm=True, seed=0, **more)  # fmt: skip
    made = type(f"Whole{name}", (WholeBatches, kind), {}) if parallel else kind
    trainer = made(model=on_mesh(gpt2()), args=args, processing_class=tokenizer(), **own)
    trainer.train()
    return [h[key] for h in trainer.state.log_history for key in ("loss", "grad_norm", "entropy") if key in h]


def on_ranks(rank: int, name: str, folder: str) -> list[float]:
    return train(name, folder, parallel=True)


@pytest.mark.deep
@pytest.mark.distributed
@pytest.mark.parametrize("name", ["SFT", "DPO", "GRPO"])
def test_trainers(two: Ranks, tmp_path: Path, name: str) -> None:
    pytest.importorskip("trl")
    expected = train(name, str(tmp_path / "one"), parallel=False)
    assert len(expected) == 6
    for found in two.run(on_ranks, name, str(tmp_path / "two")):
        assert found == pytest.approx(expected, rel=2e-4, abs=1e-6)
