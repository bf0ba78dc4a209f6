"""Import paths that documents of earlier versions name."""

import sys
from importlib import import_module

import pytest

import autopar  # noqa: F401  installs the paths
from autopar._former_paths import FORMER


@pytest.mark.parametrize("former", FORMER)
def test_a_former_path_is_the_present_module(former: str) -> None:
    present = import_module(FORMER[former])
    assert import_module(former) is present
    assert present.__name__ == FORMER[former]
    assert present.__spec__ is not None and present.__spec__.name == FORMER[former]
    assert sys.modules[former] is present


def test_other_paths_are_not_found() -> None:
    with pytest.raises(ModuleNotFoundError):
        import_module("autopar.cost.nothing")
