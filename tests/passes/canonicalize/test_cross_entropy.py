"""fuse_cross_entropy: which losses keep no softmax, what stays as it is, and how little memory traffic there is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.ir.graph import tensor_arguments, values_of
from autopar.ir.node_info import info
from autopar.ir.ops.cross_entropy import cross_entropy, cross_entropy_backward
from autopar.ir.program import Program
from autopar.sharding.lowered.cost import emitted_work
from autopar.verify.verify import compare, global_values
from tests.plans import follow_plan

aten = torch.ops.aten

ROWS, CLASSES = 64, 512


class Head(nn.Module):
    """Logits in bfloat16, and a loss of them."""

    def __init__(self, loss: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.loss = nn.Linear(8, CLASSES, bias=False, dtype=dtype), loss

    def forward(self, x: Tensor, target: Tensor) -> Any:
        return self.loss(self.head(x), target)


def of_language(logits: Tensor, target: Tensor) -> Tensor:
    """As models of language compute it: in float32, some labels ignored."""
    return F.cross_entropy(logits.float().view(-1, CLASSES), target.view(-1), ignore_index=-100)


def batch_of(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(0)
    target = torch.randint(CLASSES, (4, ROWS // 4), generator=g)
    target[0, :5] = -100
    return {"x": torch.randn(4, ROWS // 4, 8, generator=g).to(dtype), "target": target}


def captured(loss: Callable[[Tensor, Tensor], Any], dtype: torch.dtype = torch.bfloat16) -> Program:
    return program_of(Head(loss, dtype), batch_of(dtype))


def targets(program: Program) -> set[Any]:
    return {n.target for n in program.graph.graph.nodes if n.op == "call_function"}


def smoothed(logits: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, CLASSES), target.view(-1), label_smoothing=0.1)


def returned(logits: Tensor, target: Tensor) -> dict[str, Tensor]:
    """The softmax is a result, too."""
    found = F.log_softmax(logits.view(-1, CLASSES), -1)
    return {"loss": F.nll_loss(found, target.view(-1)), "softmax": found}


def by_position(logits: Tensor, target: Tensor) -> Tensor:
    """Along another dim than the last."""
    return F.cross_entropy(logits.transpose(1, 2), target)


@pytest.mark.parametrize("loss", [smoothed, returned, by_position])
def test_who_reads_more_of_the_softmax_keeps_it(loss: Callable[[Tensor, Tensor], Any]) -> None:
    made = targets(captured(loss))
    assert aten._log_softmax.default in made
    assert cross_entropy not in made


def test_no_softmax_is_made() -> None:
    program = captured(of_language)
    made = targets(program)
    assert {cross_entropy, cross_entropy_backward} <= made
    assert not made & {aten._log_softmax.default, aten.gather.default, aten.scatter.value, aten.exp.default}
    wide = [n for n in program.graph.graph.nodes for v in values_of(n) if v is not None and v.numel() >= ROWS * CLASSES]
    # The logits are widened nowhere, and their gradient is narrowed by what computes it.
    assert {v.dtype for n in wide for v in values_of(n)} == {torch.bfloat16}


@pytest.mark.parametrize("axes", [{"a": 1}, {"a": 4}, {"a": 2, "b": 2}])
def test_memory_traffic_is_at_most_a_fifth_above_the_least(axes: dict[str, int]) -> None:
    """The least is to read the logits forward, to read them backward, and to write their gradient.

    Counted are all kernels but the two products' and views: between the logits and their gradient there are no others.
    """
    program = captured(of_language)
    vocabulary = " ".join(["S(0)"] * len(axes))
    plan = follow_plan(program, axes, parameters={"head.weight": vocabulary})
    local = rewrite(program, plan)
    ours = [n for n in local.graph.graph.nodes if n.target in (cross_entropy, cross_entropy_backward)]
    assert len(ours) == 2
    moved = 0.0
    for node in local.graph.graph.nodes:
        if node.op == "call_function" and node.target is not aten.mm.default:
            operator = info(node).operator
            if node in ours or operator is None:
                work = emitted_work(node)
                moved += float(work.moved[0]) if work is not None else 0.0
            elif not operator.rule.view:
                moved += sum(v.nbytes for a in (node, *tensor_arguments(node)) for v in values_of(a) if v is not None)
    parts = torch.Size(axes.values()).numel()
    least = 3 * ROWS * CLASSES // parts * 2
    # Numbers a row, of which there are few hundred bytes, count most where classes are few.
    rows = 8 * 64 * ROWS
    assert least <= moved <= 1.2 * least + (rows if parts > 1 else rows // 2)


@pytest.mark.parametrize("axes", [{"a": 4}, {"a": 2, "b": 2}])
def test_classes_that_are_split(axes: dict[str, int]) -> None:
    model, batch = Head(of_language, torch.float64), batch_of(torch.float64)
    program = program_of(model, batch)
    plan = follow_plan(program, axes, parameters={"head.weight": " ".join(["S(0)"] * len(axes))})
    local = rewrite(program, plan)
    report = compare(program, local, plan, global_values(program, model, batch), torch.float64)
    assert report.max_error <= 1e-12, f"{report.worst}: {report.max_error}"
    kinds = [info(n).collective for n in local.graph.graph.nodes if info(n).collective]
    # One number a row for the maximum and two for the sums, on each axis; and the gradient of the inputs is not asked.
    assert [c.bytes for c in kinds if c is not None] == [4.0 * ROWS] * len(axes) + [8.0 * ROWS] * len(axes)


def test_a_softmax_of_16_bits_is_rounded_to_these() -> None:
    program = captured(lambda logits, target: F.cross_entropy(logits.view(-1, CLASSES), target.view(-1)))
    assert cross_entropy in targets(program)
    (loss,) = program.output_values[: program.forward_outputs]
    assert loss is not None
    assert loss.meta["val"].dtype == torch.bfloat16
