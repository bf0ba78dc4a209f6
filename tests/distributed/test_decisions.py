"""Where torch's rules for tensors of the mesh are wrong, or its cache of them is: against plain tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.distributed.launch import Ranks, mesh_of

DOUBLE = torch.float64
TWO = torch.tensor(2.0, dtype=DOUBLE)

REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    "any": lambda x: (x > 0.8).any(0),
    "any kept": lambda x: (x > 0.8).any(1, keepdim=True),
    "all": lambda x: (x > -1).all(0),
    "norm": lambda x: x.norm(dim=0),
    "norm 3": lambda x: torch.linalg.vector_norm(x, 3, dim=1),
    "product": lambda x: x.prod(0),
    "largest": lambda x: x.amax(0),
    "sum": lambda x: x.sum(0),
    "mean": lambda x: x.mean(1),
    "square": lambda x: x.T @ x,
}
READ: dict[str, Callable[[Tensor], Any]] = {
    "numbers": lambda y: y.double(),
    "counted": lambda y: y.sum(),
    "half": lambda y: y * 0.5,
    "any of": lambda y: y.any(),
    "stacked": lambda y: torch.stack([y, y * 2]),
    "complex": lambda y: torch.complex(y.double(), y.double()),
    "plain scalar": lambda y: y.double() + TWO,
    "number": lambda y: y.double() + 2.0,
    "number after it": lambda y: (y.double() + y.double().norm(), y.double() + 5.0)[1],
    "plain after it": lambda y: (y.double() + 3.0, y.double() + TWO)[1],
    "both in a list": lambda y: torch._foreach_add([y.double()], TWO)[0] + torch._foreach_add([y.double()], 2.0)[0],
    "in place": lambda y: (y.double() * 1).add_(TWO).add_(2.0),
}
ALONG: dict[str, Callable[[Tensor, int], Tensor]] = {
    "cumsum": lambda x, d: x.cumsum(d),
    "cumsum in place": lambda x, d: x.clone().cumsum_(d),
    "cumprod": lambda x, d: x.cumprod(d),
    "logcumsumexp": lambda x, d: x.logcumsumexp(d),
    "cummax": lambda x, d: x.cummax(d)[0],
    "argmax": lambda x, d: x.argmax(d),
    "argmin": lambda x, d: x.argmin(d, keepdim=True),
    "select": lambda x, d: x.select(d, -1),
    "narrow": lambda x, d: x.narrow(d, 1, 2),
    "unbind": lambda x, d: x.unbind(d)[1],
    "chunk": lambda x, d: x.chunk(2, d)[1],
    "unfold": lambda x, d: x.unfold(d, 2, 1),
    "softmax": lambda x, d: x.softmax(d),
}


def plain() -> Tensor:
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(1), dtype=DOUBLE)


def is_equal(found: Any, expected: Tensor) -> bool:
    whole = found.full_tensor()
    return whole.shape == expected.shape and whole.dtype == expected.dtype and torch.allclose(whole, expected)


def wrong(rank: int) -> list[str]:
    """What differs from plain tensors, or is an error."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from autopar.runtime.state.whole_operators import install_whole_operators

    install_whole_operators()
    found, mesh = [], mesh_of(2)
    calls: dict[str, Callable[[Tensor], Any]] = {
        f"{r} {n}": lambda x, f=f, g=g: g(f(x))  # type: ignore[misc]
        for r, f in REDUCED.items()
        for n, g in READ.items()
    }
    calls |= {f"{n} {d}": lambda x, f=f, d=d: f(x, d) for n, f in ALONG.items() for d in (0, 1, -1, -2)}  # type: ignore[misc]
    for split in (0, 1):
        for name, call in calls.items():
            try:
                if not is_equal(call(distribute_tensor(plain(), mesh, [Shard(split)])), call(plain())):
                    found.append(f"{name}, split along {split}")
            except Exception as e:  # every rank alike, so that they go on together
                found.append(f"{name}, split along {split}: {type(e).__name__}")
    return found


def gradients(rank: int) -> list[str]:
    from torch.distributed.tensor import Shard, distribute_tensor

    from autopar.runtime.state.whole_operators import install_whole_operators

    install_whole_operators()
    found = []
    for name, along in ALONG.items():
        for dim, split in ((-1, 0), (-1, 1), (-2, 0), (-2, 1)):
            if name.startswith("arg"):
                continue
            whole = plain().requires_grad_()
            part = distribute_tensor(plain(), mesh_of(2), [Shard(split)]).requires_grad_()
            try:
                for x in (whole, part):
                    along(x * 1, dim).sin().sum().backward()
                if not is_equal(part.grad, whole.grad):  # type: ignore[arg-type]
                    found.append(f"{name} {dim}, split along {split}")
            except Exception as e:  # every rank alike
                found.append(f"{name} {dim}, split along {split}: {type(e).__name__}")
    return found


@pytest.mark.slow
def test_results_are_those_of_plain_tensors(two_ranks: Ranks) -> None:
    assert two_ranks.run(wrong) == [[], []]


def test_gradients_along_negative_dims(two_ranks: Ranks) -> None:
    assert two_ranks.run(gradients) == [[], []]


HALVES: dict[str, Callable[[Tensor], Tensor]] = {
    "square": lambda x: x.T @ x,
    "other square": lambda x: x @ x.T,
    "added": lambda x: torch.addmm(x.T @ x, x.T, x, beta=0.5, alpha=2.0),
    "sum": lambda x: x.sum(),
    "sums": lambda x: x.sum(0) + x.sum(1).sum(),
    "mean": lambda x: x.mean(),
    "norm": lambda x: x / (x.norm() + 1e-7),
    "norms": lambda x: x / x.norm(dim=0, keepdim=True),
    "variance": lambda x: x.var(1),
    "of 32 bits": lambda x: (x.float().T @ x.float()).bfloat16() * 2,
    "cast": lambda x: x.float().sum(0).to(torch.float16),
}


def rounded(rank: int) -> list[str]:
    """What differs from plain tensors of 16 bits, in any bit; products of float16 on CPUs depend on strides."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from autopar.runtime.state.whole_operators import install_whole_operators

    install_whole_operators()
    found, mesh = [], mesh_of(2)
    many = torch.randn(64, 48, generator=torch.Generator().manual_seed(2))
    for call in HALVES.values():  # as torch decides for models, which it must not keep
        call(distribute_tensor(many.bfloat16(), mesh, [Shard(0)]))
    with torch.no_grad():
        for dtype in (torch.bfloat16, torch.float16):
            for split in (0, 1):
                part = distribute_tensor(many.to(dtype), mesh, [Shard(split)])
                calls = (
                    HALVES
                    if dtype is torch.bfloat16
                    else {n: HALVES[n] for n in ("sum", "sums", "mean", "norm", "norms")}
                )
                results = {name: (call(part), call(many.to(dtype))) for name, call in calls.items()}
                found += [
                    f"{name}, {dtype}, split along {split}"
                    for name, (own, plain) in results.items()
                    if own.dtype != plain.dtype or not torch.equal(own.full_tensor(), plain)
                ]
    return found


def low_rank_muon(rank: int) -> float:
    """How far Muon moves parameters otherwise than on one device, of gradients of four samples."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    def trained(parallel: bool) -> list[Tensor]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(16, 24, bias=False), nn.Tanh(), nn.Linear(24, 8, bias=False)).double()
        model = parallelize(net, mesh_of(2), search=Search(recipe="fsdp")) if parallel else net
        optimizer = torch.optim.Muon(model.parameters(), lr=0.1)
        for step in range(3):
            optimizer.zero_grad()
            model(
                torch.randn(4, 16, generator=torch.Generator().manual_seed(step), dtype=DOUBLE)
            ).square().mean().backward()
            optimizer.step()
        return [p.full_tensor() if parallel else p for p in model.parameters()]

    return max(float((a - b).abs().max()) for a, b in zip(trained(True), trained(False), strict=True))


def test_sums_of_16_bits_are_rounded_once(two_ranks: Ranks) -> None:
    assert two_ranks.run(rounded) == [[], []]


def test_muon_of_gradients_of_low_rank(two_ranks: Ranks) -> None:
    """Rounding of each rank's term of a product made up a third of the update."""
    assert max(two_ranks.run(low_rank_muon)) < 1e-6
