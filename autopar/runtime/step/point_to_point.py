"""Point-to-point communication of a pipeline, and its stages as torch's pipeline runtime calls them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from autopar.pipeline.executor import StageRun
from autopar.pipeline.stage_graphs import BACKWARD, FORWARD, INPUT
from autopar.runtime.agreement.control import first_line

Receive = Callable[[str], torch.Tensor]
"""Memory for a value of another stage, by name."""

Arrival = tuple[torch.Tensor, Any]
"""A tensor, and the work that fills it."""


class PointToPoint:
    """Sends and receives along the axis of the stages, with a timeout for every wait."""

    def __init__(self, group: dist.ProcessGroup | None, device: int, timeout: float) -> None:
        """Nothing is under way.

        Args:
            group: of the devices along the axis of the stages; None where there is one.
            device: this one's coordinate along the axis.
            timeout: seconds of a wait.
        """
        self._group, self._device, self._timeout = group, device, timedelta(seconds=timeout)
        self._under_way: list[tuple[Any, int]] = []

    def send(self, tensors: Sequence[torch.Tensor], device: int) -> None:
        """Begin to send."""
        # A work keeps its tensor alive: forget those that are done, or activations would pile up over the step.
        self._under_way = [(work, to) for work, to in self._under_way if not work.is_completed()]
        for tensor in tensors:
            work = dist.isend(tensor.contiguous(), group=self._group, group_dst=device)
            self._under_way.append((work, device))

    def receive(self, tensors: Sequence[torch.Tensor], device: int) -> list[Arrival]:
        """Begin to receive into these tensors."""
        return [(t, (dist.irecv(t, group=self._group, group_src=device), device)) for t in tensors]

    def arrived(self, arrivals: Sequence[Arrival]) -> list[torch.Tensor]:
        """The received tensors; waits for them."""
        for _, (work, device) in arrivals:
            self._wait(work, device)
        return [tensor for tensor, _ in arrivals]

    def finish(self) -> None:
        """Wait until all is sent."""
        while self._under_way:
            self._wait(*self._under_way.pop(0))

    def _wait(self, work: Any, device: int) -> None:
        try:
            work.wait(self._timeout)
        except RuntimeError as e:
            # "gloo" is a word by which `is_of_collective` knows an error that another rank caused.
            raise PointToPointError(
                f"gloo: device {self._device} of the pipeline had no answer from device {device}: {first_line(e)}"
            ) from e


class PointToPointError(RuntimeError):
    """A neighbor in the pipeline does not answer."""


class RuntimeStage:
    """A stage with the methods that torch's pipeline runtime calls.

    It sends and receives by itself, and returns no operations for the runtime to wait for: that waits without a
    timeout.

    Attributes:
        neighbors: numbers of the stages of this device.
    """

    # What the runtime reads of a stage: no module to gather for FSDP, and backwards to be run.

    submod = None
    has_backward = True

    def __init__(self, run: StageRun, devices: Sequence[int], empty: Receive, wires: PointToPoint) -> None:
        """Nothing has been received.

        Args:
            run: the stage.
            devices: of each stage.
            empty: memory to receive a value into.
            wires: sends and receives.
        """
        self.stage_index, self.num_stages = run.stage, len(devices)
        self.group_rank, self.group_size = devices[run.stage], max(devices) + 1
        self.is_first, self.is_last = run.stage == 0, run.stage == self.num_stages - 1
        self.neighbors: set[int] = set()
        self._run, self._devices, self._empty, self._wires = run, devices, empty, wires
        # From stages of this device, whose values the runtime hands over without a send.
        self._local: dict[str, dict[int, list[torch.Tensor]]] = {FORWARD: {}, BACKWARD: {}}
        self._arriving: dict[tuple[str, int], list[Arrival]] = {}

    def forward_one_chunk(self, microbatch: int, *_: Any, **__: Any) -> list[torch.Tensor]:
        """Run a microbatch forward; the activations, where the next stage is on this device."""
        self._run.forward(microbatch, self._received(FORWARD, microbatch))
        return self._run.take_sent(FORWARD, microbatch) if self.stage_index + 1 in self.neighbors else []

    def backward_one_chunk(self, microbatch: int, *_: Any, full_backward: bool, **__: Any) -> None:
        """Run a microbatch backward, or the part for the input."""
        self._run.backward(microbatch, self._received(BACKWARD, microbatch), BACKWARD if full_backward else INPUT)

    def backward_weight_one_chunk(self, microbatch: int, **_: Any) -> None:
        """Run the part of the backward for the weights."""
        self._run.weights(microbatch)

    def set_local_fwd_input(self, outputs: list[torch.Tensor], microbatch: int) -> None:
        """Take activations from the stage before, on this device."""
        self._local[FORWARD][microbatch] = outputs

    def get_local_bwd_output(self, microbatch: int) -> list[torch.Tensor]:
        """The gradients for the stage before, on this device."""
        return self._run.take_sent(BACKWARD, microbatch)

    def set_local_bwd_input(self, outputs: list[torch.Tensor], microbatch: int) -> None:
        """Take gradients from the stage after, on this device."""
        self._local[BACKWARD][microbatch] = outputs

    def get_fwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Begin to receive activations."""
        return self._receive(
            FORWARD, microbatch, self._run.stage_graphs.received(self.stage_index), self.stage_index - 1
        )

    def get_bwd_recv_ops(self, microbatch: int) -> list[Any]:
        """Begin to receive gradients."""
        return self._receive(
            BACKWARD, microbatch, self._run.stage_graphs.returned(self.stage_index), self.stage_index + 1
        )

    def get_fwd_send_ops(self, microbatch: int) -> list[Any]:
        """Begin to send activations."""
        return self._send(FORWARD, microbatch, self.stage_index + 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[Any]:
        """Begin to send gradients."""
        return self._send(BACKWARD, microbatch, self.stage_index - 1)

    def _received(self, kind: str, microbatch: int) -> list[torch.Tensor]:
        if (kind, microbatch) in self._arriving:
            return self._wires.arrived(self._arriving.pop((kind, microbatch)))
        return self._local[kind].pop(microbatch, [])

    def _receive(self, kind: str, microbatch: int, names: Sequence[str], stage: int) -> list[Any]:
        tensors = [self._empty(name) for name in names]
        # Begun here, and waited for when the action that needs it runs: the schedule computes meanwhile.
        self._arriving[kind, microbatch] = self._wires.receive(tensors, self._devices[stage])
        return []

    def _send(self, kind: str, microbatch: int, stage: int) -> list[Any]:
        self._wires.send(self._run.take_sent(kind, microbatch), self._devices[stage])
        return []
