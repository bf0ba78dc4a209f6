"""Import paths of before the packages, which documents and scripts still name: each is the module that took its place.

>>> from autopar.cluster import Cluster
>>> Cluster.__module__
'autopar.costs.cluster'
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FORMER = {
    "autopar.cluster": "autopar.costs.cluster",
    "autopar.cost": "autopar.costs",
    "autopar.cost.collectives": "autopar.costs.collectives",
    "autopar.cost.host": "autopar.costs.host_copies",
    "autopar.cost.kernels": "autopar.costs.kernels",
    "autopar.cost.memory": "autopar.costs.memory",
    "autopar.dims": "autopar.sharding.dims",
    "autopar.hybrid": "autopar.explain.hybrid.predict",
    "autopar.layout": "autopar.ir.layout",
    "autopar.oracle": "autopar.rules.oracle.sharding",
    "autopar.padding_oracle": "autopar.rules.oracle.padding",
    "autopar.precision": "autopar.ir.precision",
    "autopar.program": "autopar.ir.program",
    "autopar.step": "autopar.explain.hybrid.layer_profile",
    "autopar.strategy": "autopar.rules.rule",
    "autopar.strides_oracle": "autopar.rules.oracle.strides",
    "autopar.training": "autopar.explain.hybrid.training_step",
    "autopar.simulate.emitted": "autopar.simulate.graph_tasks",
}
"""Former path to present path."""


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, _Loader()) if fullname in FORMER else None


class _Loader(Loader):
    """Gives the present module itself, so that there is one of it, whichever path it was imported by."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = import_module(FORMER[spec.name])
        self.own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """It has run; the import system has written the former name into it."""
        module.__spec__ = self.own


def install() -> None:
    """Let these paths be imported. First of all: a former package would find the modules of the present one anew."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
