"""Where regions begin and end, and what stays a node."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from autopar.ir.node_info import NodeInfo, set_info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.ops.collectives import c10d
from autopar.ir.ops.host import to_host
from autopar.ir.ops.random import draw, seeded
from autopar.runtime.compiled.regions import SMALLEST_BLOCK, Region, regions_of

aten = torch.ops.aten
VALUE = torch.empty(4, 4)


class Build:
    """Nodes of 4 x 4 tensors."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = VALUE

    def call(self, target: Any, *args: Any, module: str = "", value: Any = VALUE, name: str = "") -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name or None)
        node.meta["val"] = value
        set_info(node, NodeInfo(module_path=module))
        return node

    def chain(self, node: fx.Node, count: int = 2, module: str = "") -> fx.Node:
        for _ in range(count):
            node = self.call(aten.sin.default, node, module=module)
        return node

    def parts(self, outputs: Sequence[fx.Node], blocks: Sequence[str] = ()) -> list[str]:
        """``sin sin`` for a region, the operator's name in brackets for a node that stays."""
        self.graph.output(tuple(outputs))
        found = regions_of(self.graph, blocks)
        return [
            " ".join(_name(n) for n in part.nodes) if isinstance(part, Region) else f"[{_name(part)}]" for part in found
        ]


def _name(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target)).split(".")[0]


def reduced(b: Build, node: fx.Node) -> fx.Node:
    started = b.call(c10d.all_reduce.default, node, "sum", "0")
    return b.call(c10d.wait_tensor.default, started)


def test_collectives_and_waits_are_between_regions() -> None:
    b = Build()
    end = b.chain(reduced(b, b.chain(b.x)))
    assert b.parts([end]) == ["sin sin", "[all_reduce]", "[wait_tensor]", "sin sin"]


def test_host_copies_are_between_regions() -> None:
    b = Build()
    first = b.chain(b.x)
    sent = b.call(to_host, first)
    assert b.parts([sent, b.chain(first)]) == ["sin sin", "[to_host]", "sin sin"]


def test_draws_run_before_the_region_that_takes_them_in_their_order() -> None:
    b = Build()
    first = b.chain(b.x, 1)
    one = b.call(draw, "uniform", [0.0, 1.0], [4, 4], [0, 1])
    middle = b.call(aten.mul.Tensor, first, one)
    two = b.call(seeded, draw, 1, 0, "uniform", [0.0, 1.0], [4, 4], [0, 1])
    end = b.call(aten.mul.Tensor, middle, two)
    assert b.parts([end]) == ["[draw]", "[seeded]", "sin mul mul"]


def test_a_draw_of_what_the_region_makes_ends_it() -> None:
    b = Build()
    drawn = b.call(aten.bernoulli.default, b.chain(b.x))
    assert b.parts([b.chain(drawn)]) == ["sin sin", "[bernoulli]", "sin sin"]


def test_sums_over_microbatches_wait_for_the_end_of_the_region() -> None:
    b = Build()
    first = b.chain(b.x)
    summed = b.call(accumulate, first)
    end = b.chain(first)
    again = b.call(accumulate, end)
    assert b.parts([summed, again]) == ["sin sin sin sin", "[accumulate]", "[accumulate]"]


def test_blocks_are_regions_of_their_own() -> None:
    b = Build()
    node = b.x
    for i in range(2):
        node = b.chain(node, SMALLEST_BLOCK, f"layers.{i}.mlp")
        node = b.chain(node, 1)  # of no module, such as a sum of gradients: in the block before it
    end = b.chain(node, 2, "head")
    blocks = ("layers.0", "layers.1")
    assert b.parts([end], blocks) == [" ".join(["sin"] * (SMALLEST_BLOCK + 1))] * 2 + ["sin sin"]


def test_small_blocks_are_compiled_together() -> None:
    b = Build()
    node = b.x
    for i in range(4):
        node = b.chain(node, 1, f"layers.{i}")
    assert b.parts([node], tuple(f"layers.{i}" for i in range(4))) == ["sin sin sin sin"]


def test_one_operator_is_not_worth_a_compilation() -> None:
    b = Build()
    end = b.chain(reduced(b, b.x), 1)
    assert b.parts([end]) == ["[all_reduce]", "[wait_tensor]", "[sin]"]


def test_results_are_taken_where_they_are_made() -> None:
    """Getitem nodes are in the region of what they take from, wherever they stand."""
    b = Build()
    both = b.call(aten.split.Tensor, b.chain(b.x), 2, value=(VALUE[:2], VALUE[2:]))
    waited = reduced(b, b.x)
    half = b.call(operator.getitem, both, 0, value=VALUE[:2])
    end = b.call(aten.add.Tensor, half, waited, value=VALUE)
    end = b.chain(end)
    parts = b.parts([end])
    assert parts == ["sin sin split getitem", "[all_reduce]", "[wait_tensor]", "add sin sin"]


def test_complex_numbers_and_other_devices_are_not_compiled() -> None:
    b = Build()
    turned = b.call(aten.view_as_complex.default, b.chain(b.x), value=torch.empty(4, 2, dtype=torch.complex64))
    moved = b.call(aten._to_copy.default, b.x, value=VALUE.to("meta"))
    assert b.parts([turned, moved]) == ["sin sin", "[view_as_complex]", "[_to_copy]"]


def test_views_are_taken_of_what_a_region_returns() -> None:
    b = Build()
    made = b.chain(b.x)
    flat = b.call(aten.reshape.default, made, [16], value=VALUE.reshape(16))
    copied = b.call(aten.reshape.default, b.call(aten.permute.default, made, [1, 0], value=VALUE.t()), [16],
                    value=VALUE.t().reshape(16))  # fmt: skip
    b.graph.output((flat, copied))
    (region,) = regions_of(b.graph, ())
    assert isinstance(region, Region)
    assert region.views == [flat]
    assert region.outputs == [made, copied]
