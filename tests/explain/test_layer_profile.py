"""What a step does on one device: kernels, collectives, and the memory that its forward leaves."""

from __future__ import annotations

from functools import lru_cache

import pytest

from autopar.compiler import program_of, solve
from autopar.costs.cluster import Cluster
from autopar.explain.hybrid.layer_profile import AFTER, BEFORE, Part, spend, step_of
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.search.options import Search
from autopar.sharding.assignment import machine_of
from autopar.sharding.dims import analyze
from benchmarks.gpt import GPT, batch_of

# Small, and no two alike.
BATCH, SEQUENCE, HIDDEN, HEADS, VOCABULARY = 2, 16, 32, 4, 96
MASK = SEQUENCE * SEQUENCE  # one byte an element, made once and kept for every layer's backward
STATISTICS = 2 * 2 * BATCH * SEQUENCE * 2  # mean and deviation of each token, two norms, 2 bytes each


@lru_cache
def planned(layers: int, tensor: int, recipe: str | None) -> tuple[Program, Plan]:
    program = program_of(GPT(HIDDEN, HEADS, layers, SEQUENCE, VOCABULARY), batch_of(BATCH, SEQUENCE))
    search = Search(recipe=recipe, padding=False)
    return program, solve(program, {"tensor": tensor}, "a100-80gb", search=search)


def parts(layers: int = 2, tensor: int = 1, recipe: str | None = None) -> dict[str, Part]:
    program, plan = planned(layers, tensor, recipe)
    return {p.name: p for p in step_of(program, analyze(program), plan)}


def published(which: str, tensor: int) -> float:
    """Bytes that a layer keeps: Reducing Activation Recomputation in Large Transformer Models, table 2."""
    sbh, scores = SEQUENCE * BATCH * HIDDEN, 5 * HEADS * SEQUENCE / HIDDEN
    table = {
        "none": 34 + scores,
        "selective": 34,
        "tensor + selective": 10 + 24 / tensor,
        "tensor + sequence + selective": 34 / tensor,
        "tensor": 10 + 24 / tensor + scores / tensor,
        "tensor + sequence": (34 + scores) / tensor,
    }
    return sbh * table[which]


@pytest.mark.slow
def test_the_parts_are_the_blocks_and_what_is_around_them() -> None:
    assert list(parts()) == [BEFORE, "layers.0", "layers.1", AFTER]


@pytest.mark.slow
def test_one_device_keeps_what_the_paper_says() -> None:
    found = parts()
    assert found["layers.0"].saved == published("none", 1) + STATISTICS + MASK
    assert found["layers.1"].saved == published("none", 1) + STATISTICS


@pytest.mark.slow
@pytest.mark.parametrize("tensor", [4, pytest.param(2, marks=pytest.mark.deep)])
def test_tensor_parallelism_keeps_what_the_paper_says(tensor: int) -> None:
    found = parts(tensor=tensor, recipe="megatron")
    assert found["layers.1"].saved == published("tensor", tensor) + STATISTICS


@pytest.mark.slow
def test_sequence_parallelism_keeps_what_the_paper_says() -> None:
    """Statistics are split with the sequence."""
    found = parts(tensor=2, recipe="megatron-sequence")
    assert found["layers.1"].saved == published("tensor + sequence", 2) + STATISTICS / 2


@pytest.mark.parametrize(
    ("which", "tensor", "recipe"),
    [("", 1, None), ("tensor + ", 4, "megatron"), ("tensor + sequence + ", 2, "megatron-sequence")],
)
def test_selective_recomputation_keeps_what_the_paper_says(which: str, tensor: int, recipe: str | None) -> None:
    layer = parts(tensor=tensor, recipe=recipe)["layers.1"]
    statistics = STATISTICS / (tensor if "sequence" in which else 1)
    assert layer.saved - layer.recomputed_bytes == published(f"{which}selective", tensor) + statistics
    # Attention's first product and what follows it up to the second: scale, mask, softmax, draw, drop.
    scores = 2 * BATCH * SEQUENCE**2 * HIDDEN / tensor
    assert sum(w.flops.sum() for w in layer.recompute.kernels.values()) == scores
    assert (
        sum(w.launches.sum() for w in layer.recompute.kernels.values()) == 6
    )  # product, scale, mask, softmax, draw, drop
    assert layer.recompute.collectives == ()
    assert parts(tensor=tensor, recipe=recipe)[AFTER].recomputed_bytes == 0


def test_full_recomputation_keeps_what_the_paper_says() -> None:
    assert parts()["layers.0"].output_bytes == 2 * SEQUENCE * BATCH * HIDDEN
    tensor = parts(tensor=4, recipe="megatron")["layers.0"]
    assert tensor.replicated_bytes == (tensor.output_bytes,) == (2 * SEQUENCE * BATCH * HIDDEN,)
    sequence = parts(tensor=2, recipe="megatron-sequence")["layers.0"]
    assert sequence.replicated_bytes == (0.0,)


def test_megatron_communicates_as_megatron() -> None:
    """Two all-reduces of the activations in each pass over a layer; the loss's are in the last part."""
    found = parts(tensor=4, recipe="megatron")
    activations = 2 * BATCH * SEQUENCE * HIDDEN
    for name in ("layers.0", "layers.1"):
        for activity in (found[name].forward, found[name].backward):
            assert [(c.kind, c.size) for c in activity.collectives] == [("all_reduce", activations)] * 2


def test_alike_layers_do_the_same() -> None:
    """So one stands for all of them, however many there are."""
    shallow, deep = parts(layers=1), parts(layers=2)
    for key in ("forward", "backward"):
        one, two = (getattr(found["layers.0"], key).kernels for found in (shallow, deep))
        assert {d: w.flops.sum() for d, w in one.items()} == {d: w.flops.sum() for d, w in two.items()}
    assert shallow["layers.0"].parameters == deep["layers.1"].parameters


def test_parameters_are_counted_once() -> None:
    program, _ = planned(2, 1, None)
    counted = sum(sum(p.parameters.values()) for p in parts().values())
    values = (n.meta["val"] for n, i in zip(program.placeholders, program.inputs, strict=True) if i.kind == "parameter")
    assert counted == sum(v.numel() for v in values)


@pytest.mark.slow
def test_a_step_costs_its_kernels_and_collectives() -> None:
    _, plan = planned(2, 2, "megatron")
    machine = machine_of(plan)
    layer = parts(tensor=2, recipe="megatron")["layers.1"]
    spent = spend(layer.forward, machine)
    assert spent.device > 0
    assert len(spent.communication) == 1
    assert spent.communication[0] > 2 * 2 * machine.links[0].latency
    assert spent.elapsed == max(spent.host, spent.device + spent.communication[0])
    twice = spent + spent
    assert twice.device == pytest.approx(spent.scaled(2).device)
    assert Cluster.preset("a100-80gb").device == machine.device
