"""Code that looks at values of buffers, or to raise, and losses by lengths, on two ranks; against eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar.parallelize import parallelize
from autopar.search.options import Search
from tests.capture.test_checks import Check, Checked, batches, either, largest, outcome, two_of_which_both
from tests.capture.test_ctc import Speech, selected
from tests.capture.test_ctc import batch as speech_batch
from tests.capture.test_known import Looks, require_equal, train
from tests.capture.test_packed_sequences import Tagger
from tests.capture.test_packed_sequences import batch as sequences
from tests.capture.test_selected_rows import Picks, asked, none_selected, picks, plain_cross_entropy, put_back
from tests.capture.test_selected_rows import batch as labelled
from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import slow_devices


def on_ranks(rank: int) -> dict[str, Any]:
    return train(parallelize(Looks(), mesh_of(2), cluster=slow_devices(), timeout=WAIT))


@pytest.mark.slow
@pytest.mark.distributed
def test_answers_choose_the_graph(two_ranks: Ranks) -> None:
    expected = train(Looks())
    for found in two_ranks.run(on_ranks):
        require_equal(found, expected)


CHECKS = largest, either, two_of_which_both


def outcomes(rank: int, microbatches: int | None) -> list[tuple[str, str]]:
    found = []
    for check in CHECKS[: None if microbatches is None else 2]:
        model = parallelize(
            Checked(check),
            mesh_of(2),
            cluster=slow_devices(),
            timeout=WAIT,
            search=Search(pins={} if microbatches is None else {"microbatches": microbatches}),
        )
        # Where the batch is split, of two wrong labels one is on each rank.
        found += [outcome(model, batch) for batch in batches().values()]
    return found


def expected(check: Check) -> list[tuple[str, str]]:
    return [outcome(Checked(check), batch) for batch in batches().values()]


@pytest.mark.distributed
@pytest.mark.parametrize("microbatches", [None, 2])
def test_checks_raise_on_all_ranks(two_ranks: Ranks, microbatches: int | None) -> None:
    checks = CHECKS[: None if microbatches is None else 2]
    for found in two_ranks.run(outcomes, microbatches):
        kinds = [kind for check in checks for kind, _ in expected(check)]
        assert [kind for kind, _ in found] == kinds, found


def speech(rank: int | None) -> list[Any]:
    model, batch = Speech(selected), speech_batch()
    if rank is not None:
        model = parallelize(model, mesh_of(2), cluster=slow_devices(), search=Search(recipe="fsdp"), timeout=WAIT)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    found = []
    for _ in range(3):
        loss = model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


@pytest.mark.distributed
def test_ctc_losses_on_ranks(two_ranks: Ranks) -> None:
    for found in two_ranks.run(speech):
        assert found == pytest.approx(speech(None), rel=1e-10)


def tagged(rank: int | None) -> list[Any]:
    """Losses of three steps, and what is said of lengths as eager mode has none: above and below what there is."""
    torch.manual_seed(0)
    model: Any = Tagger("LSTM")
    if rank is not None:
        search = Search(recipe="ddp", pins={"microbatches": 2})
        model = parallelize(model, mesh_of(2), cluster=slow_devices(), search=search, timeout=WAIT)
    optimizer, (x, lengths) = torch.optim.AdamW(model.parameters(), 0.1), sequences()
    found: list[Any] = []
    for _ in range(3):
        loss = model(x, lengths)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if rank is not None:
        for wrong in (lengths - 1, lengths.clamp(max=3)):
            with pytest.raises(ValueError, match="packed") as e:
                model(x, wrong)
            found.append(str(e.value))
    return found


@pytest.mark.distributed
def test_packed_sequences_on_ranks(two_ranks: Ranks) -> None:
    """A microbatch and a rank may have no sequence of all steps, if another one has."""
    for *losses, short, cut in two_ranks.run(tagged):
        assert losses == pytest.approx(tagged(None), rel=1e-10)
        assert "lengths that are not positive" in short
        assert "pass total_length=4" in cut


def selected_rows(rank: int | None) -> list[Any]:
    """Losses of three steps, and what is said where a mask selects nothing."""
    model: Any = Picks(put_back, picks, plain_cross_entropy, asked)
    if rank is not None:
        search = Search(recipe="fsdp", pins={"microbatches": 2})
        model = parallelize(model, mesh_of(2), cluster=slow_devices(), search=search, timeout=WAIT)
    optimizer, found = torch.optim.AdamW(model.parameters(), 0.1), list[Any]()
    for seed in range(3):  # of each batch another number of rows
        loss = model(*labelled(seed))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    if rank is not None:
        with pytest.raises(ValueError, match="how many rows a mask selects") as e:
            model(*none_selected())
        found.append(str(e.value))
    return found


@pytest.mark.distributed
def test_selected_rows_on_ranks(two_ranks: Ranks) -> None:
    for *losses, said in two_ranks.run(selected_rows):
        assert losses == pytest.approx(selected_rows(None), rel=1e-10)
        assert "of this batch there are fewer" in said
