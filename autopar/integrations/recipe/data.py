"""Batches of a recipe: of a text's tokens, or the user's; and functions by their names."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from autopar.costs.read_file import read_text
from autopar.integrations.recipe.schema import Data

MOST_TEXT = 2**30
"""Bytes of a text, which each process reads."""


def function(name: str, field: str) -> Callable[..., Any]:
    """A function by its name, ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``.

    Raises:
        ValueError: there is none; names the field of the recipe.
    """
    place, _, attribute = name.rpartition(":")
    try:
        module = _of_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except (ImportError, OSError) as e:
        raise ValueError(f"{field}: cannot import {place!r}: {type(e).__name__}: {e}") from e
    found = getattr(module, attribute, None)
    if not callable(found):
        raise ValueError(f"{field}: {place} has no function {attribute!r}")
    return found  # type: ignore[no-any-return]


def called(table: str, name: str, arguments: Mapping[str, Any]) -> Callable[[], Any]:
    """The call of a function of the recipe, ``build`` of a table with its ``arguments``.

    Raises:
        ValueError: there is no such function, or it does not take the arguments.
    """
    found = function(name, f"{table}.build")
    try:
        inspect.signature(found).bind(**arguments)
    except TypeError as e:
        raise ValueError(f"{table}.arguments: {name}: {e}") from e
    return functools.partial(found, **arguments)


def _of_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise ImportError("it is no Python file")
    # As when Python runs the file: modules beside it can be imported.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)
    spec.loader.exec_module(module)
    return module


def batches(data: Data, seed: int, first: int) -> Iterator[dict[str, Any]]:
    """Batches from that of step ``first`` on, for ever: after the last of them comes the first again.

    Raises:
        ValueError: there is none, or the text is too short; names the field of the recipe.
    """
    if data.build is not None:
        return itertools.islice(_again_and_again(called("data", data.build, data.arguments)), first, None)
    return _of_text(data, seed, first)


def _again_and_again(make: Callable[[], Iterable[Any]]) -> Iterator[Any]:
    while True:
        empty = True
        for batch in make():
            empty = False
            yield batch
        if empty:
            raise ValueError("data.build: the function returned no batch")


def _of_text(data: Data, seed: int, first: int) -> Iterator[dict[str, Any]]:
    assert data.text is not None
    text = read_text(data.text, MOST_TEXT)
    if data.tokenizer is None:
        tokens = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8).long()
    else:
        from transformers import AutoTokenizer

        load: Any = AutoTokenizer.from_pretrained
        tokens = torch.tensor(load(data.tokenizer)(text)["input_ids"])
    rows = len(tokens) // data.length
    each = rows // data.rows
    if each == 0:
        raise ValueError(
            f"data.text: {data.text} has {len(tokens)} tokens, which are fewer than {data.rows} rows (data.rows) of "
            f"{data.length} (data.length)"
        )
    table = tokens[: rows * data.length].view(rows, data.length)
    for step in itertools.count(first):
        # Another order in each round, which needs no state: a run goes on at any step.
        generator = torch.Generator().manual_seed(seed * 1_000_003 + step // each)
        order = torch.randperm(rows, generator=generator)
        place = step % each * data.rows
        ids = table[order[place : place + data.rows]]
        yield {"input_ids": ids, "labels": ids}
