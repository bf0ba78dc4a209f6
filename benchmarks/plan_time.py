"""How long does a plan take, and how much memory? Llama-3-8B on 256 devices, 405B on 16,384, eight small models on 8.

Each case runs in a process of its own. Capture (export and the joint graph) is timed apart from what follows
(dimension analysis, candidates, search, prediction), by the clock and in CPU time, which a busy machine disturbs less.
With ``--repeat`` the cases take turns, and each keeps its least times. Of blocks that are alike a few are captured, as
`autopar.plan` does; with ``--whole`` all of them, as `autopar.parallelize` must.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LLAMA = [f"llama3-8b {layers} {memory}" for layers in (4, 32) for memory in ("none", "80GiB", "8GiB")]
LLAMA += ["llama3-405b 126 72GiB"]
LLAMA += [f"llama3-8b-on-three-axes 32 {memory}" for memory in ("none", "24GiB", "12GiB")]
LLAMA += ["llama3-8b-on-four-axes 32 none"]
SMALL = ["mlp", "encoder", "cnn", "gpt2", "llama", "bert", "vit", "mixtral"]
THREE, FOUR = {"node": 4, "rail": 8, "gpu": 8}, {"pod": 2, "node": 4, "rail": 8, "gpu": 8}
COLUMNS = ("case", "capture_s", "after_s", "cpu_s", "peak_GiB", "graph", "classes", "objective_ms", "gap", "method")


def main() -> None:
    """Run the cases and print a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--small", action="store_true", help="eight small models on axes a=2,b=2,c=2")
    parser.add_argument("--only", metavar="TEXT", default="", help="cases that contain TEXT")
    parser.add_argument("--time-limit", type=float, default=120.0, help="seconds of the search in each case")
    parser.add_argument("--serial", action="store_true", help="as if no collective ran beside kernels")
    parser.add_argument("--whole", action="store_true", help="capture every block")
    parser.add_argument("--check", action="store_true", help="verify the bound, too; counted into the times")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each case")
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--case", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeat < 1:
        parser.error(f"--repeat {options.repeat}: every case runs at least once")
    if options.case:
        print(json.dumps(measure(options.case, options.time_limit, options.whole, options.check, options.serial)))
        return
    least: dict[str, dict[str, Any]] = {}
    cases = [c for c in (SMALL if options.small else LLAMA) if options.only in c]
    for turn in range(options.repeat):
        for case in cases:
            row = in_a_process(case, options.time_limit, options.whole, options.check, options.serial)
            least[case] = fastest(least.get(case, row), row)
            if options.repeat > 1:
                print(f"turn {turn + 1} of {options.repeat}: {case}", file=sys.stderr)
            if turn == options.repeat - 1 and not options.json:
                print_row(least[case], header=case == cases[0])
    if options.json:
        print(json.dumps(list(least.values()), indent=1))
    sys.exit(any("error" in row for row in least.values()))


def fastest(a: dict[str, Any], b: dict[str, Any]) -> dict[str, Any]:
    """The same case with the least of each time; an error stays."""
    if "error" in a or "error" in b:
        return a if "error" in a else b
    return {k: min(v, b[k]) if k.endswith("_s") else v for k, v in a.items()}


def in_a_process(case: str, time_limit: float, whole: bool, check: bool, serial: bool) -> dict[str, Any]:
    """What the case reports, or its error."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    command = [sys.executable, __file__, "--case", case, "--time-limit", str(time_limit)]
    command += ["--whole"] * whole + ["--check"] * check + ["--serial"] * serial
    try:
        done = subprocess.run(
            command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=300 + 4 * time_limit
        )
    except subprocess.TimeoutExpired as e:
        return {"case": case, "error": f"no result after {e.timeout:.0f} s"}
    if done.returncode:
        return {"case": case, "error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    row: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return row


def print_row(row: dict[str, Any], header: bool) -> None:
    """One line of the table."""
    widths = (22, 9, 8, 8, 8, 7, 8, 12, 9, 0)
    if header:
        first, *others = zip(COLUMNS, widths, strict=True)
        print("  ".join([first[0].ljust(first[1]), *(name.rjust(width) for name, width in others)]))
    if "error" in row:
        print(f"{row['case']:22}  {row['error']}", flush=True)
        return
    cells = [
        f"{row['case']:22}", f"{row['capture_s']:9.2f}", f"{row['after_s']:8.2f}", f"{row['cpu_s']:8.2f}",
        f"{row['peak_GiB']:8.2f}", f"{row['graph']:7d}", f"{row['classes']:8d}", f"{row['objective_ms']:12.5g}",
        f"{row['gap']:9.2e}",
    ]  # fmt: skip
    print("  ".join([*cells, row["method"]]), flush=True)


def measure(case: str, time_limit: float, whole: bool, check: bool, serial: bool = False) -> dict[str, Any]:
    """Plan one case in this process."""
    sys.path.insert(0, str(ROOT))
    warnings.simplefilter("ignore")
    import torch

    from autopar.compiler import program_of, program_to_plan, solve
    from autopar.ir.graph import operators
    from autopar.search.options import Search
    from autopar.sharding.dims import analyze
    from autopar.sharding.layer_classes import layer_classes

    torch.set_num_threads(1)
    name, *rest = case.split()
    if name.startswith("llama3-"):
        model, batch = llama3(name.partition("-on-")[0], int(rest[0]))
        axes, cluster = {"node": 32 if name == "llama3-8b" else 2048, "gpu": 8}, "h100"
        for end, more in (("three-axes", THREE), ("four-axes", FOUR)):
            axes = more if name.endswith(end) else axes
        memory = None if rest[1] == "none" else rest[1]
    else:
        model, batch = small(name)
        axes, cluster, memory = {"a": 2, "b": 2, "c": 2}, "cpu", None
    pins = {"overlap": "none"} if serial else {}
    start = time.perf_counter()
    program = (program_of if whole else program_to_plan)(model, batch)
    captured, before = time.perf_counter(), time.process_time()
    plan = solve(program, axes, cluster, memory=memory, search=Search(time_limit=time_limit, check=check, pins=pins))
    done, after = time.perf_counter(), time.process_time()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
    return {
        "case": case,
        "capture_s": captured - start,
        "after_s": done - captured,
        "cpu_s": after - before,
        "peak_GiB": peak / 2**30,
        "graph": sum(1 for _ in operators(program.graph.graph)),
        "classes": len(layer_classes(program, analyze(program)).members),
        "objective_ms": 1e3 * plan.certificate.objective,
        "lower_bound_ms": 1e3 * plan.certificate.lower_bound,
        "checked_ms": None if plan.certificate.checked is None else 1e3 * plan.certificate.checked,
        "gap": plan.certificate.gap,
        "method": plan.certificate.method,
        "predicted_ms": 1e3 * plan.predicted.step_seconds,
        "memory_GiB": sum(plan.predicted.memory_bytes.values()) / 2**30,
    }


def llama3(name: str, layers: int) -> tuple[Any, Any]:
    """Llama-3-8B or 405B with so many layers, on the meta device in bfloat16; batch 256 x 4096 or 2048 x 8192."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    small = name == "llama3-8b"
    config = LlamaConfig(
        vocab_size=128256, hidden_size=4096 if small else 16384, intermediate_size=14336 if small else 53248,
        num_hidden_layers=layers, num_attention_heads=32 if small else 128, num_key_value_heads=8,
        max_position_embeddings=8192, rope_theta=500000.0, use_cache=False,
    )  # fmt: skip
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        tokens = torch.zeros(256, 4096, dtype=torch.long) if small else torch.zeros(2048, 8192, dtype=torch.long)
    torch.set_default_dtype(torch.float32)
    return model, {"input_ids": tokens, "labels": tokens}


def small(name: str) -> tuple[Any, Any]:
    """One of eight small models with a batch; each returns its loss."""
    import torch
    import transformers as hf
    from torch import nn

    torch.manual_seed(0)
    tokens = torch.randint(0, 128, (8, 32))
    text = {"input_ids": tokens, "labels": tokens}
    images = {"x": torch.randn(8, 3, 32, 32), "labels": torch.randint(0, 16, (8,))}
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    if name == "mlp":
        net = nn.Sequential(nn.Flatten(), nn.Linear(3072, 256), nn.GELU(), nn.Linear(256, 16))
        return WithLoss.of(net), images
    if name == "encoder":
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        net = nn.Sequential(
            nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Flatten(), nn.Linear(2048, 16)
        )
        return WithLoss.of(net), {"x": torch.randn(8, 32, 64), "labels": images["labels"]}
    if name == "cnn":
        blocks = [m for i in (3, 32) for m in (nn.Conv2d(i, 32, 3, padding=1), nn.GroupNorm(8, 32), nn.ReLU())]
        return WithLoss.of(nn.Sequential(*blocks, nn.Flatten(), nn.Linear(32 * 32 * 32, 16))), images
    if name == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        config = hf.GPT2Config(
            vocab_size=128, n_embd=64, n_layer=2, n_head=4, n_positions=64, use_cache=False, **dropouts
        )
        return hf.GPT2LMHeadModel(config), text
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=128, num_key_value_heads=2, use_cache=False, **sizes)
        return hf.LlamaForCausalLM(config), text
    zero = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=128, **zero, **sizes)), text
    if name == "mixtral":
        config = hf.MixtralConfig(
            vocab_size=128, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, use_cache=False, **sizes
        )
        return hf.MixtralForCausalLM(config), text
    if name == "vit":
        config = hf.ViTConfig(image_size=32, patch_size=8, num_labels=16, **zero, **sizes)
        return hf.ViTForImageClassification(config), {"pixel_values": images["x"], "labels": images["labels"]}
    raise ValueError(f"no case {name!r}: use one of {', '.join(SMALL)}")


class WithLoss:
    """Cross-entropy on top of a network that returns scores."""

    @staticmethod
    def of(net: Any) -> Any:
        """A module that takes ``x`` and ``labels`` and returns the loss."""
        import torch
        from torch import nn

        class Classifier(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
                return nn.functional.cross_entropy(self.net(x), labels)

        return Classifier()


if __name__ == "__main__":
    main()
