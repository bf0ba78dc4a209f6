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
    """Give every matrix, or stack of some, among a model's parameters a history, a buffer of its module.

    Which of them are weights of linear layers is known when a call has been captured; the others' stay zero.

    Raises:
        ValueError: there is one of other steps.
    """
    patterns = tuple(exclude)
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for parameter, own in names.items():
        if parameter.ndim < 2 or not parameter.is_floating_point():
            continue
        if any(fnmatchcase(name, pattern) for name in own for pattern in patterns):
            continue
        name = history_name(own[0])
        known = _place(model, name)[1]
        if known is not None and known.shape[-1] != steps:
            raise ValueError(
                f"Float8(history={steps}): {name!r} has {known.shape[-1]} steps of an earlier parallelize(); ask for "
                "as many, or delete the buffer"
            )
        if known is None:
            _register(model, name, steps, dtype, device)


def register_missing(model: nn.Module, buffers: Mapping[str, Tensor], device: torch.device) -> bool:
    """Give a model the histories that it lacks, of layers that came later; whether there were some.

    So too those of vectors of which layers take views as matrices.

    Args:
        model: whose.
        buffers: that a program takes, by name.
        device: where they are to be.
    """
    missing = {n: like for n, like in buffers.items() if is_history(n) and _place(model, n)[1] is None}
    for name, like in missing.items():
        _register(model, name, like.shape[-1], like.dtype, device)
    return bool(missing)


def _place(model: nn.Module, name: str) -> tuple[nn.Module, Tensor | None]:
    """The module that a history is, or is to be, a buffer of, and what it has there."""
    path, _, attribute = name.rpartition(".")
    module = model.get_submodule(path)
    return module, module._buffers.get(attribute)


def _register(model: nn.Module, name: str, steps: int, dtype: torch.dtype, device: torch.device) -> None:
    history = torch.zeros(len(ROWS), steps, dtype=dtype, device=device)
    _place(model, name)[0].register_buffer(name.rpartition(".")[2], history)


def record(recorded: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Move histories one step on, in place; `latest_of` says what each gets."""
    latest = latest_of(recorded)
    if not latest:
        return
    histories = [buffers[name] for name in latest]
    together = rolled(torch.stack(histories), torch.stack(list(latest.values())))
    for history, value in zip(histories, together.unbind(), strict=True):
        history.copy_(value)
