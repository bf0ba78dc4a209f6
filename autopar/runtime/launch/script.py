"""What each process of ``autopar run`` runs: the user's script, whose failure is written down for the launcher.

The launcher prints one traceback, that of the rank which failed first: all ranks that wait for it fail as well.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import time
import traceback
from pathlib import Path
from types import TracebackType

from autopar.runtime.launch.environment import FAILURES, QUIET

MODULE = "-m"
"""First argument where the second is the name of a module and not a file."""


def main(arguments: list[str]) -> int:
    """Run a script, or a module after ``-m``, as Python would; returns the exit code."""
    is_module = arguments[0] == MODULE
    name, rest = arguments[is_module], arguments[is_module + 1 :]
    sys.argv = [name, *rest]
    if os.environ.get(QUIET) == "1" and os.environ.get("LOCAL_RANK", "0") != "0":
        _print_nothing()
    # `python -m` has put the current folder first, where `python script.py` has the script's.
    if not sys.flags.safe_path:
        sys.path[0] = os.getcwd() if is_module else str(Path(name).resolve().parent)
    try:
        if is_module:
            runpy.run_module(name, run_name="__main__", alter_sys=True)
        else:
            runpy.run_path(name, run_name="__main__")
    except SystemExit as end:
        return _left(end)
    except KeyboardInterrupt as stop:
        sys.last_value = stop
        return 130
    except BaseException as error:
        sys.last_value = error  # as Python does for what nothing catches; what runs at exit may ask for it
        _write_down(
            type(error).__name__, str(error), "".join(traceback.format_exception(type(error), error, _own(error)))
        )
        return 1
    return 0


def _print_nothing() -> None:
    """Drop what Python prints, and what libraries write to stdout; a crash of C code may still say why on stderr."""
    nothing = open(os.devnull, "w")
    os.dup2(nothing.fileno(), 1)
    sys.stdout = sys.stderr = nothing


def _left(end: SystemExit) -> int:
    """The exit code of ``sys.exit(...)``."""
    if end.code is None or isinstance(end.code, int):
        code = end.code or 0
    else:
        code = 1
    if code:
        sys.last_value = end
        text = f"sys.exit({end.code!r})\n" if isinstance(end.code, int) else f"{end.code}\n"
        _write_down("SystemExit", str(end.code), text)
    return code


def _own(error: BaseException) -> TracebackType | None:
    """The traceback from the script on: above it are this file and Python's runpy."""
    frame = error.__traceback__
    ours = (__file__, runpy.__file__, "<frozen runpy>")
    while frame is not None and frame.tb_frame.f_code.co_filename in ours:
        frame = frame.tb_next
    return frame


def _write_down(kind: str, message: str, text: str) -> None:
    """Leave a failure for the launcher; print it if another attempt will follow, or if nobody reads it."""
    attempt, most = (int(os.environ.get(f"TORCHELASTIC_{n}", 0)) for n in ("RESTART_COUNT", "MAX_RESTARTS"))
    rank, folder = int(os.environ.get("RANK", 0)), os.environ.get(FAILURES)
    if folder is None or attempt < most:
        sys.stderr.write(f"rank {rank}, attempt {attempt + 1} of {most + 1}:\n{text}")
    if folder is not None:
        facts = {"rank": rank, "attempt": attempt, "time": time.time(), "kind": kind, "message": message, "text": text}
        temporary = Path(folder) / f".{attempt}-{rank}"
        temporary.write_text(json.dumps(facts), encoding="utf-8")
        temporary.rename(Path(folder) / f"{attempt}-{rank}.json")  # in one step: the launcher may read at any time


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
