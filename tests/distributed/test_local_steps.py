"""Workers that train apart on four ranks: two workers of two devices each, or four of one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import mlp, mlp_batch
from tests.ir.quantized.reference import sent
from tests.module.low_communication.cases import CASES, OPTIMIZERS
from tests.module.low_communication.reference import largest_difference, run

pytestmark = pytest.mark.distributed

STEPS = 13
SHARDED, TENSOR = {"a": "local", "b": "shard"}, {"a": "local", "b": "tensor"}


def searching(roles: dict[str, str], **more: Any) -> Any:
    from autopar.search.options import Search

    return Search(roles=roles, inexact=("local",), **more)


def part_of_rank(batch: dict[str, torch.Tensor], index: int, count: int) -> dict[str, torch.Tensor]:
    rows = 8 // count
    return {k: v[index * rows : (index + 1) * rows] for k, v in batch.items()}


def part(step: int, worker: int, workers: int) -> dict[str, torch.Tensor]:
    return part_of_rank(mlp_batch(step), worker, workers)


def against_reference(
    rank: int,
    sizes: tuple[int, ...],
    roles: dict[str, str],
    optimizer: str,
    cases: list[str],
    pins: dict[str, Any],
    inputs: str = "global",
) -> dict[str, float]:
    import autopar
    from autopar.module.call.batch_rows import data_world_size
    from autopar.runtime.state.parameters import contents

    workers = sizes[0]
    worker = rank // (4 // workers)
    found, plan = {}, None
    for case in cases:
        given, algorithm = CASES[case]
        search = searching(roles, pins=pins)
        model = autopar.parallelize(
            mlp(), mesh_of(*sizes), mlp_batch(0), search=search, plan=plan, inputs=inputs, timeout=WAIT
        )
        plan = model.plan
        own = OPTIMIZERS[optimizer](model)
        local = autopar.LocalSteps(model, own, **given)
        expected = run(mlp(), OPTIMIZERS[optimizer], lambda s, w: part(s, w, workers), workers, STEPS, algorithm)
        error = 0.0
        for step in range(STEPS):
            own.zero_grad()
            batch = mlp_batch(step)
            if inputs == "local":
                batch = part_of_rank(batch, model.data_rank, model.data_world_size)
            model(**batch)["loss"].backward()
            own.step()
            error = max(error, largest_difference(model.full_state_dict(), expected[step][worker]))
        found[case] = error
        local.synchronize()
        own_digest = contents(list(model.full_state_dict().values()))
        after = model._autopar.context.everyone.gather(own_digest, "after synchronize()")
        assert len(set(after)) == 1
        assert model.data_world_size == workers * data_world_size(model._autopar)
    return found


def check(found: list[dict[str, float]], cases: list[str]) -> None:
    for own in found:
        assert list(own) == cases
        assert max(own.values()) < 1e-12, own


QUICK = ["post-local", "streaming, long delay"]


@pytest.mark.parametrize(
    ("roles", "optimizer", "cases"),
    [
        (SHARDED, "AdamW", QUICK),
        pytest.param(TENSOR, "SGD", ["streaming"], marks=pytest.mark.deep),
        pytest.param(SHARDED, "Adafactor", ["post-local"], marks=pytest.mark.deep),
        pytest.param(SHARDED, "SGD", list(CASES), marks=pytest.mark.deep),
        pytest.param(TENSOR, "AdamW", list(CASES), marks=pytest.mark.deep),
    ],
)
def test_equals_the_reference(ranks: Ranks, roles: dict[str, str], optimizer: str, cases: list[str]) -> None:
    check(ranks.run(against_reference, (2, 2), roles, optimizer, cases, {}), cases)


@pytest.mark.deep
def test_workers_of_one_device_and_of_pipelines(ranks: Ranks) -> None:
    cases = ["DiLoCo", "streaming"]
    check(ranks.run(against_reference, (4,), {"a": "local"}, "AdamW", cases, {}), cases)
    pins = {"stages": ["down"], "stage_axis": "b", "microbatches": 2, "schedule": "1f1b"}
    cases = [*cases, "post-local"]
    check(ranks.run(against_reference, (2, 2), {"a": "local"}, "AdamW", cases, pins), cases)


@pytest.mark.deep
def test_workers_of_several_axes(ranks: Ranks) -> None:
    roles = {"a": "local", "b": "shard", "c": "data"}
    for sizes in ((2, 2, 1), (1, 2, 2)):
        check(ranks.run(against_reference, sizes, roles, "AdamW", ["DiLoCo"], {}), ["DiLoCo"])


@pytest.mark.deep
def test_each_rank_passes_its_own_rows(ranks: Ranks) -> None:
    check(ranks.run(against_reference, (2, 2), SHARDED, "AdamW", ["DiLoCo"], {}, "local"), ["DiLoCo"])


def automatic(rank: int) -> tuple[str, float, int]:
    import autopar
    from autopar.errors import AutoparError

    model = autopar.parallelize(mlp(), mesh_of(2, 2), mlp_batch(0), search=searching(SHARDED), timeout=WAIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = autopar.LocalSteps(model, optimizer, every="auto", fragments="auto", delay=1)
    with pytest.raises(AutoparError, match="decided in the first step"):
        _ = local.predicted
    trained(model, optimizer, range(1))
    assert local.settings is not None
    trained(model, optimizer, range(1, 2 * local.settings.every + 1))
    cost = local.predicted
    assert cost.steps == local.settings.every and cost.fragments == local.settings.fragments
    assert local.bytes_sent == 2 * cost.sent_bytes  # two rounds, as predicted
    return str(local.settings), cost.slowdown, local.settings.every


@pytest.mark.deep
def test_rounds_chosen_from_costs(ranks: Ranks) -> None:
    found = ranks.run(automatic)
    assert len({settings for settings, *_ in found}) == 1
    assert all(slowdown <= 0.05 and every >= 2 for _, slowdown, every in found)


def trained(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(**mlp_batch(step))["loss"].backward()
        optimizer.step()


def resumed(rank: int, folder: str, roles: dict[str, str], pins: dict[str, Any], again: dict[str, str]) -> list[float]:
    """A run that is saved with a fragment in flight, and goes on in another model."""
    import autopar
    from autopar import checkpoint
    from autopar.errors import AutoparError

    given = CASES["streaming"][0]

    def made(roles: dict[str, str], pins: dict[str, Any]) -> tuple[Any, Any, Any]:
        sizes = (2, 2) if len(roles) > 1 or pins else (4,)
        search = searching(roles, pins=pins)
        model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, timeout=WAIT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        return model, optimizer, autopar.LocalSteps(model, optimizer, **given)

    model, optimizer, local = made(roles, pins)
    trained(model, optimizer, range(6))
    assert list(local._in_flight) == [0]
    checkpoint.save(folder, model, optimizer, step=6, local=local)
    trained(model, optimizer, range(6, 11))
    expected = model.full_state_dict()
    errors = []
    for other_roles, other_pins in ((again, {}), (roles, pins)):
        other, own, others = made(other_roles, other_pins)
        found = checkpoint.load(folder, other, own, local=others)
        assert found.step == 6 and others.steps == 6 and found.folder.parent.name == f"worker-{rank // 2}"
        trained(other, own, range(6, 11))
        assert others.exchanges == local.exchanges
        errors.append(largest_difference(other.full_state_dict(), expected))
    others.detach()
    with pytest.raises(AutoparError, match="and what is loaded has every=4"):
        checkpoint.load(folder, other, own, local=autopar.LocalSteps(other, own, every=7, delay=1))
    return errors


@pytest.mark.slow
@pytest.mark.parametrize(
    ("roles", "pins", "again"),
    [
        (SHARDED, {}, TENSOR),
        pytest.param(
            {"a": "local"}, {"stages": ["down"], "stage_axis": "b", "microbatches": 2, "schedule": "1f1b"}, SHARDED,
            marks=pytest.mark.deep,
        ),
    ],
)  # fmt: skip
def test_resumes(ranks: Ranks, tmp_path: Any, roles: Any, pins: Any, again: Any) -> None:
    for errors in ranks.run(resumed, str(tmp_path), roles, pins, again):
        assert max(errors) < 1e-12, errors


def with_others(rank: int, folder: str, before: int, after: int) -> float:
    """A run that is saved with a fragment in flight, and goes on with another number of workers."""
    import autopar
    from autopar import checkpoint
    from autopar.errors import AutoparError

    given, algorithm = CASES["streaming"]

    def made(workers: int) -> tuple[Any, Any, Any]:
        sizes, roles = ((2, 2), SHARDED) if workers == 2 else ((4,), {"a": "local"})
        model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=searching(roles), timeout=WAIT)
        optimizer = OPTIMIZERS["AdamW"](model)
        return model, optimizer, autopar.LocalSteps(model, optimizer, **given)

    model, optimizer, local = made(before)
    trained(model, optimizer, range(3))
    checkpoint.save(folder, model, optimizer, step=3, local=local)
    trained(model, optimizer, range(3, 6))
    checkpoint.save(folder, model, optimizer, step=6, local=local)
    other, own, others = made(after)
    found = checkpoint.load(folder, other, own, local=others)
    worker = rank // (4 // after)
    assert found.step == 6 and found.folder.parent.name == f"worker-{worker % before}"
    assert found.same_random_numbers == (before == 4 and after == 4)

    def batches(step: int, worker: int) -> dict[str, torch.Tensor]:
        return part(step, worker, before if step < 6 else after)

    expected = run(mlp(), OPTIMIZERS["AdamW"], batches, before, STEPS, algorithm, {6: after})
    error = largest_difference(other.full_state_dict(), expected[5][worker % before])
    for step in range(6, STEPS):
        trained(other, own, range(step, step + 1))
        error = max(error, largest_difference(other.full_state_dict(), expected[step][worker]))
    # The next checkpoint is of these workers alone: folders of more may be there.
    checkpoint.save(folder, other, own, step=STEPS, local=others)
    last, of_last, with_last = made(before)
    assert checkpoint.load(folder, last, of_last, local=with_last).step == STEPS
    with pytest.raises(AutoparError, match=r"that all workers have \(rank 0 found none\)"):
        checkpoint.load(f"{folder}/none", last, of_last, local=with_last)
    for name in [p.name for p in Path(folder, "worker-0").iterdir() if p.is_dir()] if rank == 0 else []:
        shutil.rmtree(Path(folder, "worker-1", name), ignore_errors=True)
    last._autopar.context.everyone.gather(None, "removing what worker 1 has saved")
    with pytest.raises(AutoparError, match=r"worker 0 has .*, of which others lack their part"):
        checkpoint.load(folder, last, of_last, local=with_last)
    return error


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(2, 4), pytest.param(4, 2, marks=pytest.mark.deep)])
def test_goes_on_with_other_workers(ranks: Ranks, tmp_path: Any, before: int, after: int) -> None:
    assert max(ranks.run(with_others, str(tmp_path), before, after)) < 1e-12


def quantized(rank: int, bits: int, feedback: bool) -> tuple[bool, int, int]:
    """Two workers of two devices in float32: each shard as emulated workers have it, bit by bit."""
    import autopar
    from autopar.module.low_communication.exchange import emulated_mean
    from autopar.module.low_communication.outer import OuterState
    from autopar.runtime.dtensor import to_local

    def batch(step: int) -> dict[str, torch.Tensor]:
        return {k: v.float() for k, v in mlp_batch(step).items()}

    model = autopar.parallelize(mlp().float(), mesh_of(2, 2), batch(0), search=searching(SHARDED), timeout=WAIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def shards() -> dict[str, torch.Tensor]:
        return {n: to_local(p).detach().clone() for n, p in model.named_parameters()}

    caught: dict[str, torch.Tensor] = {}
    optimizer.register_step_post_hook(lambda *_: caught.update(shards()))  # comes before the exchange
    local = autopar.LocalSteps(model, optimizer, every=1, bits=bits, feedback=feedback)
    left: Any = {0: 0, 1: 0}
    state = OuterState(shards(), [list(shards())], torch.device("cpu"))
    same, everyone = True, model._autopar.context.everyone
    for step in range(3):
        optimizer.zero_grad()
        model(**batch(step))["loss"].backward()
        optimizer.step()
        differences = everyone.gather((rank % 2, state.difference(0, caught)), "differences")
        assert local.settings is not None
        own = [d.numpy() + left[w] for w, d in enumerate(d for place, d in differences if place == rank % 2)]
        left = {w: d - sent(d, bits) if feedback else 0 for w, d in enumerate(own)}
        mean = emulated_mean([torch.from_numpy(d) for d in own], bits)
        state.apply(0, caught, mean, local.settings, 0.0)
        same = same and all(torch.equal(own, caught[n]) for n, own in shards().items())
    state = local.state_dict()
    local.detach()
    again = autopar.LocalSteps(model, optimizer, every=1, bits=bits, feedback=feedback)
    again.load_state_dict(state)
    same = (
        same and all(torch.equal(t, local._left[f]) for f, t in again._left.items()) and feedback == (0 in again._left)
    )
    return same, local.bytes_sent, sum(t.numel() for t in caught.values())


def copies(rank: int, bits: int) -> tuple[list[str], float]:
    """Parameters that the devices of a worker all have, beside others that they split, in fragments with both."""
    import autopar
    from autopar.runtime.dtensor import to_local

    def batch(step: int) -> dict[str, torch.Tensor]:
        return {k: v.float() for k, v in mlp_batch(step).items()}

    search = searching(SHARDED, pins={"up.bias": ("R",), "down.bias": ("R",)})
    model = autopar.parallelize(mlp().float(), mesh_of(2, 2), batch(0), search=search, timeout=WAIT)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    autopar.LocalSteps(model, optimizer, every=1, bits=bits)
    for step in range(3):
        optimizer.zero_grad()
        model(**batch(step))["loss"].backward()
        optimizer.step()
    everywhere = [n for n, p in model.named_parameters() if to_local(p).numel() == p.numel()]
    own = {n: to_local(model.get_parameter(n)).detach() for n in everywhere}
    every_rank = model._autopar.context.workers.everyone.gather(own, "copies")
    return everywhere, max(largest_difference(other, own) for other in every_rank)


@pytest.mark.parametrize("bits", [4, pytest.param(8, marks=pytest.mark.deep)])
def test_devices_of_a_worker_have_the_same_of_what_they_all_have(ranks: Ranks, bits: int) -> None:
    for everywhere, difference in ranks.run(copies, bits):
        assert everywhere == ["up.bias", "down.bias"] and difference == 0.0


@pytest.mark.parametrize(
    ("bits", "feedback"),
    [(8, True), pytest.param(8, False, marks=pytest.mark.deep), pytest.param(4, True, marks=pytest.mark.deep)],
)
def test_quantized_exchanges_are_bit_exact(ranks: Ranks, bits: int, feedback: bool) -> None:
    for same, sent_bytes, elements in ranks.run(quantized, bits, feedback):
        assert same
        blocks = -(-elements // 256)
        assert sent_bytes == 3 * blocks * (256 * bits // 8 + 4)  # of two workers, each sends its own once


def wrong(rank: int) -> list[str]:
    import autopar
    from autopar.errors import AutoparError, RankError
    from autopar.runtime.mesh import axes_of

    found = []
    mesh = mesh_of(2, 2)
    assert axes_of(mesh) == {"a": 2, "b": 2}
    with pytest.raises(ValueError, match="must be the outermost one") as axis:
        autopar.parallelize(mlp(), mesh, search=searching({"b": "local"}), timeout=WAIT)
    found.append(str(axis.value))
    plain = autopar.parallelize(mlp(), mesh, mlp_batch(0), timeout=WAIT)
    with pytest.raises(ValueError, match="no axis of workers"):
        autopar.LocalSteps(plain, torch.optim.SGD(plain.parameters(), lr=0.1), every=2)
    ahead = autopar.parallelize(mlp(), mesh, mlp_batch(0), search=searching(SHARDED), timeout=WAIT)
    with pytest.raises(RankError, match="the batch's contents differ"):
        ahead(**mlp_batch(rank // 2))
    model = autopar.parallelize(mlp(), mesh, search=searching(SHARDED), timeout=WAIT)
    with pytest.raises(ValueError, match="do not divide among 2 workers"):
        model(**mlp_batch(0, rows=7))
    with pytest.raises(RankError, match="the batch's contents differ"):
        model(**mlp_batch(rank // 2))  # each worker its own, without inputs="local"
    half = torch.optim.SGD(model.up.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"does not have 'down\.weight'"):
        autopar.LocalSteps(model, half, every=2)
    more = torch.optim.SGD([*model.parameters(), torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with pytest.raises(ValueError, match="none of the model's"):
        autopar.LocalSteps(model, more, every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="every=0"):
        autopar.LocalSteps(model, optimizer, every=0)
    with pytest.raises(ValueError, match="float64"):
        autopar.LocalSteps(model, optimizer, every=2, bits=8)
    with pytest.raises(ValueError, match="fragments=3: the model has 2 blocks"):
        autopar.LocalSteps(model, optimizer, every=4, fragments=3)
    local = autopar.LocalSteps(model, optimizer, every=2)
    with pytest.raises(ValueError, match="the model has LocalSteps already, or its like, of another optimizer"):
        autopar.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    with pytest.raises(ValueError, match="state=None: expected what state_dict"):
        local.require_settings(None)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="LocalSteps already"):
        autopar.LocalSteps(model, optimizer, every=2)
    with pytest.raises(AutoparError, match="layouts are not decided"):
        local.synchronize()
    local.detach()
    model(**mlp_batch(0))["loss"].backward()
    infinite = autopar.LocalSteps(model, optimizer, every=1)
    if rank == 3:
        model.down.bias.grad._local_tensor.fill_(float("nan"))
    with pytest.raises(RankError, match=r"not finite differs: rank 3 has down\.bias, ranks 0, 1, 2 have none; all"):
        optimizer.step()
    model.up.requires_grad_(False)
    with pytest.raises(AutoparError, match=r"'up\.bias' is no longer trained"):
        optimizer.step()
    model.up.requires_grad_(True)
    infinite.detach()
    optimizer.zero_grad()
    model.load_state_dict(mlp().state_dict())
    # Out of step: one worker has other settings, or other weights.
    model(**mlp_batch(0))["loss"].backward()
    autopar.LocalSteps(model, optimizer, every=2 + rank // 2)
    with pytest.raises(RankError, match="settings of local steps differ: rank 2 has every=3") as settings:
        optimizer.step()
    found.append(str(settings.value))
    return found


@pytest.mark.slow
def test_bad_input_and_workers_that_disagree(ranks: Ranks) -> None:
    ranks.run(wrong)


def out_of_step(rank: int) -> str:
    import autopar
    from autopar.errors import RankError

    search = searching(SHARDED)
    model = autopar.parallelize(mlp(), mesh_of(2, 2), mlp_batch(0), search=search, timeout=WAIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = autopar.LocalSteps(model, optimizer, every=2)
    trained(model, optimizer, range(1))
    # Worker 1 exchanges early.
    with pytest.raises(RankError) as error:
        if rank // 2:
            local.synchronize()
        else:
            trained(model, optimizer, range(1, 2))
    return str(error.value)


def test_a_worker_out_of_step_is_named(ranks: Ranks) -> None:
    for said in ranks.run(out_of_step):
        assert "outer exchange 1" in said and "local steps differs: ranks 2, 3 have 1, ranks 0, 1 have 2" in said


def failing(rank: int, compressed: bool, where: str) -> tuple[str, float]:
    """An error of one worker alone, in its optimizer's step or outside of it, while its process lives on."""
    import sys
    import time

    import autopar

    role = "compressed" if compressed else "local"
    search = autopar.Search(roles={"a": role}, inexact=(role, "float64"))
    model = autopar.parallelize(mlp(), mesh_of(2), mlp_batch(0), search=search, timeout=WAIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if compressed:
        autopar.CompressedGradients(model, optimizer, method="topk", share=0.5)
    else:
        autopar.LocalSteps(model, optimizer, every=2)
    trained(model, optimizer, range(2))
    begun = time.monotonic()
    try:
        if rank == 1 and where == "step":
            model.up.bias.requires_grad_(False)
        elif rank == 1 and where != "script":
            model(torch.zeros(8, 15, dtype=torch.float64), mlp_batch(2)["y"])
        elif rank == 1:
            raise ValueError("the file of batch 3 is gone")
        trained(model, optimizer, range(2, 6))
    except Exception as e:
        if where == "goes on":
            time.sleep(2)  # while the other one waits
            trained(model, optimizer, range(2, 6))
            return "", 0.0
        if where == "script":
            sys.excepthook(*sys.exc_info())  # as the interpreter does, of a process that has a thread which goes on
        return f"{type(e).__name__}: {e}", time.monotonic() - begun
    return "", 0.0


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("compressed", "where"),
    [
        (False, "step"),
        (True, "step"),
        (False, "forward"),
        (True, "script"),
        (False, "goes on"),
        pytest.param(False, "script", marks=pytest.mark.deep),
        pytest.param(True, "forward", marks=pytest.mark.deep),
    ],
)
def test_a_worker_that_fails_is_heard_of(compressed: bool, where: str) -> None:
    ranks = Ranks(2)
    try:
        other, own = ranks.run(failing, compressed, where)
    finally:
        ranks.close()
    if where == "goes on":
        assert not other[0] and not own[0], (own, other)
    elif where != "step":
        said = "the file of batch 3 is gone" if where == "script" else "a forward pass of Mlp: "
        assert other[0].startswith("RankError") and "rank 1 failed at " in other[0] and said in other[0], other
    elif compressed:  # which lets parameters be frozen, on all workers
        why = (
            "which parameters are trained in step 3 of Mlp of compressed gradients differ: rank 1 has all but 'up.bias'"
        )
        assert own[0].startswith(f"RankError: {why}") and other[0].startswith(f"RankError: {why}"), (own, other)
    else:
        why = "'up.bias' is no longer trained"
        assert why in own[0] and other[0].startswith("RankError"), (own, other)
        assert "rank 1 failed at local steps of Mlp" in other[0] and why in other[0], other
    assert other[1] < WAIT / 2, other


def with_dropout(rank: int) -> Any:
    from torch import nn

    import autopar

    class Drop(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(16, 16).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(self.linear(x), 0.5)

    torch.manual_seed(0)
    x = torch.ones(8, 16, dtype=torch.float64)
    model = autopar.parallelize(Drop(), mesh_of(2, 2), search=searching(SHARDED), timeout=WAIT, inputs="global")
    return (model(x).full_tensor() == 0).tolist()


@pytest.mark.deep
def test_workers_draw_different_numbers(ranks: Ranks) -> None:
    first, same, second, _ = ranks.run(with_dropout)
    assert first == same and first != second


def left_alone(rank: int) -> tuple[str, int]:
    import os

    import autopar

    search = searching(SHARDED)
    model = autopar.parallelize(mlp(), mesh_of(2, 2), mlp_batch(0), search=search, timeout=20)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    local = autopar.LocalSteps(model, optimizer, every=4)
    trained(model, optimizer, range(2))
    if rank == 3:
        os._exit(1)
    try:
        trained(model, optimizer, range(2, 8))
    except Exception as e:
        return f"{type(e).__name__}: {e}", local.steps
    return "", local.steps


@pytest.mark.deep
def test_a_dead_worker_ends_the_others_at_the_next_exchange() -> None:
    ranks = Ranks()
    try:
        first, _, other, _ = ranks.run(left_alone, timeout=90, silent=(3,))
        assert "RankError" in first[0] and "rank 3 died" in first[0] and "outer exchange 1" in first[0]
        assert first[1] == 4  # the steps before it need nobody
        assert "RankError" in other[0] and other[1] == 2
    finally:
        ranks.close()


def checked_and_copied(rank: int) -> float:
    """``check=True``, a copy of the weights, and a batch of another size."""
    import copy

    import autopar

    search = searching(SHARDED)
    model = autopar.parallelize(mlp(), mesh_of(2, 2), search=search, check=True, timeout=WAIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    autopar.LocalSteps(model, optimizer, every=2)
    trained(model, optimizer, range(1))
    optimizer.zero_grad()  # torch cannot copy gradients that are DTensors
    averaged = copy.deepcopy(model)
    trained(model, optimizer, range(1, 3))
    model(**mlp_batch(0, rows=4))["loss"].backward()
    with torch.no_grad():
        evaluated = averaged(**mlp_batch(0))["loss"]
    reference = mlp()
    reference.load_state_dict(averaged.full_state_dict())
    return float(evaluated - reference(**part(0, rank // 2, 2))["loss"])


@pytest.mark.deep
def test_checks_copies_and_other_shapes(ranks: Ranks) -> None:
    assert max(map(abs, ranks.run(checked_and_copied))) < 1e-12


def weighted(rank: int, folder: str) -> float:
    """Workers count by their tokens, also in a run that goes on from a checkpoint within a round."""
    import autopar
    from autopar import checkpoint

    def tokens(step: int, worker: int) -> int:
        return 1 + (3 * step + 5 * worker) % 7

    given, algorithm = CASES["streaming, long delay"]
    workers = 2
    sizes, roles = ((2, 2), SHARDED) if torch.distributed.get_world_size() == 4 else ((2,), {"a": "local"})
    worker = rank // (torch.distributed.get_world_size() // workers)

    def made() -> tuple[Any, Any, Any]:
        search = searching(roles)
        model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, timeout=WAIT)
        optimizer = OPTIMIZERS["AdamW"](model)
        return model, optimizer, autopar.LocalSteps(model, optimizer, **given, weighted=True)

    expected = run(
        mlp(), OPTIMIZERS["AdamW"], lambda s, w: part(s, w, workers), workers, STEPS, algorithm, tokens=tokens
    )
    model, optimizer, local = made()
    error = 0.0
    for step in range(STEPS):
        if step == 7:
            checkpoint.save(folder, model, optimizer, step=step, local=local)
            model, optimizer, local = made()
            checkpoint.load(folder, model, optimizer, local=local)
        local.add_tokens(tokens(step, worker))
        trained(model, optimizer, range(step, step + 1))
        error = max(error, largest_difference(model.full_state_dict(), expected[step][worker]))
    local.synchronize()
    local.synchronize()  # of no more tokens
    return error


def test_workers_count_by_their_tokens(two_ranks: Ranks, tmp_path: Any) -> None:
    assert max(two_ranks.run(weighted, str(tmp_path))) < 1e-12


@pytest.mark.deep
def test_workers_of_two_devices_count_by_their_tokens(ranks: Ranks, tmp_path: Any) -> None:
    assert max(ranks.run(weighted, str(tmp_path))) < 1e-12
