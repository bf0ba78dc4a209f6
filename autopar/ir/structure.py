"""The structure of a program: texts that nodes of repeated layers share, and the comparison of two graphs."""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.ir.graph import Value, is_backward, map_nodes, module_path, producer, values_of, without_indices

if TYPE_CHECKING:  # a program has its structure as an attribute
    from autopar.ir.program import Call, Program


def structure_of(program: Program) -> Counter[str]:
    """How often each input, operator call (with the calls that its arguments come from) and output occurs.

    Numbers of repeated blocks are left out, and so are names of nodes.
    """
    key = tied_keys(program, _call_text, lambda n: short_hash(repr(output_types(n))))
    found = Counter(k for n, k in key.items() if n not in program.sources)
    found.update(f"{key[n]} of {[(key[m], i) for m, i in values]}" for n, values in program.sources.items())
    for output, value in zip(program.outputs, program.output_values, strict=True):
        made = (key[producer(value)[0]], producer(value)[1]) if value is not None else None
        found[f"{output.kind} {without_indices(output.name, program.blocks)} of {made}"] += 1
    return found


def tied_keys(
    program: Program, describe: Callable[[Program, fx.Node], tuple[str, str]], describe_tensor: Callable[[fx.Node], str]
) -> dict[fx.Node, str]:
    """A text for every placeholder, constant and operator node; the same for nodes of repeated modules that are alike.

    Those are the same operator call, by number, in the same module, indices of repeated blocks removed, of which the
    model's checkpointing asks the same. Nodes without a module (sums of gradients, constants) are alike when their
    arguments are.

    Args:
        program: the program.
        describe: an operator's name, and whatever else makes calls differ.
        describe_tensor: what makes placeholders and constants differ besides their names.
    """
    key: dict[fx.Node, str] = {}
    count: dict[tuple[str, str], int] = defaultdict(int)
    inputs = dict(zip(program.placeholders, program.inputs, strict=True))
    for node in program.graph.graph.nodes:
        if node.op == "placeholder":
            spec = inputs[node]
            named = spec.kind in ("parameter", "buffer")
            name = without_indices(spec.name, program.blocks) if named else spec.name
            key[node] = f"{spec.kind} {name} {describe_tensor(node)}"
        elif node.op == "get_attr":
            key[node] = f"constant {describe_tensor(node)}".rstrip()
        elif node in program.sources:
            key[node] = _operator_key(program, node, describe(program, node), key, count)
    return key


def _operator_key(
    program: Program,
    node: fx.Node,
    described: tuple[str, str],
    key: Mapping[fx.Node, str],
    count: dict[tuple[str, str], int],
) -> str:
    """The key of an operator; ``count``: of the calls of each module that are alike, which is advanced."""
    path = module_path(node)
    name, detail = described
    detail = f"{detail} {program.pins[node]}" if node in program.pins else detail
    phase = "backward" if is_backward(node) else "forward"
    if path:
        call = f"{phase} {name} {detail}"
        # Numbered within the module with its index, so that a layer's first product is tied to another's first.
        number = count[path, call]
        count[path, call] += 1
        return f"{without_indices(path, program.blocks)}: {call} #{number}"
    arguments = "|".join(_shallow(source, key) for source in program.sources[node])
    return f": {phase} {name} {short_hash(detail + arguments)}"


def _shallow(value: Value, key: Mapping[fx.Node, str]) -> str:
    """A node as an argument: its key, or only its operator if it has no module."""
    node, output = value
    # By its operator only: the key of a sum that held those of its arguments would tell chains apart by their length.
    if node.op == "call_function" and not module_path(node):
        return f"{node.target}{output}"
    return f"{key[node]}{output}"


def _call_text(program: Program, node: fx.Node) -> tuple[str, str]:
    return str(node.target), _call_hash(program.calls[node])


@lru_cache(maxsize=4096)
def _call_hash(call: Call) -> str:
    # Without dtypes of what operators make: those follow from the program's inputs and from casts, which are arguments,
    # but for means that a GPU keeps in float32. A plan of a CPU is for a GPU, too.
    inputs, outputs = [shape for shape, _ in call.inputs], [None if v is None else v[0] for v in call.outputs]
    return short_hash(f"{call.arguments} {inputs} {outputs}")


def short_hash(text: str) -> str:
    """Eight hexadecimal digits of a text."""
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def same_graph(a: Program, b: Program) -> bool:
    """Whether two programs compute the same, node by node, constants included; their `State` aside."""
    if (a.inputs, a.outputs, a.loss, repr(a.skeleton)) != (b.inputs, b.outputs, b.loss, repr(b.skeleton)):
        return False
    # Nodes by position: their names may differ from one trace to the next.
    number: dict[fx.Node, int] = {}
    mine, other = list(a.graph.graph.nodes), list(b.graph.graph.nodes)
    for i, nodes in enumerate(zip(mine, other, strict=False)):
        number.update(dict.fromkeys(nodes, i))
    return len(mine) == len(other) and all(
        _node_text(n, number) == _node_text(m, number) and _same_constant(a, n, b, m)
        for n, m in zip(mine, other, strict=True)
    )


def _node_text(node: fx.Node, number: Mapping[fx.Node, int]) -> str:
    arguments = map_nodes((node.args, node.kwargs), lambda n: f"%{number[n]}")
    return f"{node.op} {node.target if node.op == 'call_function' else ''} {arguments!r} {output_types(node)!r}"


def _same_constant(a: Program, node: fx.Node, b: Program, other: fx.Node) -> bool:
    # Constants differ by value, which no text of the graph has.
    if node.op != "get_attr":
        return True
    # The same tensor, most of the time: comparing elements is the exception.
    mine, its = getattr(a.graph, str(node.target)), getattr(b.graph, str(other.target))
    return mine is its or (mine.dtype == its.dtype and torch.equal(mine, its))


def output_types(node: fx.Node) -> tuple[Any, ...]:
    """Shape and dtype of each output of a node; None for one that does not exist."""
    return tuple(None if v is None else (tuple(map(int, v.shape)), v.dtype) for v in values_of(node))
