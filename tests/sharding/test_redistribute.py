"""Redistribution: every path of moves, as emitted, gives the blocks of the target."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import fx

from autopar.costs.cluster import Cluster
from autopar.ir.layout import Factor, Layout, Partial, Replicate, Split, TensorType, item_bytes, local_shape, replicated
from autopar.ir.node_info import NodeInfo, info, set_info
from autopar.ir.plan import Certificate, Plan
from autopar.ir.program import Input, Output, Program
from autopar.ir.shards import assemble, block, coordinates
from autopar.passes.insert_collectives import insert_collectives
from autopar.rules.shapes.local_shapes import value_of_call
from autopar.sharding.candidates import layouts
from autopar.sharding.emit import MoveEmitter
from autopar.sharding.node_seconds import NodeSeconds
from autopar.sharding.redistribute import Redistributions, Tables
from autopar.sharding.redistribute.moves import Machine, Move, innermost, move_kind, moved_bytes
from autopar.sharding.redistribute.shortest import ShortestPaths
from autopar.verify.emulate import emulate

R, P = Replicate(), Partial()
NAMES = ("a", "b", "c", "d")


def make_type(*dims: tuple[int, ...], dtype: str = "float64") -> TensorType:
    return TensorType(
        dtype, tuple(tuple(Factor(f"f{d}{j}", n) for j, n in enumerate(dim)) for d, dim in enumerate(dims))
    )


def make_plan(sizes: tuple[int, ...], cluster: str = "cpu") -> Plan:
    return Plan(
        axes=tuple(zip(NAMES, sizes, strict=False)), cluster=Cluster.preset(cluster),
        parameters={}, batch={}, results={}, choices={}, consumer_layouts={}, optimizer="adamw", fingerprint="",
        torch="",
        certificate=Certificate(0.0, 0.0, "", ""),
    )  # fmt: skip


def make_machine(sizes: tuple[int, ...], cluster: str = "cpu") -> Machine:
    found = Cluster.preset(cluster)
    axes = dict(zip(NAMES, sizes, strict=False))
    return Machine(tuple(axes), sizes, found.link_for(axes), found.device)


def identity(type_: TensorType, source: Layout, targets: list[Layout]) -> Program:
    """One tensor, returned in several layouts."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    x.meta["val"] = torch.empty(type_.shape)
    set_info(x, NodeInfo(types=(type_,), layouts=(source,)))
    out = graph.output([x] * len(targets))
    set_info(out, NodeInfo(input_layouts=tuple(targets)))
    outputs = tuple(Output("result", str(i)) for i in range(len(targets)))
    return Program(fx.GraphModule({}, graph), (Input("batch", "0"),), outputs, len(targets), None)


def terms(type_: TensorType, layout: Layout, sizes: tuple[int, ...], seed: int) -> list[torch.Tensor]:
    """Random blocks of a valid layout: copies are equal, Partial terms are anything. Whole numbers: sums are exact."""
    parts: dict[tuple[int, ...], torch.Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    found = []
    for where in coordinates(sizes):
        key = tuple(0 if isinstance(p, Replicate) else i for p, i in zip(layout, where, strict=True))
        if key not in parts:
            shape = block(torch.zeros(type_.shape), type_, layout, sizes, where).shape
            parts[key] = torch.randint(-99, 99, shape, generator=generator).double()
        found.append(parts[key])
    return found


def check(
    type_: TensorType, sizes: tuple[int, ...], source: Layout, targets: list[Layout], cluster: str = "cpu"
) -> Program:
    """Emit, emulate and compare with the blocks of each target."""
    program = insert_collectives(identity(type_, source, targets), make_plan(sizes, cluster))
    blocks = terms(type_, source, sizes, 0)
    full, _ = assemble(blocks, type_, source, sizes)
    results = emulate(program, NAMES[: len(sizes)], sizes, [blocks])
    for target, parts in zip(targets, results, strict=True):
        made, difference = assemble([p for p in parts if p is not None], type_, target, sizes)
        assert torch.equal(made, full), f"{source} -> {target}"
        assert difference == 0.0, f"{source} -> {target}"
        if P in target:
            continue
        for where, part in zip(coordinates(sizes), parts, strict=True):
            assert part is not None
            assert torch.equal(part, block(full, type_, target, sizes, where)), f"{source} -> {target} at {where}"
    return program


def seconds_of(table: Redistributions) -> NDArray[np.float64]:
    """From each layout to each other one."""
    every = np.arange(len(table.layouts))
    return table.seconds(every, every)


def reachable(source: Layout, target: Layout) -> bool:
    """Nothing becomes Partial; everything else can be had."""
    return all(p == q for p, q in zip(source, target, strict=True) if isinstance(q, Partial))


CASES = [
    (make_type((4,)), (2,)),
    (make_type((3, 4), (6,)), (2,)),
    (make_type((4, 2), (4,)), (2, 2)),
    (make_type((8,), (2,)), (2, 2)),
    (make_type((4, 6)), (2, 3)),
    (make_type((8, 2)), (2, 2, 2)),
    (make_type((4,), ()), (1, 2)),
    (make_type((8, 2)), (2, 2, 1, 2)),
]


@pytest.mark.some(2)
@pytest.mark.parametrize(("type_", "sizes"), CASES)
def test_every_single_move(type_: TensorType, sizes: tuple[int, ...]) -> None:
    table = Tables(make_machine(sizes)).of(type_)
    by_source: dict[Layout, list[Layout]] = {}
    for move in table.moves():
        assert move.kind == move_kind(move.source[move.axis], move.target[move.axis])
        by_source.setdefault(move.source, []).append(move.target)
    assert by_source
    for source, targets in by_source.items():
        check(type_, sizes, source, targets)


@pytest.mark.parametrize(("type_", "sizes"), CASES)
def test_reachability_and_triangle_inequality(type_: TensorType, sizes: tuple[int, ...]) -> None:
    table = Tables(make_machine(sizes)).of(type_)
    seconds = seconds_of(table)
    for (i, source), (j, target) in itertools.product(enumerate(table.layouts), repeat=2):
        assert np.isfinite(seconds[i, j]) == reachable(source, target), f"{source} -> {target}"
    assert (np.diagonal(seconds) == 0).all()
    assert (seconds[~np.eye(len(seconds), dtype=bool)] > 0).all()
    through = (seconds[:, :, None] + seconds[None, :, :]).min(axis=1)
    assert (seconds <= through * (1 + 1e-12)).all()


@pytest.mark.parametrize("cluster", ["cpu", "h100"])
@pytest.mark.parametrize(("type_", "sizes"), CASES[2:5])
def test_paths_add_up(type_: TensorType, sizes: tuple[int, ...], cluster: str) -> None:
    table = Tables(make_machine(sizes, cluster)).of(type_)
    seconds = seconds_of(table)
    for (i, source), (j, target) in itertools.product(enumerate(table.layouts), repeat=2):
        if not reachable(source, target):
            with pytest.raises(ValueError, match="no way to redistribute"):
                table.path(source, target)
            continue
        path = table.path(source, target)
        assert [m.source for m in path] == [source, *(m.target for m in path[:-1])] if path else source == target
        assert not path or path[-1].target == target
        assert sum(table.move_seconds(path)) == pytest.approx(seconds[i, j])
        assert table.chunked_seconds(path).sum() == pytest.approx(seconds[i, j])
        ones = np.ones((1, 2 + 3 * len(sizes)))
        ones[0, -1] += 1e-12  # not all alike: each part is priced by itself
        priced = table.priced(np.array([i]), np.array([j]), ones)
        assert priced[0, 0] == pytest.approx(seconds[i, j])


@pytest.mark.some(8)
@pytest.mark.parametrize("dtype", ["float32", "bool", "bfloat16"])
@pytest.mark.parametrize(("type_", "sizes"), CASES)
def test_moves_cost_what_is_emitted(type_: TensorType, sizes: tuple[int, ...], dtype: str) -> None:
    """Every move, of a row-major tensor: kernels and the collective, each with its launch."""
    type_ = replace(type_, dtype=dtype, reduce="float32" if dtype == "bfloat16" else "")
    machine = make_machine(sizes, "h100")
    table, seconds = Tables(machine).of(type_), NodeSeconds(machine)
    moves = [m for m in table.moves() if sizes[m.axis] > 1 and not (dtype == "bool" and P in (*m.source, *m.target))]
    for move, predicted, local in zip(moves, table.move_seconds(moves), table.local_seconds(moves), strict=True):
        graph = fx.Graph()
        x = graph.placeholder("x")
        shape = local_shape(type_, move.source, sizes)
        x.meta["val"] = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        MoveEmitter(graph, x, type_, move, machine).emit(x)
        kernels, collectives = 0.0, 0.0
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = value_of_call(node)
                made = info(node).collective
                collectives += seconds.collective(made) if made is not None else 0.0
                kernels += seconds.kernel(node)[0]
        assert local == pytest.approx(kernels, rel=1e-9), f"{move} of {type_}"
        assert predicted == pytest.approx(kernels + collectives, rel=1e-9), f"{move} of {type_}"


@st.composite
def redistributions(draw: st.DrawFn) -> tuple[TensorType, tuple[int, ...], Layout, list[Layout]]:
    dims = draw(st.lists(st.lists(st.sampled_from([2, 3, 4, 6, 8]), max_size=3).map(tuple), min_size=1, max_size=3))
    sizes = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3)))
    type_ = make_type(*dims)
    assume(math.prod(sizes) <= 12 and type_.numel <= 3000)
    every = layouts(type_, sizes)
    assume(len(every) <= 130)
    source = draw(st.sampled_from(every))
    possible = [x for x in every if reachable(source, x)]
    return type_, sizes, source, draw(st.lists(st.sampled_from(possible), min_size=1, max_size=3))


@settings(max_examples=60)
@given(redistributions())
def test_any_path(drawn: tuple[TensorType, tuple[int, ...], Layout, list[Layout]]) -> None:
    check(*drawn)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("P P", "P S"),  # known to be reduced twice elsewhere
        ("P P", "S P"),
        ("P P", "S S"),
        ("S P", "P R"),
        ("S S", "S R"),
        ("S S", "R S"),
        ("R S", "S S"),
        ("S S", "S T"),
        ("S S", "T S"),
        ("S T", "T S"),
        ("S P", "T S"),
        ("P S", "S T"),
    ],
)
def test_two_axes_by_name(source: str, target: str) -> None:
    """S splits the leading factor of a dim, T the one behind it."""
    spelled = {"P": P, "R": R, "S": Split(0, 0), "T": Split(0, 1)}
    before, after = (tuple(spelled[c] for c in text.split()) for text in (source, target))
    type_, sizes = make_type((8, 4), (2,)), (2, 4)
    if not reachable(before, after):
        with pytest.raises(ValueError, match="no way"):
            check(type_, sizes, before, [after])
        return
    check(type_, sizes, before, [after])


def test_partial_on_one_axis_stays_when_the_other_is_scattered() -> None:
    """``(Partial, Partial) -> (Partial, Split)`` is one reduce-scatter, on the second axis."""
    program = check(make_type((4,)), (2, 2), (P, P), [(P, Split(0))])
    kinds = [(i.kind, i.axis) for n in program.graph.graph.nodes if (i := info(n).collective)]
    assert kinds == [("reduce_scatter", "b")]


def test_outer_split_of_a_nested_factor_does_not_move_first() -> None:
    """Axes that split one factor are gathered innermost first."""
    table = Tables(make_machine((2, 2))).of(make_type((8,)))
    nested = (Split(0), Split(0))
    assert not innermost(nested, 0)
    assert innermost(nested, 1)
    assert [(m.kind, m.axis) for m in table.path(nested, (R, R))] == [("all_gather", 1), ("all_gather", 0)]


def test_moves_are_shared_between_targets() -> None:
    type_, sizes = make_type((8,), (8,)), (2, 2)
    program = check(type_, sizes, (Split(0), Split(0)), [(R, R), (R, R), (Split(0), R), (R, R)])
    axes = [i.axis for n in program.graph.graph.nodes if (i := info(n).collective)]
    assert axes == ["b", "a"]  # (Split, Replicate) lies on the way


def test_large_tensors_are_reduced_before_they_are_gathered() -> None:
    """(P, S) -> (R, R): reduce the block, then gather it."""
    table = Tables(make_machine((8, 8), "h100")).of(make_type((8, 8), (1024,)))
    assert [m.kind for m in table.path((P, Split(0)), (R, R))] in (
        ["all_reduce", "all_gather"],
        ["reduce_scatter", "all_gather", "all_gather"],
    )


def test_names_do_not_make_another_table() -> None:
    tables = Tables(make_machine((2, 2)))
    one, other = make_type((4,)), TensorType("float64", ((Factor("batch", 4),),))
    assert tables.of(one) is tables.of(other)
    assert tables.of(one) is not tables.of(replace(one, dtype="float32"))


def test_bytes() -> None:
    type_, sizes = make_type((4,), (4,), dtype="bfloat16"), (2, 2)
    table = Tables(make_machine(sizes)).of(type_)
    assert [item_bytes(n) for n in ("float32", "bfloat16", "bool", "int64")] == [4, 2, 1, 8]
    gather = table.path((Split(0), R), replicated(2))[0]
    assert moved_bytes(type_, gather, sizes) == 32.0  # 16 elements, replicated afterwards
    swap = Move("all_to_all", 0, (Split(0), R), (Split(1), R))
    assert moved_bytes(type_, swap, sizes) == 16.0
    scatter = Move("reduce_scatter", 0, (P, Split(0)), (Split(1), Split(0)))
    assert moved_bytes(type_, scatter, sizes) == 16.0  # half of it before


def test_a_mesh_of_no_axes() -> None:
    """One device: one layout, no moves."""
    table = Tables(make_machine(())).of(make_type((4,)))
    assert table.layouts == ((),)
    assert seconds_of(table).tolist() == [[0.0]]


@pytest.mark.parametrize("share", [0.03, 0.5])
def test_shortest_paths_are_those_of_textbooks(share: float) -> None:
    """Of graphs with few arcs and with many; Floyd-Warshall element by element; rows are asked for in any order."""
    draw = np.random.default_rng(0)
    count = 40
    arcs = np.where(draw.random((count, count)) < share, draw.integers(1, 9, (count, count)), np.inf)
    np.fill_diagonal(arcs, np.inf)
    ends = np.argwhere(np.isfinite(arcs))
    paths = ShortestPaths(count, ends, arcs[tuple(ends.T)])
    expected = np.where(np.eye(count, dtype=bool), 0.0, arcs)
    for k, a, b in itertools.product(range(count), repeat=3):
        expected[a, b] = min(expected[a, b], expected[a, k] + expected[k, b])
    for rows in np.array_split(draw.permutation(count), 7):
        assert np.array_equal(paths.lengths(rows, np.arange(count)), expected[rows])
    reached = np.argwhere(np.isfinite(expected) & ~np.eye(count, dtype=bool))
    assert len(reached) > 20
    for a, b in reached:
        hops = ends[paths.path(a, b)]
        assert (hops[0, 0], hops[-1, 1]) == (a, b)
        assert (hops[1:, 0] == hops[:-1, 1]).all()
        assert arcs[tuple(hops.T)].sum() == expected[a, b]
    assert paths.path(3, 3) == []
