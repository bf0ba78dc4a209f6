"""`Recipe`: what a TOML file says of a training run. A field that is wrong is an error that names it."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from autopar.costs.arguments import MOST_DEVICES
from autopar.costs.memory import parse_bytes
from autopar.costs.read_file import MIB, read_text

Count = Annotated[int, msgspec.Meta(ge=1)]
Whole = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Fraction = Annotated[float, msgspec.Meta(ge=0, lt=1)]
Function = Annotated[str, msgspec.Meta(pattern=r"^[^:].*:[A-Za-z_]\w*$")]
"""``FILE.py:FUNCTION`` or ``package.module:FUNCTION``."""

Size = Annotated[int, msgspec.Meta(ge=1, lt=MOST_DEVICES)]

T = TypeVar("T")


class _Table(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A table of the file."""


class Model(_Table, frozen=True):
    """What is trained: one of ``build`` and ``pretrained``.

    Attributes:
        build: a function that returns the module.
        arguments: of the function.
        pretrained: what ``AutoModelForCausalLM.from_pretrained`` of transformers takes: a name or a folder.
        loss: a function of the output and the batch; for a model that does not return its loss.
        precision: dtype to compute in, such as ``bf16``.
    """

    build: Function | None = None
    arguments: dict[str, Any] = {}
    pretrained: str | None = None
    loss: Function | None = None
    precision: str | None = None


class Data(_Table, frozen=True):
    """What it is trained on: one of ``build`` and ``text``.

    Attributes:
        build: a function that returns an iterable of batches, each of them the whole batch: a dict of tensors.
        arguments: of the function.
        text: a file, whose tokens are the batches: ``input_ids`` and ``labels``.
        tokenizer: of the text, by the name that transformers' ``AutoTokenizer`` takes; None: its bytes are tokens.
        rows: of a batch of text.
        length: tokens of a row of text.
    """

    build: Function | None = None
    arguments: dict[str, Any] = {}
    text: str | None = None
    tokenizer: str | None = None
    rows: Count = 8
    length: Count = 1024


class Optimizer(_Table, frozen=True):
    """Steps.

    Attributes:
        name: of the optimizer.
        lr: learning rate.
        weight_decay: see torch.
        betas: of adam and adamw.
        momentum: of sgd.
        clip: largest norm of all gradients; None: they are not clipped.
    """

    name: Literal["adamw", "adam", "sgd"] = "adamw"
    lr: Positive = 1e-3
    weight_decay: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    betas: tuple[Fraction, Fraction] = (0.9, 0.999)
    momentum: Fraction = 0.0
    clip: Positive | None = None


class Schedule(_Table, frozen=True):
    """Of the learning rate.

    Attributes:
        name: its shape after the warmup.
        warmup: steps of linear growth.
        least: fraction of the learning rate at the last step.
    """

    name: Literal["constant", "linear", "cosine"] = "constant"
    warmup: Whole = 0
    least: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class Checkpoint(_Table, frozen=True):
    """Where the run is saved, and goes on.

    Attributes:
        folder: of `autopar.checkpoint.save`; it is resumed from where there is one.
        every: steps from one to the next; one is saved after the last step, too.
        keep: how many stay.
        export: a folder for safetensors of the trained model, see `autopar.checkpoint.export_safetensors`.
    """

    folder: str
    every: Count = 100
    keep: Count = 2
    export: str | None = None


class Mesh(_Table, frozen=True):
    """How it is distributed.

    Attributes:
        axes: size of each axis by its name, outermost first; default: by nodes and devices.
        roles: what each axis is for, see `autopar.Search`.
        recipe: layouts by the name of a parallelism, see `autopar.Search`.
        pins: what is decided by hand, see `autopar.Search`.
        inexact: choices that change the numbers, see `autopar.Search`: ``fp8`` with such a precision.
        memory: of a device, such as ``70GiB``.
        cluster: a preset, or a TOML file.
        device: ``cuda`` or ``cpu``.
        compile: local graphs are compiled by inductor.
    """

    axes: dict[str, Size] = {}
    roles: dict[str, str] = {}
    recipe: str | None = None
    pins: dict[str, Any] = {}
    inexact: tuple[str, ...] = ()
    memory: str | None = None
    cluster: str | None = None
    device: Literal["cuda", "cpu"] | None = None
    compile: bool = False


class Metrics(_Table, frozen=True):
    """What is said of the steps.

    Attributes:
        every: steps from one line to the next.
        file: where lines of JSON are added; None: they are only printed.
    """

    every: Count = 10
    file: str | None = None


class Recipe(_Table, frozen=True):
    """A training run.

    Attributes:
        steps: of the optimizer, in all.
        seed: of torch's random numbers, and of the order of rows of a text.
        model: see there; so are the others.
    """

    steps: Count
    model: Model
    data: Data
    seed: Whole = 0
    optimizer: Optimizer = Optimizer()
    schedule: Schedule = Schedule()
    checkpoint: Checkpoint | None = None
    mesh: Mesh = Mesh()
    metrics: Metrics = Metrics()


def read_recipe(path: str | Path) -> Recipe:
    """A recipe from its file.

    Raises:
        ValueError: the file is none; names the field that is wrong, and what is expected.
        OSError: it cannot be read.
    """
    try:
        found = msgspec.convert(tomllib.loads(read_text(path, MIB)), Recipe)
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"{path} is no TOML: {e}") from e
    except msgspec.ValidationError as e:
        text, _, place = str(e).partition(" - at ")
        field = place.strip("`").removeprefix("$").removeprefix(".")
        raise ValueError(f"{path}: {f'{field}: ' if field else ''}{text[:1].lower()}{text[1:]}") from e
    _require_one(path, "model", {"build": found.model.build, "pretrained": found.model.pretrained})
    _require_one(path, "data", {"build": found.data.build, "text": found.data.text})
    if found.model.arguments and found.model.build is None:
        raise ValueError(f"{path}: model.arguments: they are of the function model.build, which is not given")
    if found.data.arguments and found.data.build is None:
        raise ValueError(f"{path}: data.arguments: they are of the function data.build, which is not given")
    if found.schedule.warmup >= found.steps:
        raise ValueError(f"{path}: schedule.warmup: {found.schedule.warmup} is not less than steps, {found.steps}")
    if found.optimizer.momentum and found.optimizer.name != "sgd":
        raise ValueError(f"{path}: optimizer.momentum: it is of sgd; {found.optimizer.name} has betas")
    if found.mesh.memory is not None:
        try:
            parse_bytes(found.mesh.memory)
        except ValueError as e:
            raise ValueError(f"{path}: mesh.memory: {e}") from e
    return found


def _require_one(path: str | Path, table: str, given: dict[str, str | None]) -> None:
    if sum(v is not None for v in given.values()) != 1:
        raise ValueError(f"{path}: {table}: give one of {' and '.join(f'{table}.{n}' for n in given)}")
