"""Optimizers that need whole parameters, closures, and copies and in-place shapes of tensors on the mesh."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.launch import Ranks
from tests.distributed.test_whole_operators import PINS, mesh_of, net, noise, whole

OPTIMIZERS: dict[str, Any] = {
    "LBFGS": lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "Rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
}


def parallel_net() -> Any:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    return parallelize(net(), mesh_of(2), search=Search(pins=PINS))


def trained(model: Any, kind: Any, fails: bool = False) -> dict[str, Any]:
    """Losses, parameters, gradients and the state that one device would save, after steps with a closure."""
    optimizer, found = kind(model.parameters()), {}
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(noise(8, 8) + step) - noise(8, 4)).square().mean()
            loss.backward()
            return loss

        if fails and step == 1:
            with pytest.raises(ZeroDivisionError):
                optimizer.step(lambda: 1 / 0)
        found[f"loss {step}"] = whole(optimizer.step(closure))
    if fails:
        optimizer = copy.deepcopy((model, optimizer))[1]  # with gradients, of which no copy is made
    found |= {f"gradient {n}": whole(p.grad) for n, p in model.named_parameters()}
    found |= {n: whole(p) for n, p in model.named_parameters()}
    for number, state in optimizer.state_dict()["state"].items():
        found |= {f"{number} {k}": whole(v) for k, v in state.items() if isinstance(v, torch.Tensor)}
    return found


def steps(rank: int) -> dict[str, float]:
    apart = {}
    for name, kind in OPTIMIZERS.items():
        found, expected = trained(parallel_net(), kind, fails=True), trained(net(), kind)
        assert set(found) == set(expected)
        apart[name] = max(float((found[k] - expected[k]).abs().max()) for k in expected)
    return apart


class Kron(torch.optim.Optimizer):
    """Compiles how it multiplies gradients by matrices, as timm's optimizer of this name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.multiplied = torch.compile(lambda *factors: torch.einsum("ab,bc->ac", *factors), backend="eager")

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            rows = p.grad.reshape(p.shape[0], -1)
            q = self.state[p].setdefault("Q", torch.eye(len(rows), dtype=p.dtype))
            q.add_(rows @ rows.T)
            p.sub_(self.param_groups[0]["lr"] * self.multiplied(q, rows).view_as(p))


def compiled_steps(rank: int) -> float:
    """How far apart parameters are, some of which are split and some whole on each device."""
    models = (net(), parallel_net())
    for model in models:
        optimizer = Kron(model.parameters())
        for step in range(3):
            optimizer.zero_grad()
            (model(noise(8, 8) + step) - noise(8, 4)).square().mean().backward()
            optimizer.step()
    found, expected = (dict(m.named_parameters()) for m in models)
    return max(float((whole(found[n]) - whole(p)).abs().max()) for n, p in expected.items())


def refused(rank: int) -> str:
    """A parameter that other code has split."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from autopar.errors import AutoparError

    parallel_net()
    split = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh_of(2), [Shard(0)]))
    with pytest.raises(AutoparError) as raised:
        torch.optim.Rprop([split]).step()
    return str(raised.value)


def test_parameters_that_cannot_be_made_whole_are_an_error(two_ranks: Ranks) -> None:
    for message in two_ranks.run(refused):
        assert message.startswith("optimizer Rprop writes into them where masks say, so that it needs them whole, and")
        assert "is a DTensor of other code than autopar's. Keep parameters whole by Search(recipe='ddp')" in message


@pytest.mark.slow
def test_optimizers_of_whole_parameters_take_the_steps_of_one_device(two_ranks: Ranks) -> None:
    for found in two_ranks.run(steps):
        assert all(apart < 1e-9 for apart in found.values()), found


def shapes(w: Any) -> list[Any]:
    """What changes a shape in place, or is written by ``out=`` or by strides."""
    vector = w[0] @ w
    turned, filled = (w + 0).t_().unsqueeze_(0), w + 0
    filled.fill_diagonal_(3.0)
    into = [w.float(), torch.zeros_like(whole(w))]
    torch.mul(torch.ones(4, 4), torch.full((4, 4), 2.0), out=into[0])
    torch.add(w, 1, out=into[1])
    return [vector, vector @ w.T, w.sum(0, keepdim=True).squeeze_(0), turned, turned * turned, filled, *into,
            torch.cat([torch.tensor([]), w, w], -1)]  # fmt: skip


def changed_in_place(rank: int) -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from autopar.errors import AutoparError

    parallel_net()
    values = torch.arange(16.0, dtype=torch.float64).view(4, 4)
    for placement in (Shard(0), Shard(1), Replicate()):
        split = distribute_tensor(values, mesh_of(2), [placement])
        for found, expected in zip(shapes(split), shapes(values), strict=True):
            assert (tuple(found.shape), found.dtype) == (tuple(expected.shape), expected.dtype)
            assert torch.equal(whole(found), expected)
        with pytest.raises(AutoparError, match=r"mul.out is given .* \[4, 4\] for a result of shape \[4\]"):
            torch.mul(split[0], 2, out=split)
    rows = distribute_tensor(values, mesh_of(2), [Shard(0)])
    with pytest.raises(AutoparError, match=r"call squeeze\(\), without the underscore"):
        rows[:1].squeeze_(0)


def test_shapes_that_change_in_place_are_those_of_one_device(two_ranks: Ranks) -> None:
    two_ranks.run(changed_in_place)


def compiled(rank: int) -> float:
    model, plain = parallel_net(), net()

    def loss(of: nn.Module) -> torch.Tensor:
        found: torch.Tensor = nn.functional.cross_entropy(of(noise(8, 8)), torch.arange(8) % 4)
        return found

    found: torch.Tensor = torch.compile(loss, backend="eager")(model)
    found.backward(), loss(plain).backward()
    pairs = zip(model.parameters(), plain.parameters(), strict=True)
    return max(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs)


@pytest.mark.slow
def test_a_loss_compiled_with_the_call_of_the_model_is_eagers(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(compiled)) < 1e-9


def by_parts(rank: int) -> float:
    """Gradients of a script that calls the model, a slice of it, and a part of it."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    def made() -> nn.Sequential:
        torch.manual_seed(1)
        return nn.Sequential(nn.Embedding(8, 4), nn.Tanh(), nn.Linear(4, 8)).double()

    pins = {"0.weight": ("S(0)",), "2.weight": ("S(0)",)}
    models, tokens = (
        [parallelize(made(), mesh_of(2), search=Search(pins=pins)), made()],
        torch.arange(16).view(2, 8) % 8,
    )
    for model in models:
        read, rows = model[:2](tokens), model[0](tokens)
        assert type(model[:2]) is nn.Sequential
        # Twice: torch reduces what a split table gives once, and fails then.
        (model(tokens).square().mean() + model[2](read + rows + rows.tanh()).square().mean()).backward()
    pairs = zip(*(m.parameters() for m in models), strict=True)
    return max(float((whole(a.grad) - b.grad).abs().max()) for a, b in pairs)


def test_parts_that_a_script_calls_are_those_of_one_device(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(by_parts)) < 1e-9


def test_optimizers_that_compile_their_steps(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(compiled_steps)) < 1e-12
