"""One pool of four ranks for all tests here, and their marks."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.distributed.conftest import _pools, ranks, two_ranks  # noqa: F401  fixtures

LIBRARIES = ("timm", "diffusers", "peft", "transformers")
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All are deep, and are skipped where `make test-models` has not installed what they take."""
    absent = [name for name in LIBRARIES if find_spec(name) is None]
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.deep)
            item.add_marker(pytest.mark.slow)
            if absent:
                item.add_marker(
                    pytest.mark.skip(reason=f"{', '.join(absent)} not installed: `make test-models` does it")
                )
