"""Random numbers in graphs: one operator that draws a tensor, and a call that draws from a seed of its own.

``torch.ops.autopar.draw`` is what `autopar.passes.canonicalize.rng` makes of dropout, ``torch.rand`` and their kin:
numbers that depend on nothing but a distribution, a shape and the state of a generator.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx

# Must stay alive: torch removes the operator with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define(
    "draw(str distribution, Scalar[] parameters, SymInt[] size, int[] order, *, ScalarType dtype, Device device, "
    "Generator? generator=None) -> Tensor",
    tags=(torch.Tag.nondeterministic_seeded,),
)

SCATTERED_NORMAL = "scattered_normal"
"""Normal numbers as kernels draw them into a tensor with gaps in memory: others than into one without."""

DROPOUT = "dropout"
"""What dropout keeps. Parameters: the probability to drop an element, and the bytes of one of its input."""

_INPUT = {2: torch.float16, 4: torch.float32, 8: torch.float64}
"""A dtype of an input of dropout, by bytes of an element."""

_step_seed: ContextVar[int] = ContextVar("autopar_step_seed", default=0)  # 0 outside of a step: shape propagation


def _draw(
    distribution: str,
    parameters: Sequence[float],
    size: Sequence[int],
    order: Sequence[int],
    *,
    dtype: torch.dtype,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> torch.Tensor:
    """A tensor of ``size`` filled as ``tensor.<distribution>_(*parameters)`` fills it, or as dropout masks its input.

    ``order`` lists its dims from the outermost to the innermost in memory, since numbers are drawn in that order.
    """
    if distribution == "permutation":
        shuffled: torch.Tensor = torch.randperm(size[0], dtype=dtype, device=device, generator=generator)
        return shuffled
    # Filled row by row, then permuted: kernels fill in the order of storage.
    shape = [size[d] for d in order]
    if distribution == DROPOUT:
        drop, itemsize = parameters
        if device.type == "cuda" and generator is None:
            # As eager's: a GPU's kernel takes its numbers in groups, by the bytes of an element.
            values = torch.empty(shape, dtype=_INPUT[int(itemsize)], device=device)
            kept: torch.Tensor = torch.native_dropout(values, drop, True)[1]
            return kept.permute(sorted(range(len(order)), key=order.__getitem__))
        distribution, parameters = "bernoulli", [1.0 - drop]
    if distribution == SCATTERED_NORMAL:
        distribution, inner = "normal", torch.empty([*shape, 2], dtype=dtype, device=device)[..., 0]
    else:
        inner = torch.empty(shape, dtype=dtype, device=device)
    result = inner.permute(sorted(range(len(order)), key=order.__getitem__))
    if device.type == "meta":
        return result
    filled: torch.Tensor = getattr(result, f"{distribution}_")(*parameters, generator=generator)
    return filled


_library.impl("draw", _draw, "CompositeExplicitAutograd")

draw = torch.ops.autopar.draw.default


def dropout_draw(
    drop: float, dtype: torch.dtype, size: Sequence[int], order: Sequence[int] | None = None
) -> tuple[str, list[float], list[int], list[int]]:
    """The arguments of a `draw` of what dropout keeps of an input; ``order``: default: the input is row-major."""
    return DROPOUT, [drop, dtype.itemsize], list(size), list(range(len(size)) if order is None else order)


# An unused call still changes what the next one draws, and the partitioner would drop it: within a tracing context
# torch counts random operators among the pure ones. Draws are what is left of most, these three stay as they are.
for _stays in (
    draw,
    torch.ops.aten.multinomial.default,
    torch.ops.aten.poisson.default,
    torch.ops.aten.rrelu_with_noise_functional.default,
):
    fx.has_side_effect(_stays)


def seeded(target: Any, number: int, block: int, *args: Any, **kwargs: Any) -> Any:
    """Call a random operator on numbers of its own, whatever the state of the default generator, which stays as it is.

    Args:
        target: the operator overload.
        number: of the call among the random operators of the program.
        block: which block of the output this device makes; equal on devices that make the same one.
        args: of the operator.
        kwargs: of the operator.
    """
    device = _device(args, kwargs)
    seed = derive_seed(_step_seed.get(), number, block)
    if device.type == "meta":
        return target(*args, **kwargs)
    # A generator of its own where the operator takes one: the default one is then left alone.
    if any(a.name == "generator" for a in target._schema.arguments):
        return target(*args, **kwargs, generator=torch.Generator(device).manual_seed(seed))
    with same_numbers(seed):
        return target(*args, **kwargs)


def _device(args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.device:
    """The device that an operator's call makes tensors on."""
    found: torch.device = kwargs.get("device") or next(a.device for a in args if isinstance(a, torch.Tensor))
    return found


def derive_seed(*numbers: int) -> int:
    """A seed of 63 bits from whole numbers; other numbers give an unrelated one."""
    # A hash: sums or shifts of small numbers would give neighboring seeds, and some generators related streams.
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def current_seed() -> int:
    """The seed of the step that runs."""
    return _step_seed.get()


@contextmanager
def step_seed(seed: int) -> Iterator[None]:
    """Calls of `seeded` within take numbers that belong to this seed."""
    token = _step_seed.set(seed)
    try:
        yield
    finally:
        _step_seed.reset(token)


def _cuda_is_used() -> bool:
    # Not `is_available`: a process that does not use CUDA must not initialize it to read a generator.
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]


@contextmanager
def same_numbers(seed: int) -> Iterator[None]:
    """The default generators start from ``seed``; afterwards they are as before."""
    devices = [torch.cuda.current_device()] if _cuda_is_used() else []
    # Only this device's generator: forking those of all GPUs is slow.
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        yield


def generator_states() -> dict[str, torch.Tensor]:
    """States of the default generators, by device."""
    states = {"cpu": torch.get_rng_state()}
    if _cuda_is_used():
        states["cuda"] = torch.cuda.get_rng_state()
    return states


def restore_generators(states: Mapping[str, torch.Tensor]) -> None:
    """Bring the default generators into these states."""
    if "cpu" in states:
        torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])


def generator_state(where: torch.device | torch.Tensor) -> torch.Tensor:
    """State of the default generator of a device, or of a tensor's; of no length on the meta device."""
    device = where.device if isinstance(where, torch.Tensor) else where
    if device.type == "meta":
        return torch.empty(0, dtype=torch.uint8, device=device)
    return generator_states()[device.type]


def replayed(target: Any, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a random operator as if the default generator had this state; afterwards that is as before."""
    if _device(args, kwargs).type == "meta":
        return target(*args, **kwargs)
    before = generator_states()
    restore_generators({_device(args, kwargs).type: state})
    try:
        return target(*args, **kwargs)
    finally:
        restore_generators(before)


def generator_digest(device: torch.device) -> int:
    """A number that is the same where the default generators of two devices would draw the same."""
    state = generator_states()[device.type].numpy().tobytes()
    return int.from_bytes(hashlib.blake2b(state, digest_size=8).digest(), "big") >> 1
