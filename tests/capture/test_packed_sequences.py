"""Recurrent layers take packed sequences: padded in a graph, they give what packed ones give in eager mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import autopar
from autopar.compiler import program_of
from autopar.errors import CaptureError

AXES = {"a": 2, "b": 2}
LENGTHS = torch.tensor([3, 4, 1, 2, 2, 4, 3, 1])


class Tagger(nn.Module):
    """Takes outputs, states and lengths of a recurrent layer."""

    def __init__(self, kind: str, batch_first: bool = True, total: int | None = None, **layer: Any) -> None:
        super().__init__()
        self.batch_first, self.total = batch_first, total
        self.layer = getattr(nn, kind)(6, 4, batch_first=batch_first, dtype=torch.float64, **layer)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        x = x if self.batch_first else x.transpose(0, 1)
        packed = pack_padded_sequence(x, lengths, self.batch_first, enforce_sorted=False)
        assert isinstance(packed, PackedSequence)
        output, states = self.layer(packed)
        rows, sizes = pad_packed_sequence(output, self.batch_first, 0.5, self.total)
        sums = [s.square().mean() for s in (states if isinstance(states, tuple) else (states,))]
        weights = torch.arange(rows.shape[1 if self.batch_first else 0], dtype=rows.dtype)
        rows = rows if self.batch_first else rows.transpose(0, 1)
        return (rows.pow(3) * weights[:, None]).mean() + sum(sums) + 0.01 * sizes.to(rows.dtype).mean()


class Calls(nn.Module):
    """Does something with a layer, a batch and its lengths."""

    def __init__(self, function: Callable[[Any, Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.layer, self.function = nn.GRU(6, 6, batch_first=True, dtype=torch.float64), function

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        return self.function(self.layer, x, lengths)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(8, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0)), LENGTHS


def packed(x: Tensor, lengths: Any) -> PackedSequence:
    return pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)


def require_equal(model: nn.Module, batch: tuple[Tensor, ...]) -> None:
    report = autopar.verify(model, batch, AXES, plan="random")
    assert report.reference == "eager"  # where eager mode refuses lengths, there is none
    assert report.max_error < 1e-13


@pytest.mark.some(2)
@pytest.mark.parametrize(
    "model",
    [
        {"kind": "GRU"},
        {"kind": "LSTM", "num_layers": 2, "bidirectional": True, "proj_size": 2},
        {"kind": "LSTM", "bias": False, "batch_first": False},
        {"kind": "RNN", "nonlinearity": "relu", "bidirectional": True, "total": 6},
    ],
    ids=str,
)
def test_equals_eager_mode(model: dict[str, Any]) -> None:
    torch.manual_seed(0)
    require_equal(Tagger(**model), batch())


WAYS: dict[str, Callable[[Any, Tensor, Tensor], Tensor]] = {
    "a state to begin with": lambda m, x, n: m(packed(x, n), x.sum(1).unsqueeze(0).nan_to_num())[1].square().mean(),
    "lengths on a CPU": lambda m, x, n: m(packed(x, n.cpu()))[1].square().mean(),
    "known lengths": lambda m, x, n: pad_packed_sequence(m(packed(x, [4] * 8))[0])[0].sum(),
    "a list": lambda m, x, n: m(rnn.pack_sequence([x[0, :3], x[1, :2]]))[1].square().mean() + 0 * x.nan_to_num().sum(),
}  # fmt: skip


@pytest.mark.some(2)
@pytest.mark.parametrize("way", WAYS)
def test_whatever_is_in_the_padding(way: str) -> None:
    x, lengths = batch()
    if "known" not in way:
        x[2, 1:] = float("nan")
    torch.manual_seed(0)
    require_equal(Calls(WAYS[way]), (x, lengths))


REFUSED: dict[str, Callable[[Any, Tensor, Tensor], Any]] = {
    "data": lambda m, x, n: m(packed(x, n))[0].data.sum(),
    "by position": lambda m, x, n: m(packed(x, n))[0][0].sum(),
    "packed anew": lambda m, x, n: m(PackedSequence(*packed(x, n)))[1].sum(),
    "returned": lambda m, x, n: m(packed(x, n)),
}


def test_hooks_of_layers_that_get_them_are_refused() -> None:
    model = Calls(lambda layer, x, lengths: layer(packed(x, lengths))[1].square().mean())
    model.layer.register_forward_hook(lambda module, inputs, output: None)
    with pytest.raises(CaptureError, match="or a forward hook on a layer, reads"):
        program_of(model, batch())


@pytest.mark.parametrize("case", REFUSED)
def test_nobody_reads_packed_data(case: str) -> None:
    with pytest.raises(CaptureError, match=r"data of a packed sequence at .*test_packed_sequences.py"):
        program_of(Calls(REFUSED[case]), batch())
    rows = pack_padded_sequence(*batch(), batch_first=True, enforce_sorted=False)  # as ever after that
    assert rows.data.shape == (int(LENGTHS.sum()), 6)
