"""LoRA adapters by transformers' `Trainer` on four ranks beside one device: saved, resumed on two ranks, merged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, slow_devices, token_batch
from tests.integrations.conftest import launched
from tests.integrations.test_hf_trainer import TOLERANCE, Tokens, require_equal, summed

peft: Any = pytest.importorskip("peft")
pytest.importorskip("accelerate")
pytestmark = [pytest.mark.distributed, pytest.mark.deep]


def adapted() -> Any:
    """GPT-2 with adapters of its attention and its feed-forward layers, and a head that is trained and saved whole."""
    base: Any = gpt2()
    base.loss_function, base.loss_type = summed, "ForCausalLM"
    config = peft.LoraConfig(
        r=4, lora_alpha=8, lora_dropout=0.0, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True,
        modules_to_save=["ln_f"], task_type="CAUSAL_LM",
    )  # fmt: skip
    return peft.get_peft_model(base, config).double()


def train(
    rank: int, count: int, folder: str, until: int, resume: bool = False, recipe: str | None = None
) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor], torch.Tensor]:
    """The log, the parameters at the end, and the logits of the merged model."""
    import transformers

    from autopar import Search, parallelize

    transformers.utils.logging.disable_progress_bar()
    with launched(rank, count):
        more = {"ddp_backend": "gloo"} if count > 1 else {}
        args = transformers.TrainingArguments(
            output_dir=folder, use_cpu=True, per_device_train_batch_size=4, max_steps=until, learning_rate=1e-2,
            max_grad_norm=0.4, logging_steps=1, save_steps=4, report_to=[], disable_tqdm=True, seed=3,
            logging_nan_inf_filter=False, label_names=["labels"], **more,
        )  # fmt: skip
        model, class_ = adapted(), transformers.Trainer
        if count > 1:
            from autopar.integrations.hf_trainer import Trainer

            class_ = Trainer
            search = Search(recipe=recipe)
            model = parallelize(model, mesh_of(count), cluster=slow_devices(), search=search, timeout=WAIT)
        trainer: Any = class_(model=model, args=args, train_dataset=Tokens())
        trainer.train(resume_from_checkpoint=resume or None)
        times = ("_runtime", "_per_second", "_time", "train_loss")
        log = [{k: v for k, v in entry.items() if not k.endswith(times)} for entry in trainer.state.log_history]
        state = model.full_state_dict() if count > 1 else model.state_dict()
        trainer.save_model(f"{folder}/adapters")
        return log, state, merged_logits(f"{folder}/adapters")


def merged_logits(folder: str) -> torch.Tensor:
    """Of the base with the saved adapters merged into it."""
    merged: nn.Module = peft.PeftModel.from_pretrained(gpt2(), folder).merge_and_unload()
    with torch.no_grad():
        found: torch.Tensor = merged.double()(input_ids=token_batch(7)["input_ids"]).logits
    return found


def test_adapters_are_those_of_one_device(four: Ranks, two: Ranks, tmp_path: Path) -> None:
    first = train(0, 1, str(tmp_path / "plain"), 4)
    expected = train(0, 1, str(tmp_path / "plain"), 8, resume=True)
    folder = str(tmp_path / "ranks")
    for found in four.run(train, 4, folder, 4):
        require_equal(found[:2], first[:2])
    saved = {p.name for p in (tmp_path / "ranks" / "checkpoint-4").iterdir()}
    assert "adapter_model.safetensors" in saved and not any(n.startswith("model") for n in saved)
    own, theirs = (tmp_path / n / "checkpoint-4" / "adapter_model.safetensors" for n in ("ranks", "plain"))
    assert own.stat().st_size == theirs.stat().st_size  # adapters, and nothing of the base
    for found in two.run(train, 2, folder, 8, True, "fsdp"):
        require_equal(found[:2], expected[:2])
        assert float((found[2] - expected[2]).abs().max()) < TOLERANCE
    assert float((expected[2] - first[2]).abs().max()) > 1e-4


def save(rank: int, folder: str) -> int:
    """Adapters as one call writes them; how many elements were gathered for it."""
    from autopar import Search, parallelize
    from autopar.module import copies

    model: Any = parallelize(
        adapted(), mesh_of(2), token_batch(0), cluster=slow_devices(), search=Search(recipe="fsdp")
    )
    gathered, original = [], copies.full_tensor
    copies.full_tensor = lambda tensor: gathered.append(tensor.numel()) or original(tensor)  # type: ignore[assignment, func-returns-value]
    try:
        model.save_pretrained(folder)
    finally:
        copies.full_tensor = original
    return sum(gathered)


def test_only_adapters_are_gathered(two: Ranks, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    counts = two.run(save, str(tmp_path / "ranks"))
    adapted().save_pretrained(str(tmp_path / "plain"))
    found, expected = (load_file(tmp_path / n / "adapter_model.safetensors") for n in ("ranks", "plain"))
    assert found.keys() == expected.keys() and all(torch.equal(found[n], expected[n]) for n in expected)
    assert counts == [sum(t.numel() for t in expected.values())] * 2
