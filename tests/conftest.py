"""Settings of the whole suite: one intra-op thread, the two hypothesis profiles, and what runs in one process."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)

# The same examples on every run, so that a failure is never a matter of luck.
SLOW_MACHINES = (HealthCheck.too_slow,)
settings.register_profile("default", derandomize=True, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.register_profile("deep", max_examples=2000, deadline=None, suppress_health_check=SLOW_MACHINES)
settings.load_profile("default")


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A file's tests share what they capture; all distributed ones share a pool of ranks, and take longest: first."""
    pools = Path(__file__).parent / "distributed"
    items.sort(key=lambda item: pools not in item.path.parents)
    for item in items:
        shared = pools in item.path.parents
        item.add_marker(pytest.mark.xdist_group("distributed" if shared else item.nodeid.partition("::")[0]))
