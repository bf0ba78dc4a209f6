"""Operators that copy a tensor to host memory and back.

On a GPU the host memory is pinned, and the copies are put on the stream that computes: they run after what makes the
tensor and before what reads it, nobody waits for them on the host, and nothing overlaps them. Where the device is
the CPU itself, a copy stands for the tensor on the host, so that the same graphs run there.
"""

from __future__ import annotations

from typing import Any

import torch

# Must stay alive: torch removes the operators with the library object.
_library: Any = torch.library.Library("autopar", "FRAGMENT")  # type: ignore[no-untyped-call]
_library.define("to_host(Tensor value) -> Tensor")
_library.define("to_device(Tensor value) -> Tensor")


def send(value: torch.Tensor) -> torch.Tensor:
    """A copy in host memory; on the meta device, one there."""
    host = value.device if value.is_meta else torch.device("cpu")
    # Pinned, or the copy would wait for the stream and block the host.
    copy = torch.empty_like(value, device=host, pin_memory=value.is_cuda)
    return copy.copy_(value, non_blocking=True)


def bring(value: torch.Tensor) -> torch.Tensor:
    """A copy on the device that this process computes on, of what `send` returned."""
    # A tensor in host memory does not say where it came from; only what came from a GPU is pinned.
    from_gpu = value.device.type == "cpu" and value.is_pinned()
    device = torch.device("cuda", torch.cuda.current_device()) if from_gpu else value.device
    return torch.empty_like(value, device=device).copy_(value, non_blocking=True)


_library.impl("to_host", send, "CompositeExplicitAutograd")
_library.impl("to_device", bring, "CompositeExplicitAutograd")

to_host = torch.ops.autopar.to_host.default
to_device = torch.ops.autopar.to_device.default
