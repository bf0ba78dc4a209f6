"""Training on four ranks gives the parameters of training on one device, whatever the plan."""

from __future__ import annotations

from typing import Any

import pytest

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import make, slow_devices
from tests.distributed.steps import TOLERANCE, follow

pytestmark = pytest.mark.distributed

STEPS = 3
# transformers' Llama casts to float32 in its norms and its loss, in float64 too: what is split there rounds elsewhere.
ROUNDS = {("llama", "random (2, 2)"): 1e-4, ("llama", "sharded (2, 2)"): 1e-5}

# Pins that force a plan (data parallel, fully sharded, tensor parallel), and the meshes on which it is tried.
DATA = {"batch.*": "S(0)", "*.weight": "R", "*.bias": "R"}
SHARDED = {"batch.*": "S(0)", "*.weight": "S(0)"}
LINE, SQUARE, FOUR = (4,), (2, 2), (2, 1, 2, 1)
PLANS: dict[str, dict[str, tuple[dict[str, str] | int, tuple[tuple[int, ...], ...]]]] = {
    "mlp": {
        "search": ({}, (LINE, SQUARE, FOUR)),
        "data": (DATA, (LINE,)),
        "sharded": (SHARDED, (LINE, SQUARE)),
        "tensor": ({"up.weight": "S(0)", "up.bias": "S(0)", "down.weight": "S(1)"}, (LINE, SQUARE)),
        "random": (5, (LINE, SQUARE, FOUR)),
        "columns": ({"*.weight": "S(1)", "batch.0": "S(1)"}, (SQUARE,)),
    },
    "gpt2": {
        "random": (1, (SQUARE,)),
        "queries": (2, (SQUARE,)),
        "sharded": (SHARDED, (LINE,)),
        "tensor": ({"*.c_attn.weight": "S(1.1)", "*.c_attn.bias": "S(0.1)", "*.mlp.c_fc.weight": "S(1)"}, (SQUARE,)),
    },
    "llama": {
        "random": (2, (SQUARE,)),
        "search": ({}, (LINE,)),
        "sharded": (SHARDED, (SQUARE,)),
        "tensor": (
            {"*.[qkv]_proj.weight": "S(0)", "*.gate_proj.weight": "S(0)", "*.down_proj.weight": "S(1)"}, (LINE,),
        ),
    },
    "tied": {"sharded": (SHARDED, (LINE,)), "vocabulary": ({"model.embed_tokens.weight": "S(0)"}, (SQUARE,))},
}  # fmt: skip


SHORT = {
    "mlp": {"search": FOUR, "random": SQUARE},
    "gpt2": {"tensor": SQUARE, "queries": SQUARE},
    "llama": {"sharded": SQUARE},
    "tied": {},
}
"""What `make test` tries; the others are for `make test-deep`."""


def pins_on(pins: dict[str, str], axes: int) -> dict[str, Any]:
    """The same placement on every axis; strided ones on the last only, since one axis is all that they can take."""
    return {k: tuple("R" if "." in v and a < axes - 1 else v for a in range(axes)) for k, v in pins.items()}


def train(rank: int, name: str, plans: Any) -> dict[str, Any]:
    from autopar.ir.node_info import info
    from autopar.ir.ops.attention import attention
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    found = {}
    for label, (pins, meshes) in plans.items():
        for sizes in meshes:
            (model, batch), (plain, _) = make(name), make(name)
            drawn = isinstance(pins, int)  # the seed of a random plan
            search = Search(recipe="random", seed=pins) if drawn else Search(pins=pins_on(pins, len(sizes)))
            parallel = parallelize(model, mesh_of(*sizes), search=search, cluster=slow_devices(), timeout=WAIT)
            worst = follow(parallel, plain, [batch(step) for step in range(STEPS)], clip=0.5)
            nodes = [*parallel.forward_graph.graph.nodes, *parallel.backward_graph.graph.nodes]
            if label == "queries":  # of a causal attention are split: a mask says which they are
                assert any(n.target is attention and n.args[3] is not None for n in nodes)
            found[f"{label} {sizes}"] = (
                worst,
                sorted({info(n).collective.kind for n in nodes if info(n).collective is not None}),
            )
    return found


def cases() -> list[Any]:
    """Name and plans, the short ones and the others apart."""
    found = []
    for name, plans in sorted(PLANS.items()):
        short = {label: (plans[label][0], (sizes,)) for label, sizes in SHORT[name].items()}
        rest = {
            label: (pins, tuple(s for s in meshes if SHORT[name].get(label) != s))
            for label, (pins, meshes) in plans.items()
        }
        # test_memory_repair.py has one of the first, test_overlap.py one of the second.
        marks = [pytest.mark.deep] if name in ("gpt2", "llama") else []
        found += [pytest.param(name, short, id=name, marks=marks)] if short else []
        found += [
            pytest.param(name, rest, id=f"{name}-more", marks=pytest.mark.deep),
        ]
    return found


@pytest.mark.parametrize(("name", "plans"), cases())
def test_three_steps_of_adamw_equal_one_device(ranks: Ranks, name: str, plans: Any) -> None:
    results = ranks.run(train, name, plans)
    assert all(r.keys() == results[0].keys() for r in results)
    for label, (_, collectives) in results[0].items():
        assert {"all_reduce", "reduce_scatter"} & set(collectives), f"{name} {label}: nothing is computed in parts"
        tolerance = ROUNDS.get((name, label), TOLERANCE)
        assert all(r[label][0] < tolerance for r in results), f"{name} {label}: {[r[label] for r in results]}"
