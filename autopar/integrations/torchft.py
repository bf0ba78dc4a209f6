"""`replica_groups`: copies of a parallel model that average gradients by torchft, and of which each may be lost.

::

    from autopar.integrations.torchft import replica_groups

    model = autopar.parallelize(model, autopar.mesh(), batch)  # of this group's processes alone
    optimizer = torch.optim.AdamW(model.parameters())
    run = replica_groups(model, optimizer, group=0, count=2, lighthouse="http://node0:29510", scheduler=scheduler)
    for step in run.steps(10_000):
        model(**batch_of(step, run.rows(64)))["loss"].backward()
        run.average_gradients()
        if run.commit():
            optimizer.step()
            scheduler.step()

Each group is a world of its own. Groups meet by a lighthouse, ``torchft_lighthouse --min_replicas 1``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from autopar.checkpoint.arguments import PARALLEL
from autopar.checkpoint.run import require_stateful
from autopar.costs.arguments import TEXT, a, number, optional, require, whole
from autopar.integrations.replicas.cards import Card, card_of, difference, swap_cards
from autopar.integrations.replicas.groups import ReplicaGroups
from autopar.module.parallel_module import ParallelModule

try:
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo, ProcessGroupNCCL, create_store_client
except ImportError as e:
    raise ImportError(f"torchft cannot be imported: {e}; pip install 'torchft>=0.2'") from e

LIGHTHOUSE = "TORCHFT_LIGHTHOUSE"
"""The environment variable of the lighthouse's address, as torchft has it."""


def replica_groups(
    model: ParallelModule,
    optimizer: torch.optim.Optimizer,
    *,
    group: int,
    count: int,
    least: int = 1,
    lighthouse: str | None = None,
    host: str | None = None,
    timeout: float = 60.0,
    quorum_timeout: float = 300.0,
    retries: int = 20,
    **stateful: Any,
) -> ReplicaGroups:
    """Join the groups that train copies of a model; every rank of the group calls it, before its first step.

    Args:
        model: what `autopar.parallelize` returned, on a mesh of this group's processes alone; its layouts must be
            decided: pass it ``batch=``. Every group has the same plan.
        optimizer: of the model's parameters, the same in every group.
        group: the number of this group, from 0 on. One that comes back has the number that it had.
        count: into how many groups the global batch is divided. As many are asked for; the mean is over those there.
        least: with fewer groups a step is discarded. The lighthouse has a number of its own, by which groups wait.
        lighthouse: its address, as ``http://node0:29510``; default: the environment's ``TORCHFT_LIGHTHOUSE``.
        host: a name of this machine by which other groups reach it; default: its own.
        timeout: seconds for an exchange, for the state of a peer, and for the ranks of this group to decide.
        quorum_timeout: seconds to wait for the other groups: longer than a step of theirs.
        retries: how many discarded steps in a row are no error.
        stateful: further objects with ``state_dict()`` and ``load_state_dict()``, by name, the same in every group:
            learning-rate scheduler, sampler of the global batch.

    Raises:
        ValueError: an argument is wrong, or the layouts are not decided.
        RankError: the lighthouse does not answer.
    """
    require(
        model=(model, PARALLEL),
        optimizer=(optimizer, a(torch.optim.Optimizer, "a torch.optim.Optimizer of the model's parameters")),
        count=(count, whole(1)), group=(group, whole(0)), least=(least, whole(1)),
        lighthouse=(lighthouse, optional(TEXT)), host=(host, optional(TEXT)), timeout=(timeout, number(0, above=True)),
        quorum_timeout=(quorum_timeout, number(0, above=True)), retries=(retries, whole(1)),
    )  # fmt: skip
    require_stateful(stateful)
    if not group < count or not least <= count:
        raise ValueError(f"group={group}, least={least}: expected a group below count={count}, and at most so many")
    address = lighthouse or os.environ.get(LIGHTHOUSE)
    if not address:
        raise ValueError(
            "lighthouse=None: expected an address; start `torchft_lighthouse --min_replicas 1`, "
            f"and pass lighthouse='http://HOST:29510', or set {LIGHTHOUSE}"
        )
    _require_model(model)
    name, seconds = host or socket.gethostname(), {"timeout": timeout, "quorum": quorum_timeout}
    card = card_of(model, optimizer, group)

    def connect(receive: Callable[[Any], None], give: Callable[[], Any], own: Callable[[], Card]) -> tuple[Any, Any]:
        context = model._autopar.context
        limit, store = timedelta(seconds=timeout), None
        if context.rank == 0:
            store = TCPStore(name, 0, is_master=True, wait_for_workers=False, timeout=limit)
        at = context.decide(lambda: (name, store.port if store else 0), "the store of a replica group")
        exchange = _exchange(context.device)(own, timeout)
        manager = Manager(
            exchange, receive, give, least,
            # A newcomer has its peer's state before its forward pass, and takes part in the step at once.
            use_async_quorum=False,
            timeout=limit, quorum_timeout=timedelta(seconds=quorum_timeout), connect_timeout=limit,
            rank=context.rank, world_size=len(context.gather(None, "the ranks of a replica group")),
            store_addr=at[0], store_port=at[1], lighthouse_addr=address, hostname=name, replica_id=f"group_{group}",
            # Cards have a hash of the first weights: no group needs those of another.
            init_sync=False, max_retries=retries,
        )  # fmt: skip
        exchange.store = store  # lives as long as the group
        return manager, exchange

    return ReplicaGroups(model, optimizer, stateful, card, count, connect, seconds)


def _require_model(model: ParallelModule) -> None:
    session = model._autopar
    if session.first is None:
        raise ValueError("replica_groups() needs layouts that are decided: pass batch= to parallelize()")
    session.require_values()
    if session.context.workers is not None:
        raise ValueError(
            f"workers of the role {session.context.workers.role!r}: a replica group is one parallel model: "
            "leave the role out, and start each group as a world of its own"
        )


def _exchange(device: torch.device) -> Any:
    """The class of the process group among the ranks at one place in each group, which meets anew with others."""
    base: Any = ProcessGroupNCCL if device.type == "cuda" else ProcessGroupGloo

    class Exchange(base):  # type: ignore[misc]
        """Compares cards before it connects."""

        def __init__(self, own: Callable[[], Card], seconds: float) -> None:
            super().__init__(timeout=timedelta(seconds=seconds))
            self.members: tuple[int, ...] = ()
            self.refused = ""
            self.store: TCPStore | None = None
            self._own, self._seconds = own, seconds

        def configure(
            self,
            store_addr: str,
            replica_id: str,
            rank: int,
            world_size: int,
            quorum_id: int | None = None,
            group_rank: int | None = None,
            group_world_size: int | None = None,
            global_ranks: list[int] | None = None,
        ) -> None:
            """Connect to the ranks at this place in the groups of a quorum."""
            inner = group_world_size or 1
            numbers = [r // inner for r in global_ranks or range(world_size)]
            store = create_store_client(store_addr, timeout=timedelta(seconds=self._seconds))
            own, who = self._own(), f"rank {group_rank} of group {{}}"
            cards = swap_cards(store, own, rank, numbers, self._seconds, who.format)
            self.refused = difference(cards, rank)
            wrong = self.refused or next((d for i in range(world_size) if (d := difference(cards, i))), "")
            if wrong:
                raise ValueError(wrong)
            super().configure(
                store_addr, replica_id, rank, world_size, quorum_id, group_rank, group_world_size, global_ranks
            )
            self.members = tuple(c.group for c in cards)

    return Exchange


__all__ = ["ReplicaGroups", "replica_groups"]
