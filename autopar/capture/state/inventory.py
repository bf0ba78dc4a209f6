"""`Inventory` and `Holdings`: the objects that a model consists of, compared by identity.

Every call asks which parameters, buffers and modules there are, and whether anything of them has changed. Most calls
find what the last one found. One comparison of all objects decides that, in loops that Python runs in C; walking
through the modules, as `named_modules` does, takes many times as long.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import nn

from autopar.capture.state.values import dict_of, holds_attributes_alone

TABLES = ("_parameters", "_buffers", "_modules", "_forward_hooks", "_forward_pre_hooks", "_backward_hooks",
          "_backward_pre_hooks")  # fmt: skip
"""Tables of a module whose entries may be replaced."""

_facts = operator.attrgetter("requires_grad", "dtype", "shape")


class Inventory:
    """What a model consists of; the same object as long as nothing in it has been replaced, added or removed.

    Attributes:
        modules: path and module.
        parameters: by name.
        modes: class and mode of each module.
        memo: what others derive from these alone, by its name.
    """

    def __init__(self, model: nn.Module, attributes: Callable[[torch.Tensor], list[str]]) -> None:
        """Walk through a model.

        Args:
            model: whose.
            attributes: names of the attributes of a tensor that count.
        """
        self.modules = list(model.named_modules())
        self.parameters = dict(model.named_parameters())
        self.modes = tuple([(type(m), m.training) for _, m in self.modules])
        self.memo: dict[str, Any] = {}
        self._own = [m for _, m in self.modules]
        self._tables = [getattr(m, name) for m in self._own for name in TABLES]
        self._filled = [t for t in self._tables if t]
        tensors = (t for m in self._own for table in (m._parameters, m._buffers, vars(m)) for t in table.values())
        self._tensors = list({id(t): t for t in tensors if isinstance(t, torch.Tensor)}.values())
        self._set = [(vars(t), n) for t in self._tensors for n in attributes(t)]
        self._lengths, self._names, self._objects = self._sizes(), self._keys(), list(self._now())

    def holds(self) -> bool:
        """Whether all is as it was."""
        # From what takes the least time; lengths first, so that the objects below are as many as they were.
        return (
            self._sizes() == self._lengths
            and self._keys() == self._names
            and all(map(operator.is_, self._now(), self._objects))
        )

    def facts(self) -> tuple[Any, ...]:
        """Of each parameter whether it requires a gradient, its dtype and its shape, which may change in place."""
        return tuple(map(_facts, self.parameters.values()))

    def _sizes(self) -> list[int]:
        """How many attributes and entries of tables there are."""
        return [*map(len, map(vars, self._own)), *map(len, self._tables)]

    def _keys(self) -> list[Any]:
        """Names of attributes, of what is registered, and of what is set on tensors: one object may change its name."""
        # Of modules all names in a row: how many each has is compared before.
        return [*chain.from_iterable(map(vars, self._own)), *map(tuple, chain(self._filled, map(vars, self._tensors)))]

    def _now(self) -> Iterator[Any]:
        """The objects themselves: those of the last time are alive, so that no other can have their identity."""
        tables = chain(map(vars, self._own), self._filled)
        values = chain.from_iterable(map(dict.values, tables))
        return chain(map(type, self._own), values, (own[name] for own, name in self._set))


class Holdings:
    """The objects that some containers hold, to be compared in the same way."""

    def __init__(self, containers: Iterable[tuple[Any, tuple[Any, ...]]]) -> None:
        """Look at the containers, given with what they hold."""
        tables: list[dict[Any, Any]] = []
        self._lists: list[list[Any]] = []
        self._objects: list[Any] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._others: list[tuple[Any, tuple[Any, ...]]] = []
        for container, held in {id(c): (c, held) for c, held in containers}.values():
            kind = type(container)
            if kind is dict:
                tables.append(container)
            elif kind is list:
                self._lists.append(container)
            # A set of texts holds the same ones if it is equal; of other objects equal ones may differ.
            elif kind is set and all(type(v) is str for v in container):
                self._sets.append((container, frozenset(container)))
            elif holds_attributes_alone(container):
                self._objects.append(container)
            elif kind is not tuple:  # which always holds the same
                self._others.append((container, held))
        self._tables = tables
        self._dicts = list(map(dict_of, self._objects))
        self._names, self._held = self._keys(), list(self._now())

    def hold(self, contents: Callable[[Any], tuple[Any, ...]]) -> bool:
        """Whether all hold what they held.

        Args:
            contents: what a container of any other kind holds.
        """
        return (
            all(map(operator.is_, map(dict_of, self._objects), self._dicts))
            and self._keys() == self._names
            and all(map(operator.is_, self._now(), self._held))
            and all(now == then for now, then in self._sets)
            and all(same_objects(held, contents(container)) for container, held in self._others)
        )

    def _keys(self) -> list[Any]:
        """How many items there are, and names of attributes."""
        return [*map(len, self._tables), *map(tuple, self._dicts), *map(len, self._lists)]

    def _now(self) -> Iterator[Any]:
        # A dict is iterated for its keys, which need not be texts, nor comparable.
        values = map(dict.values, chain(self._tables, self._dicts))
        return chain(chain.from_iterable(self._tables), chain.from_iterable(values), chain.from_iterable(self._lists))


def same_objects(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two tuples hold the same objects."""
    return len(a) == len(b) and all(map(operator.is_, a, b))
