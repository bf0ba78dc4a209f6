"""timm, beside any build of torch.

timm takes image transforms from torchvision, whose compiled operators load beside the torch that they were built for
only (a wheel of the package index next to a CPU build of torch does not), and no network needs them. Where torchvision
cannot be imported, names of it are placeholders while timm is.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any


class _Name(type):
    """A class that has every attribute, which are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        return _placeholder(name)


def _placeholder(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Name(name, (), {})


class _Module(ModuleType):
    def __getattr__(self, name: str) -> Any:
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        ours = name.partition(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if ours else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Module(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@contextlib.contextmanager
def _placeholders() -> Iterator[None]:
    """Of torchvision's names; none is left behind, or other libraries would take it for installed."""
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [n for n in sys.modules if n.partition(".")[0] == "torchvision"]:
            del sys.modules[name]


def import_timm() -> Any:
    """timm, with torchvision where it works."""
    try:
        import torchvision  # noqa: F401
    except (ImportError, RuntimeError):
        with _placeholders():
            import timm
    else:
        import timm
    return timm
