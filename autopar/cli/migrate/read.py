"""`read`: a configuration file as a tree of tables, or an error that names the file; bounded in size and depth."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

MOST_BYTES, MOST_DEPTH = 2**20, 16
"""Of a file, and of tables within tables; the largest examples of these tools have 20 KiB and 4."""

Tree = dict[str, Any]

DEEPSPEED, ACCELERATE, TORCHTITAN = "DeepSpeed", "accelerate", "torchtitan"

FORMATS = {".json": DEEPSPEED, ".yaml": ACCELERATE, ".yml": ACCELERATE, ".toml": TORCHTITAN}
"""Whose configuration a file is, by the end of its name."""

OF_ACCELERATE = ("compute_environment", "distributed_type", "fsdp_config")
"""Keys by which a JSON file is accelerate's, which writes either."""


def read(path: Path) -> tuple[str, Tree]:
    """Whose configuration a file is, and what it says.

    Raises:
        ValueError: the file is of no known kind, too large or deep, or no table of JSON, YAML or TOML.
        OSError: it cannot be read.
    """
    kind = FORMATS.get(path.suffix.lower())
    if kind is None:
        raise ValueError(
            f"{path}: autopar migrate reads DeepSpeed's .json, accelerate's .yaml and torchtitan's .toml, and tells "
            "them by the end of their names; rename the file"
        )
    with path.open("rb") as file:
        raw = file.read(MOST_BYTES + 1)
    if len(raw) > MOST_BYTES:
        raise ValueError(f"{path} has more than {MOST_BYTES} bytes; give the configuration alone")
    try:
        tree = _PARSERS[kind if path.suffix.lower() != ".json" else DEEPSPEED](raw.decode("utf-8"))
    # A parser's own recursion ends it before the check of the depth below.
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read: {_first(error)}; correct the file there") from error
    _check(path, tree)
    if path.suffix.lower() == ".json" and any(key in tree for key in OF_ACCELERATE):
        kind = ACCELERATE
    return kind, tree


def _check(path: Path, tree: Any, inside: tuple[str, ...] = ()) -> None:
    if not inside and not isinstance(tree, dict):
        raise ValueError(f"{path} is {_article(tree)}; write a table of keys and values")
    for key, value in tree.items():
        if not isinstance(key, str):
            raise ValueError(f"{path}: key {key!r} in {'.'.join(inside) or 'the file'} is no text; quote it")
        if len(inside) >= MOST_DEPTH:
            raise ValueError(f"{path}: {'.'.join(inside)} is {MOST_DEPTH} tables deep; no such configuration is")
        if isinstance(value, dict):
            _check(path, value, (*inside, key[:40]))


def _json(text: str) -> Any:
    return json.loads(text, object_pairs_hook=_once)


def _once(pairs: Sequence[tuple[str, Any]]) -> Tree:
    """A table, unless a key is there twice, of which a parser would drop one."""
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"key {next(k for k in keys if keys.count(k) > 1)!r} is there twice: keep one")
    return table


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise ValueError("YAML takes PyYAML, which accelerate installs (pip install pyyaml)") from error
    try:
        # Events come before anything is built: an alias may stand for a text of any size, many times over.
        depth = 0
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            if isinstance(event, yaml.AliasEvent):
                raise ValueError(f"line {event.start_mark.line + 1} has an alias (*{event.anchor}): write it out")
            depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
            if depth > 2 * MOST_DEPTH:
                raise ValueError(f"line {event.start_mark.line + 1} is too deep")
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        _require_single_keys(node)
        return {} if node is None else loader.construct_document(node)
    # KeyError: how PyYAML refuses the likes of `?0:` as a number; TypeError: a table as a key.
    except (yaml.YAMLError, KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{_first(error)}") from error


def _require_single_keys(node: Any) -> None:
    """Refuse a key that is there twice, of which PyYAML keeps the last."""
    if getattr(node, "id", "") == "mapping":
        _once([(str(key.value), None) for key, _ in node.value])
        for _, value in node.value:
            _require_single_keys(value)


_PARSERS: dict[str, Callable[[str], Any]] = {DEEPSPEED: _json, ACCELERATE: _yaml, TORCHTITAN: tomllib.loads}


def _first(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


def _article(tree: Any) -> str:
    return {list: "a list", str: "a text", type(None): "empty"}.get(type(tree), f"a {type(tree).__name__}")
