"""Checks in `forward` that only raise or warn: made after the step, of whole batches; all else is refused."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.errors import CaptureError
from autopar.parallelize import parallelize

D = torch.float64
WORDS, ROWS, LENGTH = 16, 4, 6

Check = Callable[["Checked", Tensor, Tensor], Any]


class Checked(nn.Module):
    """Looks at its labels in the way that it is given."""

    def __init__(self, check: Check) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(WORDS, 8, dtype=D)
        self.head = nn.Linear(8, WORDS, dtype=D)
        self.check, self.strict, self.words = check, True, WORDS

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        hidden = self.embedding(ids)
        self.check(self, hidden, labels)
        # A sum, so that microbatches and devices have parts of the same.
        return nn.functional.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten().clamp(0, WORDS - 1))


def largest(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if labels.max() >= model.words:
        raise ValueError(f"labels must be less than the vocabulary's size: {model.words}")


def both_asserted(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if not ((labels >= 0).all() and (labels < WORDS).all()):
        raise AssertionError("labels out of range")


def asserted(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    assert (labels >= 0).all(), "labels out of range"


def either(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if (labels < 0).any() or (labels >= WORDS).any():
        raise IndexError("out of range")


def joined(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if ((labels < 0) | (labels >= WORDS)).any():
        message = f"out of range: {labels.min()}"
        raise IndexError(message)


def flagged(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if model.strict and not torch.all(labels < WORDS):
        raise RuntimeError


def number(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    most = labels.max().item()
    if most >= WORDS:
        raise ValueError(f"label {most}, but there are {WORDS} words")


def two_of_which_both(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if labels.min() < 0 and labels.max() >= WORDS:
        raise ValueError("too little and too much")


def otherwise(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if 0 <= labels.min() and labels.max() < WORDS:
        pass
    else:
        raise ValueError("out of range")


def chain(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if not (0 <= labels.min() <= labels.max() < WORDS):
        raise ValueError("out of range")


def of_any(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if any((part < 0).any() for part in labels.chunk(2)):
        raise ValueError("out of range")


def asked_by_function(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if bool((labels < 0).any()):
        raise ValueError("out of range")


def written_between(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    shifted = labels + 0
    most = shifted.max()
    shifted.zero_()
    if most >= WORDS:
        raise ValueError("what the maximum was before")


def mean_of_floats(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if not torch.isfinite(hidden.sum() / (labels.float().mean() > -100)):
        raise FloatingPointError("not finite")


def warns(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if (labels >= WORDS).any():
        warnings.warn(f"more than {WORDS}", RuntimeWarning, stacklevel=2)


def numbers_of_python(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if int(labels.max()) >= WORDS or not 0 <= int(labels.min()):
        raise ValueError("out of range")


def number_of_floats(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if not float(labels.double().mean()) < 7:
        raise AssertionError("too much")


def both_numbers(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    least = labels.min().item()
    if least + 1 < 1 and labels.max().item() >= WORDS:
        raise ValueError("too little and too much")


def with_its_category(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if not (labels < WORDS).all():
        warnings.warn("too much", category=RuntimeWarning, stacklevel=2)


def recomputed(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    torch.utils.checkpoint.checkpoint(lambda h: either(model, h, labels) or h, hidden, use_reentrant=False)


def by_torch(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    torch._assert((labels >= 0).all(), "out of range")


class OwnError(Exception):
    def __init__(self, place: int, reason: str) -> None:
        super().__init__(f"{place}: {reason}")


CHECKS = (
    largest, both_asserted, asserted, either, joined, flagged, number, two_of_which_both, otherwise, chain, of_any,
    asked_by_function, written_between, mean_of_floats, warns, by_torch,
    numbers_of_python, number_of_floats, both_numbers, with_its_category, recomputed,
)  # fmt: skip


def batches() -> dict[str, tuple[Tensor, Tensor]]:
    ids = torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) % WORDS
    low, high = ids.clone(), ids.clone()
    low[1, 2], high[3, 1] = -3, WORDS
    both = low.clone()
    both[3, 1] = WORDS
    return {"fine": (ids, ids), "low": (ids, low), "high": (ids, high), "both": (ids, both)}


def outcome(model: nn.Module, batch: tuple[Tensor, Tensor]) -> tuple[str, str]:
    """What a call of a model raises or warns, and says first."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", RuntimeWarning)
        try:
            model(*batch)
        except Exception as e:
            return type(e).__name__, str(e).partition("\n")[0].partition(" (")[0]
    return next(((type(w.message).__name__, str(w.message)) for w in told if w.category is RuntimeWarning), ("", ""))


def require_as_eager(model: nn.Module, check: Check, batches: dict[str, Any], whole: dict[str, Any]) -> None:
    """The same errors; texts that have no values of tensors in them, too."""
    for name, batch in batches.items():
        found, expected = outcome(model, batch), outcome(Checked(check), whole[name])
        assert found[0] == expected[0], (check, name, found)
        if check not in (joined, number):
            assert found[1].startswith(expected[1]), (check, name, found)


@pytest.mark.some(8)
@pytest.mark.parametrize("check", CHECKS)
def test_a_check_raises_after_the_step(check: Check) -> None:
    own = batches()
    require_as_eager(parallelize(Checked(check), None), check, own, own)


@pytest.mark.parametrize("check", [either, two_of_which_both])
def test_checks_in_random_plans(check: Check) -> None:
    report = autopar.verify(Checked(check), batches()["fine"], {"a": 2, "b": 2}, plan="random")
    assert report.max_error < 1e-12


def test_whole_batches_are_counted_in_microbatches() -> None:
    report = autopar.verify(Checked(largest), batches()["fine"], {"a": 2}, pins={"microbatches": 2})
    assert report.max_error < 1e-12


def test_checks_of_layers_that_are_alike() -> None:
    class Layer(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.isfinite(x).all(), "finite"
            return super().forward(x).relu()

    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(8, 8, dtype=D) for _ in range(7)))
    x = torch.ones(4, 8, dtype=D)
    assert len(capture(model, (x,)).state.checks) == 7
    parallel = parallelize(model, None)
    parallel(x)
    x[2, 3] = torch.inf
    with pytest.raises(AssertionError, match="finite"):
        parallel(x)


def test_what_is_logged_and_printed_and_errors_of_ones_own(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    def tells(model: Checked, hidden: Tensor, labels: Tensor) -> None:
        if (labels < 0).any():
            logging.getLogger("checks").warning("less than 0: %d", labels.min())
        if (labels >= WORDS).any():
            print("more than", WORDS)
        if labels.min() < -2:
            raise OwnError(3, "out of range")

    model = parallelize(Checked(tells), None)
    with pytest.raises(RuntimeError, match="OwnError: 3 out of range"):
        model(*batches()["both"])
    assert "less than 0: %d {labels.min()} (" in caplog.text
    assert capsys.readouterr().out.startswith(f"more than {WORDS} (")


def caught(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    try:
        largest(model, hidden, labels)
    except ValueError:
        model.strict = False


def suppressed(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    with contextlib.suppress(ValueError):
        largest(model, hidden, labels)


def computes(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if labels.max() >= WORDS:
        hidden.mul_(2)


def returns_first(model: Checked, hidden: Tensor, labels: Tensor) -> Any:
    if labels.max() >= WORDS:
        if model.strict:
            return hidden
        raise ValueError


def kind_of_number(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    most = labels.max().item()
    if most >= WORDS:
        raise ValueError
    if isinstance(most, int):
        hidden.mul_(2)


def all_of_some(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if all((part < 0).any() for part in labels.chunk(2)):
        raise ValueError


def rounded(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if int(hidden.sum()) >= WORDS:
        raise ValueError


def one_of_some(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    assert labels.max().item() in (WORDS - 2, WORDS - 1)


def in_a_set(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if labels.max().item() in {WORDS, WORDS + 1}:
        raise ValueError


def named_in_a_set(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    most = labels.max().item()
    if most in {WORDS, WORDS + 1}:
        raise ValueError


def is_wrong(number: object) -> bool:
    return isinstance(number, int) and number > WORDS


def passed_on(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    most = labels.max().item()
    if is_wrong(most):
        raise ValueError


def another_error(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    try:
        largest(model, hidden, labels)
    except ValueError as e:
        raise RuntimeError from e


def of_lists(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if (labels.min().item(), 0) != (0, 0):
        raise ValueError


def chosen_ones(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if any((part < 0).any() for part in labels.chunk(2) if part.sum() > 0):
        raise ValueError


def chosen(model: Checked, hidden: Tensor, labels: Tensor) -> None:
    if labels.max() >= WORDS if model.strict else False:
        raise ValueError


REFUSED = (
    caught, suppressed, computes, returns_first, kind_of_number, all_of_some, chosen, rounded, one_of_some, of_lists,
    chosen_ones, in_a_set, named_in_a_set, passed_on, another_error,
)  # fmt: skip


@pytest.mark.parametrize("check", REFUSED)
def test_more_than_an_error_depends_on_it(check: Check) -> None:
    with pytest.raises(CaptureError, match="control flow that depends on data"):
        capture(Checked(check), batches()["fine"])


def test_a_check_in_a_backward_pass_is_refused() -> None:
    def looks(gradient: Tensor) -> None:
        if gradient.isnan().any():
            raise ValueError

    def watched(model: Checked, hidden: Tensor, labels: Tensor) -> None:
        hidden.register_hook(looks)

    with pytest.raises(CaptureError):
        capture(Checked(watched), batches()["fine"])


@contextlib.contextmanager
def no_source() -> Iterator[Check]:
    names: dict[str, Any] = {"WORDS": WORDS}
    exec("def check(model, hidden, labels):\n    if labels.max() >= WORDS:\n        raise ValueError\n", names)
    yield names["check"]


def test_code_without_its_source_is_refused() -> None:
    with no_source() as check, pytest.raises(CaptureError, match="control flow"):
        capture(Checked(check), batches()["fine"])
