"""What does the planner find for large models, how long does it take, and what was published?

GPT 39.1B and GPT-3 175B on 512 A100, Llama-3-70B on 64 H100 and Llama-3-405B on 16,384: stages, microbatches, schedule,
layouts and recomputation are searched together, or, with ``--flat``, all of it without stages and beside the recipes.
Mixtral 8x22B on 128 H100, DeepSeek-V3 on 2,048 H800 and Llama-3-405B with 131,072 tokens on 16,384 H100 likewise.
Beside GPT 39.1B stand the published configuration's measured step (``--data``; by the source's own FLOP formula) and
its step as the cost model predicts it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

GPTS = {"gpt-39.1b": (8192, 64, 48, 1536), "gpt-175b": (12288, 96, 96, 1536)}
"""Hidden size, heads, layers, batch; sequence 2048, vocabulary 51200 (arXiv 2104.04473)."""

LLAMAS = {
    "llama3-70b": (80, 8192, 28672, 64, 8, 512, 8192),
    "llama3-405b": (126, 16384, 53248, 128, 2048, 2048, 8192),
    "llama3-405b-131k": (126, 16384, 53248, 128, 2048, 128, 131072),
}
"""Layers, hidden size, that of the MLP, heads, nodes of 8 H100, batch, sequence; vocabulary 128256."""

MIXTURES = {"mixtral-8x22b": (16, 256, 4096), "deepseek-v3": (256, 15360, 4096)}
"""Nodes of 8 devices, batch, sequence; of DeepSeek-V3 as in https://arxiv.org/abs/2412.19437."""

MIXED = ("llama3-70b",)
"""With parameters and optimizer state in float32, computed in bfloat16; the others are in bfloat16 altogether."""

BUDGET = 0.9
"""Share of a device's memory, in docs/case-studies.md; the default budget leaves a little more."""

BLOCK = ".layers.9."
"""Whose layouts are shown."""

CASES = (*GPTS, *LLAMAS, *MIXTURES)


def main() -> None:
    """Search each case, and print its plan beside what is known."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--data", type=Path, metavar="DIR", help="with published/megatron_ptdp_table1.json")
    parser.add_argument("--time-limit", type=float, default=60.0, help="of each search inside a stage, seconds")
    parser.add_argument("--flat", action="store_true", help="no stages; and every recipe beside the search")
    parser.add_argument("--save", type=Path, metavar="DIR", help="write the plans there")
    options = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "AUTOPAR_CACHE": "0"}
    warnings.simplefilter("ignore")
    for case in options.case or CASES:
        print(json.dumps(measure(case, options.time_limit, options.save, options.flat)), flush=True)
        if case == "gpt-39.1b" and options.data:
            print(json.dumps(published(options.data)), flush=True)


def measure(case: str, time_limit: float, save: Path | None, flat: bool) -> dict[str, Any]:
    """Search a case."""
    import torch

    from autopar.compiler import program_to_plan, solve
    from autopar.costs.cluster import Cluster
    from autopar.explain.recipes import Found, compare_recipes
    from autopar.ir.precision import Precision
    from autopar.search.options import Search

    torch.set_num_threads(1)
    model, batch, cluster, axes, flops = task(case)

    def progress(phase: str, incumbent: float, bound: float) -> None:
        if "devices along" in phase or "peak" in phase:
            print(f"{time.perf_counter() - start:7.1f} s  {phase}  {incumbent:.4g} {bound:.4g}", file=sys.stderr)

    start = time.perf_counter()
    search = Search(pins={} if flat else {"stages": "search"}, time_limit=time_limit)
    precision = Precision.resolve("bf16") if case in MIXED else None
    program = program_to_plan(model, batch, precision=precision, search=search)
    budget = BUDGET * Cluster.resolve(cluster).device.memory
    plan = solve(program, axes, cluster, memory=budget, search=search, progress=progress, factored=True)
    done = time.perf_counter() - start
    if save:
        plan.save(save / f"{case}.json")
    devices, step = 1, plan.predicted.step_seconds
    for _, size in plan.axes:
        devices *= size
    found = {
        "case": case,
        "planned_s": round(done, 1),
        "axes": dict(plan.axes),
        "pipeline": str(plan.pipeline),
        "stages": len(plan.stages),
        "microbatches": plan.microbatches,
        "recomputed_classes": len(plan.recompute),
        "step_s": step,
        "lower_bound_s": plan.certificate.lower_bound,
        "gap": plan.certificate.gap,
        "peak_GiB": {k: round(v / 2**30, 2) for k, v in plan.predicted.peak_bytes.items()},
        "process_GiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
        "model_tflops_a_device": flops / step / devices / 1e12,
        "collectives": plan.predicted.collectives,
        "layouts": {n: [str(p) for p in layout] for n, layout in plan.parameters.items() if BLOCK in n},
    }
    if flat:
        rows = compare_recipes(Found(plan, program, budget, search))
        found["recipes"] = {r.label: r.plan.predicted.step_seconds if r.plan else r.reason for r in rows}
    return found


def task(case: str) -> tuple[Any, Any, Any, dict[str, int], float]:
    """Model, batch, devices, mesh, and operations of a step without recomputation."""
    import torch

    if case in GPTS:
        from gpt import GPT, batch_of

        hidden, heads, layers, size = GPTS[case]
        model = GPT(hidden, heads, layers, 2048, 51200, dtype=torch.bfloat16)
        return model, batch_of(size, 2048), "a100-80gb", {"node": 64, "gpu": 8}, gpt_flops(hidden, layers, size, 72)
    if case in MIXTURES:
        return mixture(case)
    from transformers import LlamaConfig, LlamaForCausalLM

    layers, hidden, wide, heads, nodes, size, length = LLAMAS[case]
    config = LlamaConfig(
        vocab_size=128256, hidden_size=hidden, intermediate_size=wide, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=length, use_cache=False,
    )  # fmt: skip
    model = on_meta(LlamaForCausalLM, config, torch.float32 if case in MIXED else torch.bfloat16)
    # Six operations a parameter and token; attention's scores, some 4% more where half of them are masked, left out.
    flops = 6.0 * sum(p.numel() for p in model.parameters()) * size * length
    if length > 8192:  # where they are more than the rest: two products of a causal half, three times
        flops += 6.0 * layers * hidden * size * length**2
    return model, tokens(size, length), "h100", {"node": nodes, "gpu": 8}, flops


def tokens(size: int, length: int) -> dict[str, Any]:
    """A batch on the meta device."""
    import torch

    ids = torch.zeros(size, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


def on_meta(kind: Any, config: Any, dtype: Any) -> Any:
    """A model that returns its loss alone: the logits would be held to the end."""
    import torch

    class LossOnly(torch.nn.Module):
        def __init__(self, model: torch.nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, **batch: torch.Tensor) -> torch.Tensor:
            return self.model(**batch).loss

    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):
            return LossOnly(kind(config))
    finally:
        torch.set_default_dtype(torch.float32)


def mixture(case: str) -> tuple[Any, Any, Any, dict[str, int], float]:
    """The same of a mixture of experts; a token's operations are those of the experts that it goes to."""
    import torch
    import transformers

    from autopar.costs.cluster import Cluster

    nodes, size, length = MIXTURES[case]
    cluster = Cluster.preset("h100")
    if case == "deepseek-v3":
        config = transformers.DeepseekV3Config(use_cache=False, max_position_embeddings=length)
        model = on_meta(transformers.DeepseekV3ForCausalLM, config, torch.bfloat16)
        experts, chosen = config.n_routed_experts, config.num_experts_per_tok
        # 400 GB/s of NVLink, both directions together, in place of 900; network cards are the same.
        near = replace(cluster.links[0], name="NVLink of H800", bandwidth=200e9)
        cluster = replace(cluster, name="h800", links=(near, *cluster.links[1:]))
        width = config.num_attention_heads * (config.qk_nope_head_dim + config.qk_rope_head_dim + config.v_head_dim) / 2
    else:
        config = transformers.MixtralConfig(
            vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=56, num_attention_heads=48,
            num_key_value_heads=8, num_local_experts=8, max_position_embeddings=length, use_cache=False,
        )  # fmt: skip
        model = on_meta(transformers.MixtralForCausalLM, config, torch.bfloat16)
        experts, chosen, width = config.num_local_experts, config.num_experts_per_tok, config.hidden_size
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    active = sum(n * (chosen / experts if ".experts." in name else 1) for name, n in sizes.items())
    # Attention's scores and values of a causal half, forward and twice that backward.
    flops = 6.0 * size * length * (active + config.num_hidden_layers * width * length)
    return model, tokens(size, length), cluster, {"node": nodes, "gpu": 8}, flops


def gpt_flops(hidden: int, layers: int, batch: int, factor: int) -> float:
    """Operations of a step by the source's formula: 96 counts full recomputation, 72 does not."""
    return factor * batch * 2048 * layers * hidden**2 * (1 + 2048 / (6 * hidden) + 51200 / (16 * layers * hidden))


def published(folder: Path) -> dict[str, Any]:
    """The row of GPT 39.1B: measured, and as the cost model predicts it."""
    from gpt import GPT, batch_of

    from autopar.explain.hybrid.predict import predict_hybrid

    table = json.loads((folder / "published" / "megatron_ptdp_table1.json").read_text())
    row = next(dict(zip(table["columns"], r, strict=True)) for r in table["rows"] if r[0] == 39.1)
    hidden, heads, layers, size = GPTS["gpt-39.1b"]
    axes = {"pp": row["pipeline"], "dp": row["gpus"] // row["tensor"] // row["pipeline"], "tp": row["tensor"]}
    found = predict_hybrid(
        GPT(hidden, heads, layers, 2048, 51200),
        batch_of(size, 2048),
        cluster="a100-80gb",
        axes=axes,
        microbatch=row["microbatch"],
        recompute="full",
    )
    measured = gpt_flops(hidden, layers, size, 96) / row["tflops_per_gpu"] / 1e12 / row["gpus"]
    return {
        "published": "gpt-39.1b: tensor 8, pipeline 2, data 32, microbatch 4, full recomputation, 1F1B",
        "measured_step_s": measured,
        "predicted_step_s": found.to_dict()["step_seconds"],
        "model_tflops_a_device": gpt_flops(hidden, layers, size, 72) / measured / row["gpus"] / 1e12,
    }


if __name__ == "__main__":
    main()
