"""Runs of operators in torch's interpreter: the same values, memory and errors as one by one in Python."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.profiler import ProfilerActivity, profile

from autopar._torch_compat import BoxedCodeGen, interpreting
from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.parallelize import parallelize
from autopar.passes import DETERMINISTIC_PASSES
from autopar.runtime.compiled import interpreter
from autopar.runtime.compiled.interpreter import Interpreter
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.float64 import as_dtype
from autopar.verify.verify import compare
from tests import models
from tests.runtime.compiled.test_compiler import steps

aten = torch.ops.aten


def python(parallel: Any) -> Any:
    """A parallel module whose graphs run node by node in Python."""
    session = parallel._autopar
    session.options = replace(session.options, compiler=None)
    return parallel


@pytest.mark.parametrize("name", ["cnn", *(pytest.param(n, marks=pytest.mark.deep) for n in ("gpt2", "mlp", "vit"))])
def test_a_step_is_bit_for_bit_that_of_python(name: str) -> None:
    model, batch = getattr(models, name)()
    plain, run = python(parallelize(copy.deepcopy(model), None)), parallelize(model, None)
    for a, b in zip(steps(run, batch), steps(plain, batch), strict=True):
        assert torch.equal(a, b)
    assert isinstance(made := run._autopar.options.compiler, Interpreter) and made.regions


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.deep)])
def test_on_every_rank_of_an_emulated_mesh(seed: int) -> None:
    model, batch = models.gpt2()
    program = program_of(model, batch)
    _, _, values = models.captured("gpt2")
    plan = random_plan(program, analyze(program), {"a": 2, "b": 2}, Cluster.preset("cpu"), seed, recompute=True)
    local = as_dtype(rewrite(program, replace(plan, fingerprint=program.fingerprint), passes=DETERMINISTIC_PASSES))
    runs = Interpreter()
    outer = runs.outer(local.graph, local.blocks)
    assert len(runs.regions) > 5
    with interpreting():
        report = compare(program, replace(local, graph=outer), plan, values, torch.float64)
    assert report.max_error <= 1e-10


def chain(a: Tensor, b: Tensor) -> tuple[Tensor, ...]:
    """Each value is used by the next alone, and the inputs by the first ones."""
    return ((a * 2 + b).sin().exp().cos().sum(),)


def traced(function: Callable[..., Any], *inputs: Tensor, boxed: bool = False) -> fx.GraphModule:
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    if boxed:
        graph.graph.set_codegen(BoxedCodeGen())
        graph.recompile()
    return graph


def peak_of(run: Callable[[], Any]) -> int:
    """Most bytes that are allocated at once, less than at the start."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    live = peak = 0
    for event in found.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


@pytest.mark.parametrize("boxed", [False, True])
def test_memory_is_freed_after_the_last_use(boxed: bool) -> None:
    size = 2**18
    graph = traced(chain, torch.ones(size), torch.ones(size), boxed=boxed)
    run = Interpreter().executable(graph, ())
    peaks = []
    for function in (graph, run):

        def call(function: Callable[..., Any] = function) -> None:
            values = [torch.ones(size), torch.ones(size)]
            function(values) if boxed else function(*values)

        call()
        peaks.append(peak_of(call) / (4 * size))
    assert peaks[0] == peaks[1] == pytest.approx(3 if boxed else 4, abs=0.1)


def test_small_inputs_are_passed_one_by_one() -> None:
    graph = traced(chain, torch.ones(4), torch.ones(4), boxed=True)
    runs = Interpreter()
    assert [n.name for n in runs.outer(graph, ()).graph.nodes if "listed" in n.name] == []
    assert torch.equal(runs.executable(graph, ())([torch.ones(4), torch.ones(4)])[0], chain(*torch.ones(2, 4))[0])


def test_views_and_writes_are_those_of_python() -> None:
    graph = traced(lambda x: (y := x.sin().exp(), y.view(16), x.t(), x[0]), torch.randn(4, 4))
    x = torch.randn(4, 4)
    y, flat, turned, first = Interpreter().executable(graph, ())(x)
    before = flat._version
    y.add_(1.0)
    assert flat._version > before
    assert torch.equal(flat, y.view(16))
    assert turned._is_view() and turned._base is x and first.data_ptr() == x.data_ptr()


class Failing(nn.Module):
    """Fails by the values of its batch, as torch does."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.function, self.weight = function, nn.Parameter(torch.eye(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.weight, x).sin().exp().cos().sum()


@pytest.mark.parametrize(
    ("function", "good", "bad"),
    [
        (lambda w, x: torch.nn.functional.embedding(x, w), torch.tensor([1]), torch.tensor([9])),
        (lambda w, x: w[x] * 2, torch.tensor([1]), torch.tensor([9])),
        (lambda w, x: w.gather(0, x), torch.tensor([[1]]), torch.tensor([[9]])),
        (lambda w, x: torch.linalg.inv(w * x), torch.tensor([1.0]), torch.tensor([0.0])),
        (lambda w, x: torch.linalg.cholesky(w * x), torch.tensor([1.0]), torch.tensor([-1.0])),
        (lambda w, x: torch.nn.functional.cross_entropy(w, x), torch.tensor([0] * 4), torch.tensor([9] * 4)),
    ],
)
def test_errors_are_those_of_eager(function: Callable[[Tensor, Tensor], Tensor], good: Tensor, bad: Tensor) -> None:
    model = Failing(function)
    run = parallelize(copy.deepcopy(model), None)
    run(good).backward()
    with pytest.raises(Exception) as expected:
        model(bad)
    with pytest.raises(type(expected.value)) as found:
        run(bad)
    assert type(found.value) is type(expected.value)


def test_out_of_memory_is_the_error_that_torch_has_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> Any:
        raise RuntimeError(
            "The following operation failed\n...\nRuntimeError: CUDA out of memory. Tried to allocate 2 GiB\n"
        )

    monkeypatch.setattr(interpreter, "interpreted", lambda *_: full)
    with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\. Tried to allocate 2 GiB$"):
        Interpreter().executable(traced(chain, torch.ones(4), torch.ones(4)), ())(torch.ones(4), torch.ones(4))


def test_what_the_interpreter_does_not_take_runs_in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: Any) -> Any:
        raise TypeError("for aten.mul.Tensor the interpreter takes another")

    monkeypatch.setattr(interpreter, "interpreted", refused)
    for boxed in (False, True):
        size = 2**16
        graph = traced(chain, torch.ones(size), torch.ones(size), boxed=boxed)
        run, values = Interpreter().executable(graph, ()), [torch.ones(size), torch.ones(size)]
        expected = chain(*values)[0]
        assert torch.equal((run(values) if boxed else run(*values))[0], expected)


def slope(x: Tensor) -> Tensor:
    """Needs autograd when it runs."""
    with torch.enable_grad():
        y = x.detach().requires_grad_()
        return torch.autograd.grad(y.sin().sum(), y)[0]


LIBRARY: Any = torch.library.Library("autopar_tests", "FRAGMENT")  # type: ignore[no-untyped-call]
LIBRARY.define("slope(Tensor x) -> Tensor")
LIBRARY.impl("slope", slope, "CPU")
torch.library.register_fake("autopar_tests::slope", torch.empty_like, lib=LIBRARY)


def test_operators_of_the_user_may_differentiate() -> None:
    class Sloping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return ((torch.ops.autopar_tests.slope(x) * self.weight + 1).exp() * 2).sum()

    model, x = Sloping(), torch.randn(4)
    run = parallelize(copy.deepcopy(model), None)
    for _ in range(3):  # torch's interpreter would profile two calls, and compile the third
        assert torch.equal(run(x), model(x))


def test_results_that_none_asked_for_may_be_none() -> None:
    """As the gradients of a norm's weights, where these are frozen."""

    def function(grad: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, weight: Tensor) -> tuple[Any, ...]:
        of_x, of_weight, of_bias = aten.native_layer_norm_backward(
            grad * 2, x.sin(), [4], mean.cos(), rstd.cos(), weight, None, [True, True, False]
        )
        return of_x.sin().exp().cos(), of_weight, of_bias

    values = [torch.randn(3, 4), torch.randn(3, 4), torch.randn(3, 1), torch.randn(3, 1), torch.randn(4)]
    graph = traced(function, *values)
    for found, expected in zip(Interpreter().executable(graph, ())(*values), function(*values), strict=True):
        assert (found is None) == (expected is None) and (found is None or torch.equal(found, expected))


def test_runs_live_as_long_as_their_graphs() -> None:
    """Graphs of shapes that come no more are dropped; what ran them must not stay."""
    runs = Interpreter()
    graph = traced(chain, torch.ones(4), torch.ones(4))
    runs.executable(graph, ())(torch.ones(4), torch.ones(4))
    assert len(runs.regions) == 1
    del graph
    # The graph, after it what ran in its place, which is in a cycle of its own, and then that one's class.
    for _ in range(3):
        gc.collect()
    assert len(runs.regions) == 0
