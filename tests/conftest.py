"""Settings of the whole suite: one intra-op thread, the two hypothesis profiles, and what runs in one process."""

import gc
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

from tests.garbage import collect_now_and_then, freeze
from tests.rounds import THOROUGH, search_thoroughly

torch.set_num_threads(1)

# Until all is imported and collected: see tests/garbage.py for what comes then.
gc.disable()

# Tests search: no plan of an earlier run may answer for them, and nothing is written into anybody's home.
os.environ["AUTOPAR_CACHE"] = "0"

# The same examples on every run, so that a failure is never a matter of luck.
SLOW_MACHINES = (HealthCheck.too_slow,)
settings.register_profile(
    "default", max_examples=40, derandomize=True, deadline=None, suppress_health_check=SLOW_MACHINES
)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.load_profile("default")


DISTRIBUTED = "tests/distributed/"

LONGEST = (DISTRIBUTED, "tests/test_docs.py", "tests/fuzz/")
"""Groups that would keep one worker busy when the other is done."""


@pytest.hookimpl(tryfirst=True)  # before tests are chosen by their marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest groups first; of tests marked ``some(n)`` all but n are slow."""
    sets: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some") and not item.get_closest_marker("deep"):
            sets.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for group in sets.values():
        mark = group[0].get_closest_marker("some")
        assert mark is not None
        kept = {len(group) * i // mark.args[0] for i in range(mark.args[0])}
        for number, item in enumerate(group):
            if number not in kept:
                item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: [not item.nodeid.startswith(name) for name in LONGEST])


def pytest_collection_finish() -> None:
    """What was imported stays."""
    freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Deep runs search as users do."""
    deep = item.config.getoption("--hypothesis-profile", None) == "deep"
    search_thoroughly(deep or "thorough" in item.keywords or item.nodeid.startswith(THOROUGH))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Traces leave cycles behind: they are collected between tests, not while one runs."""
    collect_now_and_then()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share what they capture, and all distributed ones share a pool of ranks: each on one worker."""
    from xdist.scheduler import LoadFileScheduling

    class Groups(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return DISTRIBUTED if nodeid.startswith(DISTRIBUTED) else nodeid.partition("::")[0]

    return Groups(config, log)
