"""What scripts do to parameters, gradients and outputs, and torch has no rule for, or a wrong one; against eager."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.distributed.launch import Ranks, mesh_of

PINS: dict[str, Any] = {
    "0.weight": ("S(1)",),
    "2.weight": ("S(0)",),
    "0.bias": ("S(0)",),
    "2.bias": ("R",),
    "batch.0": ("S(0)",),
}
DOUBLE = torch.float64


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4)).double()


def noise(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=DOUBLE)


def every_third(p: Tensor) -> Tensor:
    return torch.arange(p.numel()).view(p.shape) % 3 == 0


def masks(p: Any) -> None:
    p.grad[p.grad.abs() < 0.05] = 0
    p.grad[every_third(p)] *= 2
    p.grad.mul_(~every_third(p))
    p.grad.index_add_(0, torch.tensor([1]), torch.ones(1, *p.shape[1:], dtype=DOUBLE))
    p.grad.add_(p.grad[p.grad > 0].sum())


def views(p: Any) -> None:
    p.grad[:3] = 0.5
    p.grad[..., -1] *= 3
    p.grad.view(-1)[2:5].add_(1)
    p.grad[1].copy_(noise(*p.shape[1:]))
    first, second = p.grad.chunk(2)
    first.mul_(2)
    second.view(-1)[0] = 7
    row = p.grad[1:][0]
    p.grad.mul_(2)
    p.grad.add_(row.sum() + first.sin().sum())
    second.mul_(row.sum())


def scalars(p: Any) -> None:
    total = torch.zeros((), dtype=DOUBLE)
    total += p.grad.norm()
    p.grad.div_(1 + p.grad.norm().item() + float(p.grad.sum()) + float(f"{total:.3f}"))
    listed = torch.tensor([p.grad.norm(), p.grad.sum()], dtype=p.dtype) + torch.tensor([p.grad.argmax(), p.grad.ndim])
    p.grad.div_(1 + float(listed.norm()) + torch.tensor([p.grad.sum() > 0]).sum().item())


def draws(p: Any) -> None:
    torch.manual_seed(4)
    p.grad.add_(torch.randn_like(p.grad))
    nn.init.uniform_(p)
    p.grad.add_(torch.empty_like(p.grad).exponential_())
    p.grad.data = p.grad.data * 0.5
    with torch.no_grad():
        p += functional.dropout(torch.ones_like(p), 0.5)


def factories(p: Any) -> None:
    nn.init.eye_(p) if p.ndim == 2 else nn.init.ones_(p)
    torch.full(p.shape, 0.3, out=p.grad, dtype=DOUBLE)
    p.data.add_(p.grad)
    torch.manual_seed(4)
    torch.randn(p.shape, out=p.grad)
    p.data.add_(p.grad)
    torch.cumsum(noise(*p.shape), 0, out=p.grad)
    p.data.add_(p.grad)
    torch.bernoulli(noise(*p.shape).sigmoid(), out=p.grad)


def several(p: Any) -> None:
    """Into tensors of the mesh, plain ones that hold anything, empty ones, and those of a plain argument."""
    rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    ranks = torch.arange(p.numel()).view(p.shape) + rank
    torch.sort(p.detach(), 0, out=(p.grad, ranks))
    torch.cummax(noise(*p.shape), 0, out=(extra := torch.empty_like(p), ranks))
    most, places = torch.max(p.detach(), -1, out=(torch.empty(0, dtype=DOUBLE), torch.empty(0, dtype=torch.int64)))
    least = torch.amin(p.detach(), 0, out=torch.full(p.shape[1:], float(rank), dtype=DOUBLE))
    p.data += extra.detach() + (ranks + places.sum()) * most.sum() + least
    torch.topk(noise(*p.shape), p.shape[0], 0, out=(p.grad, ranks))
    torch.logaddexp(noise(*p.shape), noise(*p.shape), out=extra)
    p.data += extra.detach()


def inference(p: Any) -> None:
    """Views of tensors that were made outside of inference mode are written to in it."""
    with torch.inference_mode():
        total = p.view(-1)[1:5].sum() + p.flatten()[2] + p.unflatten(0, (-1, 2))[1].sum() + p.t().reshape(-1)[-1]
        p.grad.view(-1)[2:5].add_(total)
        p.grad[0].mul_(p.unbind()[1].sum())
        p.detach().unsqueeze(0).mul_(2)


@torch.no_grad()
def terms(p: Any) -> None:
    """Into tensors of which each rank has a term: of a sum, a product, a mean or a maximum, and into views of these."""
    if p.ndim < 2:
        return
    for reduced in (p.grad.t() @ p, p.prod(0), p.mean(0), p.amax(0), p.amin(-1)):
        reduced[0] = 0.5
        part = reduced[1:3]
        reduced.add_(p.mean())
        reduced.sub_(reduced.abs())
        part.mul_(part.sin())
        p.grad.add_(reduced.sum() + part.sum() + reduced.clone().fill_(2).sum())


@torch.no_grad()
def into_terms(p: Any) -> None:
    """What is split is added, copied and multiplied into sums of which each rank has a term."""
    if p.ndim < 2:
        return
    update = p.t() @ p.grad  # of parts of the dim that is summed over
    square = p.grad.t() @ p
    row = update[0]
    update.add_(square.tanh()).copy_(torch.where(update > 0, update, square.sin()))
    torch.mul(update, square.sin(), out=square)
    torch._foreach_add_([update, square], [square.cos(), update.cos()])
    p.grad.copy_((p @ update).sin() + row + square.sum())


CHANGES: tuple[Callable[[Any], None], ...] = (
    masks, views, scalars, draws, factories, several, inference, terms, into_terms,
)  # fmt: skip
if torch.__version__.startswith("2.11."):  # there `views` is an error: see the contract tests
    CHANGES = (masks, scalars, draws, factories, several)

WEIGHT = torch.arange(1.0, 5.0, dtype=DOUBLE)
LOSSES: tuple[Callable[[Tensor, Tensor], Tensor], ...] = (
    lambda out, y: functional.cross_entropy(out, y.argmax(1), weight=WEIGHT) + out[:, 1:].square().mean(),
    lambda out, y: functional.mse_loss(out, y) + functional.binary_cross_entropy_with_logits(out, y.sigmoid()),
    lambda out, y: out[y > 0].mean() + (out[torch.arange(8), y.argmax(1)]).std(),
)


def whole(tensor: Any) -> Tensor:
    found: Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return found.detach()


def differences(rank: int) -> dict[str, float]:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    parallel, found = parallelize(net(), mesh_of(2), search=Search(pins=PINS)), {}
    for loss in LOSSES:
        plain, scale = net(), [nn.Parameter(torch.ones(4, dtype=DOUBLE)) for _ in range(2)]
        values = [loss(m(noise(8, 8)) * s, noise(8, 4)) for m, s in zip((parallel, plain), scale, strict=True)]
        parallel.zero_grad()
        for value in values:
            value.backward()
        gradients = [
            [p.grad for p in chain(m.parameters(), [s])] for m, s in zip((parallel, plain), scale, strict=True)
        ]
        apart = [float((whole(a) - b).abs().max()) for a, b in zip(*gradients, strict=True)]
        found[f"loss {LOSSES.index(loss)}"] = max(abs(values[0].item() - values[1].item()), *apart)
    for change in CHANGES:
        plain, states = net(), []
        for model in (parallel, plain):
            model.load_state_dict(copy.deepcopy(net().state_dict()))
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            optimizer.zero_grad()
            model(noise(8, 8)).square().mean().backward()
            for parameter in model.parameters():
                change(parameter)
            optimizer.step()
            states.append([whole(p) for p in model.parameters()])
        found[change.__name__] = max(float((a - b).abs().max()) for a, b in zip(*states, strict=True))
    return found


@pytest.mark.slow
def test_operators_without_a_rule_are_eagers(two_ranks: Ranks) -> None:
    for found in two_ranks.run(differences):
        assert max(found.values()) < 1e-9, found


class Encoder(nn.Module):
    """A part that a script calls beside the model: a convolution and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.norm = nn.Conv1d(4, 6, 3, padding=1), nn.BatchNorm1d(6)
        self.double()

    def encode(self, x: Tensor) -> Tensor:
        return self.norm(self.conv(x))

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x).square().mean()


def with_a_part(model: Any) -> list[Tensor]:
    """Parameters, their last gradients, and buffers."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        (model(noise(4, 4, 6)) if step == 0 else model.encode(noise(4, 4, 6)).sin().mean()).backward()
        optimizer.step()
    model.eval()
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *model.buffers()]
    return [whole(t).double() for t in [*tensors, model.encode(noise(4, 4, 6))]]


def part(rank: int) -> float:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    pins: Any = {"conv.weight": "S(0)", "norm.weight": "S(0)"}
    parallel = parallelize(Encoder(), mesh_of(2), search=Search(pins=pins))
    return max(float((a - b).abs().max()) for a, b in zip(with_a_part(parallel), with_a_part(Encoder()), strict=True))


def test_a_part_that_a_script_calls(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(part)) < 1e-9


def refused(rank: int) -> list[str]:
    import pickle

    import safetensors.torch

    from autopar.errors import AutoparError, RankError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    model = parallelize(net(), mesh_of(2), search=Search(pins=PINS))
    model(noise(8, 8)).sum().backward()
    parameter = next(model.parameters())
    with pytest.raises(RankError) as differs:
        parameter.grad.mul_(torch.full(parameter.shape, float(rank), dtype=DOUBLE))
    with pytest.raises(AutoparError) as part:
        pickle.dumps(model.state_dict())
    with pytest.raises(RuntimeError) as values:
        parameter.detach().numpy()
    with pytest.raises(RuntimeError) as memory:
        safetensors.torch.save(model.state_dict())
    assert torch.equal(pickle.loads(pickle.dumps(dict(model.named_parameters())["2.bias"])), net()[2].bias)
    return [str(e.value) for e in (differs, part, values, memory)]


def test_what_would_be_this_ranks_alone_is_refused(two_ranks: Ranks) -> None:
    for differs, part, values, memory in two_ranks.run(refused):
        assert "takes a plain tensor of shape [6, 8]" in differs and "torch.manual_seed" in differs
        assert "autopar.checkpoint.torch_save" in part and "Shard(dim=1)" in part
        assert "full_tensor().numpy()" in values
        assert "save model.full_state_dict()" in memory and "Shard(dim=1)" in memory


class Anchored(nn.Linear):
    """Held near a buffer and an attribute that are computed from its weight between steps."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(8, 4)
        self.register_buffer("old", torch.zeros(4, 8))
        self.center = torch.zeros(8)

    def forward(self, x: Tensor) -> Tensor:
        apart = (self.weight - self.old).square().sum() + (self.weight - self.center).square().mean()
        return super().forward(x).square().mean() + apart


def anchored(rank: int) -> float:
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    models: list[Any] = [parallelize(Anchored().double(), mesh_of(2), search=Search(pins={"weight": ("S(1)",)}))]
    models.append(Anchored().double())
    if rank == 0:
        models[0].register_forward_hook(lambda *_: None).remove()  # numbers of hooks differ between ranks from here on
    for step in range(2):
        for model in models:
            model(noise(8, 8)).backward()
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            if step == 0:
                model.old, model.center = model.weight.detach().clone(), model.weight.detach().mean(0)
                model.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    return float((whole(models[0].weight) - models[1].weight).abs().max())


def test_state_computed_from_parameters_is_whole(two_ranks: Ranks) -> None:
    assert max(two_ranks.run(anchored)) < 1e-9
