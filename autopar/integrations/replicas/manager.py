"""`Manager`: what replica groups need of the library by which they meet: that of torchft, or of a test."""

from __future__ import annotations

from typing import Any, Protocol

import torch


class Work(Protocol):
    """A reduction that is under way."""

    def wait(self) -> Any:
        """Until the tensor has the mean, or the reduction has failed, which `Manager.errored` tells."""


class Manager(Protocol):
    """Of one rank of a group; its calls are made by all ranks of the group."""

    def start_quorum(self) -> None:
        """Meet the other groups for a step; returns when this group has the state of those that are furthest."""

    def allreduce(self, tensor: torch.Tensor) -> Work:
        """The mean over the groups that take part, in place; after an error nothing is done."""

    def should_commit(self) -> bool:
        """Whether no rank of this group has had an error in the step; counts the step then."""

    def report_error(self, e: Exception) -> None:
        """Have the step discarded."""

    def errored(self) -> Any:
        """The first error of the step, or None."""

    def num_participants(self) -> int:
        """How many groups take part in the step."""

    def current_step(self) -> int:
        """How many steps are committed."""

    def state_dict(self) -> dict[str, int]:
        """Numbers of committed steps and of their shares."""

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Take them over."""

    def shutdown(self, wait: bool = True) -> None:
        """Leave the other groups."""


class Exchange(Protocol):
    """The process group of the ranks at one place in each group, and who they are.

    Attributes:
        members: numbers of the groups that met last, in the order of their ranks.
        refused: why this group cannot be one of them; empty: it can.
    """

    members: tuple[int, ...]
    refused: str

    def abort(self) -> None:
        """Close connections: who waits for this rank sees it at once."""
