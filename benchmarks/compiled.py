"""How long does a compiled step take, and its compilation?

On one device, forward and backward without the optimizer: the eager model, `torch.compile` of it, the emitted module as
it is, and compiled. They take turns within each round, every round starting with another one; figures are medians over
rounds. Every model runs in a process of its own, so that nothing is compiled already but what torch keeps on disk.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EAGER, TORCH, EMITTED, COMPILED = "eager", "torch.compile", "emitted", "compiled"


def main() -> None:
    """Measure each model and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS), help=f"(default: {','.join(MODELS)})")
    parser.add_argument("--rounds", type=int, default=30, help="measured rounds (default: 30)")
    parser.add_argument("--layers", type=int, default=4, help="of the models that have them (default: 4)")
    parser.add_argument("--cpu-time", action="store_true", help="seconds of the process instead of the clock's")
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1", AUTOPAR_CACHE="0")
    rows = []
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        for name in options.models.split(","):
            rows.append(pool.apply(measure, (name, options.layers, options.rounds, options.cpu_time)))
            print(json.dumps(rows[-1]) if options.json else line(rows[-1]), flush=True)


def line(row: dict[str, Any]) -> str:
    """Medians, their ratios to `torch.compile`, and what compilation took."""
    figures = "  ".join(f"{name} {ms:.1f} ms ({ms / row['ms'][TORCH]:.3f})" for name, ms in row["ms"].items())
    took = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in row["first_step_s"].items())
    return f"{row['model']}: {figures}; first step: {took}; {row['compilations']} compilations"


def measure(name: str, layers: int, rounds: int, cpu_time: bool) -> dict[str, Any]:
    """Medians of every competitor, in milliseconds."""
    warnings.filterwarnings("ignore")
    import torch

    import autopar
    from benchmarks.turns import agreed_losses, stepper

    torch.set_num_threads(1)
    made = [MODELS[name](layers) for _ in range(4)]
    batch = made[0][1]
    compiled = autopar.parallelize(made[3][0], None, compile=True)
    models = {EAGER: made[0][0], TORCH: torch.compile(made[1][0]), EMITTED: autopar.parallelize(made[2][0], None)}
    steps = {n: stepper(m, batch) for n, m in {**models, COMPILED: compiled}.items()}
    first = {}
    for competitor, step in steps.items():
        start = time.perf_counter()
        step()
        first[competitor] = time.perf_counter() - start
    agreed_losses(steps)
    clock = time.process_time if cpu_time else time.perf_counter
    return {
        "model": name,
        "ms": {n: 1e3 * statistics.median(s) for n, s in in_turn(steps, rounds, clock).items()},
        "first_step_s": first,
        "compilations": compiled._autopar.options.compiler.compilations,
    }


def in_turn(steps: dict[str, Any], rounds: int, clock: Callable[[], float]) -> dict[str, list[float]]:
    """Seconds of each in each round."""
    names = list(steps)
    times: dict[str, list[float]] = {name: [] for name in names}
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            start = clock()
            steps[name]()
            times[name].append(clock() - start)
    return times


def llama(layers: int) -> Any:
    """Hidden 256, 8 sequences of 128 bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256, hidden_size=256, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=8,
            num_key_value_heads=4, max_position_embeddings=128, use_cache=False,
        )
    )  # fmt: skip
    ids = torch.randint(0, 256, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def gpt2(layers: int) -> Any:
    """Hidden 256, 8 sequences of 128 bytes, no dropout."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=256, n_embd=256, n_layer=layers, n_head=8, n_positions=128, use_cache=False, resid_pdrop=0.0,
            embd_pdrop=0.0, attn_pdrop=0.0,
        )
    )  # fmt: skip
    ids = torch.randint(0, 256, (8, 128))
    return model, {"input_ids": ids, "labels": ids}


def vit(layers: int) -> Any:
    """Hidden 192, 8 images of 128 x 128 in patches of 16 x 16."""
    import torch
    from transformers import ViTConfig, ViTForImageClassification

    torch.manual_seed(0)
    model = ViTForImageClassification(
        ViTConfig(
            hidden_size=192, intermediate_size=768, num_hidden_layers=layers, num_attention_heads=6, image_size=128,
            patch_size=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_labels=10,
        )
    )  # fmt: skip
    return model, {"pixel_values": torch.randn(8, 3, 128, 128), "labels": torch.randint(0, 10, (8,))}


def unet(layers: int) -> Any:
    """The denoising network of `benchmarks.zoo.vision` with 32 channels, 8 images of 32 x 32."""
    import torch

    from benchmarks.zoo.vision import UNet

    torch.manual_seed(0)
    shape = (8, 4, 32, 32)
    return UNet(32, 32), {"image": torch.randn(shape), "noise": torch.randn(shape), "time": torch.rand(8)}


MODELS: dict[str, Callable[[int], Any]] = {"llama": llama, "gpt2": gpt2, "vit": vit, "unet": unet}

if __name__ == "__main__":
    main()
