"""Bytes of tensors that are alive at once while a function runs, as torch's CPU allocator sees them.

The profiler reports each allocation and each release of this thread, also of tensors that Python never sees, and of
storages that are resized in place. What was allocated before is not in it.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch.profiler import ProfilerActivity, profile


def peak_allocated(run: Callable[[], Any]) -> int:
    """Most bytes that are allocated at once since the function was called."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            run()
        found.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    changes = [e for e in events if e["name"] == "[memory]"]
    changes.sort(key=lambda e: (e["ts"], e["args"].get("Ev Idx", 0)))
    return max(accumulate(_differences(changes)), default=0)


def _differences(changes: list[dict[str, Any]]) -> Iterator[int]:
    """Bytes that each event adds; what another thread has given back unseen is missed when its place is taken anew."""
    live: dict[int, int] = {}
    for event in changes:
        size, place = event["args"]["Bytes"], event["args"]["Addr"]
        if size > 0:
            yield size - live.get(place, 0)
            live[place] = size
        else:
            live.pop(place, None)
            yield size
