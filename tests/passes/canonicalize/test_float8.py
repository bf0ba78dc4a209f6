"""float8_linear_layers: which products are rounded, and that the step is the one of an eager model with such layers."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Float8, Precision, Search
from autopar.compiler import program_of, program_to_plan, rewrite, solve
from autopar.errors import PlanError
from autopar.ir.graph import is_backward, values_of
from autopar.ir.node_info import info
from autopar.ir.ops import float8
from autopar.ir.program import Program
from autopar.verify.compare import compare
from autopar.verify.verify import global_values
from tests import models as zoo
from tests.crossed import seeds
from tests.distributed.models import slow_devices
from tests.float8_layers import in_float8, product

aten = torch.ops.aten
F64 = torch.float64
SCALINGS = ("tensorwise", "rowwise")


class Tied(nn.Module):
    """What linear layers meet: two of one value, sequences, a tied weight, attention, a weight of another kind."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(24, 16)
        self.queries, self.keys = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.words.weight
        self.gate = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, words: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        q, k = self.queries(x), self.keys(x)
        mixed = torch.softmax(q @ k.transpose(-1, -2), -1) @ x
        return nn.functional.cross_entropy(
            self.head(mixed * torch.tanh(self.gate @ self.gate)[0]).flatten(0, 1), target.flatten()
        )


WRITTEN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "einsum": lambda x, w: torch.einsum("bsi,oi->bso", x, w),
    "heads": lambda x, w: torch.einsum("bsi,hki->bshk", x, w.reshape(2, -1, w.shape[1])).flatten(2),
    "left": lambda x, w: (w @ x.flatten(0, 1).T).T.reshape(*x.shape[:-1], -1),
    "left of each": lambda x, w: (w @ x.transpose(1, 2)).transpose(1, 2),
    "batched": lambda x, w: torch.bmm(x, w.T.expand(len(x), -1, -1)),
    "frozen": lambda x, w: (x.transpose(0, 1) @ w.T).transpose(0, 1),
}
"""`x @ w.T` by other operators than a product of two matrices, or with the weight on the left."""


class Written(nn.Module):
    """A layer for each of these, and one in two parts, as attention's projections are; ``product`` instead of them."""

    def __init__(self, instead: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weights = nn.ParameterDict({n: nn.Parameter(torch.randn(8, 8) / 3) for n in [*WRITTEN, "parts"]})
        self.weights["frozen"].requires_grad_(False)
        self.instead = instead

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name, written in WRITTEN.items():
            x = torch.tanh((self.instead or written)(x, self.weights[name]))
        parts = self.weights["parts"].split([2, 6])
        return torch.cat([(self.instead or nn.functional.linear)(x, w) for w in parts], -1).square().mean()


def tied() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model, g = Tied(), torch.Generator().manual_seed(0)
    return model, {n: torch.randint(0, 24, (4, 8), generator=g) for n in ("words", "target")}


def large() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """With two blocks of 32 in the batch and inside."""
    return zoo.mlp(32, 64, batch=64)


def policy(scaling: str = "tensorwise", dtype: torch.dtype = F64, **options: Any) -> Precision:
    return Precision(dtype, dtype, dtype, Float8(scaling, **options))


def products(program: Program) -> list[Any]:
    return [n for n in program.graph.graph.nodes if n.target is float8.product]


def gradients(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Of the loss of a model, by parameter, and the loss."""
    loss = model(**batch)
    loss.backward()
    return {"loss": loss.detach(), **{n: p.grad for n, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("make", "scaling"),
    [
        pytest.param(large, "tensorwise", marks=pytest.mark.deep),
        (large, "rowwise"),
        (large, "mxfp8"),
        (tied, "tensorwise"),
        pytest.param(tied, "rowwise", marks=pytest.mark.deep),
    ],
)
def test_same_step_as_an_eager_model_with_such_layers(make: Any, scaling: str) -> None:
    """Loss and every gradient in float64, under random plans on an emulated mesh."""
    model, batch = make()
    model.double()
    batch = {k: v.double() if v.is_floating_point() else v for k, v in batch.items()}
    expected = gradients(in_float8(copy.deepcopy(model), scaling), batch)
    exact = gradients(copy.deepcopy(model), batch)
    program = program_of(model, batch, precision=policy(scaling))
    for seed in seeds(3):
        plan = solve(program, {"a": 2, "b": 2}, "cpu", search=Search(recipe="random", seed=seed), deterministic=True)
        report = compare(program, rewrite(program, plan), plan, global_values(program, model, batch), F64)
        assert report.loss is not None
        for name, value in {"loss": report.loss, **report.gradients}.items():
            # The bias of keys has none: a softmax does not see it.
            largest = float(expected[name].abs().max()) if name != "keys.bias" else 1e-3
            assert float((value - expected[name]).abs().max()) <= 1e-10 * largest, (name, seed)
            # Not by rounding nothing.
            assert float((exact[name] - expected[name]).abs().max()) > 1e-4 * largest or name == "keys.bias", name


@pytest.mark.parametrize("scaling", ["tensorwise", "delayed"])
def test_a_linear_layer_is_one_however_it_is_written(scaling: str) -> None:
    """All three products of each are rounded, of those in parts each part by itself."""
    batch = {"x": torch.randn(4, 6, 8, dtype=F64)}
    program = program_of(Written().double(), batch, precision=policy(scaling))
    # Forward, and gradients of value and weight: a frozen weight has none, nor has the batch.
    assert len(products(program)) == 3 * (len(WRITTEN) + 2) - 2
    assert not any(n.target in (aten.mm.default, aten.bmm.default) for n in program.graph.graph.nodes)
    if scaling == "delayed":
        return
    expected = gradients(Written(lambda x, w: product(x, w, scaling)).double(), batch)
    model = Written().double()
    plan = solve(program, {"a": 2, "b": 2}, "cpu", search=Search(recipe="random", seed=0), deterministic=True)
    report = compare(program, rewrite(program, plan), plan, global_values(program, model, batch), F64)
    for name, value in report.gradients.items():
        assert float((value - expected[name]).abs().max()) <= 1e-10 * float(expected[name].abs().max()), name
    assert len(report.gradients) == len(expected) - 1


@pytest.mark.parametrize("scaling", SCALINGS)
def test_same_step_in_bfloat16_on_one_device(scaling: str) -> None:
    """Up to the rounding of what is not in float8; the same layers, with parameters and gradients in float32."""
    model, batch = zoo.mlp()
    plain = in_float8(copy.deepcopy(model).bfloat16(), scaling)
    expected = gradients(plain, {k: v.bfloat16() for k, v in batch.items()})
    module = autopar.parallelize(model, None, precision=f"fp8-{scaling}", search=Search(inexact=("fp8",)))
    found = gradients(module, batch)
    for name, value in expected.items():
        assert float((found[name].float() - value.float()).abs().max()) <= 0.05 * float(value.float().abs().max()), name
    assert {p.dtype for p in module.parameters()} == {torch.float32}


@pytest.mark.slow
def test_which_products_are_rounded_and_that_each_tensor_is_once() -> None:
    model, batch = tied()
    program = program_of(model, batch, precision=policy())
    # Queries, keys and head: three each. Not attention's, nor that of a parameter and itself.
    assert len(products(program)) == 9
    assert any("attention" in str(n.target) for n in program.graph.graph.nodes)
    assert any(n.target is aten.mm.default and not is_backward(n) for n in program.graph.graph.nodes)
    rounded = [n for n in program.graph.graph.nodes if n.target is float8.quantize]
    assert len({n.args[0] for n in rounded}) == len(rounded)
    # Queries and keys round the same value: of their 2 values, 3 weights and 3 gradients there are 8.
    assert len(rounded) == 8
    formats = [n.args[2] for n in rounded if is_backward(n)]
    assert formats == ["e5m2"] * 3
    assert {n.args[2] for n in rounded if not is_backward(n)} == {"e4m3"}
    # The head's weight is that of the words.
    for pattern in ("words.weight", "head.*"):
        assert len(products(program_of(model, batch, precision=policy(exclude=("queries.*", pattern))))) == 3


def test_scales_of_sharded_tensors_are_reduced_over_the_axes_that_shard_them() -> None:
    """As maxima; without them each device rounds by a scale of its own, and the step is another one."""
    model, batch = zoo.mlp()
    program = program_of(model, batch, precision=policy())
    pins = {"batch.*": ("S(0)", "R"), "up.weight": ("R", "S(0)"), "down.weight": ("R", "S(1)"), "*.bias": ("R", "R")}
    # Without overlap no two collectives are joined.
    search = Search(pins={**pins, "overlap": "none"})
    plan = solve(program, {"data": 2, "tensor": 2}, slow_devices(), search=search)
    local, values = rewrite(program, plan), global_values(program, model, batch)
    assert compare(program, local, plan, values, F64).max_error <= 1e-10
    maxima = [n for n in local.graph.graph.nodes if n.op == "call_function" and "max" in n.args]
    # Values and gradients of the batch over "data", weights over "tensor", what has dims of both over both.
    assert {n.args[2] for n in maxima} == {"data", "tensor"}
    for node in maxima:
        node.replace_all_uses_with(node.args[0])
    local.graph.graph.eliminate_dead_code()
    assert compare(program, replace(local), plan, values, F64).max_error > 1e-3


@pytest.mark.slow
@pytest.mark.thorough  # a plan in one piece gathers the whole weight
def test_costs_and_gathers_of_large_layers() -> None:
    """Rounding before the gather is a layout like any other: half the bytes of bfloat16, which the search takes.

    Products are counted at the rate of float8, and on a device that has none at that of float32.
    """
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4096, 16384, bias=False), nn.ReLU(), nn.Linear(16384, 4096, bias=False))
    batch, pins = (torch.empty(65536, 4096, device="meta"),), {"batch.*": ("S(0)",), "*.weight": ("S(0)",)}
    gathered, step = [], {}
    for precision in (Precision(), Precision(linear=Float8())):
        program = program_of(model, batch, loss_fn=lambda y, _: y.float().square().mean(), precision=precision)
        for cluster in ("h100", "a100-80gb"):
            plan = solve(program, {"a": 4}, cluster, search=Search(pins=pins))
            step[cluster, precision.linear is None] = plan.predicted.step_seconds
            if cluster == "h100":
                local = rewrite(program, plan)
                moves = [
                    n for n in local.graph.graph.nodes if info(n).collective and "gather" in info(n).collective.kind
                ]
                made = [v for n in moves for v in values_of(n) if v is not None and v.numel() == 4096 * 16384]
                gathered.append({v.dtype for v in made})
    assert gathered == [{torch.bfloat16}, {torch.uint8}]
    # Products are nearly all of it: half as long, and rounding besides; an A100 multiplies float32 on other units.
    assert 0.5 < step["h100", False] / step["h100", True] < 0.7
    assert step["a100-80gb", False] > 5 * step["a100-80gb", True]


def test_verify_compares_with_the_same_layers_on_one_device() -> None:
    report = autopar.verify(*zoo.mlp(), {"a": 2, "b": 2}, plan="random", precision="fp8")
    assert report.max_error <= 1e-10, report.worst
    assert report.reference == "captured graph" and "fp8, tensorwise" in report.note
    assert report.capture_error <= 1e-10


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [pytest.param("tensorwise", marks=pytest.mark.deep), "rowwise"])
def test_each_microbatch_has_scales_of_its_own(scaling: str) -> None:
    """As where an eager model adds up the gradients of microbatches; sharded, in pipelines, and verified so."""
    model, batch = zoo.mlp()
    model.double()
    batch = {k: v.double() for k, v in batch.items()}
    program = program_of(model, batch, precision=policy(scaling))
    plain = in_float8(copy.deepcopy(model), scaling)
    for rows in range(0, 8, 2):
        (plain(**{k: v[rows : rows + 2] for k, v in batch.items()}) / 4).backward()
    # Along the other dims of the model: the rows of a microbatch are then those that follow one another.
    pins = {"microbatches": 4, "batch.*": ("R",), "up.weight": ("S(0)",), "down.weight": ("S(1)",)}
    plan = solve(program, {"a": 2}, "cpu", search=Search(pins=pins), deterministic=True)
    assert plan.microbatches == 4
    report = compare(program, rewrite(program, plan), plan, global_values(program, model, batch), F64)
    for name, parameter in plain.named_parameters():
        assert parameter.grad is not None
        error = float((report.gradients[name] - parameter.grad).abs().max())
        assert error <= 1e-10 * float(parameter.grad.abs().max()), name
    for pinned, kind in (({"microbatches": 2}, scaling), ({"stages": 2, "microbatches": 2}, "mxfp8")):
        model, batch = large()
        verified = autopar.verify(
            model, batch, {"a": 2, "b": 2}, plan="random", seed=1, precision=policy(kind), pins=pinned
        )
        assert verified.plan.microbatches == 2 and verified.max_error <= 1e-10, verified.worst


def test_it_is_asked_for_twice_and_the_plan_says_so(tmp_path: Any) -> None:
    model, batch = zoo.mlp()
    asked = Search(inexact=("fp8",))
    for run in (
        lambda s: autopar.plan(model, batch, cluster="h100", axes={"a": 2}, precision="fp8", search=s),
        lambda s: autopar.parallelize(model, None, batch, precision="fp8", search=s),
    ):
        with pytest.raises(ValueError, match=r"linear layers in fp8, tensorwise.*inexact=\('fp8',\)"):
            run(None)
    plan = autopar.plan(model, batch, cluster="h100", axes={"a": 2}, precision="fp8", search=asked)
    for text in (" ".join(plan.summary().split()), plan.certificate.space):
        assert "fp8, tensorwise scaling of current values" in text and "not equal to training" in text
    assert "multiplied in float32" not in " ".join(plan.summary().split())
    plan.save(tmp_path / "plan.json")
    loaded = autopar.Plan.load(tmp_path / "plan.json")
    assert loaded.float8 == plan.float8 == str(Float8())
    # A plan says what it is of: it is followed without asking again, and under no other precision.
    one = autopar.plan(model, batch, cluster="cpu", axes={"device": 1}, precision="fp8", search=asked)
    assert "multiplied in float32" in " ".join(one.summary().split())
    with pytest.raises(PlanError, match="the plan computes linear layers in fp8"):
        autopar.parallelize(copy.deepcopy(model), None, batch, plan=one, precision="bf16")
    exact = autopar.plan(model, batch, cluster="cpu", axes={"device": 1}, precision="bf16")
    with pytest.raises(PlanError, match="precision= asks for fp8"):
        autopar.parallelize(copy.deepcopy(model), None, batch, plan=exact, precision="fp8")
    assert exact.float8 == "" and "fp8" not in exact.summary()


def test_what_cannot_be_is_refused() -> None:
    model, batch = zoo.mlp()
    with pytest.raises(ValueError, match=r"Float8\(scaling='blocks'\): expected one of tensorwise, rowwise, mxfp8"):
        Float8("blocks")
    with pytest.raises(ValueError, match=r"Float8\(exclude="):
        Float8(exclude="head")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"Precision\(linear='fp8'\)"):
        Precision(linear="fp8")  # type: ignore[arg-type]
    asked = Search(inexact=("fp8",))
    with pytest.raises(ValueError, match=r"names 'nothing.\*', which is no parameter"):
        autopar.plan(
            model, batch, cluster="cpu", precision=Precision(linear=Float8(exclude=("nothing.*",))), search=asked
        )
    with pytest.raises(ValueError, match="no linear layer beside those that"):
        autopar.plan(model, batch, cluster="cpu", precision=Precision(linear=Float8(exclude=("*",))), search=asked)


@pytest.mark.deep
def test_layers_that_are_told_apart_are_captured_all() -> None:
    """Blocks of which some are in float8 are not alike; where all are, three stand for them."""
    model, batch = zoo.llama(layers=5)
    for exclude, alike in ((("*.mlp.*",), True), (("model.layers.1.*",), False)):
        program = program_to_plan(model, batch, precision=policy(exclude=exclude))
        assert (program.repeat is not None) == alike, exclude


@pytest.mark.deep
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("model", ["residual", "encoder", "gpt2", "llama", "bert", "vit"])
def test_models_under_random_plans(model: str, scaling: str) -> None:
    for seed in range(3):
        report = autopar.verify(
            *zoo.MODELS[model](), {"a": 2, "b": 2}, plan="random", seed=seed, precision=policy(scaling)
        )
        assert report.max_error <= 1e-10, (seed, report.worst)


@pytest.mark.deep
def test_compiled_is_the_same() -> None:
    found = []
    for compiled in (None, True):
        model, batch = zoo.mlp()
        module = autopar.parallelize(model, None, precision="fp8", search=Search(inexact=("fp8",)), compile=compiled)
        found.append(gradients(module, batch))
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=0.05, atol=0.05 * float(value.float().abs().max()))


@pytest.mark.parametrize("precision", ["fp8", "fp8-rowwise", "fp8-delayed", "mxfp8"])
def test_linears_in_float8_are_tensor_parallel(precision: str) -> None:
    """As those in bfloat16: what their scales need of other devices is no reason not to be."""
    search = Search(recipe="megatron", inexact=("fp8",))
    plan = autopar.plan(*large(), cluster="h100", axes={"a": 2}, precision=precision, search=search)
    assert [str(plan.parameters[f"{n}.weight"][0]) for n in ("up", "down")] == ["S(0.0)", "S(1.0)"]
