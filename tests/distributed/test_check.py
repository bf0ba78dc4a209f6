"""``check=True`` on ranks: rank 0 compares, and all of them go on, or none."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch, slow_devices

pytestmark = pytest.mark.distributed


def checked(rank: int) -> tuple[list[str], float, list[str]]:
    from autopar import compiler
    from autopar.errors import VerifyError
    from autopar.parallelize import parallelize
    from autopar.search.options import Search

    said: list[str] = []
    handler = logging.Handler(logging.INFO)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("autopar")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    original = compiler.capture
    pins = {"batch.*": ("S(0)", "R"), "*.weight": ("R", "S(0)")}
    options = {"search": Search(pins=pins), "cluster": slow_devices(), "timeout": WAIT, "check": True}
    try:
        model = parallelize(mlp(), mesh_of(2, 2), inputs="local", batch=mlp_batch(0), **options)  # type: ignore[arg-type]
        rows = slice(4 * model.data_rank, 4 * model.data_rank + 4)
        model(**{k: v[rows] for k, v in mlp_batch(1).items()})["loss"].backward()
        reference = mlp()
        reference(**mlp_batch(1))["loss"].backward()
        full = model.full_gradients()
        worst = max(float((full[n] - p.grad).abs().max()) for n, p in reference.named_parameters())  # type: ignore[operator]

        class Other(type(reference)):  # type: ignore[misc]
            def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
                return super().forward(x * 1.5, y)  # type: ignore[no-any-return]

        other: nn.Module = Other().double()
        compiler.capture = lambda module, batch, **more: original(other, batch, **more)
        wrong = parallelize(mlp(), mesh_of(4), **{**options, "search": Search()})  # type: ignore[arg-type]
        with pytest.raises(VerifyError) as caught:
            wrong(**mlp_batch(1))
    finally:
        compiler.capture = original
        logger.removeHandler(handler)
    return [text for text in said if "computes" in text], worst, [str(caught.value)]


@pytest.mark.slow
def test_every_rank_goes_on_or_none_does(ranks: Ranks) -> None:
    for rank, (said, worst, error) in enumerate(ranks.run(checked)):
        assert len(said) == (1 if rank == 0 else 0)
        assert worst < 1e-12
        assert "captured graph" in error[0]
