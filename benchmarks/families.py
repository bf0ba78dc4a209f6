"""Do families of transformers that nobody here has looked at compute what eager mode does, under a random plan?

Each is made tiny from its own configuration, in a process of its own, and verified in float64 with a batch of four
sequences on a mesh of (2, 2): loss and every gradient, of the graph as captured beside the eager model and of the plan
beside the graph. Families whose configuration cannot be made tiny by the sizes below, or whose own forward pass fails
with these, are counted as such. With ``--role`` the plan is the one that is searched with this role on an axis of four
in place of a random one: ``--role context`` says whether a family's sequence can be split through all of it; with
several, such as ``--role data,context,expert``, each is of an axis of two. ``--axes 3`` draws plans on three axes of
two, and ``--skewed`` sends all tokens to the same experts and none to the others. The parameters after a step of AdamW
with these gradients are compared, too. A router's
choice is one of float64 only if the family's code runs in it: grouped products of torch do not, and such a family is
compared in float32 first.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from typing import Any

SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64, "max_position_embeddings": 64, "n_embd": 32,
    "n_layer": 2, "n_head": 4, "n_positions": 64, "n_inner": 64, "d_model": 32, "n_layers": 2, "n_heads": 4,
    "ffn_dim": 64, "num_layers": 2, "hidden_dim": 64, "word_embed_proj_dim": 32, "dim": 32, "max_seq_len": 64,
    "num_local_experts": 4, "num_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "moe_intermediate_size": 32, "topk_group": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1, "state_size": 8, "d_state": 8, "n_groups": 1,
    "mamba_d_state": 8, "mamba_n_heads": 4, "mamba_d_head": 16, "time_step_rank": 4, "sliding_window": 4,
    "shared_expert_intermediate_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "lru_width": 32,
    "intermediate_size_mlp": 64, "attention_window_size": 8, "rotary_dim": 4, "num_heads": 4, "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "chunk_size": 4, "mamba_chunk_size": 4,
    "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_dt_rank": 4,
}  # fmt: skip

LATENT = {"num_key_value_heads": 4, "head_dim": None}
"""Further sizes where keys are latent, as in DeepSeek-V3: tried where the others do not fit together."""

SCANNED, ATTENDED, HYBRID = "linear_attention", "full_attention", "hybrid"
OWN: dict[str, dict[str, Any]] = {
    "mamba2": {"head_dim": 16},
    "bamba": {"layer_types": None, "attn_layer_indices": [1]},
    "dots1": {"n_shared_experts": 1},
    "falcon_h1": {"layer_types": None, "mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": [SCANNED, ATTENDED], "num_hidden_layers": 2, "shared_intermediate_size": 32},
    "lfm2": {"layer_types": ["conv", ATTENDED], "num_hidden_layers": 2},
    "lfm2_moe": {"layer_types": ["conv", ATTENDED], "num_hidden_layers": 2, "num_dense_layers": 1},
    "recurrent_gemma": {"layer_types": None, "block_types": ("recurrent", "attention"), "sliding_window": None},
    "zamba2": {"layers_block_type": [SCANNED, HYBRID, SCANNED, HYBRID], "layer_types": None, "num_hidden_layers": 4,
               "n_mamba_heads": 4, "mamba_ngroups": 1, "mamba_headdim": 16, "adapter_rank": 4, "head_dim": None},
}  # fmt: skip
"""Sizes of families that give a name above another meaning, or have names of their own; None: the family's default."""

MOST = 3_000_000
"""Parameters beyond which a family is not tiny."""

BOUND, SINGLE = 1e-9, 1e-5
"""Largest relative differences: in float64, and of a float32 model from the graph in float64."""


def tiny(name: str, more: dict[str, Any]) -> Any:
    """A family's model of two layers, in float64 where its code runs in it."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    base = AutoConfig.for_model(name)
    known = {*base.to_dict(), *base.attribute_map}
    sizes = {key: n for key, n in {**SIZES, **more}.items() if key in known and n is not None}
    kinds = list(dict.fromkeys((getattr(base, "layer_types", None) or ()) if "layer_types" in known else ()))
    if kinds and "layer_types" not in more:
        sizes["layer_types"] = (kinds * 2)[: max(2, len(kinds))]
        sizes["num_hidden_layers"] = len(sizes["layer_types"])
    torch.manual_seed(0)
    with torch.device("meta"):
        config = AutoConfig.for_model(name, **sizes)
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > MOST:
        raise ValueError(f"{count:,} parameters")
    model = AutoModelForCausalLM.from_config(config).double()
    ids = torch.ones(4, 16, dtype=torch.long)
    try:
        model(input_ids=ids)
    except RuntimeError as error:
        if "Double" not in str(error):
            raise
        model.float()(input_ids=ids)
    return model.train()


def skew(model: Any) -> None:
    """Give routers no preference but that of their biases: the same experts for all tokens."""
    import torch

    for name, module in model.named_modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and weight.shape == (4, 32) and name.endswith(("gate", "router")):
            weight.data.zero_()
            for own in (getattr(module, "bias", None), getattr(module, "e_score_correction_bias", None)):
                if own is not None:
                    own.data.copy_(torch.tensor([0.0, 50.0, 20.0, 0.0]))


def step_error(model: Any, report: Any) -> float:
    """How far parameters are apart after a step of AdamW with either gradients."""
    import torch

    stepped = []
    for gradients in (report.gradients, report.reference_gradients):
        parameters = []
        for name, parameter in model.named_parameters():
            if name in gradients:
                parameters.append(torch.nn.Parameter(parameter.detach().double().clone()))
                parameters[-1].grad = gradients[name].double()
        torch.optim.AdamW(parameters, lr=1e-3).step()
        stepped.append(parameters)
    return max(((a - b).abs().max().item() for a, b in zip(*stepped, strict=True)), default=0.0)


def outcome(name: str, role: str | None, axes_of_two: int = 2, skewed: bool = False) -> dict[str, Any]:
    """What became of a family, in this process."""
    import torch
    import transformers

    import autopar

    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    begun = time.monotonic()
    try:
        try:
            model = tiny(name, OWN.get(name, {}))
        except RuntimeError:
            model = tiny(name, LATENT)
    except Exception as error:  # whatever its code raises
        return {"family": name, "kind": "not tiny", "text": f"{type(error).__name__}: {error}"[:300]}
    ids = torch.randint(3, 60, (4, 16), generator=torch.Generator().manual_seed(0))
    batch, axes, plan = {"input_ids": ids, "labels": ids}, dict.fromkeys("abcd"[:axes_of_two], 2), "random"
    if skewed:
        skew(model)
    try:
        if role:
            roles = dict(zip("abcd", role.split(","), strict=False))
            axes = {"a": 4} if len(roles) == 1 else dict.fromkeys(roles, 2)
            search = autopar.Search(roles=roles, padding=False)
            plan = autopar.plan(model, batch, cluster="h100", axes=axes, search=search)
        report = autopar.verify(model, batch, axes, plan=plan, seed=1)
    except autopar.AutoparError as error:
        return {"family": name, "kind": "refused", "text": f"{type(error).__name__}: {error}"[:300]}
    except Exception as error:
        return {"family": name, "kind": "crash", "text": f"{type(error).__name__}: {error}"[:300]}
    single = next(model.parameters()).dtype == torch.float32
    same = report.max_error < BOUND and not report.capture_error > (SINGLE if single else BOUND)
    step = step_error(model, report)
    same = same and step < BOUND
    return {
        "family": name, "kind": "equal" if same else "wrong", "error": report.max_error,
        "capture": report.capture_error, "step": step, "seconds": time.monotonic() - begun,
        "collectives": dict(report.plan.predicted.collectives.get("a", {})),
    }  # fmt: skip


def main() -> None:
    """Run the families, one process each, and count."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="*", help="names as transformers has them; default: all causal language models")
    parser.add_argument("--seconds", type=float, default=300.0, help="for each of them")
    parser.add_argument("--role", help="of the axis, such as context, or of several; default: a random plan")
    parser.add_argument("--axes", type=int, default=2, help="of two devices each, of a random plan")
    parser.add_argument("--skewed", action="store_true", help="route all tokens to the same experts")
    parser.add_argument("--json", action="store_true", help="a line of JSON for each")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.here:
        print(json.dumps(outcome(given.family[0], given.role, given.axes, given.skewed)))
        return
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    counts: Counter[str] = Counter()
    for name in given.family or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        command = [
            sys.executable,
            __file__,
            "--here",
            name,
            *(("--role", given.role) if given.role else ()),
            "--axes",
            str(given.axes),
        ]
        command += ["--skewed"] if given.skewed else []
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=given.seconds, check=False)
            lines = done.stdout.splitlines()
            found = json.loads(lines[-1]) if lines else {"family": name, "kind": "killed", "text": done.stderr[-300:]}
        except subprocess.TimeoutExpired:
            found = {"family": name, "kind": "slow"}
        counts[found["kind"]] += 1
        print(json.dumps(found) if given.json else f"{name:28} {found['kind']:10} {found.get('text', '')}", flush=True)
    print(", ".join(f"{count} {kind}" for kind, count in counts.most_common()), file=sys.stderr)


if __name__ == "__main__":
    main()
