"""`Parallelism`, what a configuration file asks for, and `Setup`, the same in autopar's terms and as Python."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from autopar.search.options import Search

DDP, ZERO1, ZERO2, FSDP = "ddp", "zero1", "zero2", "fsdp"

PRECISION, MAX_NORM = "precision", "max_norm"
"""Arguments of the printed functions where a file leaves to who runs it in what is computed, and what is clipped."""

ROLE = {DDP: "data", ZERO1: "optimizer", ZERO2: "shard", FSDP: "shard"}
"""The role of an axis along which a recipe alone would split."""


@dataclass(frozen=True)
class Parallelism:
    """How the devices of a run share the work.

    Attributes:
        data: recipe of the devices that each have rows of their own.
        replicas: copies of the parameters, each of which is split over the others; None: as many as devices allow.
        shards: devices of such a copy, or without copies all that have rows of their own; None: as many as there are.
        expert: of the shards, those that split experts.
        context: devices that split a sequence.
        tensor: devices that split a layer.
        sequence: whether they split the sequence between these layers.
        stages: devices of a pipeline; ``"search"`` leaves them to the search.
        pins: of `autopar.Search`.
        quantized: bits of ``weights`` and ``gradients`` along the axes of the shards.
        secondary: of the shards, devices over which copies for the backward pass are split; 1: there are none.
    """

    data: str = DDP
    replicas: int | None = 1
    shards: int | None = None
    expert: int = 1
    context: int = 1
    tensor: int = 1
    sequence: bool = False
    stages: int | str = 1
    pins: Mapping[str, Any] = field(default_factory=dict)
    quantized: Mapping[str, int] = field(default_factory=dict)
    secondary: int = 1

    @property
    def axes(self) -> dict[str, int | None]:
        """Mesh axes, outermost first; one at most is open."""
        stages = self.stages if isinstance(self.stages, int) else 1
        found: dict[str, int | None] = {"stage": stages, "replica": self.replicas}
        shards = {"data": self.shards}
        if self.secondary > 1:
            shards = {"node": None if self.shards is None else self.shards // self.secondary, "data": self.secondary}
        found |= {**shards, "expert": self.expert, "context": self.context, "tensor": self.tensor}
        sizes = {name: size for name, size in found.items() if size != 1}
        return sizes or {"data": 1}

    @property
    def arguments(self) -> dict[str, Any]:
        """Of `autopar.Search`."""
        axes, pins = [axis for axis in self.axes if axis != "stage"], dict(self.pins)
        if isinstance(self.stages, str):
            pins = {"stages": self.stages, **pins}
        elif self.stages > 1:
            pins = {"stages": self.stages, "stage_axis": "stage", **pins}
        role = {"replica": "data", "data": ROLE[self.data], "expert": "expert", "context": "context"}
        role["node"] = ROLE[self.data]
        if "node" in axes:
            pins["secondary"] = "data"
        role["tensor"] = "sequence" if self.sequence else "tensor"
        roles = {axis: role[axis] for axis in axes}
        found: dict[str, Any] = {}
        if axes in (["data"], ["node", "data"]) and "stages" not in pins:
            found["recipe"] = self.data
        elif axes == ["replica", "data"] and "stages" not in pins and self.data == FSDP:
            found["recipe"] = "hsdp"
        elif roles:
            found["roles"] = roles
        quantized = {axis: dict(self.quantized) for axis in ("node", "data") if self.quantized and axis in axes}
        if quantized:
            found |= {"quantized": quantized, "inexact": ("quantized",)}
        return {**found, **({"pins": pins} if pins else {})}


@dataclass(frozen=True)
class Optimizer:
    """An optimizer of `torch.optim`.

    Attributes:
        name: of its class.
        arguments: besides the parameters.
        state: whose state `autopar.parallelize` counts.
        open: names of arguments that the file leaves to who runs it.
    """

    name: str
    arguments: Mapping[str, Any]
    state: str
    open: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setup:
    """A run in autopar's terms.

    Attributes:
        parallelism: how devices share the work.
        compute: the dtype to compute in, and `reduce`, in which gradients are added; None: the model's own.
        reduce: see there.
        optimizer: None: the file names none.
        clip: the largest norm of all gradients.
        compile: whether kernels are fused.
        rows: that a rank passes in one call; None: the file does not say.
        scaler: arguments of the GradScaler of a step in float16, or of one that may be in it; None: there is none.
        open: of `PRECISION` and `MAX_NORM`, what the file leaves to who runs it.
    """

    parallelism: Parallelism
    compute: str | None = None
    reduce: str | None = None
    optimizer: Optimizer | None = None
    clip: float | None = None
    compile: bool = False
    rows: int | None = None
    scaler: Mapping[str, Any] | None = None
    open: tuple[str, ...] = ()

    @property
    def search(self) -> Search:
        """How to search; raises ValueError where autopar has no such search."""
        from autopar.search.options import Search

        return Search(**self.parallelism.arguments)

    def to_dict(self) -> dict[str, Any]:
        """As plain data."""
        search = self.parallelism.arguments
        named: dict[str, Any] | None = None
        if self.optimizer is not None:
            left = dict.fromkeys(self.optimizer.open, "auto")
            named = {"name": self.optimizer.name, **self.optimizer.arguments, **left}
        return {
            "axes": self.parallelism.axes,
            "recipe": search.get("recipe"),
            "roles": search.get("roles", {}),
            "pins": search.get("pins", {}),
            "quantized": search.get("quantized", {}),
            "precision": self._computed(),
            "memory": None,
            "optimizer": named,
            "clip_grad_norm": "auto" if MAX_NORM in self.open else self.clip,
            "compile": self.compile,
            "rows": self.rows,
            "scaler": None if self.scaler is None else dict(self.scaler),
        }

    def _computed(self) -> dict[str, str] | str | None:
        if PRECISION in self.open:
            return "auto"
        return None if self.compute is None else {"compute": self.compute, "reduce": self.reduce or "fp32"}

    def script(self, source: str) -> str:
        """A Python module that distributes a model like this.

        Args:
            source: the name of the file, for its first line.
        """
        axes, search = self.parallelism.axes, self.parallelism.arguments
        fixed = 1
        for size in axes.values():
            fixed *= size or 1
        rest = "world" if fixed == 1 else f"world // {fixed}"
        sizes = ", ".join(f'"{name}": {rest if size is None else size}' for name, size in axes.items())
        words = ["autopar.mesh(axes)", "batch", "search=search", 'inputs="local"']
        if self.compute or PRECISION in self.open:
            words += [f"precision={self._precision()}"]
        words += [f'optimizer="{self.optimizer.state}"'] if self.optimizer else []
        words += ["compile=True"] if self.compile else []
        rows = "its own rows" if self.rows is None else f"{self.rows} rows of its own"
        name = re.sub(r"[^\w. -]", "_", source)
        lines = [f'"""Distributes a model as {name} does; written by autopar migrate."""', ""]
        lines += ["import os", ""] if None in axes.values() else []
        lines += ["import torch", ""] if self._names_torch else []
        lines += ["import autopar", ""]
        lines += ['world = int(os.environ.get("WORLD_SIZE", 1))'] if None in axes.values() else []
        lines += [f"axes = {{{sizes}}}", "search = autopar.Search("]
        lines += [*(f"    {_arguments({name: value})}," for name, value in search.items()), ")", "", ""]
        lines += [
            f"def distribute({', '.join(['model', 'batch', *self._given(PRECISION)])}):",
            '    """Each rank calls it; ``batch`` is an example of all ranks\' rows.',
            "",
        ]
        lines += [f"    Later a rank passes {rows}: part `data_rank` of `data_world_size`.", '    """']
        lines += [f"    return autopar.parallelize(model, {', '.join(words)})", "", ""]
        if self.optimizer is not None:
            left = self.optimizer.open
            given = [*(f"{name}={name}" for name in left), _arguments(self.optimizer.arguments)]
            lines += [f"def optimizer_of({', '.join(['model', *left])}):", '    """Made after `distribute`."""']
            inside = ", ".join(["model.parameters()", *filter(None, given)])
            lines += [f"    return torch.optim.{self.optimizer.name}({inside})", "", ""]
        return "\n".join([*lines, *self._update(), ""])

    def _update(self) -> list[str]:
        """What follows the backward pass."""
        largest = self._given(MAX_NORM) or ([repr(self.clip)] if self.clip else [])
        clip = [f"    torch.nn.utils.clip_grad_norm_(model.parameters(), {value})" for value in largest]
        left = ["scaler"] if self.scaler is not None and PRECISION in self.open else []
        head = f"def update({', '.join(['model', 'optimizer', *left, *self._given(MAX_NORM)])}):"
        zero = "    optimizer.zero_grad()"
        if self.scaler is None:
            return [head, '    """After the backward pass of a step."""', *clip, "    optimizer.step()", zero]
        made = [f"scaler = torch.amp.GradScaler({_arguments(self.scaler)})", "", ""]
        if left:
            given = ", ".join(filter(None, [_arguments(self.scaler), 'enabled=precision == "fp16"']))
            made = ["def scaler_of(precision):", '    """Losses in other precisions are not scaled by it."""',
                    f"    return torch.amp.GradScaler({given})", "", ""]  # fmt: skip
        return [
            *made, head, '    """After `scaler.scale(loss).backward()`."""',
            *(["    scaler.unscale_(optimizer)", *clip] if clip else []),
            "    scaler.step(optimizer)", "    scaler.update()", zero,
        ]  # fmt: skip

    @property
    def _names_torch(self) -> bool:
        own_sums = self.compute is not None and self.reduce not in (None, "fp32")
        return bool(self.optimizer or self.clip or MAX_NORM in self.open or own_sums or self.scaler is not None)

    def _given(self, name: str) -> list[str]:
        """The argument of this name of a printed function, if it has one."""
        return [name] if name in self.open else []

    def _precision(self) -> str:
        if PRECISION in self.open:
            return PRECISION
        if self.reduce in (None, "fp32"):
            return f'"{self.compute}"'
        dtypes = {"bf16": "torch.bfloat16", "fp16": "torch.float16"}
        return f"autopar.Precision(compute={dtypes[str(self.compute)]}, reduce={dtypes[str(self.reduce)]})"


def _arguments(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in values.items())


def on_devices(setup: Parallelism, devices: int | None, file: str) -> Parallelism:
    """With the open axis closed for this many devices.

    Raises:
        ValueError: they are not divided by the other axes.
    """
    fixed, left = 1, [name for name, size in setup.axes.items() if size is None]
    for size in setup.axes.values():
        fixed *= size or 1
    if devices is None:
        return setup
    if devices % fixed or (not left and devices != fixed):
        named = " x ".join(f"{name} {size}" for name, size in setup.axes.items() if size is not None)
        raise ValueError(f"{file} asks for {named} devices, and there are {devices}; give other --devices")
    if not left:
        return setup
    # Replicas are open only where the shards of each are given.
    count = devices // fixed
    return replace(setup, replicas=count) if left == ["replica"] else replace(setup, shards=count * setup.secondary)
