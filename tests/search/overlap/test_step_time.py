"""The predicted step of a plan that overlaps is about that of the simulator, which walks the emitted graph."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

from autopar.compiler import program_of, rewrite, solve
from autopar.costs.cluster import Cluster
from autopar.search.options import Search
from autopar.search.overlap.buckets import Unit
from autopar.search.overlap.regions import BACKWARD, BLOCKING, CHUNKED, GATHER, GRADIENT, OUTSIDE, WAITED, regions_of
from autopar.search.overlap.step_time import FILLING, KERNELS, Floats, StepTime, feature, no_features
from autopar.simulate import simulate
from autopar.simulate.graph_tasks import emitted
from benchmarks import overlap
from tests import models

captured = cache(overlap.captured)


@pytest.mark.slow
@pytest.mark.parametrize(("recipe", "axes"), [
    pytest.param("ddp", {"gpu": 8}, marks=pytest.mark.deep),
    pytest.param("fsdp", {"node": 8, "gpu": 8}, marks=pytest.mark.deep),
    pytest.param("hsdp", {"node": 8, "gpu": 8}, marks=pytest.mark.deep),
    ("megatron", {"node": 8, "gpu": 8}), pytest.param(None, {"gpu": 8}, marks=pytest.mark.deep),
])  # fmt: skip
def test_predictions_are_those_of_the_simulator(recipe: str | None, axes: dict[str, int]) -> None:
    program = captured(int(np.prod(list(axes.values()))), 3)
    plan = solve(program, axes, "h100", search=Search(recipe=recipe, cache=False))
    simulated = simulate(emitted(rewrite(program, plan), plan)).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(simulated, rel=0.05)
    known, proven = plan.predicted, plan.certificate
    assert proven.lower_bound <= proven.objective == pytest.approx(known.step_seconds, rel=1e-12)
    assert (known.chunked_seconds > 0) == (recipe == "megatron")


def test_a_region_takes_the_longest_of_its_rows() -> None:
    program, _, _ = models.captured("llama", layers=2)
    regions = regions_of(program)
    (first, second), (last, before) = regions.opening, regions.closing
    middle = next(r for r in regions.units if r not in (first, second, last, before, regions.turning))
    kinds = {"blocking": BLOCKING, "waited": WAITED, "gather": GATHER, "gradient": GRADIENT, "chunked": CHUNKED}
    numbers = {"kernels": KERNELS, "filling": FILLING} | {name: feature(kind, 0, 1) for name, kind in kinds.items()}

    def vector(**parts: float) -> Floats:
        found = no_features(1)
        for name, value in parts.items():
            found[numbers[name]] = value
        return found

    def seconds(microbatches: int = 1, region: str = middle, graphs: int = 1, **parts: float) -> float:
        step = StepTime(regions, 1, microbatches, dict.fromkeys(regions.units, (Unit(1.0),) * 2), graphs)
        return step.seconds({region: vector(**parts)})

    assert seconds(kernels=3, filling=2, gather=4) == 5  # hidden
    assert seconds(kernels=3, filling=2, gather=6) == 6  # the link is busy for longer
    assert seconds(kernels=3, filling=2, blocking=1) == 6  # kernels wait
    assert seconds(kernels=3, filling=2, waited=1) == 5  # gradients of weights are computed meanwhile
    assert seconds(kernels=3, filling=2, waited=4) == 7  # but no longer than they take
    assert seconds(kernels=3, blocking=1, chunked=3) == 4  # but for what chunks of products hide
    assert seconds(kernels=3, blocking=1, chunked=5) == 6
    assert seconds(kernels=3, region=first, gather=2) == 4  # the first of two blocks hides behind nothing
    assert seconds(kernels=3, region=last, gradient=2) == 4  # nor does the last one
    assert seconds(kernels=3, region=regions.turning, gather=2) == 4  # nor does what is re-gathered for the head
    # A unit of the neighbour is gathered beside the first region, or reduced beside the last one.
    assert seconds(kernels=3, region=second, gather=4) == 3 + 2
    assert seconds(kernels=3, region=before, gradient=4) == 3 + 2
    assert seconds(kernels=3, region=before, gradient=4, microbatches=2) == max(3, 1.5 + 2) + 2
    blocks = StepTime(regions, 1, 1, dict.fromkeys(regions.units, (Unit(1.0),) * 2))
    assert blocks.seconds({first: vector(kernels=1.5), second: vector(kernels=3, gather=4)}) == 2 + 3
    assert blocks.seconds({first: vector(kernels=2.5), second: vector(kernels=3, gather=4)}) == 2.5 + 3
    assert blocks.seconds({last: vector(kernels=1.5), before: vector(kernels=3, gradient=4)}) == 2 + 3
    assert blocks.seconds({last: vector(kernels=2.5), before: vector(kernels=3, gradient=4)}) == 2.5 + 3
    # Each graph of a stage begins with a block's gather, and ends with a reduction, that nothing hides.
    of_blocks = [r for r in regions.units if not r.startswith(OUTSIDE)]
    assert all(seconds(kernels=3, region=r, gather=2) < seconds(kernels=3, region=r, gather=2, graphs=2)
               for r in of_blocks)  # fmt: skip
    backward = next(r for r in of_blocks if r.endswith(BACKWARD))
    assert seconds(kernels=3, region=backward, gather=2, graphs=2) == 3 + 1
    assert seconds(kernels=4, gradient=3, microbatches=4) == 6  # beside the last microbatch alone


@pytest.mark.deep
@pytest.mark.parametrize("recipe", ["fsdp", "ddp", "megatron-sequence"])
def test_what_hides_takes_the_device_for_its_share(recipe: str) -> None:
    """The simulator's kernels are as much longer, and predictions with what calibrations find are about its steps."""
    program, (near, far) = captured(8, 3), Cluster.preset("h100").links
    link, search = replace(near, wait=1e-4, occupies=0.5), Search(recipe=recipe, cache=False)
    plan = solve(program, {"gpu": 8}, replace(Cluster.preset("h100"), links=(link, far)), search=search)
    simulated = simulate(emitted(rewrite(program, plan), plan)).step_seconds
    assert plan.predicted.step_seconds == pytest.approx(simulated, rel=0.05)
    without = solve(program, {"gpu": 8}, "h100", search=search).predicted
    hidden = without.communication_seconds + without.compute_seconds - without.step_seconds
    assert plan.predicted.step_seconds > without.step_seconds + 0.5 * link.occupies * hidden


def test_gradients_of_norms_are_reduced_beside_kernels() -> None:
    """One operator computes them and the gradient of what is normed, which alone is waited for."""
    program, _, _ = models.captured("gpt2")
    regions, norms = regions_of(program), 0
    for node in program.sources:
        if node.target is torch.ops.aten.native_layer_norm_backward.default:
            norms += 1
            kinds = [regions.of_move((node, i), backward=True)[1] for i in range(3)]
            assert kinds == [WAITED, GRADIENT, GRADIENT]
            assert node not in regions.filling
    assert norms


@pytest.mark.slow
def test_the_pin_overlap() -> None:
    with pytest.raises(ValueError, match="pin 'overlap' must be 'search' or 'none'"):
        Search(pins={"overlap": True})
    model, batch = models.llama()
    program = program_of(model, batch)
    apart = solve(program, {"gpu": 2}, "h100", search=Search(recipe="fsdp", pins={"overlap": "none"}))
    assert not apart.overlap
    together = solve(program, {"gpu": 2}, "h100", search=Search(recipe="fsdp"))
    assert together.overlap
    assert together.predicted.step_seconds < apart.predicted.step_seconds
    assert replace(together.predicted, step_seconds=0.0).compute_seconds > 0
