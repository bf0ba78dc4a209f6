"""merge_windows: which pairs become one operator that keeps the length, which do not, and that values stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of
from autopar.verify.verify import verify

LENGTH = 8


class Of(nn.Module):
    """A function of a sequence ``[2, LENGTH, 4]`` with weights, which are trained."""

    def __init__(self, function: Callable[[Tensor, nn.Conv1d], Tensor], **conv: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.function = function
        self.scale, self.conv = nn.Parameter(torch.randn(4)), nn.Conv1d(4, 4, 3, **conv)

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x * self.scale, self.conv).tanh().sum()


def causal(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.transpose(1, 2))[..., :LENGTH]


def cut_when_turned(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.transpose(1, 2)).transpose(1, 2)[:, :LENGTH]


def padded(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.transpose(1, 2), (2, 0)))


def padded_before_it_is_turned(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x, (0, 0, 0, 2)).transpose(1, 2))


def padded_and_cast(x: Tensor, conv: nn.Conv1d) -> Tensor:
    wide = F.pad(x.transpose(1, 2).float(), (2, 0)).to(x.dtype)
    return conv(wide)


def reflected(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.transpose(1, 2), (1, 1), mode="reflect"))


def edges_and_zeros(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.transpose(1, 2), (2, 0), mode="replicate"))[..., :LENGTH]


def reflected_and_read(x: Tensor, conv: nn.Conv1d) -> Tensor:
    wide = F.pad(x.transpose(1, 2), (2, 0), mode="reflect")
    return conv(wide) + wide[..., 1:-1].exp()


def padded_with_ones(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(F.pad(x.transpose(1, 2), (2, 0), value=1.0))


def read_twice(x: Tensor, conv: nn.Conv1d) -> Tensor:
    wide = F.pad(x.transpose(1, 2), (2, 0))
    return conv(wide) + wide[..., 1:-1].exp()


def shorter(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.transpose(1, 2))[..., : LENGTH - 1]


def both_ends(x: Tensor, conv: nn.Conv1d) -> Tensor:
    return conv(x.transpose(1, 2))[..., 1:-1] + conv(x.transpose(1, 2))[..., :-2]


def shifted(x: Tensor, _: nn.Conv1d) -> Tensor:
    return x * F.pad(x, (0, 0, 0, 1), value=0.5)[:, 1:] + F.pad(x[:, :-2], (0, 0, 2, 0), value=3.0) * x


def beside_zeros(x: Tensor, _: nn.Conv1d) -> Tensor:
    return torch.cat([x.new_zeros(2, 1, 4), x[:, :-1]], 1) * torch.cat([x[:, 1:], x.new_ones(2, 1, 4)], 1)


def assigned(x: Tensor, _: nn.Conv1d) -> Tensor:
    before, after = torch.zeros_like(x), torch.full_like(x, 2.0)
    before[:, 1:], after[:, :-2] = x[:, :-1], x[:, 2:]
    return before.tanh() * after


def assigned_elsewhere(x: Tensor, _: nn.Conv1d) -> Tensor:
    """Every second row, rows where they are, and rows of another dtype: no shifts."""
    second, same, cast = torch.zeros_like(x), torch.zeros_like(x), torch.zeros_like(x)
    second[:, ::2], same[:, 1:], cast[:, 1:] = x[:, : LENGTH // 2], x[:, 1:], x[:, :-1].float()
    return second * same + cast


def there_and_back(x: Tensor, _: nn.Conv1d) -> Tensor:
    return F.pad(x, (0, 0, 1, 2))[:, 1:-2] * x


def lost(x: Tensor, _: nn.Conv1d) -> Tensor:
    """The first row is gone, though the length is the same."""
    return F.pad(x[:, 1:], (0, 0, 1, 0)) * x


def two_fillings(x: Tensor, _: nn.Conv1d) -> Tensor:
    return F.pad(F.pad(x, (0, 0, 1, 0), value=1.0), (0, 0, 1, 0), value=2.0)[:, :LENGTH] * x


def far(x: Tensor, _: nn.Conv1d) -> Tensor:
    return F.pad(x, (0, 0, LENGTH, 0), value=2.0)[:, :LENGTH] * x


def scanned(x: Tensor, _: nn.Conv1d) -> Tensor:
    return x.cumsum(1) * x + x.flip(1).cumsum(1).flip(1)


def other_dims(x: Tensor, _: nn.Conv1d) -> Tensor:
    return x.flip(2).cumsum(1).flip(2) + x.flip(1, 2).cumsum(1).flip(1, 2)


def unfolded(x: Tensor, _: nn.Conv1d) -> Tensor:
    wide = F.pad(x, (0, 0, 1, 1))  # read by three windows, whose gradients add up
    return (
        wide.unfold(1, 3, 1).square().sum(-1)
        + wide.unfold(1, 3, 1).amax(-1) * wide[:, 2:]
        + F.pad(x, (0, 0, 2, 0), value=3.0).unfold(-2, 4, 2).sum((1, 3))[:, None]
    )


def unfolded_otherwise(x: Tensor, _: nn.Conv1d) -> Tensor:
    """Nothing before, too few windows, along another dim, gaps, read by more than windows, and of all rows."""
    wide = F.pad(x, (0, 0, 1, 1))
    wide = wide.unfold(1, 3, 1).sum(-1) + wide[:, 1:-1].exp()
    few = (
        F.pad(x, (0, 0, 1, 0)).unfold(1, 3, 1).mean((1, 3))
        + F.pad(x, (0, 0, 1, 1)).unfold(2, 3, 1).mean((1, 3, 2))[:, None]
    )
    gaps = F.pad(x, (0, 0, 1, 1)).unfold(1, 2, 3).mean((1, 3)) + F.pad(x, (0, 0, 4, 3)).unfold(1, 8, 1).mean((1, 3))
    return wide + (x.unfold(1, 3, 1).mean((1, 3)) + few + gaps)[:, None]


CONVOLUTIONS = ("padded_convolution", "padded_convolution_backward")


@pytest.mark.some(3)
@pytest.mark.parametrize(
    ("function", "conv", "made", "gone"),
    [
        (causal, {"padding": 2}, CONVOLUTIONS, ("convolution", "slice", "slice_backward")),
        (cut_when_turned, {"padding": 2}, CONVOLUTIONS, ("convolution", "slice", "slice_backward")),
        (padded, {}, CONVOLUTIONS, ("convolution", "constant_pad_nd")),
        (padded_before_it_is_turned, {}, CONVOLUTIONS, ("convolution", "constant_pad_nd")),
        (padded_and_cast, {}, ("padded_convolution",), ()),
        (reflected, {}, CONVOLUTIONS, ("convolution", "reflection_pad1d", "reflection_pad1d_backward")),
        (edges_and_zeros, {"padding": 1}, ("replication_pad1d", "replication_pad1d_backward"), CONVOLUTIONS),
        (reflected_and_read, {}, ("padded_convolution", "reflection_pad1d_backward"), CONVOLUTIONS[1:]),
        (padded_with_ones, {}, ("convolution", "constant_pad_nd"), CONVOLUTIONS),
        (read_twice, {}, ("convolution_backward", "padded_convolution"), ("padded_convolution_backward",)),
        (shorter, {"padding": 2}, ("convolution", "masked_fill"), (*CONVOLUTIONS, "slice")),
        (both_ends, {"padding": 2}, CONVOLUTIONS, ()),
        (shifted, {}, ("constant_pad_nd",), ("slice", "slice_backward")),
        (beside_zeros, {}, ("constant_pad_nd",), ("slice", "slice_backward")),
        (assigned, {}, ("constant_pad_nd",), ("slice", "slice_backward", "slice_scatter")),
        (assigned_elsewhere, {}, ("slice_scatter",), ()),
        (there_and_back, {}, (), ("constant_pad_nd", "slice")),
        (lost, {}, ("masked_fill",), ("constant_pad_nd", "slice")),
        (two_fillings, {}, ("constant_pad_nd",), ()),
        (far, {}, ("constant_pad_nd", "slice"), ()),
        (unfolded, {}, ("padded_windows", "padded_windows_backward"), ("unfold", "unfold_backward")),
        (unfolded_otherwise, {}, ("unfold", "unfold_backward", "padded_windows"), ()),
        (scanned, {}, ("cumsum", "reverse_cumsum"), ("flip",)),
        (other_dims, {}, ("cumsum", "flip"), ()),
    ],
    ids=lambda f: f.__name__ if callable(f) else "",
)
def test_pairs(
    function: Callable[[Tensor, nn.Conv1d], Tensor], conv: dict[str, int], made: tuple[str, ...], gone: tuple[str, ...]
) -> None:
    x = torch.randn(2, LENGTH, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    model = Of(function, **conv).double()
    nodes = program_of(model, (x,)).graph.graph.nodes
    found = Counter(str(n.target).split(".")[1] for n in nodes if n.op == "call_function" and "." in str(n.target))
    assert all(found[name] for name in made), found
    assert not any(found[name] for name in gone), found
    # One device computes the same, and two do.
    report = verify(model, (x,), {"a": 2}, plan="random", seed=3)
    assert report.max_error < (1e-5 if function in (padded_and_cast, assigned_elsewhere) else 1e-10)
