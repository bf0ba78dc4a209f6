"""What a process frees stays with it, so that the next step has no new memory to clear."""

import os
import resource
import subprocess
import sys

import pytest

from autopar.costs.calibrate.allocator import SETTINGS, keep_freed_memory

HUGE = 2**21
"""Bytes of the largest pages that the system gives without being asked."""

STEPS = """
import resource, sys, torch
if sys.argv[1] == "kept":
    from autopar.costs.calibrate.allocator import keep_freed_memory
    assert keep_freed_memory()
def step():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    made = [torch.ones(1 << 21) for _ in range(8)]
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
print([step() for _ in range(4)][-1])
"""


def new_pages(how: str, **settings: str) -> int:
    """How many pages the fourth of four equal steps gets from the system, in a process of its own."""
    own = {name: value for name, value in os.environ.items() if name not in SETTINGS} | settings
    said = subprocess.run([sys.executable, "-c", STEPS, how], env=own, capture_output=True, text=True, check=True)
    return int(said.stdout)


@pytest.mark.deep
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's allocator")
def test_a_step_gets_no_new_pages() -> None:
    # The library adapts its own threshold to what is freed, and then keeps some of it, or not: here it stays as it is.
    returned = new_pages("as it is", MALLOC_MMAP_THRESHOLD_="131072")
    kept, size = new_pages("kept"), 8 * (4 << 21)
    # Pages may be huge: of those that are returned each comes anew.
    assert returned * HUGE >= size
    assert kept * resource.getpagesize() < 0.1 * size
    assert kept < 0.1 * returned


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "131072")
    assert not keep_freed_memory()
