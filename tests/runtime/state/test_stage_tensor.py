"""Optimizers of torch take parameters that one stage holds in lists, and compute what they compute of plain ones."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import optimizer as torch_optimizer
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar._torch_compat import DTensorSpec, TensorMeta, TorchDispatchMode, take_in_foreach
from autopar.runtime.state.stage_tensor import OwnerStage, StageTensor, with_owner

STEPS = 3

Optimizers = dict[str, Callable[..., torch.optim.Optimizer]]

FUSED: Optimizers = {
    "adamw": lambda ps, **way: torch.optim.AdamW(ps, lr=1e-2, amsgrad=True, **way),
    "adam": lambda ps, **way: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, **way),
    "sgd": lambda ps, **way: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, **way),
    "adagrad": lambda ps, **way: torch.optim.Adagrad(ps, lr=1e-2, **way),
}
FOREACH: Optimizers = FUSED | {
    "rmsprop": lambda ps, **way: torch.optim.RMSprop(ps, lr=1e-2, momentum=0.9, centered=True, **way),
    "adamax": lambda ps, **way: torch.optim.Adamax(ps, **way),
    "adadelta": lambda ps, **way: torch.optim.Adadelta(ps, **way),
    "nadam": lambda ps, **way: torch.optim.NAdam(ps, **way),
    "radam": lambda ps, **way: torch.optim.RAdam(ps, **way),
    "asgd": lambda ps, **way: torch.optim.ASGD(ps, **way),
}
ROUNDED_OTHERWISE = ("nadam", "radam", "asgd")
"""Torch's own loop and lists round differently, of plain tensors as well."""


class Calls(TorchDispatchMode):
    """Counts operators as they are called, before they are taken apart."""

    def __init__(self) -> None:
        super().__init__()
        self.of: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.of[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    """Two stages of two devices, of which this is the first; nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    take_in_foreach(StageTensor)
    # Without what other tests have given the dispatcher: sums that it reduces at once are others where nothing is sent.
    dispatcher, name = DTensor._op_dispatcher, "_propagate_op_sharding_dispatch_slow_path"
    changed = vars(dispatcher).pop(name, None)
    yield init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "a"))
    if changed is not None:
        setattr(dispatcher, name, changed)
    dist.destroy_process_group()


def placed(whole: Tensor, mesh: DeviceMesh, stage: int | None, split: bool) -> DTensor:
    """This rank's part of a tensor that one stage holds, or every stage (None), as it is or split."""
    inner = Shard(0) if split else Replicate()
    local = whole.chunk(2)[0] if split else whole
    local = local[:0] if stage == 1 else local
    outer = Replicate() if stage is None else Shard(0)
    meta = TensorMeta(whole.shape, whole.stride(), whole.dtype)
    made: Any = DTensor(local.clone(), DTensorSpec(mesh, (outer, inner), tensor_meta=meta), requires_grad=False)
    return with_owner(made, None if stage is None else OwnerStage(0, stage))


def parameters(mesh: DeviceMesh, stages: tuple[int | None, ...] = (0, 1, None)) -> list[nn.Parameter]:
    """Parameters of both stages and of all, with gradients."""
    generator, found = torch.Generator().manual_seed(0), []
    for shape in ((4, 6), (6,), (2, 2, 2)):
        for stage in stages:
            for split in (False, True):
                values, gradients = (torch.randn(shape, generator=generator) for _ in range(2))
                parameter: Any = nn.Parameter(placed(values, mesh, stage, split))
                with_owner(parameter, None if stage is None else OwnerStage(0, stage))
                parameter.grad = placed(gradients, mesh, stage, split)
                found.append(parameter)
    return found


def plain(mesh: DeviceMesh) -> list[nn.Parameter]:
    """The local parts of `parameters` as plain parameters."""
    found = []
    for p in parameters(mesh):
        found.append(nn.Parameter(local(p).clone()))
        assert isinstance(p.grad, DTensor)
        found[-1].grad = local(p.grad).clone()
    return found


def local(tensor: Any) -> Tensor:
    found: Tensor = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return found.detach()


def stepped(
    made: Callable[..., torch.optim.Optimizer], given: list[nn.Parameter], **way: bool
) -> tuple[list[Tensor], Counter[str]]:
    """Parameters and their state after some steps, and the operators that were called."""
    optimizer = made(given, **way)
    with Calls() as calls:
        for _ in range(STEPS):
            optimizer.step()
    states = [(p, optimizer.state[p]) for p in given]
    for p, state in states:
        assert all(type(s) is type(p.data) for s in state.values() if isinstance(s, Tensor) and s.shape == p.shape)
    return [local(t) for p, state in states for t in (p, *state.values()) if isinstance(t, Tensor)], calls.of


def all_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


@pytest.mark.some(4)
@pytest.mark.parametrize("name", FOREACH)
def test_lists_compute_what_the_loop_does(mesh: DeviceMesh, name: str) -> None:
    made = FOREACH[name]
    of_lists, calls = stepped(made, parameters(mesh), foreach=True)
    assert all_equal(of_lists, stepped(made, plain(mesh), foreach=True)[0])
    of_loop, each = stepped(made, parameters(mesh), foreach=False)
    assert all_equal(of_loop, stepped(made, plain(mesh), foreach=False)[0])
    assert name in ROUNDED_OTHERWISE or all_equal(of_lists, of_loop)
    assert any(op.startswith("_foreach_") for op in calls)
    assert not any(op.startswith("_foreach_") for op in each)
    # A list has all parameters, so the number of its operators does not grow with them.
    one = parameters(mesh)[:1]
    assert {
        o: n for o, n in stepped(made, one, foreach=True)[1].items() if o.startswith("_foreach_")
    }.keys() <= calls.keys()
    assert max(n for o, n in calls.items() if o.startswith("_foreach_")) < STEPS * len(parameters(mesh))


@pytest.mark.parametrize("name", FUSED)
def test_fused_steps_compute_what_they_compute_of_plain_tensors(mesh: DeviceMesh, name: str) -> None:
    found, calls = stepped(FUSED[name], parameters(mesh), fused=True)
    assert all_equal(found, stepped(FUSED[name], plain(mesh), fused=True)[0])
    assert calls[f"_fused_{name}_"] == STEPS


def test_lists_are_the_default_where_torch_has_them(mesh: DeviceMesh, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Tensor] = [*parameters(mesh)]
    assert torch_optimizer._default_to_fused_or_foreach(given, False, use_fused=True) == (True, False)
    # Torch's default on a CPU is the loop, for any tensors.
    monkeypatch.setattr(torch_optimizer, "_get_foreach_kernels_supported_devices", lambda: ["cpu"])
    assert torch_optimizer._default_to_fused_or_foreach(given, False) == (False, True)
    assert stepped(FOREACH["adamw"], parameters(mesh))[1]["_foreach_lerp_"] == STEPS


def test_norms_take_gradients_in_lists(mesh: DeviceMesh) -> None:
    for order in (2.0, float("inf")):
        norms, given = [], [parameters(mesh, (0, 1)) for _ in range(3)]
        # Of both stages, so that empty parts are in the list; None is torch's default, which is by lists on a CPU.
        for each, way in zip(given, (False, True, None), strict=True):
            with Calls() as calls:
                norms.append(nn.utils.clip_grad_norm_(each, 0.1, norm_type=order, foreach=way))
            assert calls.of["_foreach_norm"] == (way is not False)
            assert calls.of["_foreach_mul_"] == (way is not False)
        assert {type(n) for n in norms} == {DTensor}
        for each in given[1:]:
            assert all_equal([local(p.grad) for p in each], [local(p.grad) for p in given[0]])


def test_state_goes_through_a_state_dict(mesh: DeviceMesh) -> None:
    """A step after loading is a step without it, for lists and fused steps alike."""
    for way in ({"foreach": True}, {"fused": True}):
        one, two = parameters(mesh), parameters(mesh)
        first, second = (FUSED["adamw"](ps, **way) for ps in (one, two))
        first.step()
        for p, q in zip(one, two, strict=True):
            q.data.copy_(p.data)
        second.load_state_dict(copy.deepcopy(first.state_dict()))
        for p, q in zip(one, two, strict=True):
            assert type(first.state[p]["exp_avg"]) is type(second.state[q]["exp_avg"]) is type(p.data)
        first.step()
        second.step()
        assert all_equal([local(q) for q in two], [local(p) for p in one])


def test_scaled_gradients_are_unscaled_in_lists(mesh: DeviceMesh) -> None:
    given = parameters(mesh)
    optimizer = FUSED["sgd"](given, foreach=True)
    before = [local(p.grad).clone() for p in given]
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    with Calls() as calls:
        scaler.unscale_(optimizer)
    assert calls.of["_amp_foreach_non_finite_check_and_unscale_"] == 1
    assert all_equal([local(p.grad) for p in given], [g / 4 for g in before])


def test_a_whole_tensor_is_written_to_the_owner_alone(mesh: DeviceMesh) -> None:
    """An operand that every stage holds: of it the owner takes its part, and the others nothing."""
    whole = torch.arange(24.0).reshape(4, 6)
    for stage in (0, 1):
        for split in (False, True):
            held, other = (placed(whole, mesh, s, split and s is not None) for s in (stage, None))
            assert held.add_(other) is held
            assert torch.equal(local(held), 2 * local(placed(whole, mesh, stage, split)))
