"""Compressed gradients on four ranks: two workers of two devices each, or four of one."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tests.distributed.launch import WAIT, Ranks, mesh_of
from tests.distributed.models import gpt2, mlp, mlp_batch
from tests.module.low_communication.compressed_cases import CASES, OPTIMIZERS
from tests.module.low_communication.compressed_reference import run, zero_one
from tests.module.low_communication.reference import largest_difference

pytestmark = pytest.mark.distributed

STEPS = 7
SHARDED, TENSOR, ALONE = {"a": "compressed", "b": "shard"}, {"a": "compressed", "b": "tensor"}, {"a": "compressed"}


def searching(roles: dict[str, str], **more: Any) -> Any:
    from autopar.search.options import Search

    return Search(roles=roles, inexact=("compressed", "float64"), **more)


def part(step: int, worker: int, workers: int) -> dict[str, torch.Tensor]:
    rows = 8 // workers
    return {k: v[worker * rows : (worker + 1) * rows] for k, v in mlp_batch(step).items()}


def made(
    sizes: tuple[int, ...], roles: dict[str, str], given: dict[str, Any], plan: Any = None, **more: Any
) -> tuple[Any, Any, Any]:
    import autopar

    search = searching(roles, **more)
    model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, plan=plan, timeout=WAIT)
    optimizer = OPTIMIZERS[given["method"]](model)
    return model, optimizer, autopar.CompressedGradients(model, optimizer, **given)


def trained(model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(**mlp_batch(step))["loss"].backward()
        optimizer.step()


def cut_as(model: Any) -> Any:
    """Shards of whole parameters, as the devices of a worker have them: the rest of autopar is not asked how."""
    dims = {}
    for name, parameter in model.named_parameters():
        placement = parameter.placements[0] if hasattr(parameter, "placements") else None
        assert type(placement).__name__ in ("Shard", "Replicate", "NoneType")
        dims[name] = getattr(placement, "dim", None)

    def shards(name: str, tensor: np.ndarray) -> list[np.ndarray]:
        return [tensor] if dims[name] is None else np.array_split(tensor, 2, dims[name])

    return shards


def against_reference(
    rank: int, sizes: tuple[int, ...], roles: dict[str, str], cases: list[str], more: dict[str, Any]
) -> dict[str, tuple[float, bool]]:
    """Largest error, and whether the plan shards parameters."""
    found, plan = {}, None
    for case in cases:
        given = CASES[case]
        model, optimizer, compressed = made(sizes, roles, given, plan, **more)
        plan = model.plan
        assert model.plan.worker_role == "compressed"
        workers, shards = sizes[0], cut_as(model)
        expected = run(
            mlp(), OPTIMIZERS[given["method"]], lambda s, w: part(s, w, sizes[0]), workers, STEPS, given, shards
        )
        error = 0.0
        for step in range(STEPS):
            predicted, before = compressed.predicted, compressed.bytes_sent
            trained(model, optimizer, range(step, step + 1))
            assert compressed.bytes_sent - before == predicted.sent_bytes
            error = max(error, largest_difference(model.full_state_dict(), expected[step]))
        assert 0 < compressed.error < 1
        cut = [name for name, p in mlp().named_parameters() if len(shards(name, p.detach().numpy())) > 1]
        found[case] = error, bool(cut)
    return found


def check(found: list[dict[str, tuple[float, bool]]], cases: list[str], sharded: bool | None) -> None:
    for own in found:
        assert list(own) == cases
        assert max(error for error, _ in own.values()) < 1e-12, own
        assert sharded is None or {cut for _, cut in own.values()} == {sharded}


QUICK = ["powersgd", "topk, late", "onebit"]


@pytest.mark.parametrize(
    ("sizes", "roles", "cases", "more", "sharded"),
    [
        ((2, 2), SHARDED, ["onebit"], {}, True),
        pytest.param((4,), ALONE, list(CASES), {}, False, marks=pytest.mark.deep),
        pytest.param((2, 2), SHARDED, list(CASES), {}, True, marks=pytest.mark.deep),
        pytest.param((2, 2), TENSOR, list(CASES), {}, True, marks=pytest.mark.deep),
        *(
            pytest.param((2, 2), ALONE, QUICK, {"recipe": "random", "seed": seed}, None, marks=pytest.mark.deep)
            for seed in range(4)
        ),
    ],
)
def test_equals_the_reference(
    ranks: Ranks, sizes: tuple[int, ...], roles: dict[str, str], cases: list[str], more: dict[str, Any], sharded: Any
) -> None:
    check(ranks.run(against_reference, sizes, roles, cases, more), cases, sharded)


def resumed(rank: int, folder: str, case: str) -> tuple[float, float]:
    """A run that goes on in another model: the largest difference, and that of errors in another layout."""
    import autopar
    from autopar import checkpoint
    from autopar.errors import AutoparError

    given = CASES[case]
    model, optimizer, compressed = made((2, 2), SHARDED, given)
    trained(model, optimizer, range(6))
    checkpoint.save(folder, model, optimizer, step=6, grads=compressed)
    saved = full(compressed.state_dict()["tensors"])
    trained(model, optimizer, range(6, 9))
    expected = model.full_state_dict()
    other, own, others = made((2, 2), SHARDED, given, model.plan)
    found = checkpoint.load(folder, other, own, grads=others)
    assert found.step == others.steps == 6 and found.folder.parent.name == f"worker-{rank // 2}"
    trained(other, own, range(6, 9))
    again = largest_difference(other.full_state_dict(), expected)
    with pytest.raises(AutoparError, match="of 3 workers in what is loaded, and there are 2"):
        others.require_settings({**others.state_dict(), "workers": 3})
    others.detach()
    wrong = {"method": "topk", "share": 0.5} if given["method"] != "topk" else {"method": "powersgd", "rank": 3}
    another = autopar.CompressedGradients(other, own, **wrong)
    with pytest.raises(AutoparError, match=f"have method={wrong['method']}.*loaded has method={given['method']}"):
        checkpoint.load(folder, other, own, grads=another)
    moved, its, with_it = made((2, 2), TENSOR, given)
    if given["method"] == "powersgd":
        with pytest.raises(AutoparError, match="use the plan it was saved with"):
            checkpoint.load(folder, moved, its, grads=with_it)
        return again, 0.0
    checkpoint.load(folder, moved, its, grads=with_it)
    return again, largest_difference(full(with_it.state_dict()["tensors"]), saved)


def full(tensors: dict[str, Any]) -> dict[str, torch.Tensor]:
    assert tensors
    return {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in tensors.items()}


@pytest.mark.deep
@pytest.mark.parametrize("case", ["onebit", "powersgd", "topk"])
def test_resumes(ranks: Ranks, tmp_path: Any, case: str) -> None:
    for again, moved in ranks.run(resumed, str(tmp_path), case):
        assert again == 0.0 and moved == 0.0


def wrong(rank: int) -> None:
    import autopar
    from autopar.errors import AutoparError, RankError

    given = CASES["topk"]
    model, optimizer, compressed = made((2, 2), SHARDED, given)
    with pytest.raises(ValueError, match="axis 'a' has the role 'compressed', and LocalSteps is for 'local'"):
        autopar.LocalSteps(model, torch.optim.SGD(model.parameters(), lr=0.1), every=2)
    with pytest.raises(ValueError, match="has CompressedGradients already"):
        autopar.CompressedGradients(model, optimizer, **given)
    with pytest.raises(ValueError, match=r"optimizer= is RMSprop; give it torch\.optim\.Adam"):
        autopar.CompressedGradients(model, torch.optim.RMSprop(model.parameters()), **CASES["onebit"])
    with pytest.raises(ValueError, match="has amsgrad=True"):
        autopar.CompressedGradients(model, torch.optim.Adam(model.parameters(), amsgrad=True), **CASES["onebit"])
    with pytest.raises(AutoparError, match=r"optimizer\.step\(closure\) computes gradients within the step"):
        optimizer.step(lambda: 0.0)
    with pytest.raises(AutoparError, match="has no 'frozen', and is no state of compressed gradients"):
        compressed.load_state_dict({"settings": str(compressed.settings), "steps": 1})
    with pytest.raises(AutoparError, match=r"what is loaded has no error of 'up\.weight'"):
        compressed.load_state_dict({"settings": str(compressed.settings), "steps": 1, "frozen": {}})
    state = compressed.state_dict()
    state["tensors"]["error.up.weight"] = torch.zeros(3)
    with pytest.raises(AutoparError, match=r"what is loaded of 'up\.weight' is of \(3,\), and here it is \("):
        compressed.load_state_dict(state)
    # Whose error it is: on every rank the same.
    model(**mlp_batch(0))["loss"].backward()
    if rank == 1:
        model.up.weight.grad._local_tensor[0, 0] = float("nan")
    with pytest.raises(AutoparError, match=r"the gradient of 'up\.weight' on rank 1 is not finite in step 1"):
        optimizer.step()
    optimizer.zero_grad()
    model(**mlp_batch(0))["loss"].backward()
    optimizer.param_groups[0]["lr"] = 0.1 + rank // 2
    with pytest.raises(RankError, match="options of the optimizer of compressed gradients differ: rank 2 has"):
        optimizer.step()
    if rank // 2:
        model.up.bias.grad = None
    with pytest.raises(RankError, match=r"have gradients in step 1 .* differ: rank 2 has all but 'up\.bias', rank 0"):
        optimizer.step()
    compressed.detach()
    model.requires_grad_(False)
    with pytest.raises(ValueError, match="all parameters of the model are frozen"):
        autopar.CompressedGradients(model, optimizer, **given)
    model.down.requires_grad_(True)
    later = autopar.CompressedGradients(model, optimizer, **given)
    later._made()
    model.requires_grad_(True)
    with pytest.raises(AutoparError, match=r"'up\.bias' was not trained when these began"):
        optimizer.step()
    later.detach()
    autopar.CompressedGradients(model, optimizer, method="topk", share=0.1 + 0.1 * (rank // 2))
    with pytest.raises(RankError, match="settings of compressed gradients differ: rank 2 has method=topk"):
        optimizer.step()


def wrong_models(rank: int) -> None:
    import autopar
    from autopar.errors import AutoparError

    given = CASES["topk"]
    alone = autopar.parallelize(
        mlp(), mesh_of(1, 2, 2), mlp_batch(0), search=searching({"a": "compressed"}), timeout=WAIT
    )
    with pytest.raises(ValueError, match="there is one worker, which has nobody"):
        autopar.CompressedGradients(alone, torch.optim.SGD(alone.parameters(), lr=0.1), **given)
    half = autopar.parallelize(mlp().half(), mesh_of(2, 2), search=searching(SHARDED), timeout=WAIT)
    with pytest.raises(AutoparError, match=r"parameter 'up\.weight' is float16"):
        autopar.CompressedGradients(half, torch.optim.SGD(half.parameters(), lr=0.1), **given)
    local = autopar.Search(roles={"a": "local"}, inexact=("local",))
    apart = autopar.parallelize(mlp(), mesh_of(2, 2), mlp_batch(0), search=local, timeout=WAIT)
    with pytest.raises(ValueError, match="axis 'a' has the role 'local', and CompressedGradients is for 'compressed'"):
        autopar.CompressedGradients(apart, torch.optim.SGD(apart.parameters(), lr=0.1), **given)


def test_bad_input_and_workers_that_disagree(ranks: Ranks) -> None:
    ranks.run(wrong)


@pytest.mark.deep
def test_models_that_cannot_be_followed(ranks: Ranks) -> None:
    ranks.run(wrong_models)


def clipped_and_accumulated(rank: int) -> tuple[float, float]:
    """A hook that clips what takes the gradients' place; and two backward passes for one exchange."""

    def clip(model: Any) -> None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)

    given = CASES["topk"]
    model, optimizer, compressed = made((2, 2), SHARDED, given)
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    expected = run(mlp(), OPTIMIZERS["topk"], lambda s, w: part(s, w, 2), 2, STEPS, given, cut_as(model), clip)
    trained(model, optimizer, range(STEPS))
    clipped = largest_difference(model.full_state_dict(), expected[-1])

    model, optimizer, compressed = made((2, 2), SHARDED, given)
    expected = run(
        mlp(), OPTIMIZERS["topk"], lambda s, w: part(2 * s, w, 2), 2, 3, given, cut_as(model),
        further=lambda s, w: part(2 * s + 1, w, 2),
    )  # fmt: skip
    for step in range(3):
        optimizer.zero_grad()
        with model.no_sync():
            model(**mlp_batch(2 * step))["loss"].backward()
        model(**mlp_batch(2 * step + 1))["loss"].backward()
        optimizer.step()
    assert compressed.bytes_sent == 3 * compressed.predicted.sent_bytes
    return clipped, largest_difference(model.full_state_dict(), expected[-1])


@pytest.mark.deep
def test_clips_the_mean_and_exchanges_once_what_was_accumulated(ranks: Ranks) -> None:
    for found in ranks.run(clipped_and_accumulated):
        assert max(found) < 1e-12, found


def of_attention(rank: int, norm: float | None) -> float:
    """GPT-2 with heads on two devices: keys' biases have gradients of roundings alone, beside those of values."""
    import autopar

    def words(step: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (8, 12), generator=torch.Generator().manual_seed(step))
        return {"input_ids": ids, "labels": ids}

    def part_of(step: int, worker: int) -> dict[str, torch.Tensor]:
        return {k: v[4 * worker : 4 * worker + 4] for k, v in words(step).items()}

    def clip(model: Any) -> None:
        if norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), norm)

    given = CASES["onebit"]
    model = autopar.parallelize(gpt2(), mesh_of(2, 2), words(0), search=searching(TENSOR), timeout=WAIT)
    placements = {n: str(p.placements[0]) if hasattr(p, "placements") else "R" for n, p in model.named_parameters()}
    assert "_S(0, 3)" in placements.values()

    def shards(name: str, tensor: np.ndarray) -> list[np.ndarray]:
        if placements[name].startswith("_S"):  # heads of queries, keys and values
            return np.split(tensor.reshape(*tensor.shape[:-1], 3, -1), 2, -1)
        cut = placements[name].removeprefix("S(").removesuffix(")")
        return np.split(tensor, 2, int(cut)) if cut.isdecimal() else [tensor]

    optimizer = OPTIMIZERS["onebit"](model)
    compressed = autopar.CompressedGradients(model, optimizer, **given)
    optimizer.register_step_pre_hook(lambda *_: clip(model))
    expected = run(gpt2(), OPTIMIZERS["onebit"], part_of, 2, STEPS, given, shards, clip)
    error = 0.0
    for step in range(STEPS):
        optimizer.zero_grad()
        model(**words(step))["loss"].backward()
        optimizer.step()
        found = model.full_state_dict()  # with the tied head under both names
        for state in (found, expected[step]):
            # Of roundings in Adam too, which divides them by each other: no run has the same.
            keys = state["transformer.h.0.attn.c_attn.bias"][32:64]
            assert float(keys.abs().max()) < 0.01
            keys.zero_()
        error = max(error, largest_difference({n: found[n] for n in expected[step]}, expected[step]))
    compressed.detach()
    return error


@pytest.mark.deep
@pytest.mark.parametrize("norm", [None, 0.05])
def test_variances_of_roundings_leave_parameters_alone(ranks: Ranks, norm: float | None) -> None:
    found = ranks.run(of_attention, norm)
    assert max(found) < 1e-12, found


def of_pipelines(rank: int) -> dict[str, float]:
    pins = {"stages": ["down"], "stage_axis": "b", "microbatches": 2, "schedule": "1f1b"}
    found = {}
    for case in QUICK:
        given = CASES[case]
        model, optimizer, compressed = made((2, 2), ALONE, given, pins=pins)
        expected = run(mlp(), OPTIMIZERS[given["method"]], lambda s, w: part(s, w, 2), 2, STEPS, given)
        trained(model, optimizer, range(STEPS))
        assert compressed.state_dict()["steps"] == STEPS
        found[case] = largest_difference(model.full_state_dict(), expected[-1])
    return found


@pytest.mark.deep
def test_workers_of_pipelines(ranks: Ranks) -> None:
    for found in ranks.run(of_pipelines):
        assert max(found.values()) < 1e-12, found


ZERO_ONE = {"method": "zeroone", "freeze": 4, "doubling": 2, "local": 3, "longest": 4}


def seldom(rank: int, sizes: tuple[int, ...], roles: dict[str, str], more: dict[str, Any], folder: str) -> list[float]:
    """0/1 Adam, and a run that goes on from within an interval without exchanges."""
    from autopar import checkpoint

    workers, steps = sizes[0], 12
    worker = rank // (torch.distributed.get_world_size() // workers)

    def make(plan: Any = None) -> tuple[Any, Any, Any]:
        import autopar

        search = searching(roles, **more)
        model = autopar.parallelize(mlp(), mesh_of(*sizes), mlp_batch(0), search=search, plan=plan, timeout=WAIT)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        return model, optimizer, autopar.CompressedGradients(model, optimizer, **ZERO_ONE)

    model, optimizer, compressed = make()
    staged = any(hasattr(p, "owner_stage") for p in model.parameters())
    expected = zero_one(
        mlp(), lambda s, w: part(s, w, workers), workers, steps, ZERO_ONE, lambda _: 0.01, decoupled=0.1,
        **({} if staged else {"shards": cut_as(model)}),
    )  # fmt: skip
    errors = []
    for step in range(steps):
        predicted, before = compressed.predicted, compressed.bytes_sent
        trained(model, optimizer, range(step, step + 1))
        assert compressed.bytes_sent - before == predicted.sent_bytes
        errors.append(largest_difference(model.full_state_dict(), expected[step][worker]))
        if step == 10:
            checkpoint.save(folder, model, optimizer, step=step, grads=compressed)
            assert compressed.predicted.sent_bytes == 0  # nothing is exchanged in step 12
    other, own, others = make(model.plan)
    checkpoint.load(folder, other, own, grads=others)
    # A set's order is another one in each process of torchrun, and all exchange in this one.
    assert list(others._made().method.anchors) == list(others._made().method.errors)
    trained(other, own, range(11, steps))
    errors.append(largest_difference(other.full_state_dict(), expected[-1][worker]))
    others.synchronize()
    everyone = other._autopar.context.workers.everyone
    assert len({float(sum(v.sum() for v in s.values())) for s in everyone.gather(other.full_state_dict(), "")}) == 1
    return errors


def test_zero_one_adam(two_ranks: Ranks, tmp_path: Any) -> None:
    for errors in two_ranks.run(seldom, (2,), ALONE, {}, str(tmp_path)):
        assert max(errors) < 1e-12, errors


@pytest.mark.deep
def test_zero_one_adam_of_workers_of_several_devices(ranks: Ranks, tmp_path: Any) -> None:
    stages = {"pins": {"stages": ["down"], "stage_axis": "b", "microbatches": 2, "schedule": "1f1b"}}
    for i, (roles, more) in enumerate(((SHARDED, {}), (TENSOR, {}), (ALONE, stages))):
        for errors in ranks.run(seldom, (2, 2), roles, more, str(tmp_path / f"{i}")):
            assert max(errors) < 1e-12, errors


def scaled(rank: int, given: dict[str, Any], synchronous: bool, fused: bool) -> float:
    """An optimizer under GradScaler, which leaves the scale to a fused one's step, against one that sees no scales.

    In step 3 a gradient of rank 1 is infinite: all workers leave that step out.
    """
    import autopar

    states = []
    for scales in (True, False):
        role = "local" if synchronous else "compressed"
        search = autopar.Search(roles={"a": role}, inexact=(role, "float64"))
        model = autopar.parallelize(mlp(), mesh_of(2), mlp_batch(0), search=search, timeout=WAIT)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=0.1, fused=scales and fused)
        if synchronous:
            autopar.LocalSteps(model, optimizer, **given)
        else:
            autopar.CompressedGradients(model, optimizer, **given)
        # Scales are powers of two: nothing is lost, and they double in each second step.
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2, enabled=scales)
        for step in range(7):
            if step == 3 and not scales:
                continue
            optimizer.zero_grad()
            loss = model(**mlp_batch(step))["loss"] * (torch.inf if (step, rank) == (3, 1) else 1.0)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        states.append(model.full_state_dict())
    return largest_difference(*states)


@pytest.mark.some(1)
@pytest.mark.parametrize(
    ("given", "synchronous", "fused"),
    [
        ({"method": "onebit", "freeze": 2}, False, True),
        ({"method": "powersgd", "rank": 2}, False, False),
        ({"every": 9, "synchronous": 9}, True, False),
        pytest.param({"every": 9, "synchronous": 9}, True, True, marks=pytest.mark.deep),
        pytest.param({"method": "topk", "share": 0.2}, False, True, marks=pytest.mark.deep),
        pytest.param(
            {"method": "zeroone", "freeze": 4, "doubling": 1, "local": 2}, False, True, marks=pytest.mark.deep
        ),
    ],
)
def test_optimizers_under_a_scaler(two_ranks: Ranks, given: dict[str, Any], synchronous: bool, fused: bool) -> None:
    assert max(two_ranks.run(scaled, given, synchronous, fused)) < 1e-12


def left_out(rank: int, given: dict[str, Any], synchronous: bool, after: bool) -> str:
    """A script that leaves a step out on rank 1, with ``zero_grad`` before the backward pass or after the step."""
    import autopar
    from autopar.errors import RankError

    role = "local" if synchronous else "compressed"
    search = autopar.Search(roles={"a": role}, inexact=(role, "float64"))
    model = autopar.parallelize(mlp(), mesh_of(2), mlp_batch(0), search=search, timeout=WAIT)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    (autopar.LocalSteps if synchronous else autopar.CompressedGradients)(model, optimizer, **given)
    try:
        for step in range(5):
            if not after:
                optimizer.zero_grad(set_to_none=False)
            model(**mlp_batch(step))["loss"].backward()
            if (rank, step) == (1, 2):
                continue
            optimizer.step()
            if after:
                optimizer.zero_grad()
    except RankError as e:
        assert step == 2 + rank
        return str(e)
    return ""


@pytest.mark.parametrize(
    ("given", "synchronous", "after"),
    [
        ({"method": "topk", "share": 0.2}, False, True),
        pytest.param({"every": 9, "synchronous": 9}, True, False, marks=pytest.mark.deep),
    ],
)
def test_a_step_that_one_worker_leaves_out(
    two_ranks: Ranks, given: dict[str, Any], synchronous: bool, after: bool
) -> None:
    what = "synchronous step 3 of Mlp of local steps" if synchronous else "step 3 of Mlp of compressed gradients"
    for said in two_ranks.run(left_out, given, synchronous, after):
        assert said.startswith(f"backward passes before {what} differ: rank 1 has 4, rank 0 has 3"), said
