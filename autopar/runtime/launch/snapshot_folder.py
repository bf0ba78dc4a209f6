"""`snapshot_folder`: where processes of a node keep snapshots in memory, which outlive them and end with the launcher.

Torch's agent ends all processes of a node when one of the run is gone, and starts new ones. What the old ones had is
lost, unless it is in files: here on a file system in memory, in a folder of this launcher.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PREFIX, LOCK = "autopar-snapshots-", "lock"


def memory_root() -> Path:
    """The folder of a file system in memory; that of temporary files where there is none."""
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and os.access(shared, os.W_OK | os.X_OK) else Path(tempfile.gettempdir())


@contextmanager
def snapshot_folder(root: Path | None = None) -> Iterator[Path]:
    """A folder that is there while this process lives; what launchers have left that were killed is deleted.

    Args:
        root: in which it is made; default: `memory_root`.
    """
    root = memory_root() if root is None else root
    remove_abandoned(root)
    made = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
    with (made / LOCK).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        # Renamed when it is locked: without a lock it would look abandoned.
        folder = made.rename(root / made.name.removeprefix("."))
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def remove_abandoned(root: Path) -> None:
    """Delete this user's folders whose launcher is gone: the system has given up its lock, however it ended."""
    for folder in root.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if folder.is_symlink() or folder.stat().st_uid != os.geteuid():
                continue
            with (folder / LOCK).open("a") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
