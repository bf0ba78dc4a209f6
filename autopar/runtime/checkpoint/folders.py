"""Where checkpoints lie: each in a folder of its own, which is whole or not there, and a pointer to the last.

``root/step-00000100-3f9a1c20`` holds one, and ``root/latest`` its name. What is being written is called ``….partial``
until all of it is on the disk; then it is renamed, and then the pointer is replaced. Whenever a process is killed, the
checkpoint before that moment is there, or the new one.
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from pathlib import Path

from autopar.costs.read_file import read_text

LATEST, MANIFEST, PARTIAL = "latest", "autopar.json", ".partial"

_NAME = re.compile(r"step-(\d{8,})-[0-9a-f]{8}")


def new_name(step: int) -> str:
    """A name that no checkpoint has had, of the same step or another."""
    return f"step-{step:08d}-{secrets.token_hex(4)}"


def begin(root: Path, name: str) -> Path:
    """Make the folder that is written to."""
    folder = root / f"{name}{PARTIAL}"
    folder.mkdir(parents=True)
    return folder


def publish(root: Path, name: str, manifest: str) -> Path:
    """Make what has been written the last checkpoint: the manifest, the folder's name, the pointer, in this order."""
    partial, whole = root / f"{name}{PARTIAL}", root / name
    write(partial / MANIFEST, manifest)
    partial.rename(whole)
    sync(root)
    write(root / LATEST, name)
    return whole


def write(file: Path, text: str) -> None:
    """Replace a file by one that is on the disk."""
    new = file.with_name(f"{file.name}.new")
    with new.open("w", encoding="utf-8") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())
    new.replace(file)
    sync(file.parent)


def sync(folder: Path) -> None:
    """Names in a folder are on the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def find(folder: Path) -> Path:
    """The checkpoint that a folder is, or the last one in it.

    Raises:
        FileNotFoundError: it is none and has none.
    """
    if (folder / MANIFEST).is_file():
        return folder
    known = whole(folder)
    if not known:
        of_workers = sorted(p.name for p in folder.glob("worker-*") if whole(p))
        if of_workers:
            raise FileNotFoundError(
                f"{folder} has a checkpoint of each worker, {', '.join(of_workers)}, and the model has no workers: "
                "give the folder of one of them"
            )
        raise FileNotFoundError(
            f"there is no checkpoint in {folder}: give the folder that autopar.checkpoint.save() was given"
        )
    try:
        last = read_text(folder / LATEST, 1000).strip()
    except (OSError, ValueError):
        last = ""
    # Nobody has renamed the pointer of a first checkpoint whose writer was killed between the two.
    return folder / last if last in known else folder / known[-1]


def whole(root: Path) -> list[str]:
    """Names of the checkpoints in a folder, the oldest first: a run that went back has newer ones of earlier steps."""
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if _NAME.fullmatch(p.name) and not p.is_symlink() and (p / MANIFEST).is_file()]
    return [p.name for p in sorted(found, key=lambda p: (p.stat().st_mtime_ns, p.name))]


def prune(root: Path, keep: int, but: str) -> None:
    """Delete all but the last checkpoints, and what killed writers have left.

    Args:
        root: the folder.
        keep: how many stay, the one that has just been written included.
        but: name of the latter.
    """
    others = [name for name in whole(root) if name != but]
    for name in others[: max(0, len(others) - (keep - 1))]:
        # Renamed first: it must not look whole while it is deleted.
        (root / name).rename(root / f"{name}{PARTIAL}")
    for path in root.iterdir():
        if path.name.endswith(PARTIAL) and _NAME.fullmatch(path.name.removesuffix(PARTIAL)) and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
