"""Replica groups without torchft: gradients, states, cards, and steps that are discarded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.errors import AutoparError, RankError
from autopar.integrations.replicas.cards import Card, card_of, difference, swap_cards
from autopar.integrations.replicas.gradients import average, flatten
from autopar.integrations.replicas.groups import ReplicaGroups
from autopar.integrations.replicas.state import own_state, take_state
from autopar.runtime.dtensor import to_local
from tests.distributed.launch import Ranks
from tests.integrations.replica_fakes import FakeManager, average_together, grouped
from tests.integrations.replica_processes import MODEL

NAMES: dict[str, Any] = {}
exec(MODEL, NAMES)
ROWS = NAMES["ROWS"]


def parallel(mesh: Any = None, count: int = 2, **options: Any) -> Any:
    example = tuple(t[: ROWS // count] for t in NAMES["Sampler"]().batch())
    return autopar.parallelize(NAMES["made"](), mesh, example, **options)


def group_of(number: int, model: Any = None, count: int = 2) -> tuple[ReplicaGroups, FakeManager, Any, Any, Any]:
    model = parallel() if model is None else model
    optimizer, scheduler = NAMES["optimized"](model)
    sampler = NAMES["Sampler"]()
    run, manager = grouped(model, optimizer, number, count, scheduler=scheduler, sampler=sampler)
    return run, manager, model, optimizer, scheduler


def eager(steps: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Steps on the whole batch."""
    model, sampler = NAMES["made"](), NAMES["Sampler"]()
    optimizer, scheduler = NAMES["optimized"](model)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(*sampler.batch())
        loss.backward()
        NAMES["clip"](model)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, {n: p.detach() for n, p in model.named_parameters()}


def forward(run: ReplicaGroups) -> torch.Tensor:
    x, y = run._stateful["sampler"].batch()
    loss = run._model(x[run.rows(ROWS)], y[run.rows(ROWS)])
    loss.backward()
    return loss


def test_two_groups_are_one_device_with_the_whole_batch() -> None:
    made = [group_of(number) for number in range(2)]
    losses = []
    for _ in zip(*(run.steps(4) for run, *_ in made), strict=True):
        losses.append(sum(forward(run).item() for run, *_ in made) / 2)
        average_together([(run, manager) for run, manager, *_ in made])
        for run, _, model, optimizer, scheduler in made:
            NAMES["clip"](model)
            assert run.commit()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    expected, state = eager(4)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    for _, _, model, *_ in made:
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.detach(), state[name], rtol=0, atol=1e-12)


def four_ranks(rank: int, search: dict[str, Any], inputs: str) -> None:
    """Two groups of two ranks with shards, which average over the outer axis; the second takes the first's state."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("group", "gpu"))
    number, across = mesh.get_coordinate()[0], mesh.get_group("group")
    model = parallel(mesh["gpu"], search=autopar.Search(**search), inputs=inputs, timeout=60)
    assert any(to_local(p).shape != p.shape for p in model.parameters())
    run, manager, _, optimizer, scheduler = group_of(number, model)
    manager.reduce = lambda flat: dist.all_reduce(flat, group=across)
    losses = []
    for step in run.steps(4):
        loss = forward(run).detach().clone()
        dist.all_reduce(loss, group=across)
        losses.append(loss.item() / 2)
        run.average_gradients()
        NAMES["clip"](model)
        assert run.commit()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        if step == 1 and number == 1:  # it has lost what it has learned
            with torch.no_grad():
                for parameter in model.parameters():
                    to_local(parameter).add_(1)
            optimizer.state.clear()
        if step == 1:
            states: list[Any] = [None, None]
            dist.all_gather_object(states, own_state(model, optimizer, run._stateful), group=across)
            manager.peer = (states[0], 2) if number == 1 else None
    expected, state = eager(4)
    torch.testing.assert_close(losses, expected, rtol=0, atol=1e-12)
    for name, value in model.full_state_dict().items():
        if name in state:
            torch.testing.assert_close(value, state[name], rtol=0, atol=1e-12)
    assert run.healed == number


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("search", "inputs"),
    [
        ({"recipe": "fsdp"}, "local"),
        pytest.param({"recipe": "megatron"}, "global", marks=pytest.mark.deep),
        pytest.param({"pins": {"stages": 2, "microbatches": 3}}, "global", marks=pytest.mark.deep),
    ],
)
def test_shards_of_two_groups_on_four_processes(four: Ranks, search: dict[str, Any], inputs: str) -> None:
    four.run(four_ranks, search, inputs)


def test_gradients_of_several_dtypes_and_missing_ones() -> None:
    def made(scale: float, missing: tuple[str, ...]) -> dict[str, torch.Tensor]:
        kinds = {"a": torch.float32, "b": torch.bfloat16, "c": torch.complex64, "d": torch.float32, "e": torch.bfloat16}
        found = {n: nn.Parameter(torch.zeros(3, 2, dtype=dtype)) for n, dtype in kinds.items()}
        for name, parameter in found.items():
            if name not in missing:
                values = scale * torch.arange(6.0).view(3, 2)
                parameter.grad = (values * (1 + 2j) if parameter.is_complex() else values).to(parameter.dtype)
        return found

    first, second = made(2, ("d",)), made(4, ("d", "e"))
    others = iter(flatten(second))
    sizes = []

    def mean(flat: torch.Tensor) -> Any:
        sizes.append(flat.numel())
        flat += next(others).values
        flat /= 2
        return lambda: None

    assert average(first, mean) == 4 * 14 + 2 * 14 + 4 * 13
    assert sizes == [14, 14, 13]  # one exchange for each dtype, and a number for each parameter
    assert first["d"].grad is None
    expected = torch.arange(6.0).view(3, 2)
    torch.testing.assert_close(first["a"].grad, 3 * expected)
    torch.testing.assert_close(first["c"].grad, 3 * expected * (1 + 2j))
    torch.testing.assert_close(first["e"].grad, expected.bfloat16())


@pytest.mark.parametrize("where", ["start_quorum", "allreduce", "should_commit"])
def test_a_discarded_step_leaves_nothing(where: str) -> None:
    run, manager, model, optimizer, _ = group_of(0)
    steps = run.steps(2)
    before = own_state(model, optimizer, run._stateful)
    manager.failures[where] = [RuntimeError("a connection is closed")]
    assert next(steps) == 0
    if where == "start_quorum":  # they have met once more
        assert run.discarded == 1
        return
    torch.rand(3)
    forward(run)
    run.average_gradients()
    assert not run.commit()
    after = own_state(model, optimizer, run._stateful)
    leaves = [torch.utils._pytree.tree_leaves(state) for state in (before, after)]
    assert all(torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*leaves, strict=True))
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(AutoparError, match=r"optimizer\.step\(\) where the step is closed"):
        optimizer.step()
    assert next(steps) == 0


def test_a_further_optimizer_is_refused() -> None:
    _, _, model, optimizer, *_ = group_of(0)
    with pytest.raises(ValueError, match="second= is a further optimizer, whose steps no vote decides on"):
        ReplicaGroups(model, optimizer, {"second": optimizer}, CARD, 2, lambda *_: None, {})


def test_a_state_that_one_rank_alone_has_is_taken_by_none(monkeypatch: pytest.MonkeyPatch) -> None:
    run, manager, model, *_ = group_of(0)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    manager.peer = ({"not": "a state"}, 7)
    told = iter([("", "OSError: the peer is gone", (0, False))])
    gather = type(model._autopar.context).gather
    monkeypatch.setattr(
        type(model._autopar.context), "gather", lambda self, own, what: [*gather(self, own, what), *list(told)]
    )
    assert next(run.steps(9)) == 0  # and not 7
    assert (run.discarded, run.healed) == (1, 0)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


@pytest.mark.some(2)
@pytest.mark.parametrize("has_steps", [False, True])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_a_state_is_taken_to_the_last_bit(has_steps: bool, kind: Any) -> None:
    def made() -> tuple[Any, Any, Any]:
        model = parallel()
        options = {"momentum": 0.9, "dampening": 0.5} if kind is torch.optim.SGD else {}
        optimizer = kind(model.parameters(), lr=0.1, **options)
        return model, optimizer, {"sampler": NAMES["Sampler"]()}

    def advance(model: Any, optimizer: Any, stateful: Any) -> None:
        x, y = stateful["sampler"].batch()
        model(x[:12], y[:12]).backward()
        optimizer.step()
        optimizer.zero_grad()

    first, second = made(), made()
    if has_steps:
        advance(*first)
        first[1].param_groups[0]["lr"] = 0.05
        next(first[0].parameters()).requires_grad_(False)  # at a step by which the other has not come
    else:
        advance(*second)  # what it has learned is forgotten
        second[0].calls.add_(5)
    torch.rand(2)
    take_state(
        *second, torch.utils._pytree.tree_map(lambda v: v.clone() if hasattr(v, "clone") else v, own_state(*first))
    )
    for _ in range(2):
        advance(*first)
        advance(*second)
    for (name, a), b in zip(first[0].state_dict().items(), second[0].state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    assert second[2]["sampler"].at == first[2]["sampler"].at

    with pytest.raises(AutoparError, match=r"give|gives states of \['sampler'\], and this one has \[\]"):
        take_state(second[0], second[1], {}, own_state(*first))
    second[1].add_param_group({"params": [second[1].param_groups[0]["params"].pop()]})
    with pytest.raises(AutoparError, match="has 2 groups of parameters, and that of the other group 1"):
        take_state(*second, own_state(*first))


CARD = Card(0, "gpu=2", "graph", "layouts", "AdamW with 1 parameter groups", "weights")


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({}, ""),
        ({"axes": "gpu=4"}, "group 1 has the axes of its mesh gpu=4, and group 0 gpu=2"),
        ({"graph": "other"}, "group 1 has the plan with the fingerprint other/layouts, and group 0 graph/layouts"),
        ({"layouts": "other"}, "group 1 has the plan with the fingerprint graph/other, and group 0 graph/layouts"),
        ({"optimizer": "SGD"}, "group 1 has the optimizer SGD, and group 0 AdamW"),
        ({"weights": "other"}, "group 1 begins with other weights than group 0"),
        ({"group": 0}, "two groups have the number 0"),
    ],
)
def test_who_does_not_belong_to_the_others(changes: dict[str, Any], error: str) -> None:
    other = Card(**{**vars(CARD), "group": 1, **changes})
    found = difference([CARD, other], 1)
    assert found.startswith(error) and bool(found) == bool(error)
    assert difference([CARD, other], 0) == ""
    # Those that have done steps are right, whoever comes first; and a newcomer has any weights.
    assert bool(difference([other, CARD.at(3)], 0)) == (bool(error) and "weights" not in changes)
    assert difference([other, CARD.at(3)], 1) == ""
    assert Card.of_text(other.to_text()) == other


def test_the_card_of_a_model() -> None:
    first, other = parallel(), parallel(count=3)
    with torch.no_grad():
        other.up.bias.add_(1)
    cards = [card_of(m, torch.optim.AdamW(m.parameters()), n) for n, m in enumerate((first, parallel(), other))]
    assert difference(cards[:2], 1) == ""
    assert cards[2].weights != cards[0].weights
    assert "same model, batch size and plan=" in difference(cards, 2)


def test_a_group_that_does_not_meet_is_named() -> None:
    store = dist.HashStore()
    with pytest.raises(RankError, match=r"group 0 waited 0\.1 s for rank 1 of group 3 to meet"):
        swap_cards(store, CARD, 0, [0, 3], 0.1, lambda n: f"rank 1 of group {n}")


def test_what_the_body_leaves_out() -> None:
    run, _, _, optimizer, _ = group_of(0)
    steps = run.steps(3)
    with pytest.raises(AutoparError, match=r"average_gradients\(\) where the step is closed"):
        run.average_gradients()
    next(steps)
    forward(run)
    with pytest.raises(AutoparError, match=r"optimizer\.step\(\) where the step is open"):
        optimizer.step()
    with pytest.raises(AutoparError, match=r"commit\(\) where the step is open"):
        run.commit()
    with pytest.raises(AutoparError, match=r"has ended without average_gradients\(\)"):
        next(steps)
    steps = run.steps(3)
    next(steps)
    run.average_gradients()
    assert run.commit()
    with pytest.raises(AutoparError, match=r"step\(closure\) computes gradients within the step"):
        optimizer.step(lambda: 1.0)
    assert next(steps) == 1  # the script may leave the optimizer's step out, in all groups alike
    with pytest.raises(ValueError, match="total=23: so many rows"):
        run.rows(23)
    run.close()
    optimizer.step()  # its own again


def test_a_checkpoint_has_the_step(tmp_path: Path) -> None:
    run, _, model, optimizer, scheduler = group_of(0)
    steps = run.steps(5)
    for _ in range(2):
        next(steps)
        forward(run)
        run.average_gradients()
        assert run.commit()
        optimizer.step()
    assert run.leads
    autopar.checkpoint.save(tmp_path, model, optimizer, run=run, scheduler=scheduler)
    other, _, model, optimizer, scheduler = group_of(1)
    autopar.checkpoint.load(tmp_path, model, optimizer, run=other, scheduler=scheduler)
    assert next(other.steps(5)) == other.step == 2
    assert not other.leads
