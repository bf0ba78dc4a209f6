"""`Precision`: in which dtypes a step computes, adds gradients up and stores its weights; `Float8` linear layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

_NAMES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}

TENSORWISE, ROWWISE, BLOCKS, DELAYED = SCALINGS = ("tensorwise", "rowwise", "mxfp8", "delayed")
"""What has one scale in a float8 product: each operand, each row of the left and column of the right one, or every 32
numbers of these; ``delayed``: each operand, by what it was in earlier steps."""


@dataclass(frozen=True)
class Float8:
    """Linear layers whose matrix products take float8 operands, with scales of the very values, or of earlier steps'.

    Values and weights are rounded to ``e4m3``, gradients to ``e5m2``, and products accumulate in float32, as in P.
    Micikevicius et al., "FP8 Formats for Deep Learning", https://arxiv.org/abs/2209.05433. A linear layer is a product
    of a value and a parameter (through views and casts); its three products are the one of the forward pass, and those
    of the gradients of value and parameter. Attention, and experts' grouped products, are none.

    It changes the numbers: ``Search(inexact=("fp8",))`` must ask for it.

    Attributes:
        scaling: ``tensorwise``, one scale of each operand; ``rowwise``, one of each row of what is summed over;
            ``mxfp8``, a power of two for every 32 numbers of such a row, which must divide into these; ``delayed``, one
            scale of each operand, by the largest entry that it had in any of the last ``history`` steps. Where that is
            not known, or zero, the scale is 1.
        exclude: patterns of names of parameters (``"lm_head.*"``) whose layers compute as without it.
        history: of ``delayed``: how many steps count; of the other scalings nothing.

    Raises:
        ValueError: there is no such scaling, a pattern is no text, or the history is no whole number from 1 on.
    """

    scaling: str = TENSORWISE
    exclude: tuple[str, ...] = ()
    history: int = 16

    def __post_init__(self) -> None:
        """Refuse what does not exist."""
        if self.scaling not in SCALINGS:
            raise ValueError(f"Float8(scaling={self.scaling!r}): expected one of {', '.join(SCALINGS)}")
        if not isinstance(self.exclude, tuple) or not all(isinstance(p, str) and p for p in self.exclude):
            raise ValueError(f"Float8(exclude={self.exclude!r}): expected a tuple of patterns, such as ('lm_head.*',)")
        if not isinstance(self.history, int) or isinstance(self.history, bool) or self.history < 1:
            raise ValueError(f"Float8(history={self.history!r}): expected a number of steps, such as 16")
        if self.scaling != DELAYED and self.history != Float8.history:
            raise ValueError(
                f"Float8(history={self.history}): expected none with scaling={self.scaling!r}: only 'delayed' looks "
                "back; leave history out"
            )

    def __str__(self) -> str:
        """``fp8, tensorwise scaling of current values``."""
        but = f", without {', '.join(self.exclude)}" if self.exclude else ""
        scaled = {
            BLOCKS: "mxfp8, a scale for every 32 values",
            DELAYED: f"fp8, delayed scaling by the last {self.history} steps",
        }.get(self.scaling, f"fp8, {self.scaling} scaling of current values")
        return f"{scaled}{but}"


_FLOAT8 = {"fp8": Float8(), "mxfp8": Float8(BLOCKS), **{f"fp8-{s}": Float8(s) for s in (TENSORWISE, ROWWISE, DELAYED)}}

NAMES = (*_NAMES, *_FLOAT8)
"""What `Precision.resolve` knows by name."""


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
        linear: float8 products of linear layers, whose results have ``compute``; None: their products are in
            ``compute``, too.
    """

    compute: torch.dtype = torch.bfloat16
    reduce: torch.dtype = torch.float32
    master: torch.dtype = torch.float32
    linear: Float8 | None = None

    def __post_init__(self) -> None:
        """Refuse what is no floating dtype."""
        for name in ("compute", "reduce", "master"):
            if getattr(self, name) not in _NAMES.values():
                raise ValueError(
                    f"Precision({name}={getattr(self, name)!r}): expected one of {', '.join(map(str, _NAMES.values()))}"
                )
        if self.linear is not None and not isinstance(self.linear, Float8):
            raise ValueError(f"Precision(linear={self.linear!r}): expected an autopar.Float8 or None")

    @staticmethod
    def resolve(value: Precision | str | torch.dtype | None) -> Precision | None:
        """A policy from itself, or from the dtype to compute in (``"bf16"``, ``torch.bfloat16``); None for none.

        ``"fp8"``, ``"fp8-rowwise"``, ``"fp8-delayed"`` and ``"mxfp8"`` compute in bfloat16, with linear layers in
        float8.

        Raises:
            ValueError: nothing of that kind.
        """
        # A dtype alone means the usual mixture: sums and master weights in float32.
        if value is None or isinstance(value, Precision):
            return value
        if isinstance(value, str) and value in _FLOAT8:
            return Precision(linear=_FLOAT8[value])
        # An unknown name stays, for the message.
        compute = _NAMES.get(value, value) if isinstance(value, str) else value
        if compute not in _NAMES.values():
            raise ValueError(
                f"precision={value!r}: expected {', '.join(map(repr, NAMES))}, a torch dtype or autopar.Precision(...)"
            )
        assert isinstance(compute, torch.dtype)
        return Precision(compute)
