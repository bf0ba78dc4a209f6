"""The emulated mesh against torch's own: `LocalTensorMode` runs the real functional collectives' semantics."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.compiler import rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.ir.graph import copy_graph
from autopar.ir.node_info import GraphInfo, NodeInfo, set_graph_info, set_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.balanced_attention import swap_blocks
from autopar.ir.ops.collectives import GROUP_ARGUMENT, IN_PLACE, Collective, axis_index, c10d
from autopar.ir.ops.exchange import exchange_rows
from autopar.ir.ops.rows import gather_rows_, new_rows, reduce_rows_, scatter_rows_
from autopar.ir.ops.sequence.send_block import send_block
from autopar.ir.program import Input, Output, Program
from autopar.search.options import Search
from autopar.verify.emulate import census, emulate, run_whole
from autopar.verify.verify import compare
from tests import models

aten = torch.ops.aten
NAMES, SIZES = ("a", "b"), (2, 2)


def program_of(build: Any, inputs: int = 1) -> Program:
    """A program on ``inputs`` placeholders; ``build(graph, *placeholders)`` gives the outputs."""
    graph = fx.Graph()
    placeholders = [graph.placeholder(f"x{i}") for i in range(inputs)]
    outputs = build(graph, *placeholders)
    graph.output(outputs)
    named = tuple(Output("result", str(i)) for i in range(len(outputs)))
    return Program(
        fx.GraphModule({}, graph), tuple(Input("batch", str(i)) for i in range(inputs)), named, len(named), None
    )


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """A mesh of four ranks that exist in name only."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", SIZES, mesh_dim_names=NAMES)
    dist.destroy_process_group()


CALLS = {
    "sum": (c10d.all_reduce.default, ("sum",)),
    "max": (c10d.all_reduce.default, ("max",)),
    "gather": (c10d.all_gather_into_tensor.default, (2,)),
    "scatter": (c10d.reduce_scatter_tensor.default, ("sum", 2)),
    "all_to_all": (c10d.all_to_all_single.default, ([2, 2], [2, 2])),
    "gather of several": (c10d.all_gather_into_tensor_coalesced.default, (2,)),
    "sum of several": (c10d.all_reduce_coalesced.default, ("sum",)),
    "scatter of several": (c10d.reduce_scatter_tensor_coalesced.default, ("sum", 2)),
}


@pytest.mark.parametrize("axis", NAMES)
@pytest.mark.parametrize("name", CALLS)
def test_collectives_do_what_torch_does(mesh: DeviceMesh, name: str, axis: str) -> None:
    from torch.distributed._local_tensor import LocalTensor, LocalTensorMode

    target, arguments = CALLS[name]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(-9, 9, (4, 3), generator=generator).double() for _ in range(4)]
    several = name.endswith("several")
    with LocalTensorMode(4):
        given = LocalTensor(dict(enumerate(parts)))
        made: Any = target([given, given[:, :2]] if several else given, *arguments, mesh.get_group(axis).group_name)
        waited: list[Any] = [c10d.wait_tensor(t) for t in (made if several else [made])]
        expected = [[local._local_tensors[r] for r in range(4)] for local in waited]

    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        narrow = graph.call_function(torch.ops.aten.narrow.default, (x, 1, 0, 2))
        called = graph.call_function(target, ([x, narrow] if several else x, *arguments, axis))
        tensors = [graph.call_function(operator.getitem, (called, i)) for i in range(2)] if several else [called]
        return [graph.call_function(c10d.wait_tensor.default, (t,)) for t in tensors]

    found = emulate(program_of(build), NAMES, SIZES, [parts])
    for one, other in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        assert one is not None
        assert torch.equal(one, other)


def test_every_collective_is_covered() -> None:
    """But those that ask each device for its own sizes: see `test_experts`, `test_attention` and `test_sequences`."""
    called = {target for target, _ in CALLS.values()} | {exchange_rows, swap_blocks, send_block, *INTO_ROWS}
    assert called | {IN_PLACE[target] for target in called & set(IN_PLACE)} == set(GROUP_ARGUMENT)


INTO_ROWS: dict[Any, tuple[Any, tuple[Any, ...], int]] = {
    gather_rows_: (c10d.all_gather_into_tensor.default, (2,), 8),
    scatter_rows_: (c10d.reduce_scatter_tensor.default, ("sum", 2), 2),
    reduce_rows_: (c10d.all_reduce.default, ("sum",), 4),
}
"""By what writes into rows: the collective that it is, its arguments, and how many rows it makes of four; ranks run
them in `tests.distributed.test_chunks`."""


@pytest.mark.parametrize("axis", NAMES)
@pytest.mark.parametrize("target", INTO_ROWS)
def test_rows_are_what_the_collective_gives(target: Any, axis: str) -> None:
    plain, arguments, count = INTO_ROWS[target]
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randint(-9, 9, (4, 3), generator=generator).double() for _ in range(4)]

    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        whole = graph.call_function(new_rows, (x, count + 1, 3))
        whole = graph.call_function(target, (whole, x, 1, *([2] if target is not reduce_rows_ else []), axis))
        rows = graph.call_function(c10d.wait_tensor.default, (whole,))
        part = graph.call_function(aten.narrow.default, (rows, 0, 1, count))
        return [part, graph.call_function(plain, (x, *arguments, axis))]

    written, expected = emulate(program_of(build), NAMES, SIZES, [parts])
    assert all(torch.equal(a, b) for a, b in zip(written, expected, strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("several", [False, True])
def test_what_is_reduced_in_place_holds_nothing_afterwards(several: bool) -> None:
    copying = c10d.all_reduce_coalesced.default if several else c10d.all_reduce.default
    parts = [torch.full((2, 2), float(r)) for r in range(4)]
    results = {}
    for target in (copying, IN_PLACE[copying]):

        def build(graph: fx.Graph, x: fx.Node, target: Any = target) -> list[fx.Node]:
            made = graph.call_function(target, ([x] if several else x, "sum", "a"))
            wait = graph.call_function(operator.getitem, (made, 0)) if several else made
            return [graph.call_function(c10d.wait_tensor.default, (wait,)), x]

        results[target] = emulate(program_of(build), NAMES, SIZES, [[p.clone() for p in parts]])
    (copied, kept), (sums, spoiled) = results.values()
    assert all(torch.equal(a, b) for a, b in zip(copied, sums, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(kept, parts, strict=True))
    assert all(v.isnan().all() for v in spoiled)


def test_collectives_keep_the_dtype() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [graph.call_function(c10d.all_reduce.default, (x, "sum", "a"))]

    (found,) = emulate(program_of(build), ("a",), (2,), [[torch.ones(2, dtype=torch.bfloat16)] * 2])
    assert [f.dtype for f in found if f is not None] == [torch.bfloat16] * 2


def test_axis_index_is_the_rank_along_the_axis() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        index = [graph.call_function(axis_index, (n,)) for n in NAMES]
        return [graph.call_function(aten.mul.Tensor, (x, i)) for i in index]

    first, second = emulate(program_of(build), NAMES, (2, 3), [[torch.ones(())] * 6])
    assert [int(v) for v in first if v is not None] == [0, 0, 0, 1, 1, 1]
    assert [int(v) for v in second if v is not None] == [0, 1, 2, 0, 1, 2]


def test_run_whole_and_missing_outputs() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node | None]:
        return [graph.call_function(aten.neg.default, (x,)), None, x]

    found = run_whole(program_of(build), [torch.ones(2)])
    assert found[1] is None
    assert found[0] is not None and found[0].tolist() == [-1, -1]
    assert found[2] is not None and found[2].tolist() == [1, 1]


def test_failure_names_node_and_rank() -> None:
    def build(graph: fx.Graph, x: fx.Node, y: fx.Node) -> list[fx.Node]:
        return [graph.call_function(aten.mm.default, (x, y), name="product")]

    good, bad = torch.ones(2, 2), torch.ones(3, 2)
    with pytest.raises(RuntimeError, match=r"node product \(aten\.mm\.default\) failed on rank 1"):
        emulate(program_of(build, 2), ("a",), (2,), [[good, good], [good, bad]])


def test_collective_on_another_axis_is_an_error() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        return [graph.call_function(c10d.all_reduce.default, (x, "sum", "elsewhere"))]

    with pytest.raises(KeyError, match="elsewhere"):
        emulate(program_of(build), ("a",), (2,), [[torch.ones(2)] * 2])


def test_census_adds_up_members_and_bytes() -> None:
    def build(graph: fx.Graph, x: fx.Node) -> list[fx.Node]:
        one = graph.call_function(c10d.all_reduce.default, (x, "sum", "a"))
        set_info(one, NodeInfo(collective=Collective("all_reduce", "a", 64.0, 3, True)))
        two = graph.call_function(c10d.all_reduce.default, (one, "sum", "a"))
        set_info(two, NodeInfo(collective=Collective("all_reduce", "a", 16.0)))
        return [two]

    program = program_of(build)
    set_graph_info(program.graph, GraphInfo(axes={"a": 4}))
    assert census(program) == {"a": {"all_reduce": (4, 80.0 * 2 * 3 / 4)}}  # a ring sends 2 (n - 1) / n of the bytes


def test_a_sum_of_sums_differs() -> None:
    """As on devices: what depends on a sum runs once, after the last microbatch, and the other terms are lost."""
    program, _, values = models.captured("mlp")
    plan = solve(program, {"a": 2}, Cluster.preset("cpu"), search=Search(recipe="ddp", pins={"microbatches": 2}))
    local = rewrite(program, plan)
    assert compare(program, local, plan, values, torch.float64).max_error < 1e-12
    # Numbers stay the same where all of the graph runs in each microbatch.
    graph = copy_graph(local.graph)
    first, *_, later = (n for n in graph.graph.nodes if n.target is accumulate)
    with graph.graph.inserting_before(later):
        nothing = graph.graph.call_function(aten.mul.Tensor, (graph.graph.call_function(aten.sum.default, (first,)), 0))
        later.update_arg(0, graph.graph.call_function(aten.add.Tensor, (later.args[0], nothing)))
    report = compare(program, replace(local, graph=graph), plan, values, torch.float64)
    assert report.worst in report.gradients
    assert report.max_error > 0.1
