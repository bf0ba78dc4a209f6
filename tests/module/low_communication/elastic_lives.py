"""Lives of elastic workers, in threads or processes, and what they compute, written down in plain PyTorch."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

EVERY = 3
Log = Callable[..., None]


class Net(nn.Module):
    """With a buffer that every step changes, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.last = nn.Linear(4, 6), nn.Linear(6, 4), nn.Linear(4, 4)
        self.last.requires_grad_(False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.add_(x.shape[0])
        return (self.last(self.down(self.up(x).tanh())) - x).square().mean()


def made(seed: int) -> Net:
    torch.manual_seed(seed)
    return Net().double()


def batch(step: int, worker: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * worker + step)
    return torch.randn(4, 4, dtype=torch.float64, generator=generator)


def optimized(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.9)


def tokens(worker: int) -> int:
    """That each counts in a step."""
    return 2 + worker


class KilledError(BaseException):
    """What ends a thread as SIGKILL ends a process."""


def kill_at(local: Any, where: str, round_: int, kill: Callable[[], None]) -> None:
    """Have a worker die in the meeting that ends a round."""

    def before(owner: Any, name: str) -> None:
        then = getattr(owner, name)

        def call(*args: Any) -> Any:
            if local.rounds == round_ - 1 and local.steps == round_ * EVERY:
                kill()
            return then(*args)

        setattr(owner, name, call)

    names = {"coming": (local, "_meet"), "exchange": (local._links, "mean"), "voted": (local._meetings, "_votes")}
    before(*names[where])


def live(
    local: Any, model: Any, scheduler: Any, worker: int, total: int, log: Log, before_round: Callable[[int], None]
) -> None:
    """Train until the run has made so many rounds."""
    optimizer = local.optimizer
    log(rounds=local.rounds, members=local.members, state=state_of(model))
    while local.rounds < total:
        if local.steps % EVERY == EVERY - 1:
            before_round(local.rounds + 1)
        optimizer.zero_grad()
        local.add_tokens(tokens(worker))
        model(batch(local.steps, worker)).backward()
        rounds = local.rounds
        optimizer.step()
        scheduler.step()
        if local.rounds > rounds:
            log(rounds=local.rounds, members=local.members, state=state_of(model))


def state_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.full_state_dict().items()}


def wait_until(ready: Callable[[], Any], what: str, seconds: float = 120.0) -> None:
    deadline = time.monotonic() + seconds
    while not ready():
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.01)


def expected(history: Sequence[Sequence[tuple[int, bool]]], weighted: bool, outer: dict[str, Any]) -> list[Any]:
    """States of all members after each meeting: ``[meeting][worker][name]``.

    Args:
        history: of each meeting that counts its workers, and whether each is new; the first is of those that begin.
        weighted: by the tokens of a round.
        outer: arguments of the outer SGD.
    """
    first = made(history[0][0][0])
    shared = {n: nn.Parameter(p.detach().clone()) for n, p in first.named_parameters() if p.requires_grad}
    outer_optimizer = torch.optim.SGD(shared.values(), **outer)
    lives: dict[int, Any] = {}
    found = []
    for meeting, members in enumerate(history):
        begins = (meeting - 1) * EVERY
        differences, weights = [], []
        for worker, (model, optimizer, scheduler) in lives.items():
            if (worker, False) not in members:
                continue
            for step in range(begins, begins + EVERY):
                optimizer.zero_grad()
                model(batch(step, worker)).backward()
                optimizer.step()
                if step < begins + EVERY - 1:
                    scheduler.step()
            own = dict(model.named_parameters())
            differences.append({n: p.detach() - own[n].detach() for n, p in shared.items()})
            weights.append(EVERY * tokens(worker) if weighted else 1)
        if differences:
            for name, parameter in shared.items():
                terms = [w * d[name] for w, d in zip(weights, differences, strict=True)]
                parameter.grad = torch.stack(terms).sum(0) / sum(weights)
            outer_optimizer.step()
        giver = min((w for w, new in members if not new), default=None)
        for worker, new in members:
            if new:
                model = copy.deepcopy(first if giver is None else lives[giver][0])
                optimizer, scheduler = optimized(model)
                if giver is not None:
                    optimizer.param_groups[0]["lr"] = lives[giver][1].param_groups[0]["lr"]
                    scheduler.load_state_dict(lives[giver][2].state_dict())
                lives[worker] = model, optimizer, scheduler
        lives = {w: lives[w] for w, _ in members}
        for model, _, scheduler in lives.values():
            with torch.no_grad():
                for name, own_parameter in model.named_parameters():
                    if name in shared:
                        own_parameter.copy_(shared[name])
            if meeting:
                scheduler.step()  # comes after the optimizer's step, which ends with the meeting
        found.append({w: {n: t.clone() for n, t in lives[w][0].state_dict().items()} for w in lives})
    return found


STREAM = {"every": 4, "fragments": 2, "delay": 1, "mix": 0.25}
PARTS = (("up",), ("down",))
"""The fragments of `STREAM`, by the beginnings of names; one is met about every two steps."""


def streamed(meetings: Sequence[dict[int, bool]], steps: int, outer: dict[str, Any]) -> list[dict[int, Any]]:
    """States after each step of each worker: ``[step][worker][name]``, step 0 being the beginning.

    Args:
        meetings: of each, the first at the beginning, its workers, and whether each is new; means are weighted.
        steps: of the run.
        outer: arguments of the outer SGD.
    """
    shared = {n: nn.Parameter(p.detach().clone()) for n, p in made(0).named_parameters() if p.requires_grad}
    outer_optimizers = [torch.optim.SGD([shared[n] for n in shared if n.startswith(names)], **outer) for names in PARTS]
    lives: dict[int, Any] = {w: (m := made(0), *optimized(m)) for w in meetings[0]}
    trained = {w: [0, 0] for w in lives}
    found = [{w: state_in(lives[w][0]) for w in lives}]
    for step in range(1, steps + 1):
        number, fragment = step // 2, (step // 2 + 1) % 2
        for worker, (model, optimizer, _) in lives.items():
            optimizer.zero_grad()
            model(batch(step - 1, worker)).backward()
            optimizer.step()
            trained[worker] = [t + tokens(worker) for t in trained[worker]]
        named = {w: dict(life[0].named_parameters()) for w, life in lives.items()}
        names = [n for n in shared if n.startswith(PARTS[fragment])]
        if step % 2 == 1 and number:  # what was sent in the step before is used
            with torch.no_grad():
                for worker in [w for w, new in meetings[number].items() if w in lives and not new]:
                    for n in names:
                        named[worker][n].copy_(0.25 * named[worker][n] + 0.75 * shared[n])
        for life in lives.values():
            life[2].step()
        if step % 2 == 0:
            members = meetings[number]
            lives = {w: life for w, life in lives.items() if w in members}
            weights = {w: trained[w][fragment] for w in lives}
            for n in names:
                terms = [weights[w] * (shared[n].detach() - named[w][n].detach()) for w in lives]
                shared[n].grad = torch.stack(terms).sum(0) / sum(weights.values())
            outer_optimizers[fragment].step()
            for worker in lives:
                trained[worker][fragment] = 0
            for worker in [w for w, new in members.items() if new]:
                peer = lives[min(lives)]
                model = copy.deepcopy(peer[0])
                optimizer, scheduler = optimized(model)
                optimizer.param_groups[0]["lr"] = peer[1].param_groups[0]["lr"]
                scheduler.load_state_dict(peer[2].state_dict())
                with torch.no_grad():
                    for n, parameter in model.named_parameters():
                        if n in shared:
                            parameter.copy_(shared[n])
                lives[worker], trained[worker] = (model, optimizer, scheduler), [0, 0]
        found.append({w: state_in(lives[w][0]) for w in lives})
    return found


def state_in(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}
