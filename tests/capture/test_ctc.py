"""`ctc_loss` of padded targets and of those behind each other, as speech models call it; against eager."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.ir.ops.sequence.ctc import ctc

D = torch.float64
SAMPLES, TIME, CLASSES, LONGEST = 4, 12, 6, 4
LENGTHS, COUNTS = [12, 9, 12, 3], [4, 2, 1, 3]

Loss = Callable[[Tensor, Tensor], Tensor]


class Speech(nn.Module):
    """Frames to logarithms of probabilities ``[time, samples, classes]``, and a loss of these and labels."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.frames, self.head = nn.Linear(5, 8, dtype=D), nn.Linear(8, CLASSES, dtype=D)
        self.loss = loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        if labels.max() >= CLASSES:
            raise ValueError(f"labels must be less than {CLASSES}")
        logits = self.head(self.frames(x).tanh())
        return self.loss(logits.log_softmax(-1).transpose(0, 1), labels)


def padded(log_probs: Tensor, labels: Tensor) -> Tensor:
    return functional.ctc_loss(log_probs, labels.clamp_min(0), torch.tensor(LENGTHS), (labels >= 0).sum(-1))


def selected(log_probs: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    flat = labels.masked_select(mask)
    lengths = torch.full((len(labels),), TIME)
    return functional.ctc_loss(log_probs, flat, lengths, mask.sum(-1), reduction="sum", zero_infinity=True)


def indexed(log_probs: Tensor, labels: Tensor) -> Tensor:
    mask = labels >= 0
    flat = labels[mask]
    losses = functional.ctc_loss(
        log_probs, targets=flat, input_lengths=LENGTHS, target_lengths=COUNTS, reduction="none"
    )
    return losses.square().sum()


def hopeless(log_probs: Tensor, labels: Tensor) -> Tensor:
    """A sample of which no path is as short as its frames."""
    lengths = torch.tensor([12, 9, 12, 1])
    return nn.CTCLoss(blank=CLASSES - 1, zero_infinity=True)(
        log_probs, labels.clamp_min(0), lengths, torch.tensor(COUNTS)
    )


def single(log_probs: Tensor, labels: Tensor) -> Tensor:
    return torch.ctc_loss(log_probs[:, 0], labels[0], torch.tensor(TIME), torch.tensor(LONGEST))


def batch() -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(1)
    labels = torch.randint(1, CLASSES - 1, (SAMPLES, LONGEST), generator=draw)
    labels[torch.arange(LONGEST) >= torch.tensor(COUNTS).unsqueeze(1)] = -100
    return torch.randn(SAMPLES, TIME, 5, dtype=D, generator=draw), labels


@pytest.mark.parametrize("loss", [padded, selected, indexed, hopeless, single])
def test_losses_and_gradients_are_eagers(loss: Loss) -> None:
    report = autopar.verify(Speech(loss), batch(), {"a": 2, "b": 2}, plan="random")
    assert report.max_error < 1e-12
    assert report.reference == "eager"


def test_samples_are_split() -> None:
    program = capture(Speech(padded), batch())
    assert any(n.target is ctc for n in program.graph.graph.nodes)
    found = autopar.plan(Speech(padded), batch(), cluster="h100", axes={"gpu": 4}, search=autopar.Search(recipe="ddp"))
    assert str(found.batch["0"][0]).startswith("S(0")


def test_what_a_mask_selects_is_for_nothing_else() -> None:
    def both(log_probs: Tensor, labels: Tensor) -> Tensor:
        flat = labels.masked_select(labels >= 0)
        return functional.ctc_loss(log_probs, flat, LENGTHS, COUNTS) + flat.sum()

    with pytest.raises(CaptureError, match="is given what a mask selects"):
        capture(Speech(both), batch())


@pytest.mark.parametrize(
    ("lengths", "reduction", "said"),
    [([TIME], "mean", "expected one for each of 4 samples"), (LENGTHS, "average", "expected 'none', 'mean' or 'sum'")],
)
def test_bad_arguments(lengths: list[int], reduction: str, said: str) -> None:
    def wrong(log_probs: Tensor, labels: Tensor) -> Tensor:
        return functional.ctc_loss(log_probs, labels.clamp_min(0), lengths, COUNTS, reduction=reduction)

    with pytest.raises(CaptureError, match=said):
        capture(Speech(wrong), batch())
