"""chunk_collectives: products run beside the collectives of their rows, where that is faster, and compute the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import fx

from autopar import Float8, Precision
from autopar.compiler import plan as plan_of
from autopar.compiler import program_of, rewrite, solve
from autopar.ir.node_info import graph_info, info
from autopar.ir.ops.collectives import c10d
from autopar.ir.ops.rows import WRITES_ROWS, add_rows_, multiply_rows_, new_rows, reduce_rows_
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.memory.liveness import peak_memory, read_by
from autopar.passes import PASSES
from autopar.passes.collectives.chunk_collectives import chunk_collectives
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from autopar.search.recost import differences, recosted
from autopar.sharding.chunks.products import PRODUCTS
from autopar.sharding.dims import analyze
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from autopar.verify.emulate import census
from autopar.verify.verify import compare, global_values, verify
from tests import models
from tests.distributed.models import residuals, slow_links
from tests.plans import show

WITHOUT = tuple(p for p in PASSES if p is not chunk_collectives)
MESHES = ({"gpu": 4}, {"data": 2, "gpu": 2})


@cache
def captured(name: str) -> tuple[Program, tuple[torch.Tensor, ...]]:
    if name.startswith("residuals"):
        model, batch = residuals()
        scaling = name.removeprefix("residuals").strip()
        precision = Precision(torch.float64, torch.float64, torch.float64, Float8(scaling)) if scaling else None
        program = program_of(model, batch, precision=precision)
        return program, tuple(global_values(program, model, batch))
    program, _, values = models.captured(name, layers=1) if name == "llama" else models.captured(name)
    return program, tuple(values)


@cache
def planned(name: str, recipe: str, axes: tuple[tuple[str, int], ...], bandwidth: float) -> Plan:
    return solve(captured(name)[0], dict(axes), slow_links(bandwidth), search=Search(recipe=recipe))


def chunked(
    name: str = "residuals", recipe: str = "megatron-sequence", axes: dict[str, int] | None = None,
    bandwidth: float = 4e4,
) -> tuple[Program, Program, Plan]:  # fmt: skip
    """The program, what is emitted for it, and the plan."""
    program, plan = captured(name)[0], planned(name, recipe, tuple((axes or MESHES[0]).items()), bandwidth)
    assert plan.overlap
    return program, rewrite(program, plan), plan


def written(local: Program) -> Counter[str]:
    return Counter(n.target.name().split("::")[1] for n in local.graph.graph.nodes if n.target in WRITES_ROWS)


CASES = [
    ("residuals", "megatron-sequence", MESHES[0], 4e4, ("gather", "scatter", "multiply")),
    ("residuals", "megatron", MESHES[1], 4e4, ("reduce", "multiply")),
    ("residuals rowwise", "megatron-sequence", MESHES[0], 4e4, ("gather", "scatter", "multiply_float8")),
    ("residuals tensorwise", "megatron", MESHES[1], 4e4, ("reduce", "multiply_float8")),
    *(
        pytest.param(*case, marks=pytest.mark.deep)
        for case in (
            ("llama", "megatron-sequence", MESHES[1], 1e4, ("gather", "scatter", "multiply", "add")),
            ("residuals", "megatron-sequence", MESHES[1], 4e4, ("gather", "scatter", "multiply")),
            ("llama", "megatron", MESHES[1], 1e4, ("reduce", "multiply", "add")),
            ("gpt2", "megatron-sequence", MESHES[0], 1e4, ("gather", "scatter", "multiply")),
            ("gpt2", "megatron", MESHES[1], 1e5, ("reduce", "multiply")),
        )
    ),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("name", "recipe", "axes", "bandwidth", "kinds"), CASES)
def test_computes_the_same(
    name: str, recipe: str, axes: dict[str, int], bandwidth: float, kinds: tuple[str, ...]
) -> None:
    program, local, plan = chunked(name, recipe, axes, bandwidth)
    assert {f"{kind}_rows_" for kind in kinds} <= set(written(local))
    assert compare(program, local, plan, list(captured(name)[1]), torch.float64).max_error < 1e-12


def test_what_stands_for_a_value_is_one_for_later_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are gathered are multiplied for a gradient of weights, too, whose sum may be another site."""
    chunking = import_module("autopar.passes.collectives.chunk_collectives")
    emit, read = chunking._Emitter.emit, 0

    def emit_and_look(own: Any) -> None:
        nonlocal read
        products = [n for n in own.graph.nodes if n.target in PRODUCTS and n not in own.site.replaced]
        before = {operand for n in products for operand in n.all_input_nodes}
        emit(own)
        new = {operand for n in products for operand in n.all_input_nodes} - before
        assert all("val" in operand.meta for operand in new)
        read += len(new)

    monkeypatch.setattr(chunking._Emitter, "emit", emit_and_look)
    monkeypatch.setattr(chunking, "chunks_of", lambda site, _: (0.0, (1,) * site.units))
    rewrite(*random_plan_of("residuals", 11))
    assert read


def test_equals_eager_whatever_strides_tensors_have() -> None:
    _, _, plan = chunked()
    model, batch = residuals()
    assert verify(model, batch, MESHES[0], plan=plan, random_strides=True).max_error < 1e-12


def test_before_and_after() -> None:
    _, local, _ = chunked()
    text = show(local)
    assert "gather_rows_(" in text
    assert "scatter_rows_(" in text
    program, plan = captured("residuals")[0], planned("residuals", "megatron-sequence", (("gpu", 4),), 4e4)
    before = show(rewrite(program, plan, passes=WITHOUT))
    assert "rows_(" not in before
    assert "all_gather_into_tensor(" in before


def _writes(node: fx.Node) -> tuple[int, int] | None:
    """First row that a node writes, and the first behind; None if it writes none."""
    if node.target not in WRITES_ROWS:
        return None
    rows: Any = node.args[1]
    made, count = info(node).collective, rows.meta["val"].shape[0]
    parts = int(node.args[3]) if made is not None and made.kind != "all_reduce" else 1  # type: ignore[call-overload]
    count = count * parts if made is not None and made.kind == "all_gather" else count
    count = count // parts if made is not None and made.kind == "reduce_scatter" else count
    start = int(node.args[3 if node.target is multiply_rows_ else 2])  # type: ignore[call-overload]
    return start, start + count


@pytest.mark.parametrize(("recipe", "axes"), [("megatron-sequence", MESHES[0]), ("megatron", MESHES[1])])
def test_rows_are_read_when_they_are_there(recipe: str, axes: dict[str, int]) -> None:
    """On a mesh, unlike here, collectives run on: what is read must have been waited for, and all rows be written."""
    _, local, _ = chunked(recipe=recipe, axes=axes)
    rows: dict[fx.Node, tuple[set[int], set[int]]] = {}  # of each state of a tensor: those there, and on their way
    seen = 0
    for node in local.graph.graph.nodes:
        if node.target is new_rows:
            rows[node] = set(), set()
            continue
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if source in rows and node.target is c10d.wait_tensor.default:
            there, coming = rows[source]
            rows[node] = there | coming, set()
        elif source in rows and (span := _writes(node)) is not None:
            there, coming = (set(s) for s in rows[source])
            if node.target in (add_rows_, reduce_rows_) and set(range(*span)) <= there:  # in place
                there -= set(range(*span))
            assert not (there | coming) & set(range(*span)), f"{node} writes rows a second time"
            (coming if info(node).collective else there).update(range(*span))
            rows[node] = there, coming
        for argument in node.all_input_nodes:
            if argument in rows and node not in rows:
                seen += 1
                whole = range(argument.meta["val"].shape[0])
                taken = range(node.args[2], node.args[2] + node.args[3]) if "narrow" in str(node.target) else whole
                assert set(taken) <= rows[argument][0], f"{node} reads rows of {argument} that are not there"
    assert seen > 2


def test_collectives_run_beside_products() -> None:
    _, local, _ = chunked()
    nodes = list(local.graph.graph.nodes)
    beside = 0
    for i, node in enumerate(nodes):
        if node.target in WRITES_ROWS and info(node).collective:
            until = next(j for j, n in enumerate(nodes) if n.target is c10d.wait_tensor.default and j > i)
            beside += any(n.target is multiply_rows_ for n in nodes[i:until])
    assert beside >= 8


@pytest.mark.parametrize(("recipe", "axes"), [("megatron-sequence", MESHES[0]), ("megatron", MESHES[1])])
def test_the_step_is_shorter_as_predicted(recipe: str, axes: dict[str, int]) -> None:
    program, local, plan = chunked(recipe=recipe, axes=axes)
    before = simulate(emitted(rewrite(program, plan, passes=WITHOUT), plan)).step_seconds
    after = simulate(emitted(local, plan)).step_seconds
    known = plan.predicted
    saved = graph_info(local.graph).chunked
    assert 0 < sum(move.seconds for move in saved if not move.backward) <= known.chunked_seconds * (1 + 1e-9)
    assert known.chunked_seconds <= sum(move.seconds for move in saved) * (1 + 1e-9)
    assert plan.certificate.lower_bound <= plan.certificate.objective == known.step_seconds
    assert before - after > 0.9 * known.chunked_seconds
    # What chunks leave out is not predicted.
    for axis, kinds in census(local).items():
        assert {k: n for k, n in known.collectives[axis].items() if n} == {k: n for k, (n, _) in kinds.items()}
        assert known.communication_bytes[axis] == pytest.approx(sum(size for _, size in kinds.values()))
    assert list(differences(plan, recosted(program, plan))) == []


def test_communicates_as_much_and_holds_no_more() -> None:
    program, local, plan = chunked()
    whole = rewrite(program, plan, passes=WITHOUT)
    counts, before = census(local)["gpu"], census(whole)["gpu"]
    for kind in ("all_gather", "reduce_scatter"):
        assert counts[kind] == pytest.approx(before[kind])
    assert sum(peak_memory(local, plan).values()) <= sum(peak_memory(whole, plan).values())


def test_what_is_sent_is_live_until_it_is_waited_for() -> None:
    _, local, _ = chunked(bandwidth=1e5)
    sent: dict[fx.Node, list[Any]] = {}  # by state of a tensor: what has been sent into it, and not been waited for
    most = 0
    for node in local.graph.graph.nodes:
        source = node.all_input_nodes[0] if node.all_input_nodes else None
        if node.target in WRITES_ROWS:
            sent[node] = [*sent.get(source, []), *([node.args[1]] if info(node).collective else [])]
        elif node.target is c10d.wait_tensor.default and source in sent:
            assert set(sent[source]) <= set(read_by(node))
            most = max(most, len(sent[source]))
    assert most > 1, "no wait is for several"


def test_nothing_is_cut_where_that_takes_longer() -> None:
    program = captured("residuals")[0]
    for cluster, pins in (("h100", {}), (slow_links(4e4), {"overlap": "none"})):
        plan = solve(program, MESHES[0], cluster, search=Search(recipe="megatron-sequence", pins=pins))
        assert not written(rewrite(program, plan))
        assert plan.predicted.chunked_seconds == 0


def random_plan_of(name: str, seed: int) -> tuple[Program, Plan]:
    program = captured(name)[0]
    plan = random_plan(program, analyze(program), {"a": 2, "b": 2}, slow_links(1e5), seed)
    return program, replace(plan, overlap=True)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "seeds"),
    [
        ("residuals", range(4)),
        ("residuals tensorwise", range(2)),
        ("residuals rowwise", range(2)),
        pytest.param("residuals delayed", range(8), marks=pytest.mark.deep),
        pytest.param("llama", range(40), marks=pytest.mark.deep),
    ],
)
def test_random_plans_compute_the_same(name: str, seeds: range, monkeypatch: pytest.MonkeyPatch) -> None:
    chunking = import_module("autopar.passes.collectives.chunk_collectives")
    # Wherever chunks are possible, whether they pay or not.
    monkeypatch.setattr(chunking, "chunks_of", lambda site, _: (0.0, (1,) * site.units))
    sites = 0
    for seed in seeds:
        program, plan = random_plan_of(name, seed)
        local = rewrite(program, plan)
        sites += written(local)["multiply_rows_"] + written(local)["multiply_float8_rows_"]
        assert compare(program, local, plan, list(captured(name)[1]), torch.float64).max_error < 1e-10
    assert sites > 0


@pytest.mark.deep
def test_deep_models_are_extrapolated() -> None:
    """What chunks save of six layers, and hold, is known from three."""
    model, batch = models.llama(layers=6)
    roles = {"axes": MESHES[1], "search": Search(recipe="megatron-sequence"), "memory": "1GiB"}
    plan = plan_of(model, batch, cluster=slow_links(1e4), **roles)  # type: ignore[arg-type]
    local = rewrite(program_of(model, batch), plan)
    saved = graph_info(local.graph).chunked
    assert 0 < plan.predicted.chunked_seconds <= sum(move.seconds for move in saved) * (1 + 1e-6)
    program = program_of(model, batch)
    whole = recosted(program, plan).predicted
    assert plan.predicted.chunked_seconds == pytest.approx(whole.chunked_seconds, rel=1e-6)
    assert plan.predicted.step_seconds == pytest.approx(whole.step_seconds, rel=1e-6)
    assert sum(plan.predicted.peak_bytes.values()) == pytest.approx(sum(peak_memory(local, plan).values()), rel=0.05)
