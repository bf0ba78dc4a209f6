"""What a script keeps, computes and switches between calls of a parallel model, on two ranks; against eager."""

from __future__ import annotations

import copy
from collections import namedtuple
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from autopar import parallelize
from autopar.search.options import Search
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices

pytestmark = pytest.mark.distributed

D = torch.float64
TOLERANCE = 1e-9
Pair = namedtuple("Pair", "tensor name")

BANK: list[Any] = []
"""A global that a model reads."""


def x(step: int) -> torch.Tensor:
    return torch.randn(8, 6, dtype=D, generator=torch.Generator().manual_seed(step))


def ids(step: int) -> torch.Tensor:
    return torch.randint(0, 16, (8, 4), generator=torch.Generator().manual_seed(step))


class Mlp(nn.Module):
    """Two linear layers; returns the loss and what is between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(6, 16, dtype=D), nn.Linear(16, 4, dtype=D)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.up(x))
        return self.down(hidden + self.more(hidden)).square().mean(), hidden

    def more(self, hidden: torch.Tensor) -> Any:
        return 0.0


class Keeps(Mlp):
    """Adds what the script has kept of earlier outputs."""

    last = None

    def __init__(self) -> None:
        super().__init__()
        self.bank: list[Any] = []
        self.kept = SimpleNamespace(pair=Pair(None, "none"), by_name={})

    def more(self, hidden: torch.Tensor) -> Any:
        if self.last is None:
            return 0.0
        kept = self.bank[-1] + self.kept.pair.tensor.detach() + self.kept.by_name["a"][0]
        return 0.1 * (self.last.detach() + kept)


def keeps_outputs(model: Any, step: int) -> torch.Tensor:
    loss, hidden = model(x(step))
    model.last, model.bank[:] = hidden, [hidden.detach()]  # one with its history, which the model cuts off
    model.kept.pair, model.kept.by_name["a"] = Pair(hidden * 2, "twice"), (hidden.detach() * 3,)
    return loss  # type: ignore[no-any-return]


class Weights(Mlp):
    """Has its weights in a list, too."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = [self.up.weight, self.down.weight]

    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x)[0] + sum(w.square().sum() for w in self.weights)


class Momentum(Mlp):
    """The average of its layers, which is moved by new tensors in place of their values."""

    def __init__(self) -> None:
        super().__init__()
        self.slow = nn.ModuleList([copy.deepcopy(self.up), copy.deepcopy(self.down)]).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        with torch.no_grad():
            fast = [*self.up.parameters(), *self.down.parameters()]
            for slow, own in zip(self.slow.parameters(), fast, strict=True):
                slow.data = slow.data * 0.9 + own.data * 0.1
            wanted = self.slow[1](torch.tanh(self.slow[0](x)))
        return functional.mse_loss(self.down(torch.tanh(self.up(x))), wanted + 1)


class Transposed(nn.Module):
    """An embedding by the columns of its weight, as of adapters: the gradient comes with other strides."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.down, self.up = (nn.Parameter(torch.randn(4, n, dtype=D)) for n in (16, 8))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return (functional.embedding(ids, self.down.T) @ self.up).square().mean()


class Switched(nn.Module):
    """Two layers that give three times two heads, of which one is used at a time."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(6, 24, dtype=D), nn.Linear(6, 24, dtype=D)
        self.uses_second = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (self.second if self.uses_second else self.first)(x)
        q, k, v = found.unflatten(-1, (3, 2, 4)).unbind(1)
        return (torch.softmax(q @ k.mT, -1) @ v).square().mean()


def switches(model: Any, step: int) -> torch.Tensor:
    model.uses_second = step % 2 == 1
    return model(x(step))  # type: ignore[no-any-return]


def whole(tensor: Any) -> Any:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Output(Mlp):
    def forward(self, x: torch.Tensor) -> Any:
        return self.down(super().forward(x)[1])


def of_hooks(model: Any, step: int) -> torch.Tensor:
    """A loss of the output, and of what a hook has seen and has computed."""
    seen: list[torch.Tensor] = []
    handle = model.up.register_forward_hook(lambda module, args, output: seen.extend((output, output.abs().mean())))
    loss = whole(model(x(step))).square().mean() + 0.1 * seen[0].square().mean() + 0.1 * seen[1]
    handle.remove()
    return loss


def of_hooks_that_return(model: Any, step: int) -> torch.Tensor:
    """What they have looked at."""
    looked: list[float] = []
    handles = [
        model.up.register_forward_hook(lambda module, args, output: (looked.append(output.norm().item()), output)[1]),
        model.down.register_forward_pre_hook(lambda module, args: (looked.append(args[0].norm().item()), args)[1]),
    ]
    loss = whole(model(x(step))).square().mean() + sum(looked)
    for handle in handles:
        handle.remove()
    return loss


ADAMW: Any = torch.optim.AdamW
Step = Callable[[Any, int], torch.Tensor]
CASES: dict[str, tuple[type[nn.Module], Step, dict[str, Any]]] = {
    "outputs in attributes and containers": (Keeps, keeps_outputs, {}),
    "a loss of what hooks see": (Output, of_hooks, {}),
    "hooks that look at values and return them": (Output, of_hooks_that_return, {}),
    "layers that are used in turn": (Switched, switches, {}),
    "a fused step on gradients with other strides": (Transposed, lambda m, step: m(ids(step)), {"fused": True}),
    "weights in a list": (Weights, lambda m, step: m(x(step)), {}),
    "new values of parameters in forward": (Momentum, lambda m, step: m(x(step)), {}),
}


def apart(rank: int, name: str) -> float:
    """The largest difference from one device in losses, parameters and buffers over three steps."""
    kind, loss_of, options = CASES[name]
    plain, worst = kind(), [0.0]
    model: Any = parallelize(
        copy.deepcopy(plain), mesh_of(2), cluster=slow_devices(), search=Search(recipe="fsdp"), timeout=WAIT
    )
    optimizers = [ADAMW([p for p in m.parameters() if p.requires_grad], lr=1e-2, **options) for m in (model, plain)]
    for step in range(3):
        losses = []
        for m, optimizer in zip((model, plain), optimizers, strict=True):
            optimizer.zero_grad()
            losses.append(loss_of(m, step))
            losses[-1].backward()
            optimizer.step()
        found, expected = model.full_state_dict(), plain.state_dict()
        pairs = [(whole(losses[0]), losses[1]), *((found[n], expected[n]) for n in expected)]
        worst += [float((a - b).detach().abs().max()) for a, b in pairs]
    return float(torch.tensor(worst).max())


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_what_a_script_does_between_calls(two_ranks: Ranks, name: str) -> None:
    assert max(two_ranks.run(apart, name)) < TOLERANCE


class Carries(Keeps):
    """What it has kept has part in the next loss."""

    def more(self, hidden: torch.Tensor) -> Any:
        return 0.0 if self.last is None else 0.1 * self.last


class Banked(Mlp):
    def more(self, hidden: torch.Tensor) -> Any:
        return sum(0.1 * kept for kept in BANK)


def carried(model: Any) -> None:
    """A gradient through an earlier call, or through what was computed of a parameter."""
    model.last = model(x(0))[1]
    model(x(1))


def derived(model: Any) -> None:
    model(x(0))
    model.last = model.down.bias.sum() * torch.ones(8, 16, dtype=D)
    model(x(1))


def in_a_list(model: Any) -> None:
    model(x(0))
    model.more = lambda hidden: model.bank[0] * hidden
    model.bank = [torch.ones(16, dtype=D, requires_grad=True) * 2]
    model(x(1))


def in_a_global(model: Any) -> None:
    BANK[:] = [model(x(0))[1].detach()]
    try:
        model(x(1))
    finally:
        BANK.clear()


def of_a_hook(model: Any) -> None:
    seen: list[torch.Tensor] = []
    model.up.register_forward_hook(lambda module, args, output: seen.append(output.abs().mean()))
    (model(x(0))[0] + seen[0]).backward()


def of_a_hook_that_writes(model: Any) -> None:
    def clip(module: Any, args: Any) -> None:
        if args[0].norm().item() > 0:
            module.weight.data.mul_(0.5)

    model.up.register_forward_pre_hook(clip)
    model(x(0))


def by_other_weights(model: Any) -> None:
    weights = {n: p * 1.5 for n, p in model.named_parameters()}
    torch.func.functional_call(model, weights, (x(0),))[0].backward()


def by_plain_weights(model: Any) -> None:
    model(x(0))
    torch.func.functional_call(model, {"up.weight": torch.zeros(model.up.weight.shape)}, (x(0),))


REFUSED: tuple[tuple[type[nn.Module], Callable[[Any], None], str], ...] = (
    (Carries, carried, "'last' is no parameter, and requires a gradient, which would be lost"),
    (Carries, derived, "'last' is no parameter, and requires a gradient, which would be lost"),
    (Keeps, in_a_list, "'bank[0]', a tensor of shape [16] that requires a gradient and is no parameter"),
    (Banked, in_a_global, "it lies on the mesh, each rank has a part of it, and the model has it from a closure"),
    (Mlp, of_a_hook, "a gradient was asked through what the hook of up sees of the parallelized model"),
    (Mlp, of_a_hook_that_writes, "of up looks at values and writes to 'up.weight', which the rest of the call"),
    (Mlp, by_other_weights, "a computed tensor in place of parameter 'up.weight', as under torch.func.functional_call"),
    (Mlp, by_plain_weights, "or torch.func.functional_call with nn.Parameter(value); to replace or resize"),
)


def refused(rank: int) -> list[str]:
    found = []
    for kind, act, _ in REFUSED:
        model = parallelize(
            kind(), mesh_of(2), cluster=slow_devices(), search=Search(recipe="fsdp"), loss=0, timeout=WAIT
        )
        try:
            act(model)
            found.append("none")
        except Exception as e:
            found.append(str(e))
    return found


@pytest.mark.slow
def test_gradients_that_would_be_lost(two_ranks: Ranks) -> None:
    for found in two_ranks.run(refused):
        for message, (_, act, part) in zip(found, REFUSED, strict=True):
            assert part in message, (act.__name__, message)


class Notes(Mlp):
    """Notes the batch and a count in attributes that have defaults in its class, and returns the batch, too."""

    seen: Any = None
    count: Any = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        self.seen, self.count = x + 1, (x > 0).sum()
        return super().forward(x)[0], x * 2, x


def noted(rank: int) -> list[float]:
    """Differences of what one call notes and returns from eager, in a pipeline."""
    pins = {"stages": 2, "stage_axis": "a", "microbatches": 2}
    plain = Notes()
    model: Any = parallelize(
        copy.deepcopy(plain), mesh_of(2), cluster=slow_devices(), search=Search(pins=pins), timeout=WAIT
    )
    found, expected = ([*m(x(0)), m.seen, m.count.double()] for m in (model, plain))
    return [float((whole(a) - b).detach().abs().max()) for a, b in zip(found, expected, strict=True)]


def test_what_a_pipeline_returns_of_the_batch_alone(two_ranks: Ranks) -> None:
    """All of its rows, not those of a microbatch; and attributes with defaults in the class are the model's own."""
    for found in two_ranks.run(noted):
        assert max(found) < TOLERANCE, found
