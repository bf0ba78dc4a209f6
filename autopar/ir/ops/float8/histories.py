"""Histories of delayed scaling: their names, and what they are a step later.

A linear layer's weight has one, a buffer ``[3, steps]`` beside it: the largest entries, of the latest step first, of
the values that it multiplies, of itself, and of the gradients of its results.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn

INPUT, WEIGHT, GRADIENT = ROWS = range(3)
"""Rows of a history."""

_SUFFIX = "_amax_history"


def history_name(weight: str) -> str:
    """The name of the buffer of a parameter's history."""
    return weight + _SUFFIX


def is_history(name: str) -> bool:
    """Whether a buffer of this name is a history."""
    return name.endswith(_SUFFIX)


def history_names(recorded: Iterable[str]) -> tuple[str, ...]:
    """The histories of what is recorded, each once."""
    return tuple(dict.fromkeys(name.rsplit(":", 2)[0] for name in recorded))


def latest_of(recorded: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each history gets, ``[3]`` by its name, of what was recorded by history, row and number.

    A row of several tensors, as of a weight that several layers share, gets the largest; one of none gets zero.
    """
    rows: dict[str, list[list[Tensor]]] = {}
    for name, value in recorded.items():
        history, row, _ = name.rsplit(":", 2)
        rows.setdefault(history, [[] for _ in ROWS])[int(row)].append(value.reshape(()))
    if not rows:
        return {}
    zero = next(iter(recorded.values())).new_zeros(())
    # Of all histories together, since each kernel is of a few numbers.
    each = [v[0] if len(v) == 1 else torch.stack(v).amax() if v else zero for own in rows.values() for v in own]
    return dict(zip(rows, torch.stack(each).reshape(-1, len(ROWS)).unbind(), strict=True))


def rolled(history: Tensor, latest: Tensor) -> Tensor:
    """Histories one step later; what is not finite is not recorded: it would make all scales so for as long.

    Args:
        history: ``[..., 3, steps]``.
        latest: largest entries of this step, ``[..., 3]``.
    """
    first = torch.where(latest.isfinite(), latest, 0.0).to(history.dtype)
    return torch.cat([first.unsqueeze(-1), history[..., :-1]], -1)


def register(model: nn.Module, exclude: Iterable[str], steps: int, dtype: torch.dtype, device: torch.device) -> None:
    """Give every matrix among a model's parameters a history, a buffer of its module; those that have one keep it.

    Which of them are weights of linear layers is known when a call has been captured; the others' stay zero.

    Raises:
        ValueError: there is one of other steps.
    """
    patterns = tuple(exclude)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, own in names.items():
        if parameter.ndim != 2 or not parameter.is_floating_point():
            continue
        if any(fnmatchcase(name, pattern) for name in own for pattern in patterns):
            continue
        path, _, attribute = history_name(own[0]).rpartition(".")
        module = model.get_submodule(path)
        known = module._buffers.get(attribute)
        if known is not None and known.shape[-1] != steps:
            raise ValueError(
                f"Float8(history={steps}): {history_name(own[0])!r} has {known.shape[-1]} steps of an earlier "
                "parallelize(); ask for as many, or delete the buffer"
            )
        if known is None:
            module.register_buffer(attribute, torch.zeros(len(ROWS), steps, dtype=dtype, device=device))


def record(recorded: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Move histories one step on, in place; `latest_of` says what each gets."""
    latest = latest_of(recorded)
    if not latest:
        return
    histories = [buffers[name] for name in latest]
    together = rolled(torch.stack(histories), torch.stack(list(latest.values())))
    for history, value in zip(histories, together.unbind(), strict=True):
        history.copy_(value)
