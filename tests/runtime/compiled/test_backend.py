"""What `compile=` takes, and what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.parallelize import parallelize
from autopar.runtime.compiled.backend import backend_of, by_inductor

CPU = torch.device("cpu")


def doubled() -> fx.GraphModule:
    from autopar._torch_compat import BoxedCodeGen

    graph = fx.Graph()
    graph.output((graph.call_function(torch.ops.aten.mul.Tensor, (graph.placeholder("x"), 2)),))
    graph.set_codegen(BoxedCodeGen())
    return fx.GraphModule({}, graph)


def test_nothing_is_compiled_by_default() -> None:
    assert backend_of(None, CPU) is None
    assert backend_of(False, CPU) is None


def test_inductor_has_two_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("autopar.runtime.compiled.backend.inductor_lacks", lambda device: "")
    assert backend_of(True, CPU) is backend_of("inductor", CPU) is by_inductor


def test_without_a_compiler_parallelize_says_what_to_install() -> None:
    from torch._inductor import config

    model = nn.Linear(2, 1)
    with (
        config.patch({"cpp.cxx": ("/nowhere/c++",)}),
        pytest.raises(ValueError, match=r"compile=True needs a C\+\+ compiler.*: install it.*leave"),
    ):
        parallelize(model, None, compile=True)
    parallelize(model, None)  # which is as it was


@pytest.mark.parametrize("wrong", ["cudagraphs", 3])
def test_other_names_are_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match='expected True or "inductor", False, or a function'):
        parallelize(nn.Linear(2, 1), None, compile=wrong)


def test_a_backend_gets_tensors_one_by_one_and_a_graph_of_its_own() -> None:
    given: list[Any] = []

    def backend(graph: fx.GraphModule, values: list[Tensor]) -> Any:
        given.append((graph, values))
        return graph.forward

    graph, x = doubled(), torch.ones(3)
    compile_region = backend_of(backend, CPU)
    assert compile_region is not None
    run = compile_region(graph, [x])
    values = [x]
    assert torch.equal(run(values)[0], 2 * x)
    assert values == []  # so that a region's inputs are freed as it uses them
    assert given[0][0] is not graph
    assert torch.equal(given[0][0](x)[0], 2 * x)
