"""Microbatches: what is added up over the parts of a batch is what the whole batch gives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopar.compiler import program_of, rewrite, solve
from autopar.errors import InfeasibleError
from autopar.ir.layout import Factor, TensorType
from autopar.ir.node_info import info
from autopar.ir.ops.accumulate import accumulate
from autopar.ir.plan import Plan
from autopar.ir.precision import Precision
from autopar.ir.program import Program
from autopar.parallelize import parallelize
from autopar.passes import PASSES
from autopar.runtime.step.microbatch_step import whole_type
from autopar.search.microbatch.split import microbatch_program
from autopar.search.options import Search
from autopar.verify.verify import compare, global_values, verify
from tests import models as zoo

BOUND = 1e-10


def unequal(name: str, **sizes: int) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model and a batch whose samples have other numbers of tokens that count."""
    model, batch = getattr(zoo, name)(**sizes)
    for row, labels in enumerate(batch.get("labels", ())):
        labels.view(-1)[: row // 2] = -100  # where a sample has one label, the later ones of a batch
    return model, batch


@pytest.mark.some(2)
@pytest.mark.parametrize("plan", [None, "random"])
@pytest.mark.parametrize(
    "name", ["mlp", "cnn", *(pytest.param(n, marks=pytest.mark.deep) for n in ("gpt2", "llama", "bert", "vit"))]
)
def test_the_sum_is_that_of_the_whole_batch(name: str, plan: str | None) -> None:
    model, batch = unequal(name)
    report = verify(model, batch, {"a": 2, "b": 2}, plan=plan, seed=1, microbatches=2)
    assert report.plan.microbatches == 2
    assert report.program.microbatches == 2
    assert report.max_error < BOUND, report.worst


@pytest.mark.slow
def test_no_mean_of_means() -> None:
    """A mean over each microbatch would weigh tokens by how many others count beside them."""
    model, batch = unequal("gpt2")
    report = verify(model, batch, {"a": 2}, microbatches=4)
    parts = [model(**{k: v[i : i + 2] for k, v in batch.items()}).loss for i in range(0, 8, 2)]
    assert report.loss is not None
    assert abs(float(report.loss) - float(sum(p.detach() for p in parts) / 4)) > 1e-4
    assert float(report.loss) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-5)


class Step(nn.Module):
    """Dropout, a counter, a sum and a mean, and a penalty that does not depend on the batch."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.norm = nn.BatchNorm1d(16) if norm else nn.Identity()
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        self.steps += 1
        hidden = F.dropout(torch.relu(self.norm(self.up(x))), 0.5, self.training)
        out = self.down(hidden)
        penalty = 0.1 * self.up.weight.square().sum()
        return {"loss": out.square().mean() + 0.01 * out.sum() + penalty, "out": out}


def test_one_device_draws_and_counts_as_the_plain_model() -> None:
    plain, batch = Step().double(), (torch.randn(12, 8, dtype=torch.float64),)
    model: Any = parallelize(Step().double(), None, search=Search(pins={"microbatches": 3}))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (plain, model)]
    for step in range(3):
        outputs = []
        for m, optimizer in zip((plain, model), optimizers, strict=True):
            torch.manual_seed(step)
            outputs.append(m(*batch))
            outputs[-1]["loss"].backward(torch.tensor(0.5, dtype=torch.float64))
            optimizer.step()
            optimizer.zero_grad()
        for name in ("loss", "out"):
            torch.testing.assert_close(outputs[0][name], outputs[1][name], rtol=1e-12, atol=1e-12)
    assert float(model.steps) == float(plain.steps) == 3
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_a_short_last_batch_and_inference() -> None:
    plain, model = Step().eval(), parallelize(Step().eval(), None, search=Search(pins={"microbatches": 4}))
    for rows in (16, 6, 7):
        batch = torch.randn(rows, 8)
        expected, found = plain(batch), model(batch)
        for m, out in ((plain, expected), (model, found)):
            m.zero_grad()
            out["loss"].backward()
        torch.testing.assert_close(found["out"], expected["out"])
        torch.testing.assert_close(model.up.weight.grad, plain.up.weight.grad)
    with torch.no_grad():
        torch.testing.assert_close(model(batch)["out"], plain(batch)["out"])


def test_backward_calls_add_up_also_without_synchronization() -> None:
    plain, model = Step().eval(), parallelize(Step().eval(), None, search=Search(pins={"microbatches": 2}))
    first, second = torch.randn(4, 8), torch.randn(4, 8)
    (plain(first)["loss"] + plain(second)["loss"]).backward()
    with model.no_sync():
        model(first)["loss"].backward()
    model(second)["loss"].backward()
    torch.testing.assert_close(model.up.weight.grad, plain.up.weight.grad)


class Spectrum(nn.Module):
    """Weights of complex numbers, of one dim and of none, as of filters of frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.filter = nn.Parameter(torch.randn(5, 2))
        self.scale = nn.Parameter(torch.randn((), dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        found = torch.fft.rfft(x) * torch.view_as_complex(self.filter) * self.scale
        return torch.fft.irfft(found, n=8).square().mean()


@pytest.mark.slow
def test_complex_gradients_are_added_up() -> None:
    """Their all-reduce takes a flat tensor, and the graph of one microbatch is analyzed again."""
    torch.manual_seed(0)
    report = verify(Spectrum(), (torch.randn(8, 8),), {"a": 2}, plan="random", microbatches=2)
    assert report.max_error < BOUND, report.worst


def test_what_cannot_be_cut_is_refused() -> None:
    batch = (torch.randn(8, 8),)
    with pytest.raises(InfeasibleError, match=r"2 microbatches: aten.* takes something of the whole batch"):
        microbatch_program(program_of(Step(norm=True), batch), 2)
    with pytest.raises(InfeasibleError, match="8 samples do not divide into 3 microbatches"):
        microbatch_program(program_of(Step(), batch), 3)
    with pytest.raises(InfeasibleError, match="pass loss_fn"):
        microbatch_program(program_of(nn.Linear(8, 8), batch), 2)
    with pytest.raises(InfeasibleError, match="is scaled, which float16 needs: compute in bfloat16"):
        microbatch_program(program_of(Step(), batch, precision=Precision.resolve("fp16")), 2)
    with pytest.raises(ValueError, match="pin 'microbatches' must be a positive whole number or 'search', got 0"):
        Search(pins={"microbatches": 0})


def test_what_is_counted_is_what_runs() -> None:
    program, _, _ = zoo.captured("gpt2")
    pins = {"microbatches": 4, "overlap": "none"}  # else parameters may be gathered again, hidden
    plan = solve(program, {"a": 2}, "h100", search=Search(recipe="fsdp", pins=pins))
    assert plan.certificate.objective == pytest.approx(plan.predicted.step_seconds)
    local = rewrite(program, plan, passes=tuple(p for p in PASSES if p.__name__ != "bucket_collectives"))
    counts: Counter[str] = Counter()
    for node in local.graph.graph.nodes:
        if info(node).collective is not None:
            counts[info(node).collective.kind] += local.runs(node)
    assert dict(counts) == plan.predicted.collectives["a"]
    # Gradients are reduced once, and parameters gathered.
    assert 0 < counts["reduce_scatter"] <= len(plan.parameters)
    assert 0 < counts["all_gather"] <= len(plan.parameters)


@pytest.mark.deep
def test_short_memory_asks_for_microbatches() -> None:
    """What one operator works on does not fit: no recomputation helps, and parts of the batch do."""
    model, batch = zoo.mlp(hidden=64, ffn=256, batch=1024)
    program = program_of(model, batch)
    free = solve(program, {"a": 2}, "h100", memory="1GiB")
    assert free.microbatches == 1
    budget = 0.5 * sum(free.predicted.peak_bytes.values())
    found = solve(program, {"a": 2}, "h100", memory=budget)
    assert found.microbatches > 1
    assert sum(found.predicted.peak_bytes.values()) <= budget
    assert Plan.from_dict(found.to_dict()) == found
    report = compare(program, rewrite(program, found), found, global_values(program, model, batch), torch.float64)
    assert report.max_error < BOUND


def last_only(program: Program, plan: Plan) -> Program:
    """Nothing is added up."""
    for node in [n for n in program.graph.graph.nodes if n.target is accumulate]:
        node.replace_all_uses_with(node.args[0])
    return program


def own_count(program: Program, plan: Plan) -> Program:
    """Each microbatch divides by its own number of tokens that count."""
    given = [
        n for n, i in zip(program.placeholders, program.inputs, strict=True) if i.name == "2" and i.kind == "batch"
    ]
    (node,) = given
    users = list(node.users)
    with program.graph.graph.inserting_after(program.placeholders[-1]):
        less = program.graph.graph.call_function(torch.ops.aten.div.Scalar, (node, 2.0))
    less.meta = dict(node.meta)
    for user in users:
        user.replace_input_with(node, less)
    return program


@pytest.mark.parametrize("sabotage", [last_only, own_count])
def test_mistakes_are_noticed(sabotage: Callable[[Program, Plan], Program]) -> None:
    model, batch = unequal("residual")
    program = program_of(model, batch)
    plan = solve(program, {"a": 2}, "cpu", search=Search(pins={"microbatches": 2}))
    values = global_values(program, model, batch)
    assert compare(program, rewrite(program, plan), plan, values, torch.float64).max_error < BOUND
    wrong = rewrite(program, plan, passes=(*PASSES, sabotage))
    assert compare(program, wrong, plan, values, torch.float64).max_error > 1e-3


class Shared(nn.Module):
    """Parameters whose gradients are one value, or a part of it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = (nn.Parameter(torch.randn(8, n)) for n in (4, 4, 2))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.a + self.b + F.pad(self.c, (1, 1)))).square().mean()


@pytest.mark.parametrize("count", [1, 2])
def test_gradients_have_memory_of_their_own(count: int) -> None:
    model: Any = parallelize(Shared().double(), None, search=Search(pins={"microbatches": count}))
    plain, x = Shared().double(), torch.randn(4, 8, dtype=torch.float64)
    for m in (model, plain):
        (3 * m(x)).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=0, atol=1e-12)


def test_padding_is_that_of_the_whole_batch() -> None:
    """A microbatch's 3 of 4 rows are 6 of the 8 rows of two."""
    type_ = TensorType("float32", ((Factor("batch", 4),), (Factor("vocab", 6),)), used=(3, 5))
    whole = whole_type(type_, 0, 2)
    assert whole.shape == (8, 6)
    assert whole.stored_shape == (6, 5)


class Checkpointed(nn.Module):
    """Two layers, of which only the input is kept."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inner, x, use_reentrant=False).square().mean()


def test_checkpointed_regions_in_microbatches() -> None:
    torch.manual_seed(1)
    report = verify(Checkpointed(), (torch.randn(8, 8),), {"a": 2}, microbatches=2)
    assert report.max_error < BOUND, report.worst
    assert report.plan.microbatches == 2
    assert report.plan.recompute
