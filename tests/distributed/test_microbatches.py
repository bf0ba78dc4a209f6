"""Steps in microbatches on four ranks: three steps of AdamW equal one device's on the whole batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed

STEPS = 3


def train(rank: int, name: str, inputs: str, recipe: str, seed: int) -> float:
    """The largest difference of loss, logits, gradients' norm or parameters; samples have other numbers of tokens."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests import models

    (plain, batch), (model, _) = (getattr(models, name)(batch=16) for _ in range(2))
    for row, labels in enumerate(batch.get("labels", ())):
        labels[: row // 2] = -100
    search = Search(pins={"microbatches": 4, "recompute": "search"}, recipe=recipe, seed=seed)
    parallel: Any = parallelize(
        model.double(), mesh_of(2, 2), batch, inputs=inputs, search=search, cluster=slow_devices(), timeout=WAIT
    )
    plain.double()
    # The loss is of float32: gradients near zero are of its rounding, and must not decide on a whole step.
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, eps=1e-4) for m in (parallel, plain)]
    own = batch if inputs == "global" else {k: v.chunk(4)[parallel.data_rank] for k, v in batch.items()}
    worst = 0.0
    for _ in range(STEPS):
        found, expected = parallel(**own), plain(**batch)
        found["loss"].backward()
        expected["loss"].backward()
        norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.5) for m in (parallel, plain)]
        pairs = [(found["loss"], expected["loss"]), (norms[0].full_tensor(), norms[1])]
        pairs.append((found["logits"].full_tensor(), expected["logits"]))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        state = parallel.full_state_dict()
        pairs += [(state[name], value) for name, value in plain.state_dict().items() if name in state]
        worst = max(worst, *(float((a - b).detach().abs().max()) for a, b in pairs))
    return worst


@pytest.mark.slow
def test_each_rank_passes_its_rows_of_unequal_numbers_of_tokens(ranks: Ranks) -> None:
    # GPT-2's gradient of positions is reduced once a step, and those of its matrices in each microbatch.
    assert max(ranks.run(train, "gpt2", "local", "fsdp", 0)) < 1e-6  # the model computes its loss in float32


def clip(rank: int, count: int) -> float:
    """The largest difference of a gradient after clipping, where one value is the gradient of two parameters."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search
    from tests.search.microbatch.test_rewrite import Shared

    torch.manual_seed(0)
    x = torch.randn(16, 8, dtype=torch.float64)
    plain, worst = Shared().double(), 0.0
    model: Any = parallelize(
        Shared().double(), mesh_of(2, 2), (x,), search=Search(pins={"microbatches": count}), timeout=WAIT
    )
    for m in (model, plain):
        (3 * m(x)).backward()
        torch.nn.utils.clip_grad_norm_(m.parameters(), 0.01)
    found = model.full_gradients()
    for name, p in plain.named_parameters():
        worst = max(worst, float((found[name] - p.grad).abs().max()))
    return worst


@pytest.mark.parametrize("count", [1, 2])
def test_a_gradient_of_two_parameters_is_clipped_once(ranks: Ranks, count: int) -> None:
    assert max(ranks.run(clip, count)) < 1e-12


def gathers(rank: int, every: bool) -> tuple[int, int, int, float]:
    """Gathers that a step makes and that are predicted, how many parameters are split, and the largest difference.

    Args:
        rank: of the process.
        every: gather anew in each microbatch.
    """
    from dataclasses import replace

    from torch.utils._python_dispatch import TorchDispatchMode

    from autopar.compiler import program_of, solve
    from autopar.ir.layout import Replicate
    from autopar.ir.plan import EVERY
    from autopar.parallelize import parallelize
    from autopar.search.microbatch.split import microbatch_program
    from autopar.search.options import Search
    from autopar.search.predict import predict
    from autopar.sharding.dims import analyze
    from tests import models

    class Counts(TorchDispatchMode):
        made = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            # A coalesced one gathers several parameters.
            Counts.made += ("all_gather_into_tensor" in str(func)) * (len(args[0]) if isinstance(args[0], list) else 1)
            return func(*args, **(kwargs or {}))

    (plain, batch), (model, _) = (models.residual(batch=16) for _ in range(2))
    batch["x"] = batch["x"].double()
    program = program_of(model.double(), batch)
    search = Search(pins={"microbatches": 4}, recipe="fsdp")
    plan = solve(program, {"a": 2, "b": 2}, slow_devices(), search=search)
    if every:
        part = microbatch_program(program, 4)
        plan = replace(
            plan,
            recompute=dict.fromkeys([*plan.choices, *(f"consumer {name}" for name in plan.consumer_layouts)], EVERY),
        )
        plan = predict(part, analyze(part), plan)
    parallel: Any = parallelize(model, mesh_of(2, 2), plan=plan, timeout=WAIT)
    parallel(**batch)  # plans
    with Counts():
        loss = parallel(**batch)
    loss.backward()
    plain.double()(**batch).backward()
    found = parallel.full_gradients()
    worst = max(float((found[n] - p.grad).abs().max()) for n, p in plain.named_parameters() if p.grad is not None)
    split = sum(p != Replicate() for layout in plan.parameters.values() for p in layout)
    return Counts.made, sum(c.get("all_gather", 0) for c in plan.predicted.collectives.values()), split, worst


@pytest.mark.slow
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.deep)])
def test_kept_gathers_are_made_once_a_step(ranks: Ranks, every: bool) -> None:
    for made, predicted, split, worst in ranks.run(gathers, every):
        assert made == predicted >= 4 * split if every else made == predicted == split
        assert worst < 1e-9


@pytest.mark.deep
def test_a_random_plan(ranks: Ranks) -> None:
    assert max(ranks.run(train, "encoder", "global", "random", 0)) < 1e-9
