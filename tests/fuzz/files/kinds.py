"""What files there are, and what becomes of a changed one: refused in clear words, or as good as the file was."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

import safetensors.torch
import torch
from torch import nn

import autopar
from autopar import checkpoint
from autopar.compiler import part_of_worker, program_of, rewrite
from autopar.ir.plan import Plan
from autopar.ir.program import Program
from autopar.passes import DETERMINISTIC_PASSES, with_whole_numbers
from autopar.runtime.mesh import MeshContext
from autopar.runtime.state.materialize import materialize
from autopar.search import cache
from autopar.verify.reference import Reference, in_one_dtype, reference_of
from autopar.verify.verify import compare, global_values
from tests.costs import test_cluster_files as clusters
from tests.fuzz.files.mutations import mutated
from tests.fuzz.judge import RELATIVE, Outcome, explained

MOST_WORDS = 1500
"""Characters of an error: more is the file itself."""

INDEX = "model.safetensors.index.json"


def loss_fn(output: torch.Tensor, _: object) -> torch.Tensor:
    return output.square().mean()


def layers(*widths: int) -> nn.Module:
    """Linear layers with a nonlinearity between."""
    torch.manual_seed(0)
    pairs = [m for inner, outer in itertools.pairwise(widths) for m in (nn.Linear(inner, outer), nn.Tanh())]
    return nn.Sequential(*pairs[:-1])


@dataclass(frozen=True)
class Planned:
    """A plan and what it is of."""

    widths: tuple[int, ...]
    axes: dict[str, int]
    options: dict[str, Any] = field(default_factory=dict)

    @cached_property
    def model(self) -> nn.Module:
        return layers(*self.widths)

    @cached_property
    def batch(self) -> Any:
        return (torch.randn(16, self.widths[0], generator=torch.Generator().manual_seed(1)),)

    @property
    def search(self) -> autopar.Search:
        return autopar.Search(cache=False, **self.options)

    def plan(self, search: autopar.Search | None = None) -> Plan:
        return autopar.plan(
            self.model, self.batch, cluster="h100", axes=self.axes, loss_fn=loss_fn, search=search or self.search
        )  # fmt: skip

    @cached_property
    def known(self) -> dict[Any, tuple[Program, list[torch.Tensor], Reference]]:
        return {}

    def eager(self, workers: tuple[tuple[str, int], ...]) -> tuple[Program, list[torch.Tensor], Reference]:
        """The program, its inputs, and what eager mode computes of them in float64."""
        if workers not in self.known:
            batch = part_of_worker(self.model, self.batch, workers)
            program = program_of(self.model, batch, loss_fn=loss_fn)
            values = global_values(program, self.model, batch)
            given = in_one_dtype(program, values, torch.float64)
            right = reference_of(self.model, batch, program, given, torch.float64, loss_fn, None, None, 1)
            self.known[workers] = program, values, right
        return self.known[workers]

    @cached_property
    def text(self) -> bytes:
        return json.dumps(self.plan().to_dict()).encode()


MESH = {"a": 2, "b": 2}
PLANS = (
    Planned((8, 8, 8), MESH, {"recipe": "fsdp"}),
    Planned((8, 8, 8, 8), MESH, {"recipe": "random", "seed": 3, "pins": {"offload": "search", "microbatches": 2}}),
    Planned((8, 8, 8, 8, 8), MESH, {"pins": {"stages": 2, "stage_axis": "a", "microbatches": 4, "schedule": "1f1b"}}),
    Planned((8, 8, 8, 8, 8), {"a": 2}, {"pins": {"stages": 2, "virtual": 2, "microbatches": 4, "stage_order": [1, 0]}}),
    Planned((8, 7, 8), {"a": 2}, {"pins": {"0.weight": ("S(0)",)}}),
    Planned((8, 8, 8), MESH, {"roles": {"a": "local"}, "inexact": ("local",)}),
    Planned((64, 64, 8), {"a": 2}, {"recipe": "fsdp", "quantized": {"a": {"weights": 8}}, "inexact": ("quantized",)}),
)


def refused(error: BaseException, file: Path | None) -> Outcome:
    """What an error says of a file; without one, of what comes after it was read."""
    found = explained(error)
    message = str(error)
    if found.kind == "error" and len(message) > MOST_WORDS:
        return replace(found, kind="unclear", detail=f"{len(message)} characters: {found.detail[:80]}")
    if found.kind == "error" and file is not None and not (str(file) in message or str(file.parent) in message):
        return replace(found, kind="unclear", detail=f"no file: {found.detail}")
    return found


@dataclass
class Kind(ABC):
    """Files of one kind, in a folder of their own."""

    folder: Path

    @abstractmethod
    def changed(self, draw: Random) -> Any:
        """A file that was changed."""

    @abstractmethod
    def judge(self, changed: Any) -> Outcome:
        """What becomes of it: ``error`` where it is refused, ``equal`` where it is as good as the file was."""


class Plans(Kind):
    """A plan that is read passes no check, or runs and is right."""

    def changed(self, draw: Random) -> tuple[int, bytes]:
        number = draw.randrange(len(PLANS))
        return number, mutated(PLANS[number].text, draw)

    def judge(self, changed: tuple[int, bytes]) -> Outcome:
        planned, file = PLANS[changed[0]], self.folder / "plan.json"
        file.write_bytes(changed[1])
        try:
            plan = Plan.load(file)
        except Exception as e:
            return refused(e, file)
        plan.summary()
        if plan.to_dict() == Plan.from_dict(json.loads(planned.text)).to_dict():
            return Outcome("equal", "same")
        ran = self._run(planned, plan)
        # A search takes as long as all the others.
        if ran.kind != "equal" or not (plan.fused or plan.float8 or changed[1][-9] % 5 == 0):
            return ran
        return self._check(planned, plan)

    def _run(self, planned: Planned, plan: Plan) -> Outcome:
        """On an emulated mesh, beside eager mode."""
        if dict(plan.workers) | dict(plan.axes) != planned.axes:  # as `autopar.parallelize` says of a mesh
            return Outcome("error", "another mesh")
        if plan.fused or plan.float8:  # of other graphs, which Plan.check captures
            return Outcome("equal")
        try:
            program, values, reference = planned.eager(plan.workers)
            local = rewrite(program, plan, passes=with_whole_numbers(DETERMINISTIC_PASSES))
            report = compare(program, local, plan, values, torch.float64, reference=reference)
        except Exception as e:
            return refused(e, None)
        off = report.max_error
        return Outcome("wrong", "plan", f"{report.worst}: {off:.2g}") if off > RELATIVE else Outcome("equal")

    def _check(self, planned: Planned, plan: Plan) -> Outcome:
        try:
            plan.check(planned.model, planned.batch, loss_fn=loss_fn, search=planned.search)
        except Exception as e:
            found = refused(e, None)
            return Outcome("equal", "runs, and is refused by Plan.check") if found.kind == "error" else found
        return Outcome("equal", "taken")


class Entries(Kind):
    """An entry of the cache that was changed costs a search, or is the plan that it was."""

    @cached_property
    def asked(self) -> dict[int, tuple[Any, ...]]:
        """With what `autopar.search.cache.load` is called, for each plan."""
        return {}

    def _asked(self, number: int) -> tuple[Path, bytes, Any]:
        """The file of an entry, what is in it, and for what it is read."""
        if number not in self.asked:
            calls: list[Any] = []
            real = cache.load
            with mock.patch.object(cache, "load", lambda *given: calls.append(given) or real(*given)):
                with _environment(cache.VARIABLE, str(self.folder)):
                    options = {k: v for k, v in PLANS[number].options.items() if v != "random"}
                    PLANS[number].plan(autopar.Search(**options))
            file, *rest = calls[0]
            self.asked[number] = file, file.read_bytes(), rest
        file, text, rest = self.asked[number]
        return file, text, rest

    def changed(self, draw: Random) -> tuple[int, bytes]:
        number = draw.randrange(len(PLANS))
        if draw.random() < 0.1:  # of another plan, under this one's name
            return number, self._asked(draw.randrange(len(PLANS)))[1]
        return number, mutated(self._asked(number)[1], draw)

    def judge(self, changed: tuple[int, bytes]) -> Outcome:
        file, text, rest = self._asked(changed[0])
        file.write_bytes(changed[1])
        try:
            plan = cache.load(file, *rest)
        except Exception as e:
            return replace(explained(e), kind="crash")
        if plan is None:
            return Outcome("error", "searched again")
        right = Plan.from_dict(json.loads(text))
        if _but_claims(plan) == _but_claims(right):
            return Outcome("equal", "same")
        # Entries that nothing of the program reads change nothing.
        if _rewritten(rest[0], plan) == _rewritten(rest[0], right):
            return Outcome("equal", "same graph")
        return Outcome("wrong", "entry", "; ".join(_differences(plan.to_dict(), right.to_dict())))


def _rewritten(program: Program, plan: Plan) -> str:
    """What each device runs."""
    return str(rewrite(program, plan).graph.graph)


def _but_claims(plan: Plan) -> dict[str, Any]:
    """All but the certificate's words, which are claims until they are checked."""
    data = plan.to_dict()
    return {**data, "certificate": data["certificate"]["objective"]}


def _differences(own: Any, other: Any, path: str = "") -> Iterator[str]:
    """Places of two nested dicts that differ."""
    if not (isinstance(own, dict) and isinstance(other, dict)):
        if own != other:
            yield f"{path}: {str(own)[:200]} instead of {str(other)[:200]}"
        return
    for name in dict.fromkeys((*own, *other)):
        yield from _differences(own.get(name), other.get(name), f"{path}.{name}")


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name) if before is None else os.environ.update({name: before})


class Clusters(Kind):
    """Of which `tests/costs/test_cluster_files.py` says what is right."""

    def changed(self, draw: Random) -> str:
        lines = draw.choice(clusters.TEXTS).split("\n")
        for _ in range(draw.choice([1, 1, 1, 2, 3])):
            lines = draw.choice(clusters.MUTATIONS)(draw, lines)
        return "\n".join(lines)

    def judge(self, changed: str) -> Outcome:
        file = self.folder / "cluster.toml"
        try:
            return Outcome("equal", "taken") if clusters.check(file, changed) else Outcome("error", "refused")
        except AssertionError as e:
            return Outcome("wrong", "cluster", str(e))
        except Exception as e:
            return replace(refused(e, file), kind="crash")


class Manifests(Kind):
    """A manifest that is read gives a model, and an optimizer, the tensors that were saved."""

    @cached_property
    def saved(self) -> tuple[Path, bytes, dict[str, Any]]:
        model, optimizer, scheduler = self._trained(2)
        folder = checkpoint.save(self.folder, model, optimizer, scheduler=scheduler, step=2, extra={"a": [1.5]}).folder
        file = folder / "autopar.json"
        return file, file.read_bytes(), _tensors(model, optimizer)

    @staticmethod
    def _trained(steps: int) -> tuple[Any, Any, Any]:
        model: Any = autopar.parallelize(layers(4, 3, 2).append(nn.BatchNorm1d(2)), None, loss_fn=loss_fn)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        for _ in range(steps):
            model(torch.ones(3, 4)).backward()
            optimizer.step()
            scheduler.step()
        return model, optimizer, scheduler

    @cached_property
    def fresh(self) -> tuple[Any, Any, Any]:
        return self._trained(1)

    def changed(self, draw: Random) -> bytes:
        text = mutated(self.saved[1], draw)
        with contextlib.suppress(ValueError, RecursionError, AttributeError):
            data = json.loads(text)
            if draw.random() < 0.8 and data.pop("sha256", None):
                # With a digest of its own, or hardly any would be looked at.
                data["sha256"] = hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()
                return json.dumps(data).encode()
        return text

    def judge(self, changed: bytes) -> Outcome:
        file, original, right = self.saved
        file.write_bytes(changed)
        model, optimizer, scheduler = self.fresh
        before = _tensors(model, optimizer)
        try:
            checkpoint.load(file.parent, model, optimizer, scheduler=scheduler)
        except Exception as e:
            found = refused(e, file)
            if found.kind == "error" and not _equal(_tensors(model, optimizer), before):
                return Outcome("wrong", "an error, and something is changed", str(e))
            return found
        finally:
            found_now = _tensors(model, optimizer)
            if not _equal(found_now, before):
                del self.fresh  # the next is to see what is loaded
        if not _equal(found_now, right):
            return Outcome("wrong", "manifest", "other tensors than were saved")
        return Outcome("equal", "same" if changed == original else "taken")


class Indices(Kind):
    """Of safetensors: a model gets the tensors that the file says, or an error names it."""

    @cached_property
    def texts(self) -> dict[str, bytes]:
        state = layers(4, 3, 2).state_dict()
        shards = {
            f"model-0000{i}.safetensors": {n: t for n, t in state.items() if n[0] == w} for i, w in ((1, "0"), (2, "2"))
        }
        for name, tensors in shards.items():
            safetensors.torch.save_file(tensors, self.folder / name)
        table = {n: name for name, tensors in shards.items() for n in tensors}
        (self.folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 92}, "weight_map": table}))
        return {name: (self.folder / name).read_bytes() for name in (INDEX, *shards)}

    def changed(self, draw: Random) -> tuple[str, bytes]:
        name = draw.choice((INDEX, INDEX, *self.texts))
        text = self.texts[name]
        if name == INDEX:
            return name, mutated(text, draw)
        length = int.from_bytes(text[:8], "little")
        header = mutated(text[8 : 8 + length], draw)
        size = len(header) if draw.random() < 0.9 else draw.choice((0, 1, length, 2**40, 2**63))
        return name, size.to_bytes(8, "little") + header + text[8 + length :]

    def judge(self, changed: tuple[str, bytes]) -> Outcome:
        name, text = changed
        for each, whole in self.texts.items():
            (self.folder / each).write_bytes(text if each == name else whole)
        with torch.device("meta"):
            model = layers(4, 3, 2)
        try:  # as the first call does, which captures the model besides
            materialize(model, self.folder, {}, {}, MeshContext((), (), torch.device("cpu")))
        except Exception as e:
            return refused(e, self.folder / name)
        try:
            right = {n: self._read(n) for n, _ in model.named_parameters()}
        except Exception as e:
            return Outcome("wrong", "taken, and safetensors does not", str(e))
        if not all(torch.equal(p, right[n].to(p.dtype)) for n, p in model.named_parameters()):
            return Outcome("wrong", "index", "other tensors than the files have")
        return Outcome("equal", "same" if name == INDEX else "taken")

    def _read(self, name: str) -> torch.Tensor:
        """A tensor as transformers reads it."""
        table = json.loads((self.folder / INDEX).read_text())["weight_map"]
        return safetensors.torch.load_file(self.folder / table[name])[name]


def _tensors(model: Any, optimizer: Any) -> dict[str, Any]:
    state = checkpoint.state_dict(model, optimizer)
    found = {f"model.{n}": t.clone() for n, t in state["model"].items() if isinstance(t, torch.Tensor)}
    for name, entries in state["optimizer"]["state"].items():
        found.update({f"{name}.{k}": t.clone() for k, t in entries.items() if isinstance(t, torch.Tensor)})
    return found


def _equal(own: dict[str, Any], other: dict[str, Any]) -> bool:
    return own.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in own.items())


KINDS: dict[str, type[Kind]] = {
    "plan": Plans, "entry": Entries, "cluster": Clusters, "manifest": Manifests, "index": Indices,
}  # fmt: skip
