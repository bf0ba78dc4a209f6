"""Products in chunks, beside the collectives of their rows, on four ranks: steps of AdamW equal one device's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from autopar._torch_compat import inductor_lacks
from tests.distributed.launch import Ranks, mesh_of
from tests.distributed.models import residuals, slow_links
from tests.float8_layers import in_float8

pytestmark = pytest.mark.distributed


def steps(
    rank: int, recipe: str, pins: dict[str, Any], backend: Any = False, scaling: Any = None
) -> tuple[float, list[str]]:
    """The largest difference of losses, gradients and parameters, and which operators write rows."""
    from autopar import Float8, Precision, Search, parallelize
    from autopar.ir.ops.rows import WRITES_ROWS

    (model, batch), (plain, _) = residuals(), residuals()
    wide, options = torch.float64, dict[str, Any]()
    if scaling is not None:
        plain, options = in_float8(plain, scaling), {"precision": Precision(wide, wide, wide, Float8(scaling))}
    search = Search(recipe=recipe, pins=pins, inexact=("fp8",) if scaling else ())
    module: Any = parallelize(
        model, mesh_of(2, 2), batch, cluster=slow_links(), search=search, compile=backend, **options
    )
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.01, eps=1e-3) for m in (module, plain)]
    worst = 0.0
    for _ in range(2):
        losses = [m(**batch)["loss"] for m in (module, plain)]
        for loss in losses:
            loss.backward()
        worst = max(worst, abs(float(losses[0]) - float(losses[1])))
        expected = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        worst = max(worst, _difference(module.full_gradients(), expected))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    worst = max(worst, _difference(module.full_state_dict(), plain.state_dict()))
    graphs = [] if "stages" in pins else [module.forward_graph, module.backward_graph]
    return worst, sorted({n.target.name() for g in graphs for n in g.graph.nodes if n.target in WRITES_ROWS})


def aot_eager(graph: fx.GraphModule, values: list[torch.Tensor]) -> Any:
    """Torch's own backend that traces, as compilers do, and runs the result."""
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(graph, values)


def _difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() >= expected.keys()
    return max(float((found[n].detach() - v.detach()).abs().max()) for n, v in expected.items())


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("recipe", "kinds", "scaling"),
    [
        ("megatron-sequence", ("gather", "multiply", "scatter"), None),
        ("megatron-sequence", ("gather", "multiply_float8", "scatter"), "rowwise"),
        pytest.param("megatron", ("multiply", "reduce"), None, marks=pytest.mark.deep),
        pytest.param("megatron", ("multiply_float8", "reduce"), "tensorwise", marks=pytest.mark.deep),
    ],
)
def test_steps_equal_those_of_one_device(
    ranks: Ranks, recipe: str, kinds: tuple[str, ...], scaling: str | None
) -> None:
    for worst, written in ranks.run(steps, recipe, {}, False, scaling):
        assert worst < 1e-12
        assert {f"autopar::{kind}_rows_" for kind in kinds} <= set(written)


@pytest.mark.deep
@pytest.mark.parametrize("backend", [aot_eager, "inductor"])
def test_compiled(ranks: Ranks, backend: Any) -> None:
    if backend == "inductor" and inductor_lacks(torch.device("cpu")):
        pytest.skip(f"inductor lacks {inductor_lacks(torch.device('cpu'))}")
    for worst, written in ranks.run(steps, "megatron-sequence", {}, backend):
        assert worst < 1e-12
        assert "autopar::gather_rows_" in written


@pytest.mark.deep
@pytest.mark.parametrize("more", [{"microbatches": 2}, {"stages": 2, "microbatches": 4, "schedule": "zb-h1"}])
def test_microbatches_and_stages(ranks: Ranks, more: dict[str, Any]) -> None:
    assert max(worst for worst, _ in ranks.run(steps, "megatron-sequence", more)) < 1e-12
