"""What a checkpoint is: names, dtypes and shapes of its tensors, and everything that is no tensor."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired, TypedDict

import msgspec
import torch

from autopar.costs.read_file import brief
from autopar.errors import AutoparError
from autopar.runtime.checkpoint import values

VERSION, DIGEST = 1, "sha256"

OPTIMIZER = "optimizer."
"""Before the names of an optimizer's tensors, those of its parameters."""

STATEFUL = "stateful."
"""What names of tensors begin with that are none of model and optimizer, before the name of their object."""


def taken_apart(state: Mapping[str, Any], tied: Mapping[str, str]) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors by one name each, and what else there is.

    Args:
        state: of `autopar.checkpoint.state_dict`.
        tied: of a parameter's or buffer's further names, the first.
    """
    given = {n: t for n, t in state["model"].items() if isinstance(t, torch.Tensor) and n not in tied}
    tensors = {f"model.{name}": tensor for name, tensor in given.items()}
    others = {name: value for name, value in state["model"].items() if not isinstance(value, torch.Tensor)}
    if "optimizer" not in state:
        return tensors, {"model": others}
    plain: dict[str, dict[str, Any]] = {}
    for name, entries in state["optimizer"]["state"].items():
        for key, value in entries.items():
            if isinstance(value, torch.Tensor):
                tensors[f"{OPTIMIZER}{name}.{key}"] = value
            else:
                plain.setdefault(name, {})[key] = value
    return tensors, {"model": others, "optimizer": plain, "groups": state["optimizer"]["groups"]}


def put_together(state: dict[str, Any], saved: Mapping[str, Any], tied: Mapping[str, str]) -> dict[str, Any]:
    """The state whose tensors have been filled, with what else was saved."""
    state["model"].update(saved["model"])
    state["model"].update({name: state["model"][first] for name, first in tied.items() if name in state["model"]})
    if "optimizer" in state:
        for name, entries in saved["optimizer"].items():
            state["optimizer"]["state"][name].update(entries)
        own = state["optimizer"]["groups"]
        groups = {i: as_own(group, own[i]) for i, group in saved["groups"].items() if i in own}
        state["optimizer"]["groups"] = {**own, **groups}
    return state


def as_own(saved: Any, own: Any) -> Any:
    """What was saved, in the types of what it replaces: a scheduler's counters are more than dicts."""
    if isinstance(saved, dict) and isinstance(own, dict):
        found = {k: as_own(v, own[k]) if k in own else v for k, v in saved.items()}
        return Counter(found) if isinstance(own, Counter) else found
    return saved


def described(
    tensors: Mapping[str, torch.Tensor], plain: Mapping[str, Any], step: int, world: int, generators: Sequence[str]
) -> str:
    """The text of a manifest.

    Args:
        tensors: of model and optimizer, by name.
        plain: everything else, by name.
        step: of the run.
        world: how many ranks save.
        generators: names of random generators whose states every rank saves.

    Raises:
        ValueError: something cannot be saved; names it.
    """
    for name, tensor in tensors.items():
        if tensor.is_complex():
            raise ValueError(f"{name} is complex, which safetensors cannot hold; save autopar.checkpoint.state_dict()")
    encoded = {name: json.loads(values.dumps(value, name)) for name, value in plain.items()}
    content = {
        "autopar_checkpoint": VERSION, "torch": str(torch.__version__), "step": step, "world": world,
        "generators": list(generators), "tensors": _kinds(tensors), "values": encoded,
    }  # fmt: skip
    return json.dumps({**content, DIGEST: _digest(content)}, indent=1)


def _digest(content: Mapping[str, Any]) -> str:
    """Of everything else: a file that was cut or changed says so."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _kinds(tensors: Mapping[str, torch.Tensor]) -> dict[str, list[Any]]:
    return {n: [str(t.dtype).removeprefix("torch."), *map(int, t.shape)] for n, t in tensors.items()}


class _Content(TypedDict):
    """What a file holds, in the types that JSON has, which a digest says nothing of."""

    step: Annotated[int, msgspec.Meta(ge=0)]
    world: Annotated[int, msgspec.Meta(ge=1)]
    generators: list[str]
    tensors: dict[str, Annotated[list[str | int], msgspec.Meta(min_length=1)]]
    values: dict[str, Any]


class _Values(TypedDict):
    """Of which types values are."""

    model: dict[str, Any]
    stateful: dict[str, Any]
    extra: Any
    optimizer: NotRequired[dict[str, dict[str, Any]]]
    groups: NotRequired[dict[Any, dict[str, Any]]]
    random_calls: NotRequired[int]
    workers: NotRequired[int]
    alike: NotRequired[list[str]]


@dataclass(frozen=True)
class Manifest:
    """What was saved.

    Attributes:
        file: it is from.
        step: of the run.
        world: how many ranks saved it.
        generators: names of random generators whose states each has.
        tensors: dtype and sizes, by name.
        values: everything else, by name.
    """

    file: Path
    step: int
    world: int
    generators: tuple[str, ...]
    tensors: dict[str, list[Any]]
    values: dict[str, Any]

    @classmethod
    def of(cls, text: str, file: Path) -> Manifest:
        """Of a file's text.

        Raises:
            ValueError: it is damaged, or of another version.
        """
        try:
            found = json.loads(text)
            if found.pop(DIGEST) != _digest(found):
                raise ValueError("it is not what was written")
            if found["autopar_checkpoint"] != VERSION:
                raise ValueError(f"it is of version {found['autopar_checkpoint']!r}, and this autopar reads {VERSION}")
            content = msgspec.convert(found, _Content)
            plain = {n: values.loads(json.dumps(v), n) for n, v in content["values"].items()}
            try:
                msgspec.convert(plain, _Values)
            except msgspec.ValidationError as e:
                raise ValueError(f"values: {e}") from None
            if ("optimizer" in plain) != ("groups" in plain):
                raise ValueError("values: of optimizer and groups, which an optimizer has both, one is missing")
            names, tensors = tuple(content["generators"]), content["tensors"]
            return cls(file, content["step"], content["world"], names, tensors, plain)
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
            raise ValueError(f"{file} is damaged: {type(e).__name__}: {brief(str(e))}") from None

    def check(
        self, own: Mapping[str, torch.Tensor], plain: Mapping[str, Collection[str]], stateful: Mapping[str, Any]
    ) -> None:
        """Compare names, dtypes and shapes with those of a model, before anything is read into it.

        Args:
            own: tensors of model, optimizer and further objects.
            plain: names of what else the ``model`` has, and of what the ``optimizer`` has a state of, if there is one.
            stateful: further objects, by name; each is given what ``state_dict()`` of its kind gives.

        Raises:
            AutoparError: they differ; names the first.
        """
        has_optimizer = "optimizer" in plain
        saved = {n: v for n, v in self.tensors.items() if has_optimizer or not n.startswith(OPTIMIZER)}
        # As other objects that are not asked for.
        saved = {n: v for n, v in saved.items() if not n.startswith(STATEFUL) or n.split(".")[1] in stateful}
        if has_optimizer and "groups" not in self.values:
            raise AutoparError(f"{self.file.parent} has no optimizer: it was saved without one")
        described = _kinds(own)
        wrong = [f"it has no {n}" for n in described if n not in saved]
        wrong += [f"this model has no {n}" for n in saved if n not in described]
        wrong += [f"{n} is {saved[n]} there and {d} here" for n, d in described.items() if saved.get(n, d) != d]
        for kind, names in plain.items():
            wrong += [f"this {kind} has no {n}" for n in self.values.get(kind, {}) if n not in names]
        others = self.values["stateful"]
        wrong += [f"it has no {n}=" for n in stateful if n not in others]
        wrong += [
            f"{n}= is a {type(others[n]).__name__} there and a dict here"
            for n, given in stateful.items()
            if n in others and isinstance(given.state_dict(), dict) > isinstance(others[n], dict)
        ]
        if wrong:
            more = f" (and {len(wrong) - 3} more)" if len(wrong) > 3 else ""
            raise AutoparError(
                f"{self.file.parent} is of another model, optimizer or loop: {'; '.join(map(brief, wrong[:3]))}{more}"
            )
