import io
import re
import time

from rich.console import Console

from autopar.explain.tables.progress import SearchProgress


def written(terminal: bool, delay: float, wait: float = 60.0) -> str:
    """What appears; the second phase begins once the first one has appeared, or after ``wait`` seconds."""
    file = io.StringIO()
    console = Console(file=file, width=100, force_terminal=terminal, color_system=None)
    with SearchProgress(console, delay=delay) as progress:
        progress("search")
        deadline = time.monotonic() + wait
        while "search" not in file.getvalue() and time.monotonic() < deadline:
            time.sleep(0.01)
        progress("multiplier", 0.012, 0.006)
    return file.getvalue()


def test_what_is_fast_is_silent() -> None:
    assert written(False, 60.0, wait=0.0) == ""
    assert written(True, 60.0, wait=0.0) == ""


def test_a_file_gets_one_line_a_phase() -> None:
    first, second = written(False, 0.05).splitlines()
    assert re.match(r"search, \d+ s", first)
    assert re.fullmatch(r"fastest plan that fits, \d+ s; best plan so far 12 ms a step; gap 50%", second)


def test_a_terminal_gets_a_line_that_is_removed_again() -> None:
    assert re.search(r"search, \d+ s", written(True, 0.05))
