"""Regions of `torch.utils.checkpoint` and their policies: the model's numbers, and what torch would keep."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper, offload_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import autopar
from autopar._torch_compat import storage_id
from autopar.compiler import program_of, program_to_plan, rewrite, solve
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.rules.shapes.local_shapes import propagate
from autopar.runtime.step.bind import bind
from autopar.runtime.step.partition import cut
from autopar.search.options import Search
from tests import models

aten = torch.ops.aten
AXES = {"a": 2, "b": 2}
ROWS, MANY, WIDE = 16, 512, 48
Blocks = Callable[[nn.ModuleList, Tensor], Tensor]


class Block(nn.Module):
    """Something small, something wide between, and a dropout."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, WIDE), nn.Linear(WIDE, 8)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        hidden = nn.functional.dropout(nn.functional.gelu(self.up(self.norm(x))), self.dropout)
        return x + self.down(hidden)


class Stack(nn.Module):
    """Blocks that a function runs, checkpointed in some way."""

    def __init__(self, run: Blocks, dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList(Block(dropout) for _ in range(2))
        self.run = run

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.blocks, self.first(x)).square().mean()


def plainly(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def checkpointed(blocks: nn.ModuleList, x: Tensor, **options: Any) -> Tensor:
    for block in blocks:
        x = checkpoint(block, x, **options)
    return x


def by_partial(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpointed_by(PARTIAL, blocks, x)


def checkpointed_by(call: Callable[..., Tensor], blocks: nn.ModuleList, x: Tensor) -> Tensor:
    for block in blocks:
        x = call(block, x)
    return x


PARTIAL = functools.partial(checkpoint, use_reentrant=False)


def in_sequence(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint_sequential(list(blocks), 2, x, use_reentrant=False)


def nested(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return checkpoint(functools.partial(checkpointed, blocks, use_reentrant=False), x, use_reentrant=False)


def under_autocast(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    with torch.autocast("cpu", enabled=False):
        return checkpointed(blocks, x, use_reentrant=False)


WAYS: dict[str, Blocks] = {
    "non-reentrant": functools.partial(checkpointed, use_reentrant=False),
    "reentrant": functools.partial(checkpointed, use_reentrant=True),
    "partial": by_partial,
    "sequential": in_sequence,
    "nested": nested,
    "autocast": under_autocast,
}


def batch(rows: int = ROWS) -> tuple[Tensor]:
    return (torch.randn(rows, 8, generator=torch.Generator().manual_seed(1)),)


def kept_by_torch(model: nn.Module, batch: Any) -> list[int]:
    """Bytes of each tensor, parameters aside, that torch keeps for the backward pass."""
    parameters = {storage_id(p) for p in model.parameters()}
    held: dict[int, Tensor] = {}

    def pack(x: Tensor) -> Tensor:
        held.setdefault(storage_id(x), x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        result = model(**batch) if isinstance(batch, dict) else model(*batch)
    del result
    return sorted(x.untyped_storage().nbytes() for i, x in held.items() if i not in parameters)


def kept(program: Program, plan: Plan) -> list[int]:
    """The same of the graph that is emitted."""
    local = rewrite(program, plan)
    propagate(local, plan, everything=True)
    bound = bind(local.graph, {name: name for name in dict(plan.axes)}, dict.fromkeys(dict(plan.axes), 0))
    step = cut(replace(local, graph=bound))
    returned: Any = step.forward.graph.output_node().args[0]
    inputs = dict(zip(step.forward.graph.find_nodes(op="placeholder"), step.inputs, strict=True))
    held = {}
    for node in returned[len(step.outputs) :]:
        if node not in inputs or inputs[node].kind != "parameter":
            held[storage_id(node.meta["val"])] = node.meta["val"].untyped_storage().nbytes()
    return sorted(held.values())


def planned(model: nn.Module, batch: Any, **options: Any) -> tuple[Program, Plan]:
    program = program_of(model, batch)
    return program, solve(program, {"a": 1}, "cpu", **options)


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WAYS)
def test_it_keeps_what_torch_keeps(way: str) -> None:
    model = Stack(WAYS[way])
    assert kept(*planned(model, batch())) == kept_by_torch(model, batch())


@pytest.fixture(scope="module")
def plain() -> autopar.EquivalenceReport:
    return autopar.verify(Stack(plainly), batch(), {"a": 1})


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WAYS)
def test_it_computes_what_the_plain_model_does(way: str, plain: autopar.EquivalenceReport) -> None:
    for axes, plan in (({"a": 2}, None), (AXES, "random")):
        report = autopar.verify(Stack(WAYS[way]), batch(), axes, plan=plan)
        assert report.plan.recompute
        assert report.max_error < 1e-9
        assert report.capture_error < 1e-5
        assert report.gradients.keys() == plain.gradients.keys()
        for name, gradient in plain.gradients.items():
            torch.testing.assert_close(report.gradients[name], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("way", ["non-reentrant", pytest.param("reentrant", marks=pytest.mark.deep)])
def test_masks_are_drawn_again(way: str) -> None:
    """On one device they are the numbers of torch, which its own backward pass draws again, too."""
    model, eager = autopar.parallelize(Stack(WAYS[way], 0.5), None, batch()), Stack(WAYS[way], 0.5)
    assert any("draw" in name for name in model.plan.recompute)
    losses = []
    for each in (model, eager):
        torch.manual_seed(3)
        losses.append(each(*batch()))
        torch.manual_seed(4)  # the backward pass must not go on with the generator as it is
        losses[-1].backward()
    torch.testing.assert_close(*losses)
    gradients = model.full_gradients()
    for name, p in eager.named_parameters():
        torch.testing.assert_close(gradients[name], p.grad)
    assert autopar.verify(Stack(WAYS[way], 0.5), batch(), {"a": 2}).max_error < 1e-9


@pytest.mark.deep
@pytest.mark.parametrize(("kind", "reentrant"), [("llama", False), ("gpt2", True)])
def test_hugging_face(kind: str, reentrant: bool) -> None:
    model, tokens = models.llama(layers=2) if kind == "llama" else models.gpt2(layers=2)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    model.train()
    hidden = 8 * 8 * 32 * 4  # bytes; what is smaller is made of positions, which torch shows in other ways
    program, plan = planned(model, tokens)
    large = [[n for n in sizes if n >= hidden] for sizes in (kept(program, plan), kept_by_torch(model, tokens))]
    assert large[0] == large[1]
    assert plan.recompute
    report = autopar.verify(model, tokens, {"a": 2}, plan="random")
    assert report.max_error < 1e-9
    assert report.capture_error < 1e-5


def test_wrapped_modules() -> None:
    model = Stack(plainly)
    model.blocks = nn.ModuleList(checkpoint_wrapper(block) for block in model.blocks)
    assert kept(*planned(model, batch())) == kept_by_torch(model, batch())


def test_what_is_sent_to_the_host_stays_and_a_warning_says_so(caplog: pytest.LogCaptureFixture) -> None:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        return plainly([offload_wrapper(block) for block in blocks], x)  # type: ignore[arg-type]

    assert program_of(Stack(run), batch()).fingerprint == program_of(Stack(plainly), batch()).fingerprint
    assert "save_on_cpu is left out" in caplog.text


def every_second() -> Any:
    """A policy that counts, as people write them: it saves every second linear."""
    seen = [0]

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        seen[0] += op is aten.addmm.default
        save = op is aten.addmm.default and seen[0] % 2
        return CheckpointPolicy.MUST_SAVE if save else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def saving(op: Any, policy: Any) -> Any:
    def choose(context: Any, each: Any, *args: Any, **kwargs: Any) -> Any:
        return policy if each is op else CheckpointPolicy.PREFER_RECOMPUTE

    return functools.partial(create_selective_checkpoint_contexts, choose)


def with_policy(context_fn: Callable[[], Any]) -> Stack:
    return Stack(functools.partial(checkpointed, use_reentrant=False, context_fn=context_fn))


SMALL, LARGE = ROWS * 8 * 4, ROWS * WIDE * 4
LINEAR = functools.partial(create_selective_checkpoint_contexts, [aten.addmm.default])

POLICIES: dict[str, tuple[Any, int, int]] = {
    "list": (LINEAR, 0, 2),
    "counting": (every_second, 0, 2),
    "bool": (saving(aten.gelu.default, True), 0, 2),
    "prefer": (saving(aten.gelu.default, CheckpointPolicy.PREFER_SAVE), 0, 2),
    "two outputs": (saving(aten.native_layer_norm.default, CheckpointPolicy.MUST_SAVE), 2, 0),
    "recompute": (saving(aten.addmm.default, CheckpointPolicy.MUST_RECOMPUTE), 0, 0),
}
"""A policy, and how many small and large tensors more than without one are kept."""


@pytest.mark.some(2)
@pytest.mark.parametrize("name", POLICIES)
def test_policies(name: str) -> None:
    context_fn, small, large = POLICIES[name]
    model = with_policy(context_fn)
    found, bare = kept(*planned(model, batch())), kept_by_torch(Stack(WAYS["non-reentrant"]), batch())
    assert found.count(SMALL) - bare.count(SMALL) == small
    assert found.count(LARGE) - bare.count(LARGE) == large
    report = autopar.verify(model, batch(), {"a": 2})
    assert report.max_error < 1e-9


def lean(run: Blocks) -> Stack:
    """Few operators, most of them wide."""
    model = Stack(run)
    layers = (nn.Linear(8, WIDE, bias=False), nn.GELU(), nn.Linear(WIDE, 8, bias=False))
    model.blocks = nn.ModuleList(nn.Sequential(*copy.deepcopy(layers)) for _ in range(2))
    return model


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("policy", "free", "share", "held"),
    [(CheckpointPolicy.MUST_SAVE, 1, 0.7, {1}), (CheckpointPolicy.PREFER_SAVE, 0, 0.85, {0, 1})],
)
def test_what_must_be_saved_is_saved_in_little_memory(
    policy: CheckpointPolicy, free: int, share: float, held: set[int]
) -> None:
    """Where there is a free block besides, it is recomputed. What should be saved need not be."""
    context_fn = saving(aten.gelu.default, policy)

    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        return checkpointed(blocks[free:], plainly(blocks[:free], x), use_reentrant=False, context_fn=context_fn)

    program, plan = planned(lean(run), batch(MANY), memory="1GiB")
    budget = share * sum(plan.predicted.peak_bytes.values())
    tight = solve(program, {"a": 1}, "cpu", memory=budget)
    assert sum(tight.predicted.peak_bytes.values()) <= budget
    assert kept(program, tight).count(MANY * WIDE * 4) in held


def test_the_pin_wins_over_regions() -> None:
    program, plan = planned(Stack(WAYS["non-reentrant"]), batch(), search=Search(pins={"recompute": "none"}))
    assert not plan.recompute
    assert kept(program, plan) == kept(*planned(Stack(plainly), batch()))
    free = solve(program, {"a": 1}, "cpu", search=Search(pins={"recompute": "search"}))
    assert not free.recompute  # there is memory for everything
    recipe = solve(program, {"a": 2}, "cpu", search=Search(recipe="ddp"))
    assert recipe.recompute
    for name, most in {"none": 0, "search": len(program.pins) - 1}.items():
        drawn = solve(program, {"a": 2}, "cpu", search=Search(recipe="random", pins={"recompute": name}))
        assert sum("made again" in each and not each.startswith("consumer") for each in drawn.recompute) <= most


def test_regions_are_followed_within_a_budget() -> None:
    """What the model checkpoints is recomputed, and more where that is not enough."""
    model = lean(by_partial_but_one)
    program, plan = planned(model, batch(MANY), memory="1GiB")
    assert not any("gelu" in name and "made again" not in name for name in plan.recompute)
    tight = solve(program, {"a": 1}, "cpu", memory=0.9 * sum(plan.predicted.peak_bytes.values()))
    assert plan.recompute.keys() < tight.recompute.keys()
    assert any("made again" not in name for name in tight.recompute)
    assert autopar.verify(model, batch(MANY), {"a": 1}, plan=tight).max_error < 1e-9


def by_partial_but_one(blocks: nn.ModuleList, x: Tensor) -> Tensor:
    return by_partial(blocks[1:], blocks[0](x))  # type: ignore[arg-type]


@pytest.mark.slow
def test_programs_of_other_regions_are_other_programs() -> None:
    runs = (plainly, WAYS["non-reentrant"], by_partial_but_one, with_policy(LINEAR).run, with_policy(every_second).run)
    found = [program_of(Stack(run), batch()).fingerprint for run in runs]
    assert len(set(found)) == len(found)
    assert program_of(Stack(WAYS["reentrant"]), batch()).fingerprint == found[1]
    _, plan = planned(Stack(plainly), batch())
    with pytest.raises(autopar.PlanError, match="another graph"):
        rewrite(program_of(Stack(WAYS["partial"]), batch()), plan)


@pytest.mark.parametrize("way", [pytest.param("partial", marks=pytest.mark.deep), "wrapped"])
def test_a_few_blocks_stand_for_all(way: str) -> None:
    model = Stack(by_partial if way == "partial" else plainly)
    wrap = checkpoint_wrapper if way == "wrapped" else lambda block: block
    model.blocks = nn.ModuleList(wrap(Block(0.0)) for _ in range(6))
    short, whole = program_to_plan(model, batch()), program_of(model, batch())
    assert short.repeat is not None
    assert short.fingerprint == whole.fingerprint
    plans = [solve(p, {"a": 2}, "cpu") for p in (short, whole)]
    assert plans[0].recompute == plans[1].recompute != {}
    assert plans[0].predicted.step_seconds == pytest.approx(plans[1].predicted.step_seconds)
    assert "recomputed" in plans[0].summary()


@pytest.mark.slow
def test_blocks_that_are_checkpointed_by_number_are_all_captured() -> None:
    def run(blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for i, block in enumerate(blocks):
            x = block(x) if i % 2 else PARTIAL(block, x)
        return x

    model = Stack(run)
    model.blocks = nn.ModuleList(Block(0.0) for _ in range(4))
    assert program_to_plan(model, batch()).repeat is None
    assert kept(*planned(model, batch())) == kept_by_torch(model, batch())
