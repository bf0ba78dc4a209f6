"""Ranks that make different calls: every rank gets a `RankError` that names who differs, and in what, at once."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch, slow_devices

pytestmark = pytest.mark.distributed

ODD = 1
"""The rank that does something else."""


def shape(model: Any, odd: bool) -> None:
    model(**mlp_batch(0, rows=4 if odd else 8))["loss"].backward()


def mode(model: Any, odd: bool) -> None:
    model.train(not odd)
    try:
        model(**mlp_batch(0))
    finally:
        model.train()


def grad(model: Any, odd: bool) -> None:
    with torch.set_grad_enabled(not odd):
        model(**mlp_batch(0))


def autocast(model: Any, odd: bool) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=odd):
        model(**mlp_batch(0))


def dtype(model: Any, odd: bool) -> None:
    model(**{k: v.float() if odd else v for k, v in mlp_batch(0).items()})


def structure(model: Any, odd: bool) -> None:
    batch = mlp_batch(0)
    model(x=batch["x"], y=(batch["y"],)) if odd else model(**batch)


def frozen(model: Any, odd: bool) -> None:
    model.up.requires_grad_(not odd)
    try:
        model(**mlp_batch(0))
    finally:
        model.up.requires_grad_(True)


def hooked(model: Any, odd: bool) -> None:
    """As a logger does on its rank alone."""
    handle = model.register_forward_hook(lambda *_: None) if odd else None
    try:
        model(**mlp_batch(0))
    finally:
        if handle is not None:
            handle.remove()


def no_sync(model: Any, odd: bool) -> None:
    loss = model(**mlp_batch(0))["loss"]
    if odd:
        with model.no_sync():
            loss.backward()
    else:
        loss.backward()


def given_up(model: Any, odd: bool) -> None:
    with model.no_sync():
        model(**mlp_batch(0))["loss"].backward()
    if odd:
        model.zero_grad()
    try:
        model(**mlp_batch(0))["loss"].backward()
    finally:
        model.zero_grad()


def no_backward(model: Any, odd: bool) -> None:
    loss = model(**mlp_batch(0))["loss"]
    if not odd:
        loss.backward()
    model(**mlp_batch(0))


def extra(model: Any, odd: bool) -> None:
    if odd:
        model(**mlp_batch(0))
    model.full_state_dict()


def order(model: Any, odd: bool) -> None:
    a, b = (model(**mlp_batch(i))["loss"] for i in range(2))
    for loss in (b, a) if odd else (a, b):
        loss.backward()


def gradients(model: Any, odd: bool) -> None:
    model.full_gradients() if odd else model(**mlp_batch(0))


def saved(model: Any, odd: bool) -> None:
    import autopar.checkpoint

    autopar.checkpoint.state_dict(model) if odd else model(**mlp_batch(0))


CASES: dict[Callable[[Any, bool], None], str] = {
    shape: "the global shape of the batch differs: rank 1 has [4, 16] float64, [4, 16] float64, ranks 0, 2, 3 have [8,",
    mode: "the mode of the modules differs: rank 1 has eval",
    grad: "grad mode differs: rank 1 has off, ranks 0, 2, 3 have on",
    autocast: "autocast differs: rank 1 has torch.bfloat16",
    dtype: "the global shape of the batch differs: rank 1 has [8, 16] float32",
    structure: "the batch's structure differs: rank 1 has",
    hooked: "for hooks of the model, ranks 0, 2, 3 have",
    frozen: "what requires a gradient differs: rank 1 has 2 of 4 parameters",
    no_sync: "no_sync differs: rank 1 has True",
    given_up: "what waits since no_sync differs: rank 1 has none",
    no_backward: "different calls: rank 1 has forward of call",
    extra: "different calls: rank 1 has forward of call",
    order: "different calls: rank 1 has backward of call",
    gradients: "different calls: rank 1 has full_gradients()",
    saved: "different calls: rank 1 has checkpoint.state_dict()",
}


def disagree(rank: int) -> dict[str, tuple[str, float]]:
    """The error of each case, and the seconds until it; a step in which all agree goes on behind each."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    search = Search(recipe="fsdp")
    model: Any = parallelize(mlp(), mesh_of(4), mlp_batch(0), search=search, cluster=slow_devices(), timeout=WAIT)
    model(**mlp_batch(0))["loss"].backward()
    found = {}
    for case in CASES:
        start, error = time.monotonic(), "nothing"
        try:
            case(model, rank == ODD)
        except Exception as e:
            error = f"{type(e).__name__}: {e}"
        found[case.__name__] = error, time.monotonic() - start
        model.zero_grad()
        model(**mlp_batch(0))["loss"].backward()
    return found


def test_every_rank_says_who_differs_and_in_what(ranks: Ranks) -> None:
    for rank, found in enumerate(ranks.run(disagree)):
        for case, expected in CASES.items():
            error, seconds = found[case.__name__]
            assert error.startswith("RankError: ") and expected in error, (rank, case.__name__, error)
            assert seconds < WAIT / 2, (rank, case.__name__, seconds)


def go_on(rank: int) -> list[str]:
    """The errors of ranks that go on from outputs in their own ways, and where they do not."""
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    x, found = mlp_batch(0)["x"], []
    options: dict[str, Any] = {"search": Search(recipe="fsdp"), "cluster": slow_devices(), "timeout": WAIT}
    for odd in (rank == ODD, False):
        scaled: Any = parallelize(mlp(), mesh_of(4), mlp_batch(0), **options)
        whole: Any = parallelize(torch.nn.Linear(16, 3).double(), mesh_of(4), {"input": x}, outputs="whole", **options)
        labels = torch.zeros(len(x), 3, dtype=torch.float64)
        labels[0] += odd
        for loss in (scaled(**mlp_batch(0))["loss"] * (1 + odd), torch.nn.functional.mse_loss(whole(x), labels)):
            try:
                loss.backward()
                found.append("")
            except Exception as e:
                found.append(f"{type(e).__name__}: {e}")
    return found


@pytest.mark.slow
def test_gradients_of_outputs_are_the_same_on_every_rank(ranks: Ranks) -> None:
    for scaled, whole, *alike in ranks.run(go_on):
        assert scaled.startswith("RankError: backward of call") and "output 'loss' differs: rank 1" in scaled, scaled
        assert whole.startswith("RankError: backward of call") and "whole output 0 differs: rank 1" in whole, whole
        assert alike == ["", ""]
