"""`read_text`: the text of a file that a user names, which may be anything.

A pipe would block, a device has no end, and a huge file would fill the memory: all are refused before they are read.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

MIB = 2**20

_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFLNK: "a link",
}

# Without O_NONBLOCK, opening a pipe waits for somebody who writes to it. Windows has neither flag, nor such pipes.
_FLAGS = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)


def read_text(path: str | Path, most: int, *, follow: bool = True) -> str:
    """The text of a regular file.

    Args:
        path: of the file.
        most: bytes that it may have.
        follow: whether the path may be a symbolic link to it.

    Raises:
        ValueError: it is no regular file, too large, or not in UTF-8; names the file, the reason and the remedy.
        OSError: it does not exist, or cannot be read.
    """
    try:
        # Looked at before it is opened: opening a device may have effects. And after: it may be another one by then.
        _require_regular(path, os.stat(path, follow_symlinks=follow))
        handle = os.open(path, _FLAGS | (0 if follow else getattr(os, "O_NOFOLLOW", 0)))
    except OSError as e:
        if not follow and e.errno == errno.ELOOP:
            raise ValueError(f"{path} is a link; give the file itself") from e
        raise
    with open(handle, "rb") as file:
        found = os.fstat(file.fileno())
        _require_regular(path, found)
        # One more than may be read: the file may grow meanwhile.
        data = b"" if found.st_size > most else file.read(most + 1)
        if found.st_size > most or len(data) > most:
            raise ValueError(
                f"{path} has {max(found.st_size, len(data))} bytes, more than {most}: it is no file of this kind; "
                "give another"
            )
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: not a text file in UTF-8, {e.reason} at byte {e.start}; give another file") from e


def brief(text: str) -> str:
    """Of what a file says, as much as an error quotes: a name there may be as long as the file."""
    return text if len(text) <= 400 else f"{text[:200]} ... {text[-200:]}"


def _require_regular(path: str | Path, found: os.stat_result) -> None:
    if not stat.S_ISREG(found.st_mode):
        kind = _KINDS.get(stat.S_IFMT(found.st_mode), "no regular file")
        raise ValueError(f"{path} is {kind}; give a regular file")
