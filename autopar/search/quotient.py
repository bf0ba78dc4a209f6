"""The quotient graph: nodes of repeated modules share one variable, so the search does not grow with depth.

Two nodes are tied when they are the same operator call, by number, in the same module, indices of repeated blocks
removed. Nodes without a module (sums of gradients, constants) are tied when their arguments are.
"""

from __future__ import annotations

import hashlib
import re
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache

from torch import fx

from autopar.dims import Dims, Operator
from autopar.layout import TensorType
from autopar.program import Call, Program, Value, is_backward, module_path


@dataclass(frozen=True)
class Quotient:
    """A partition of a program's nodes.

    Attributes:
        key: the class of every placeholder and operator node; readable and the same in every process.
        members: nodes of each class, in program order; classes in order of their first node.
    """

    key: dict[fx.Node, str]
    members: dict[str, tuple[fx.Node, ...]]


def quotient(program: Program, dims: Dims, *, tie: bool = True) -> Quotient:
    """Tie the nodes of repeated modules; with ``tie=False`` every node is a class of its own."""
    blocks = block_prefixes(program)
    key: dict[fx.Node, str] = {}
    count: dict[tuple[str, str], int] = defaultdict(int)
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            spec = inputs[node]
            name = without_indices(spec.name, blocks) if spec.kind in ("parameter", "buffer") else spec.name
            key[node] = f"{spec.kind} {name} {_signature(dims.types[node, 0])}"
        elif node.op == "get_attr":
            key[node] = f"constant {_signature(dims.types[node, 0])}" if (node, 0) in dims.types else "constant"
        elif node in program.calls:
            key[node] = _operator_key(node, program, dims, blocks, key, count)
    if not tie:
        key = {n: f"{k} @{n.name}" for n, k in key.items()}
    members: dict[str, list[fx.Node]] = defaultdict(list)
    for node, k in key.items():
        members[k].append(node)
    return Quotient(key, {k: tuple(v) for k, v in members.items()})


def _operator_key(
    node: fx.Node, program: Program, dims: Dims, blocks: frozenset[str], key: dict[fx.Node, str],
    count: dict[tuple[str, str], int],
) -> str:  # fmt: skip
    path = module_path(node)
    name, detail = _detail(dims.operators[node], program.calls[node])
    phase = "backward" if is_backward(node) else "forward"
    if path:
        call = f"{phase} {name} {detail}"
        number = count[path, call]
        count[path, call] += 1
        return f"{without_indices(path, blocks)}: {call} #{number}"
    sources = "|".join(_shallow(source, key) for source in program.sources[node])
    return f": {phase} {name} {_short(detail + sources)}"


def _shallow(value: Value, key: dict[fx.Node, str]) -> str:
    """A node as an argument: its class if it has a module, else its operator only, or sums would count their depth."""
    node, output = value
    if node.op == "call_function" and not module_path(node):
        return f"{node.target}{output}"
    return f"{key[node]}{output}"


@lru_cache(maxsize=4096)
def _detail(operator: Operator, call: Call) -> tuple[str, str]:
    """An operator's name, and a hash of all that it is called with."""
    types = [_signature(t) for t in (*operator.inputs, *operator.outputs) if t is not None]
    bound = "".join(c if c in operator.letters else "" for c in operator.rule.letters)
    detail = _short("|".join([operator.rule.equation, bound, call.arguments, *types]))
    return str(call.target).removeprefix("aten.").removesuffix(".default"), detail


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _signature(type_: TensorType) -> str:
    """A type without names: they may differ between layers."""
    return f"{type_.dtype}{type_.reduce}{[[f.size for f in dim] for dim in type_.dims]}".replace(" ", "")


def block_prefixes(program: Program) -> frozenset[str]:
    """Prefixes ``layers.3`` of numbered modules that contain modules: these repeat; numbered leaves need not."""
    found: set[str] = set()
    for name in (i.name for i in program.inputs if i.kind == "parameter"):
        parts = name.split(".")
        found.update(".".join(parts[: i + 1]) for i, p in enumerate(parts[:-2]) if p.isdigit())
    return frozenset(found)


@lru_cache(maxsize=4096)
def without_indices(path: str, blocks: frozenset[str]) -> str:
    """``layers.3.mlp`` as ``layers.*.mlp`` if ``layers.3`` is a repeated block."""
    parts = re.sub(r"@\d+", "", path).split(".")
    return ".".join("*" if ".".join(parts[: i + 1]) in blocks else p for i, p in enumerate(parts))
