"""What linear layers in float8 cost a language model in loss, and what they gain in predicted seconds.

``--loss``, in one process: the loss on held-out text of the tiny language model of `low_communication.py`, against the
steps that it has trained, in bfloat16 and with float8 layers of each scaling, for some seeds. The loss is that of the
trained weights in float32. Without it: predicted
seconds of a step of Llama-3-8B and its communication in bfloat16 and in float8, on H100s.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

HEAD = "fp8, head in bf16"
PRECISIONS = ("bf16", "fp8-tensorwise", "fp8-rowwise", "fp8-delayed", "mxfp8", HEAD)
WIDTH, BLOCKS, ROWS = 64, 2, 16


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--loss", action="store_true", help="train, instead of predicting seconds")
    parser.add_argument("--steps", type=int, default=300, help="optimizer steps of each curve")
    parser.add_argument("--seeds", type=int, default=2, help="of each precision")
    parser.add_argument("--only", nargs="*", choices=PRECISIONS, default=PRECISIONS, help="precisions; default: all")
    parser.add_argument("--json", action="store_true", help="print JSON")
    given = parser.parse_args()
    rows = losses(given.only, given.steps, given.seeds) if given.loss else predicted(given.only)
    print(json.dumps(rows, indent=1) if given.json else "\n".join(map(line, rows)), flush=True)


def line(row: dict[str, Any]) -> str:
    """One row of the table."""
    return "  ".join(f"{name}: {value}" for name, value in row.items())


def losses(precisions: list[str], steps: int, seeds: int) -> list[dict[str, Any]]:
    """Mean loss of each precision at thirds of the run, and the largest distance of a seed from it."""
    found = []
    for precision in precisions:
        curves = [curve(precision, seed, steps) for seed in range(seeds)]
        row: dict[str, Any] = {"precision": precision}
        for i, (step, _) in enumerate(curves[0]):
            values = [c[i][1] for c in curves]
            mean = statistics.mean(values)
            row[f"step {step}"] = f"{mean:.4f} ± {max(abs(v - mean) for v in values):.4f}"
        print(line(row), file=sys.stderr, flush=True)
        found.append(row)
    return found


def policy(name: str) -> Any:
    """The argument ``precision=`` of a name."""
    import autopar

    return autopar.Precision(linear=autopar.Float8(exclude=("*head.*",))) if name == HEAD else name


def curve(precision: str, seed: int, steps: int) -> list[tuple[int, float]]:
    """Loss on held-out text after thirds of the steps."""
    import torch
    from low_communication import batch_of, language_model

    import autopar

    torch.manual_seed(seed)
    module = autopar.parallelize(
        language_model(seed, WIDTH, BLOCKS), None, precision=policy(precision), search=autopar.Search(inexact=("fp8",))
    )
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3)
    # In float32: a loss in bfloat16 has two digits.
    plain, held_out, points = language_model(seed, WIDTH, BLOCKS), batch_of(0, 64, seed, validation=True), []
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        module(**batch_of(step, ROWS, seed)).backward()
        optimizer.step()
        if step % max(1, steps // 3) == 0:
            # Without the histories of delayed scaling, which a plain model has not.
            plain.load_state_dict(module.full_state_dict(), strict=False)
            with torch.no_grad():
                points.append((step, float(plain(**held_out))))
    return points


def predicted(precisions: list[str]) -> list[dict[str, Any]]:
    """Predicted seconds of a step under the search's plans."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    import autopar

    config = AutoConfig.for_model(
        "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
    )  # fmt: skip
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids = torch.zeros(64, 4096, dtype=torch.long)
    found = []
    for precision in precisions:
        search = autopar.Search(inexact=("fp8",), time_limit=60)
        plan = autopar.plan(
            model, {"input_ids": ids, "labels": ids}, cluster="h100", axes={"node": 4, "gpu": 8},
            precision=policy(precision),
            search=search,
        )  # fmt: skip
        sent = {axis: f"{n / 2**30:.2f} GiB" for axis, n in plan.predicted.communication_bytes.items()}
        row = {"precision": precision, "step": f"{plan.predicted.step_seconds:.3f} s", "sent": sent}
        row["microbatches"] = plan.microbatches
        print(line(row), file=sys.stderr, flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    main()
