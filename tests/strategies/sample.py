"""How sample calls are written: ``call(aten.mm.default, x(4, 6), x(6, 2))``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
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


Samples = tuple[Sample, ...]


def by_operator(samples: Iterable[Sample]) -> Iterator[Any]:
    """Parameters of a test that takes all samples of an operator: there are more of them than a test is worth."""
    found: dict[str, list[Sample]] = {}
    for sample in samples:
        found.setdefault(str(sample.target), []).append(sample)
    return (pytest.param(tuple(of_one), id=name.removeprefix("aten.")) for name, of_one in found.items())


@contextmanager
def about(sample: Sample) -> Iterator[Sample]:
    """Whatever fails within says of which sample."""
    try:
        yield sample
    except BaseException as e:
        e.add_note(f"of the sample {sample}")
        raise


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
