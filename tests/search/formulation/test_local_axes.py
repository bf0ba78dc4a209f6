"""Role ``local``: asked for, left out of what is planned, and said in the plan."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopar
from autopar import Precision
from autopar.errors import PlanError
from autopar.explain.recipes import find_plan
from autopar.ir.signature.worker_rows import rows_of_worker
from autopar.search.arguments import check_float64
from tests.distributed.models import mlp, mlp_batch

ASKED: dict[str, Any] = {"roles": {"dc": "local", "gpu": "shard"}, "inexact": ("local",)}
AXES = {"dc": 2, "gpu": 2}
COMPRESSED = {"dc": "compressed", "gpu": "shard"}


def planned(**search: Any) -> autopar.Plan:
    return autopar.plan(mlp(), mlp_batch(0), cluster="cpu", axes=AXES, search=autopar.Search(**ASKED | search))


def test_what_changes_numbers_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"not equal to synchronous training; ask for that with inexact=\('local',\)"):
        autopar.Search(roles={"dc": "local"})
    with pytest.raises(ValueError, match="inexact= names 'fp3'"):
        autopar.Search(inexact=("fp3",))
    with pytest.raises(ValueError, match="expected a tuple of texts"):
        autopar.Search(inexact="local")  # type: ignore[arg-type]
    assert autopar.Search(inexact=("local",)).roles == {}  # allowed, and not chosen
    with pytest.raises(ValueError, match=r"compressed gradients, which is not .* with inexact=\('compressed',\)"):
        autopar.Search(roles={"dc": "compressed"}, inexact=("local",))
    with pytest.raises(ValueError, match="gives 2 axes the role 'local'; make them one axis"):
        both = autopar.Search(roles={"dc": "local", "gpu": "compressed"}, inexact=("local", "compressed"))
        both.of_worker(AXES)


@pytest.mark.parametrize(
    ("axes", "roles", "message"),
    [
        ({"a": 2, "b": 2}, {"b": "local"}, "must be the outermost one of the mesh, which is 'a'"),
        ({"a": 2, "b": 2}, {"c": "local"}, "roles= names axis 'c'; the mesh has a, b"),
        ({"a": 2, "b": 2}, {"a": "local", "b": "local"}, "make them one axis"),
        ({"a": 2, "b": 2}, {"a": "local", "c": "data"}, "roles= names axis 'c'; the mesh has b"),
        ({"a": 3, "b": 2}, {"a": "local"}, "8 samples, which do not divide among 3 workers; take"),
    ],
)
def test_axes_that_cannot_be_workers(axes: dict[str, int], roles: dict[str, str], message: str) -> None:
    search = autopar.Search(roles=roles, inexact=("local",))
    with pytest.raises(ValueError, match=message):
        autopar.plan(mlp(), mlp_batch(0), cluster="cpu", axes=axes, search=search)


def test_the_plan_is_that_of_a_worker_and_says_so(tmp_path: Path) -> None:
    found = planned()
    half = {k: v[:4] for k, v in mlp_batch(0).items()}
    inner = autopar.plan(mlp(), half, cluster="cpu", axes={"gpu": 2}, search=autopar.Search(roles={"gpu": "shard"}))
    assert found.workers == (("dc", 2),) and found.axes == (("gpu", 2),)
    assert replace(found, workers=(), certificate=inner.certificate) == inner
    assert found.certificate.space.endswith("not equal to synchronous training, dc=2")
    assert "2 along axis dc" in found.summary() and "not equal to synchronous training" in found.summary()
    found.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == found
    # A recipe is of the axes within a worker.
    assert planned(roles={"dc": "local"}, recipe="fsdp").parameters == found.parameters
    search = autopar.Search(roles={"dc": "local"}, inexact=("local",))
    alone = autopar.plan(mlp(), mlp_batch(0), cluster="cpu", axes={"dc": 4}, search=search)
    assert alone.axes == (("device", 1),) and alone.workers == (("dc", 4),)


def test_the_plan_is_verified_and_checked_on_a_workers_part() -> None:
    found = planned()
    report = autopar.verify(mlp(), mlp_batch(0), AXES, plan=found)
    assert report.max_error < 1e-12 and report.first_difference is None
    with pytest.raises(ValueError, match="the plan is for axes"):
        autopar.verify(mlp(), mlp_batch(0), {"dc": 4, "gpu": 2}, plan=found)
    search = autopar.Search(**ASKED)
    checked = found.check(mlp(), mlp_batch(0), search=search)
    assert checked.workers == found.workers and checked.certificate.space == found.certificate.space
    with pytest.raises(PlanError, match="the plan has workers"):
        found.check(mlp(), mlp_batch(0), search=autopar.Search(roles={"gpu": "shard"}))


def test_plans_of_workers_that_compress_are_those_of_others_and_say_so(tmp_path: Path) -> None:
    found, apart = planned(roles=COMPRESSED, inexact=("compressed", "float64")), planned()
    assert replace(found, worker_role="local", certificate=apart.certificate) == apart
    assert "exchange compressed gradients in each step" in found.certificate.space
    assert found.certificate.space.endswith("not equal to synchronous training, dc=2")
    said = " ".join(found.summary().split())
    assert "(role compressed)" in said and "CompressedGradients.error" in said
    found.save(tmp_path / "plan.json")
    assert autopar.Plan.load(tmp_path / "plan.json") == found
    assert autopar.verify(mlp(), mlp_batch(0), AXES, plan=found).max_error < 1e-12
    search = autopar.Search(roles=COMPRESSED, inexact=("compressed",))
    assert found.check(mlp(), mlp_batch(0), search=search).worker_role == "compressed"
    with pytest.raises(PlanError, match=r"\(compressed\), and the search {'dc': 2} \(local\)"):
        found.check(mlp(), mlp_batch(0), search=autopar.Search(**ASKED))


def test_parameters_in_float64_keep_their_digits_unless_that_is_asked_for() -> None:
    model, batch, machine = mlp(), mlp_batch(0), {"cluster": "cpu", "axes": AXES}
    few = {"recipe": "fsdp", "quantized": {"gpu": {"weights": 8}}, "inexact": ("quantized",)}
    asked: list[tuple[dict[str, Any], str]] = [
        (
            {"roles": COMPRESSED, "inexact": ("compressed",)},
            r"axis 'dc' has the role 'compressed', and parameter 'up\.w",
        ),
        (
            few,
            r"axis 'gpu' has messages in few bits, and parameter 'up\.weight' is float64.*\('quantized', 'float64'\)",
        ),
    ]
    for given, message in asked:
        with pytest.raises(ValueError, match=message):
            autopar.plan(model, batch, **machine, search=autopar.Search(**given))
        with pytest.raises(ValueError, match=message):
            find_plan(model, batch, **machine, search=autopar.Search(**given))
        # Parameters that the precision stores in float32 lose no digits that they are kept for.
        check_float64(model, Precision(), autopar.Search(**given))
        again = autopar.Search(**given | {"inexact": (*given["inexact"], "float64")})
        check_float64(model, None, again)
    plan = planned(roles=COMPRESSED, inexact=("compressed", "float64"))
    with pytest.raises(
        ValueError, match=r"axis 'dc' has the role 'compressed'.*search=Search\(inexact=\('float64',\)\)"
    ):
        check_float64(model, None, None, plan)
    check_float64(model.float(), None, None, plan)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.deep) for seed in range(1, 6))])
def test_random_plans_of_a_worker(seed: int) -> None:
    drawn = planned(roles={"dc": "local"}, recipe="random", seed=seed)
    assert autopar.verify(mlp(), mlp_batch(0), AXES, plan=drawn).max_error < 1e-12


class Weighted(nn.Module):
    """A vector of the batch that has as many entries as there are samples, and is none of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.linear(x).square().mean() * weights.sum()


def test_what_is_no_sample_is_not_split_in_silence() -> None:
    search = autopar.Search(**ASKED)
    batch = torch.randn(8, 4), torch.randn(8)
    with pytest.raises(ValueError, match="does not use these as one dim"):
        autopar.plan(Weighted(), batch, cluster="cpu", axes=AXES, search=search)
    with pytest.raises(ValueError, match="the first tensor of the batch has 8 rows and most have 6"):
        rows_of_worker([torch.zeros(8, 6), torch.zeros(6), torch.zeros(6, 6)], 0, 2)
    # Of another length there is no doubt.
    autopar.plan(Weighted(), (batch[0], torch.randn(3)), cluster="cpu", axes=AXES, search=search)


def test_one_device_has_no_workers() -> None:
    with pytest.raises(ValueError, match="mesh=None is one device"):
        autopar.parallelize(mlp(), None, search=autopar.Search(roles={"dc": "local"}, inexact=("local",)))
    with pytest.raises(PlanError, match="pass a mesh that has this axis"):
        autopar.parallelize(mlp(), None, plan=planned())
