"""How sample calls are written: ``call(aten.mm.default, x(4, 6), x(6, 2))``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Sample:
    """One call."""

    target: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def __str__(self) -> str:
        def text(a: Any) -> str:
            if isinstance(a, torch.Tensor):
                return "x".join(map(str, a.shape)) or "scalar"
            return f"[{' '.join(map(text, a))}]" if isinstance(a, (list, tuple)) else str(a)

        named = [f"{k}={text(v)}" for k, v in self.kwargs.items()]
        return f"{str(self.target).removeprefix('aten.')}({','.join([*map(text, self.args), *named])})"


def call(target: Any, *args: Any, **kwargs: Any) -> Sample:
    """A sample, written like the call itself."""
    return Sample(target, args, kwargs)


_generator = torch.Generator()


def x(*shape: int) -> torch.Tensor:
    """Random numbers."""
    return torch.randn(shape, dtype=torch.float64, generator=_generator)


def positive(*shape: int) -> torch.Tensor:
    """Random numbers in [0.1, 0.9]."""
    return torch.rand(shape, dtype=torch.float64, generator=_generator) * 0.8 + 0.1


def integer(high: int, *shape: int) -> torch.Tensor:
    """Random integers in [0, high)."""
    return torch.randint(high, shape, generator=_generator)


def boolean(*shape: int) -> torch.Tensor:
    """Random booleans."""
    return integer(2, *shape).bool()


def restart() -> None:
    """Make random numbers from the first one again."""
    _generator.manual_seed(0)
