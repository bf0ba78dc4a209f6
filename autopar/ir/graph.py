"""Where a node comes from: module, pass of the step, the user's line; and which modules repeat."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import replace
from functools import lru_cache

from torch import fx

from autopar.ir.node_info import info, set_info


def module_path(node: fx.Node) -> str:
    """Qualified name of the innermost module that the node (or the forward node it differentiates) comes from."""
    found = info(node).module_path
    if found is None:
        stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
        path = str(next(reversed(stack.values()))[0]) if stack else ""
        found = re.sub(r"^(L\['self'\]\.)?model\.?", "", path, count=1)
        set_info(node, replace(info(node), module_path=found))
    return found


def block_of(path: str, blocks: Collection[str]) -> str | None:
    """The block that a module is in, or is; None if it is in none.

    >>> block_of("layers.3.mlp", {"layers.3"})
    'layers.3'
    """
    parts = path.split(".")
    return next((".".join(parts[: i + 1]) for i in range(len(parts)) if ".".join(parts[: i + 1]) in blocks), None)


def module_calls(node: fx.Node) -> tuple[tuple[str, str], ...]:
    """Every module that the node comes from, the outermost first: its qualified name, and what its calls differ in."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack") or {}
    named = ((str(entry[0]), str(call)) for call, entry in stack.items())
    return tuple((name.removeprefix("model."), call) for name, call in named if name.startswith("model."))


def is_backward(node: fx.Node) -> bool:
    """Whether the node belongs to the backward pass."""
    return node.meta.get("partitioner_tag") == "is_backward"


def inherit_origin(node: fx.Node, source: fx.Node) -> None:
    """A node that a pass makes comes from where ``source`` does: module, pass of the step, region, the user's line."""
    for key in ("nn_module_stack", "fwd_nn_module_stack", "partitioner_tag", "seq_nr", "stack_trace"):
        if key in source.meta:
            node.meta[key] = source.meta[key]
    set_info(node, info(node).inherit(info(source)))


def user_line(node: fx.Node) -> str:
    """``file.py:12`` of the user's code that the node comes from, or the module's name."""
    trace = node.meta.get("stack_trace") or ""
    lines = re.findall(r'File "([^"]+)", line (\d+)', trace)
    if lines:
        return f"{lines[-1][0]}:{lines[-1][1]}"
    return f"module {module_path(node)!r}" if module_path(node) else "no source line"


def block_prefixes(parameters: Iterable[str]) -> frozenset[str]:
    """Prefixes ``layers.3`` of numbered modules that contain modules: these repeat; numbered leaves need not.

    Args:
        parameters: names of all parameters.
    """
    found: set[str] = set()
    for name in parameters:
        parts = name.split(".")
        found.update(".".join(parts[: i + 1]) for i, p in enumerate(parts[:-2]) if p.isdigit())
    return frozenset(found)


@lru_cache(maxsize=4096)
def without_indices(path: str, blocks: frozenset[str]) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp`` if ``layers.3`` is a repeated block."""
    parts = re.sub(r"@\d+", "", path).split(".")
    return ".".join("*" if ".".join(parts[: i + 1]) in blocks else p for i, p in enumerate(parts))
