"""The Python state of a model: every attribute that is no parameter, buffer or submodule, and what is in it.

A graph holds for the state that it was traced with. `Slots` says in a form that can be compared what that state is, at
every call, cheaply: what has not been assigned since is not described anew.
"""

from __future__ import annotations

import inspect
import logging
import types
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch import nn

from autopar.capture.settings import SETTINGS, Libraries
from autopar.capture.state.code.objects import is_users_object
from autopar.capture.state.code.owner import Scope
from autopar.capture.state.code.search import Code, Search, search
from autopar.capture.state.inventory import Holdings, Inventory, same_objects
from autopar.capture.state.on_mesh import Whole, is_on_mesh, make_whole
from autopar.capture.state.values import (
    BUFFERS,
    GENERATORS,
    OWN,
    Path,
    Same,
    children,
    describe,
    held_by_function,
    state_of_hook,
    walk,
)

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")

HOOK_TABLES = (*HOOKS, "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks_with_kwargs")


def tensor_attributes(tensor: torch.Tensor) -> dict[str, Any]:
    """What the user has set on a parameter or buffer, such as ``weight.no_decay``."""
    return {n: v for n, v in vars(tensor).items() if n not in _TENSORS_OWN and "_memo" not in n}


_TENSORS_OWN = frozenset(
    "_local_tensor _spec _is_param _is_hooked autopar_storage plain owner_stage elem _fake_device fake_mode constant "
    "pytype dispatch_keys real_tensor autopar_view_of".split()
)
"""Attributes that torch and autopar set."""

VIEW_OF = "autopar_view_of"
"""Of buffers and attributes: the trained parameter whose memory they had before it was split."""


_STORAGE = "autopar_storage"
"""Of the attributes that are not the user's, the one whose change counts."""


def _counting(tensor: torch.Tensor) -> list[str]:
    return [*tensor_attributes(tensor), *([_STORAGE] if _STORAGE in vars(tensor) else ())]


def own_attributes(module: nn.Module) -> dict[str, Any]:
    """Attributes that are the user's."""
    return {n: v for n, v in vars(module).items() if n not in OWN}


def promoted(module: nn.Module) -> dict[str, torch.Tensor]:
    """Attributes that are plain tensors, which become inputs of the graph as buffers are."""
    # A parameter that is an attribute, too, not registered there, is that parameter.
    found = {n: v for n, v in own_attributes(module).items()
             if isinstance(v, torch.Tensor) and not isinstance(v, nn.Parameter)}  # fmt: skip
    return {n: v for n, v in found.items()
            # Not those behind a property of the class, nor what a graph has no input for.
            if not _is_computed(type(module), n) and v.layout == torch.strided and not v.is_meta}  # fmt: skip


def _is_computed(kind: type, name: str) -> bool:
    """Whether a class computes an attribute of its objects, or only has a default for it."""
    return hasattr(inspect.getattr_static(kind, name, None), "__get__")


def state_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Registered buffers and plain tensors among the attributes, by their names, shared ones under each."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        found.update({prefix + n: b for n, b in module._buffers.items() if b is not None})
        found.update({prefix + n: t for n, t in promoted(module).items()})
    return found


def tensors_within(model: nn.Module) -> dict[str, torch.Tensor]:
    """Tensors that have memory in lists, dicts and objects among the attributes, by where they are."""
    found: dict[str, torch.Tensor] = {}
    for path, module in model.named_modules():
        for name, value in own_attributes(module).items():
            for at, part, _ in walk(value, (("attr", name),), set()):
                if type(part) is torch.Tensor and len(at) > 1 and part.layout is torch.strided and not part.is_meta:
                    found[name_of(path, at)] = part
    return found


def where_kept(model: nn.Module, tensor: torch.Tensor) -> str:
    """Where among its attributes, and in lists, dicts and objects in these, a model has a tensor; empty: nowhere."""
    for path, module in model.named_modules():
        for name, value in own_attributes(module).items():
            for at, part, _ in walk(value, (("attr", name),), set()):
                if part is tensor:
                    return name_of(path, at)
    return ""


SCOPES = "code"
"""In place of a module's path: the state that is in no module, but in the scopes that the code reads."""

OF_HOOKS = "hooks"
"""In place of a module's path: the state that hooks have of their own which are part of graphs."""

OF_TORCH = "torch"
"""In place of a module's path: `SETTINGS`."""

OF_LIBRARIES = "libraries"
"""In place of a module's path: `Libraries`."""

Signature = dict[str, dict[Path, Any]]
"""State by the path of the module and the path in it."""


def _code_in(value: Any) -> Iterator[type | types.FunctionType]:
    """The user's code that a value is: a function, or the class of an object."""
    if isinstance(value, types.FunctionType):
        yield value
    elif isinstance(value, types.MethodType):
        yield value.__func__  # type: ignore[misc]
        yield type(value.__self__)
    elif is_users_object(value) or isinstance(value, nn.Module):
        yield type(value)


def code_of(model: nn.Module) -> Code:
    """The classes of a model's modules, and functions and classes of objects that these hold."""
    kinds = [type(m) for m in model.modules()]
    held = [c for m in model.modules() for name, value in own_attributes(m).items()
            for _, part, _ in walk(value, (("attr", name),), set()) for c in _code_in(part)]  # fmt: skip
    return tuple(dict.fromkeys([*kinds, *held]))


def hooks_of(model: nn.Module) -> tuple[types.FunctionType, ...]:
    """Functions among the hooks of a model."""
    hooks = [v for m in model.modules() for name in HOOKS for v in getattr(m, name).values()]
    return tuple(dict.fromkeys(h for h in hooks if isinstance(h, types.FunctionType)))


_MUTABLE = (torch.Tensor, np.ndarray, logging.Logger, *GENERATORS, *BUFFERS)


Contents = dict[int, tuple[Any, ...]]
"""What containers hold, by their ids, read once a call: modules may share containers."""


class _Description:
    """How a module's state was described, and from which objects.

    Attributes:
        values: of its attributes and hooks; alive, so that no new object can have the same identity.
        buffers: shapes and dtypes.
        described: what describes each container and leaf, by its path.
        containers: those that can change, with what is in them.
        leaves: tensors, arrays and generators, with what describes them.
        on_mesh: whether one of them is on a mesh.
        code: functions and classes of the user's that are in it.
    """

    def __init__(self, values: tuple[Any, ...], buffers: tuple[Any, ...] = ()) -> None:
        self.values, self.buffers = values, buffers
        self.described: dict[Path, Any] = {}
        self.containers: list[tuple[Any, tuple[Any, ...]]] = []
        self.leaves: list[tuple[Any, Any]] = []
        self.on_mesh = False
        self.code: dict[type | types.FunctionType, None] = {}

    def add(self, walked: Iterator[tuple[Path, Any, Any]], inputs: frozenset[int], contents: Contents) -> None:
        """Add what `walk` finds; ``inputs``: ids of parameters and buffers, whose values the graph takes as inputs."""
        for at, part, text in walked:
            if id(part) in inputs:
                self.described[at] = "a parameter or buffer", id(part)
                continue
            self.described[at] = text
            self.code.update(dict.fromkeys(_code_in(part)))
            if isinstance(part, _MUTABLE):
                self.leaves.append((part, text))
                self.on_mesh = self.on_mesh or is_on_mesh(part)
            elif part is not None and children(part) is not None:
                self.containers.append((part, _contents(part, contents)))

    def holds(self, contents: Contents) -> bool:
        """Whether containers hold the same objects, and arrays and generators have the same contents."""
        if not all(same_objects(held, _contents(container, contents)) for container, held in self.containers):
            return False
        return all(describe(v) == text for v, text in self.leaves)


class _Whole:
    """How all modules were described, to be compared at once."""

    def __init__(self, inventory: Inventory, found: Signature, parts: list[_Description]) -> None:
        self.inventory, self.found = inventory, found
        held = dict.fromkeys(c for d in parts for c in d.code)
        self.code: Code = tuple({**dict.fromkeys([kind for kind, _ in inventory.modes]), **held})
        self._holdings = Holdings([c for d in parts for c in d.containers])
        self._leaves = [leaf for d in parts for leaf in d.leaves]
        self._buffers = [(m, _buffers_of(m)) for _, m in inventory.modules if m._buffers]

    def holds(self, contents: Contents) -> bool:
        """Whether what an inventory does not see is as it was."""
        return (
            self._holdings.hold(lambda value: _contents(value, contents))
            and all(describe(v) == text for v, text in self._leaves)
            and all(_buffers_of(m) == known for m, known in self._buffers)
        )


class Slots:
    """The state of a model, described anew where it has changed."""

    def __init__(self, model: nn.Module, whole: Whole | None = None) -> None:
        """Nothing is known yet; ``whole`` makes tensors on a mesh whole where the model keeps some."""
        self._model, self.whole = model, whole
        self._known: dict[tuple[str, bool], _Description] = {}
        self._parameters: tuple[Any, ...] = ()
        self._inputs: frozenset[int] = frozenset()
        self._settings: dict[Path, Any] = {}
        self._libraries, self._of_libraries = Libraries(), dict[Path, Any]()
        self._library_names: Any = None
        self._inventory: Inventory | None = None
        self._whole: dict[bool, _Whole] = {}
        self.computing: dict[tuple[str, Path], frozenset[Path]] = {}
        self._search: tuple[tuple[Code, tuple[types.FunctionType, ...]], Search] | None = None

    def inventory(self, compare: bool = True) -> Inventory:
        """What the model consists of now; the same object as long as that has not changed.

        Args:
            compare: false: as of the last time, where no code of the user has run since.
        """
        if self._inventory is None or (compare and not self._inventory.holds()):
            self._inventory = Inventory(self._model, _counting)
        return self._inventory

    def state_tensors(self) -> dict[str, torch.Tensor]:
        """As the function of this name, as of the last inventory."""
        memo = self.inventory(compare=False).memo
        if "state tensors" not in memo:
            memo["state tensors"] = state_tensors(self._model)
        return dict(memo["state tensors"])

    def shared(self) -> tuple[tuple[str, str], ...]:
        """Names of `state_tensors` that stand for the tensor of another name, each with that one, the first."""
        memo = self.inventory(compare=False).memo
        if "shared" not in memo:
            first: dict[int, str] = {}
            names = [(n, first.setdefault(id(t), n)) for n, t in self.state_tensors().items()]
            memo["shared"] = tuple((n, of) for n, of in names if n != of)
        found: tuple[tuple[str, str], ...] = memo["shared"]
        return found

    def signature(self, constants: bool = False, compare: bool = True) -> Signature:
        """The state of every module now; entries that have not changed are the same objects, as are whole signatures.

        Args:
            constants: plain tensors count by their identity and version, not by their shape alone.
            compare: as of `inventory`.
        """
        inventory, contents = self.inventory(compare), Contents()
        known = self._whole.get(constants)
        if known is None or known.inventory is not inventory or not known.holds(contents):
            known = self._whole[constants] = self._described(inventory, constants, contents)
        if self.computing:
            own = self._of_hooks(inventory, contents)
            if known.found.get(OF_HOOKS) is not own:
                known.found = {**known.found, OF_HOOKS: own}
        rest = self._outside(self._searched(inventory, known.code), contents)
        if any(known.found.get(name) is not own for name, own in rest.items()):
            if self._search is not None and not self._search[1].leads_alike():
                # Other functions than before read other names.
                self._search = None
                rest = self._outside(self._searched(inventory, known.code), contents)
            known.found = {**known.found, **rest}
        return known.found

    def _outside(self, searched: Search, contents: Contents) -> Signature:
        """The state that is in no module."""
        return {SCOPES: self._of_scopes(searched.scopes, contents), OF_TORCH: self._of_settings(),
                OF_LIBRARIES: self._of_library_names(searched)}  # fmt: skip

    def compute(self, hooks: Iterable[tuple[tuple[str, Path], frozenset[Path]]]) -> bool:
        """Take note of hooks that are part of a graph; whether one of them is new.

        Args:
            hooks: each with what of its state the graph does not depend on.
        """
        before = dict(self.computing)
        for place, ignored in hooks:
            self.computing[place] = self.computing.get(place, ignored) & ignored
        return self.computing != before

    def _of_hooks(self, inventory: Inventory, contents: Contents) -> dict[Path, Any]:
        """The state of the hooks that are part of graphs, and that are still there."""
        if "computing" not in inventory.memo:
            modules = dict(inventory.modules)
            inventory.memo["computing"] = [
                (module, table, number, ignored, hooks[number])
                for (module, ((_, table), (_, number))), ignored in self.computing.items()
                if module in modules and number in (hooks := getattr(modules[module], table))
            ]
        computing = inventory.memo["computing"]
        values = tuple([hook for *_, hook in computing])
        known = self._unchanged((OF_HOOKS, False), values, (), contents)
        if known is not None:
            return known
        found = _Description(values)
        for module, table, number, ignored, hook in computing:
            path = ("attr", module or "model"), ("attr", table), ("item", number)
            found.add(state_of_hook(hook, path, ignored), frozenset(), contents)
        self._known[OF_HOOKS, False] = found
        return found.described

    def _searched(self, inventory: Inventory, code: Code) -> Search:
        """What the code of the model and of what it holds reads, as of the last time where it is the same."""
        if "hooks" not in inventory.memo:
            inventory.memo["hooks"] = hooks_of(self._model)
        asked = (code, inventory.memo["hooks"])
        if self._search is None or self._search[0] != asked or not self._search[1].is_current:
            self._search = asked, search(*asked)
        return self._search[1]

    def _described(self, inventory: Inventory, constants: bool, contents: Contents) -> _Whole:
        """The state of every module, each described anew where it has changed."""
        modules = inventory.modules
        own = tuple(t for _, m in modules for t in m._parameters.values())
        # Other parameters (after a wrapper has replaced them, say): paths to them are described by their ids, so anew.
        if not same_objects(own, self._parameters):
            buffers = [t for _, m in modules for t in m._buffers.values()]
            self._parameters, self._inputs = own, frozenset(map(id, (*own, *buffers)))
            self._known = {key: known for key, known in self._known.items() if key[0] == SCOPES}
        found = {path: self._of(path, module, constants, contents) for path, module in modules}
        return _Whole(inventory, found, [self._known[path, constants] for path, _ in modules])

    def _of_settings(self) -> dict[Path, Any]:
        found: dict[Path, Any] = {(("attr", name),): value for name, value in SETTINGS.items()}
        if found != self._settings:
            self._settings = found
        return self._settings

    def _of_library_names(self, searched: Search) -> dict[Path, Any]:
        found = self._libraries.now(searched.libraries, describe)
        if found is not self._library_names:
            self._library_names = found
            self._of_libraries = {(("attr", name),): text for name, text in found.items()}
        return self._of_libraries

    def _of_scopes(self, scopes: Sequence[Scope], contents: Contents) -> dict[Path, Any]:
        """The state in the scopes that the code reads."""
        values = tuple(chain.from_iterable([s.now() for s in scopes]))
        known = self._unchanged((SCOPES, False), values, (), contents)
        if known is not None:
            return known
        found, seen = _Description(values), set[int]()
        for scope in scopes:
            for name, value in scope.items():
                found.add(walk(value, (("scope", scope.owner), ("item", name)), seen), frozenset(), contents)
        self._known[SCOPES, False] = found
        return found.described

    def _of(self, path: str, module: nn.Module, constants: bool, contents: Contents) -> dict[Path, Any]:
        """The state of one module."""
        buffers = _buffers_of(module)
        hooks = [v for name in HOOKS for v in getattr(module, name).values()]
        inputs = promoted(module)
        named = (*module._parameters.items(), *module._buffers.items(), *inputs.items())
        tensors = {n: tensor_attributes(t) for n, t in named if t is not None and vars(t)}
        # With their names: an object may get another one.
        values = (*vars(module), *vars(module).values(), *hooks)
        values += tuple([x for own in tensors.values() for x in (*own, *own.values())])
        known = self._unchanged((path, constants), values, buffers, contents)
        if known is not None:
            return known
        found, seen = _Description(values, buffers), set[int]()
        described = found.described
        described[("attr", "training"),] = module.training
        described.update({(("attr", name),): ("buffer", kind) for name, kind in buffers})
        for name, value in own_attributes(module).items():
            if name in inputs and not constants:
                # An input of the graph, as a buffer is: its values may change, its shape may not.
                described[("attr", name),] = ("input", tuple(value.shape), value.dtype, value.device)
            else:
                found.add(walk(value, (("attr", name),), seen), self._inputs, contents)
        if found.on_mesh and self.whole and make_whole(module, self.whole, self._inputs):
            contents.clear()  # of before
            return self._of(path, module, constants, contents)
        for tensor, own in tensors.items():
            for n, v in own.items():
                found.add(walk(v, (("attr", tensor), ("attr", n)), seen), self._inputs, contents)
        for name in HOOKS:
            described[("attr", name),] = tuple(getattr(module, name))  # their order
            for number, hook in getattr(module, name).items():
                described[("attr", name), ("item", number)] = Same(hook)
        self._known[path, constants] = found
        return described

    def _unchanged(
        self, key: tuple[str, bool], values: tuple[Any, ...], buffers: tuple[Any, ...], contents: Contents
    ) -> dict[Path, Any] | None:
        """The description of an earlier call if all is as it was, and None otherwise.

        From the cheapest question to the dearest: whether attributes are the same objects, whether containers hold the
        same ones, and whether arrays and generators have the same contents.
        """
        known = self._known.get(key)
        if known is None or not same_objects(known.values, values) or known.buffers != buffers:
            return None
        return known.described if known.holds(contents) else None


def _buffers_of(module: nn.Module) -> tuple[Any, ...]:
    """Shapes and dtypes of a module's buffers, which may change in place."""
    return tuple((n, None if b is None else (b.shape, b.dtype)) for n, b in module._buffers.items())


def _contents(value: Any, known: Contents) -> tuple[Any, ...]:
    """What a container holds, and under which keys and names."""
    if id(value) not in known:
        # The same as below, sooner, for what there is most of.
        if type(value) is dict:
            known[id(value)] = (*value, *value.values())
        elif type(value) in (list, tuple) or (type(value) is set and not value):
            known[id(value)] = tuple(value)
        elif type(value) is types.FunctionType:
            known[id(value)] = held_by_function(value)
        else:
            # Numbers of positions, and the texts by which a set is sorted, are other objects each time.
            named = not isinstance(value, set | frozenset | deque | list | tuple)
            known[id(value)] = tuple(
                [x for (_, key), v in children(value) or () for x in ((key, v) if named else (v,))]
            )
    return known[id(value)]


def differences(a: Signature, b: Signature, ignored: frozenset[tuple[str, Path]] = frozenset()) -> list[str]:
    """Names of the state that differs, but for what is ignored; empty: none does."""
    found: list[str] = []
    if a is b:
        return found
    for module in [*a, *(m for m in b if m not in a)]:
        mine, other = a.get(module, {}), b.get(module, {})
        if mine is other:
            continue
        for at in [*mine, *(p for p in other if p not in mine)]:
            if mine.get(at) != other.get(at) and (module, at) not in ignored:
                found.append(name_of(module, at))
    return found


def name_of(module: str, path: Path) -> str:
    """A path as Python would write it."""
    text, rest = module, path
    if path and path[0][0] == "scope":
        text, rest = ".".join(str(key) for _, key in path[:2]), path[2:]
    for i, (kind, key) in enumerate(rest):
        if i and rest[i - 1][1] in HOOK_TABLES:
            continue  # torch numbers hooks as this process has registered them: ranks compare these texts
        text += f"[{key!r}]" if kind == "item" else f".{key}" if text else str(key)
    return text
