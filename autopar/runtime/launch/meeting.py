"""`Meeting`: torch's rendezvous of nodes that come and go, without long waits for one that is lost as they meet.

Torch's agents take for granted that all nodes that have met live on: they wait for the first of them to say who has
which rank, and if it is gone, end with an error, and the run with them. And their processes wait for those of a node
that is gone. Here nodes tell each other that they are there before anything is started, and meet anew when one does
not, or is gone later.

The store of the rendezvous remembers that the run has a state: where all nodes that had it are lost, a newcomer would
begin at step 0 as if nothing had been.
"""

from __future__ import annotations

import os
import pickle
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import DistNetworkError, DistStoreError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
)
from torch.distributed.elastic.rendezvous.api import rendezvous_handler_registry
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

from autopar.runtime.checkpoint.snapshot_files import SUFFIX
from autopar.runtime.launch.environment import HELD, SNAPSHOTS

NAME = "autopar"
"""Of this rendezvous, for torch's launcher."""

PROCESSES = "processes"
"""The parameter that says how many processes this node has."""

HERE = timedelta(seconds=20)
"""How long nodes that have met wait for each other: they hear of it within some seconds."""

ATTEMPTS = 100
"""How often in turn nodes may meet without coming together."""


class Meeting(RendezvousHandler):
    """Meets by torch's own rendezvous; `register` makes it known to torch's launcher."""

    def __init__(self, within: RendezvousHandler, backend: Any, store: Store, processes: int) -> None:
        """Around torch's rendezvous, whose state is in ``backend`` and ``store``, for a node of so many processes."""
        self._within, self._backend, self._store, self._processes = within, backend, store, processes
        self._nodes, self._is_refused, self._is_noted = 0, False, False

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet, until all that have met are there.

        Raises:
            RendezvousError: as torch's, or nodes do not come together.
            ValueError: this node is new, and has another number of processes than others.
        """
        for _ in range(ATTEMPTS):
            try:
                self._note_state()
                info = self._within.next_rendezvous()
                each = all_here(info.store, info.rank, info.world_size, self._processes)
            except DistStoreError as error:
                reason = str(error).splitlines()[0]
            except DistNetworkError as error:
                raise RendezvousConnectionError(str(error).splitlines()[0]) from error
            else:
                if len(set(each)) == 1:
                    self._nodes = info.world_size
                    # For the processes that are started next.
                    os.environ[HELD] = "1" if self._store.check([self._held]) else "0"
                    return info
                reason = f"the nodes have {each} processes; give all of them the same --nproc where they come and go"
                if not self._nodes:
                    self._is_refused = True
                    raise ValueError(reason)
            sys.stderr.write(f"the nodes that have met do not come together, all meet again ({reason})\n")
        raise RendezvousError(f"nodes have met {ATTEMPTS} times, and one of them was lost each time: {reason}")

    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be taken in, or else have gone: as there are some, the agent lets all meet anew."""
        waiting = self._within.num_nodes_waiting()
        self._note_state()
        if waiting:
            return waiting
        found = self._backend.get_state()
        return max(0, self._nodes - len(pickle.loads(found[0]).participants)) if found is not None else 0

    @property
    def _held(self) -> str:
        return f"autopar/{self.get_run_id()}/held"

    def _note_state(self) -> None:
        folder = os.environ.get(SNAPSHOTS)
        if not self._is_noted and folder is not None and any(Path(folder).glob(f"*{SUFFIX}")):
            self._store.set(self._held, "1")
            self._is_noted = True

    @property
    def use_agent_store(self) -> bool:
        """As torch's."""
        return self._within.use_agent_store

    def get_backend(self) -> str:
        """Its name."""
        return NAME

    def is_closed(self) -> bool:
        """Whether the run has ended."""
        return self._within.is_closed()

    def set_closed(self) -> None:
        """End the run."""
        self._within.set_closed()  # type: ignore[no-untyped-call]

    def get_run_id(self) -> str:
        """The name of the run."""
        return self._within.get_run_id()

    def shutdown(self) -> bool:
        """End the run, unless this node was never in it, and what belongs to it here."""
        return True if self._is_refused else self._within.shutdown()


def all_here(store: Store, rank: int, nodes: int, processes: int, limit: timedelta = HERE) -> list[int]:
    """Wait until all nodes that have met are there.

    Args:
        store: of this meeting.
        rank: of this node.
        nodes: how many have met.
        processes: of this node.
        limit: how long.

    Returns:
        How many processes each of them has.

    Raises:
        DistStoreError: one is not there.
    """
    names = [f"autopar/here/{i}" for i in range(nodes)]
    store.set(names[rank], str(processes))
    store.wait(names, limit)
    return [int(store.get(name)) for name in names]


def register() -> None:
    """Make it known to torch's launcher."""
    rendezvous_handler_registry.register(NAME, _made)


def _made(wanted: RendezvousParameters) -> RendezvousHandler:
    own = RendezvousParameters(
        "c10d", wanted.endpoint, wanted.run_id, wanted.min_nodes, wanted.max_nodes, wanted.local_addr, **wanted.config
    )
    backend, store = create_backend(own)
    return Meeting(create_handler(store, backend, own), backend, store, int(wanted.config[PROCESSES]))
