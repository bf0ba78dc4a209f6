"""Compiled steps compute what they compute as they are; regions that are alike are compiled once."""

from __future__ import annotations

import copy
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, fx, nn

from autopar._torch_compat import inductor_lacks
from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.parallelize import parallelize
from autopar.passes import DETERMINISTIC_PASSES
from autopar.runtime.compiled.backend import backend_of
from autopar.runtime.compiled.compiler import VARIANTS, CompiledRegion, Compiler
from autopar.search.options import Search
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.float64 import as_dtype
from autopar.verify.verify import compare
from tests import models
from tests.pipeline.models import unet

needs_inductor = pytest.mark.skipif(bool(inductor_lacks(torch.device("cpu"))), reason="no C++ compiler")


class Recorder:
    """A backend that runs regions as they are, and notes them."""

    def __init__(self) -> None:
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph: fx.GraphModule, values: list[Tensor]) -> Callable[..., Sequence[Tensor]]:
        self.graphs.append(graph)
        return graph.forward


def aot_eager(graph: fx.GraphModule, values: list[Tensor]) -> Any:
    """Torch's own backend that traces, as compilers do, and runs the result."""
    from torch._dynamo.backends.debugging import aot_eager as backend

    return backend(graph, values)


class Dropping(nn.Module):
    """Blocks with dropout, a batch norm and a buffer that the model writes."""

    def __init__(self, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.norm = nn.BatchNorm1d(16)
        self.register_buffer("calls", torch.ones(16))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = F.dropout(torch.tanh(layer(x)) * x.sigmoid(), 0.3) + x
        before = self.calls * torch.ones_like(self.calls)  # which inductor takes for the buffer itself
        self.calls.add_(x.detach().mean(0))
        return {"loss": (self.norm(x) * before + 0.5).square().mean(), "out": x}


def dropping() -> tuple[nn.Module, dict[str, Tensor]]:
    return Dropping().double(), {"x": torch.randn(8, 16, generator=torch.Generator().manual_seed(1)).double()}


def llama(layers: int = 2) -> tuple[nn.Module, dict[str, Tensor]]:
    return models.llama(layers=layers)


MODELS: dict[str, Callable[[], Any]] = {
    "dropping": dropping, "llama": llama, "gpt2": models.gpt2, "vit": models.vit, "unet": unet, "cnn": models.cnn,
}  # fmt: skip


def steps(model: Any, batch: dict[str, Tensor], count: int = 2) -> list[Tensor]:
    """Losses, gradients, buffers and parameters of some steps of AdamW."""
    torch.manual_seed(5)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for _ in range(count):
        out = model(**batch)
        loss = out if isinstance(out, Tensor) else out["loss"]
        loss.backward()
        found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        optimizer.step()
        optimizer.zero_grad()
        found += [t.detach().clone() for t in model.state_dict().values()]
    return found


CASES = [("dropping", 1), ("unet", 1), ("cnn", 2)]
MORE = [("gpt2", 2), ("gpt2", 1), ("llama", 1), ("llama", 2), ("vit", 1), ("vit", 2), ("unet", 2), ("cnn", 1)]


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "microbatches"), [*CASES, *(pytest.param(*case, marks=pytest.mark.deep) for case in MORE)]
)
def test_a_step_in_regions_is_the_step(name: str, microbatches: int) -> None:
    recorder, search = Recorder(), Search(pins={"microbatches": microbatches})
    plain, compiled = (
        parallelize(MODELS[name]()[0], None, search=search, compile=c) for c in (None, recorder)
    )  # fmt: skip
    batch = MODELS[name]()[1]
    expected, found = steps(plain, batch), steps(compiled, batch)
    assert recorder.graphs
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", ["dropping", pytest.param("gpt2", marks=pytest.mark.deep)])
def test_backends_of_torch_fit(name: str) -> None:
    plain, compiled = (parallelize(MODELS[name]()[0], None, compile=c) for c in (None, aot_eager))
    batch = MODELS[name]()[1]
    for a, b in zip(steps(compiled, batch), steps(plain, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12 if name == "dropping" else 1e-6)


@pytest.mark.slow
@needs_inductor
def test_inductor_computes_the_same() -> None:
    plain, compiled = (parallelize(Dropping(1).double(), None, compile=c) for c in (None, True))
    batch = dropping()[1]
    for a, b in zip(steps(compiled, batch), steps(plain, batch), strict=True):
        # Sums are in another order, and AdamW's first step magnifies that where a gradient is nearly zero.
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10)
    # Another kind of strides of an input: compiled code reads memory by them.
    torch.manual_seed(5)
    found = compiled(batch["x"].t().contiguous().t())
    torch.manual_seed(5)
    torch.testing.assert_close(found["loss"], plain(batch["x"])["loss"], rtol=0, atol=1e-10)


@needs_inductor
@pytest.mark.deep
@pytest.mark.parametrize("name", ["llama", "gpt2", "vit", "unet", "cnn"])
def test_inductor_computes_the_same_of_every_model(name: str) -> None:
    plain, compiled = (parallelize(MODELS[name]()[0].double(), None, compile=c) for c in (None, True))
    batch = {k: v.double() if v.is_floating_point() else v for k, v in MODELS[name]()[1].items()}
    for a, b in zip(steps(compiled, batch), steps(plain, batch), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-10 if a.dtype == torch.float64 and name != "llama" else 1e-5)


@pytest.mark.deep
@pytest.mark.parametrize(("name", "depths"), [("llama", (2, 4)), ("gpt2", (2, 4, 8))])
def test_blocks_that_are_alike_are_compiled_once(name: str, depths: tuple[int, ...]) -> None:
    counts = {}
    for layers in depths:
        recorder = Recorder()
        model, batch = getattr(models, name)(layers=layers)
        steps(parallelize(model, None, compile=recorder), batch)
        counts[layers] = len(recorder.graphs)
    assert len(set(counts.values())) == 1
    assert counts[2] > 0


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("mlp", 0),
        ("gpt2", 1),
        *(pytest.param(n, s, marks=pytest.mark.deep) for n in ("llama", "vit") for s in range(2)),
    ],
)
def test_on_every_rank_of_an_emulated_mesh(name: str, seed: int) -> None:
    model, batch = getattr(models, name)()
    program = program_of(model, batch)
    _, _, values = models.captured(name)
    axes = {"a": 2, "b": 2}
    plan = random_plan(
        program, analyze(program), axes, Cluster.preset("cpu"), seed, recompute=True, offload=bool(seed % 2)
    )
    local = as_dtype(rewrite(program, replace(plan, fingerprint=program.fingerprint), passes=DETERMINISTIC_PASSES))
    recorder = Recorder()
    backend = backend_of(recorder, torch.device("cpu"))
    assert backend is not None
    outer = Compiler(backend).executable(local.graph, local.blocks)
    assert collectives(outer.graph) == collectives(local.graph.graph) != []
    report = compare(program, replace(local, graph=outer), plan, values, torch.float64)
    assert report.max_error <= 1e-10
    assert recorder.graphs


def collectives(graph: fx.Graph) -> list[str]:
    return [n.name for n in graph.nodes if getattr(n.target, "namespace", "") == "_c10d_functional"]


def test_a_region_frees_its_inputs() -> None:
    """What a region uses last is gone when it has read it, not when the region is done."""
    alive: list[int] = []

    def backend(graph: fx.GraphModule, values: list[Tensor]) -> Any:
        def run(values: list[Tensor]) -> Any:
            weak = [torch._C._WeakTensorRef(v) for v in values]
            x = values[0]
            values.clear()
            alive.append(sum(not w.expired() for w in weak))
            return (x.cos(),)

        return run

    compiler = Compiler(backend)
    made = fx.Graph()
    x = made.placeholder("x")
    value = torch.empty(3)
    node = x
    x.meta["val"] = value
    for target in (torch.ops.aten.bernoulli.default, torch.ops.aten.exp.default, torch.ops.aten.sin.default):
        node = made.call_function(target, (node,))
        node.meta["val"] = value
    made.output((node,))
    outer = compiler.executable(fx.GraphModule({}, made), ())
    outer(torch.ones(3))
    assert alive == [1]


def values_of(build: Callable[[fx.Graph, fx.Node], Sequence[fx.Node]], x: Tensor) -> fx.GraphModule:
    """A graph of one input with example values."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = x
    graph.output(tuple(build(graph, node)))
    for n in graph.nodes:
        if n.op == "call_function":
            n.meta["val"] = n.target(*fx.map_arg(n.args, lambda a: a.meta["val"]))
    return fx.GraphModule({}, graph)


@pytest.mark.slow
def test_what_shares_memory_notices_writes() -> None:
    """Outputs of a region that are views of one another have one version, so that autograd finds a write."""
    aten = torch.ops.aten

    def build(graph: fx.Graph, x: fx.Node) -> Sequence[fx.Node]:
        made = graph.call_function(aten.sin.default, (graph.call_function(aten.exp.default, (x,)),))
        flat = graph.call_function(aten.reshape.default, (made, [16]))
        return made, flat, graph.call_function(aten.permute.default, (x, [1, 0]))

    module = values_of(build, torch.randn(4, 4))
    backend = backend_of("inductor" if not inductor_lacks(torch.device("cpu")) else aot_eager, torch.device("cpu"))
    assert backend is not None
    x = torch.randn(4, 4)
    made, flat, turned = Compiler(backend).executable(module, ())(x)
    before = flat._version
    made.add_(1.0)
    assert flat._version > before
    assert torch.equal(flat, made.reshape(16))
    assert turned._is_view() and turned._base is x


def test_what_a_compiler_returns_is_memory_of_its_own() -> None:
    """In place of a product with ones it returns an input, and one tensor in place of two that are equal."""

    def dropping(graph: fx.GraphModule, values: list[Tensor]) -> Any:
        return lambda x: (x, made := x.exp(), made, x.t())

    region = CompiledRegion(fx.GraphModule({}, fx.Graph()), Compiler(backend_of(dropping, torch.device("cpu"))))  # type: ignore[arg-type]
    for _ in range(2):
        x = torch.randn(2, 2)
        expected = [x.clone(), x.exp(), x.exp(), x.t().clone()]
        found = region([x])
        for i, value in enumerate(found):
            assert torch.equal(value, expected[i])
            value.add_(1)
        assert torch.equal(x, expected[0])


def test_strides_without_end_are_not_compiled(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    backend = backend_of(recorder, torch.device("cpu"))
    assert backend is not None
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(4, 4)
    for target in (torch.ops.aten.exp.default, torch.ops.aten.sin.default):
        node = graph.call_function(target, (node,))
        node.meta["val"] = torch.empty(4, 4)
    graph.output((node,))
    outer = Compiler(backend).executable(fx.GraphModule({}, graph), ())
    with caplog.at_level(logging.WARNING, "autopar"):
        for stride in range(4, 4 + VARIANTS + 3):
            x = torch.randn(200).as_strided((4, 4), (stride, 1))
            assert torch.equal(outer(x)[0], x.exp().sin())
    assert len(recorder.graphs) == VARIANTS
    assert "others are not compiled" in caplog.text


def test_a_copy_of_the_model_shares_what_is_compiled() -> None:
    recorder = Recorder()
    model, batch = dropping()
    compiled = parallelize(model, None, compile=recorder)
    steps(compiled, batch, 1)
    count = len(recorder.graphs)
    steps(copy.deepcopy(compiled), batch, 1)
    assert len(recorder.graphs) == count
    compiled.eval()
    with torch.no_grad():
        compiled(**batch)
    assert len(recorder.graphs) > count  # a mode of its own, without dropout


def test_random_generators_stay_as_they_are() -> None:
    def drawing(graph: fx.GraphModule, values: list[Tensor]) -> Any:
        torch.rand(3)
        return graph.forward

    model, batch = dropping()
    plain = parallelize(copy.deepcopy(model), None)
    assert torch.equal(steps(parallelize(model, None, compile=drawing), batch, 1)[0], steps(plain, batch, 1)[0])


def test_what_takes_long_says_so_on_one_rank(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    clock = itertools.count(step=1.5)  # a compilation takes as long
    monkeypatch.setattr("autopar.runtime.compiled.compiler.time.monotonic", lambda: next(clock))
    x = torch.zeros(4, 4)
    for speaks in (False, True):
        compiler = Compiler(backend_of(Recorder(), torch.device("cpu")), speaks)  # type: ignore[arg-type]
        with caplog.at_level(logging.WARNING, "autopar"):
            for _ in range(4):
                compiler.compile(fx.GraphModule({}, fx.Graph()), [x])
    assert [r.message for r in caplog.records] == [
        "compiling: 0 regions so far, 3 s", "compiling: 0 regions so far, 6 s"
    ]  # fmt: skip
