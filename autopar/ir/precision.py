"""`Precision`: in which dtypes a step computes, adds gradients up and stores its weights."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}


@dataclass(frozen=True)
class Precision:
    """A mixed-precision policy, as of Micikevicius et al., "Mixed Precision Training", https://arxiv.org/abs/1710.03740.

    Parameters have dtype ``master`` and are cast to ``compute`` at their use, so that they are gathered in ``compute``;
    floating tensors of the batch are cast too, buffers are not. The model's own casts (a norm in float32) stay.
    Gradients are made in ``compute`` and added over devices in ``reduce``; they have the parameter's dtype.

    Attributes:
        compute: of parameters and batch as the model sees them.
        reduce: in which the terms of a parameter's gradient are added.
        master: of the parameters, gradients and optimizer state.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        """Refuse what is no floating dtype."""
        for name in (f.name for f in fields(self)):
            if getattr(self, name) not in _NAMES.values():
                raise ValueError(
                    f"Precision({name}={getattr(self, name)!r}): expected one of {', '.join(map(str, _NAMES.values()))}"
                )

    @staticmethod
    def resolve(value: Precision | str | torch.dtype | None) -> Precision | None:
        """A policy from itself, or from the dtype to compute in (``"bf16"``, ``torch.bfloat16``); None for none.

        Raises:
            ValueError: nothing of that kind.
        """
        # A dtype alone means the usual mixture: sums and master weights in float32.
        if value is None or isinstance(value, Precision):
            return value
        # An unknown name stays, for the message.
        compute = _NAMES.get(value, value) if isinstance(value, str) else value
        if compute not in _NAMES.values():
            raise ValueError(
                f"precision={value!r}: expected {', '.join(map(repr, _NAMES))}, a torch dtype or autopar.Precision(...)"
            )
        assert isinstance(compute, torch.dtype)
        return Precision(compute)
