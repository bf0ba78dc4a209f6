"""Module outputs: the tensors that a module returns, found in the graph by its name.

A captured graph knows of each operator in which modules it ran. What is made in a module and read outside of it is an
output of the module. This is read off the graph as it was captured, and marked there: later passes join what is
computed twice, and views of views.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

import torch
from torch import fx

from autopar.ir.graph import Value, is_backward, module_calls, producer
from autopar.ir.layout import Placement, Split, TensorType
from autopar.ir.node_info import ModuleOutput, info, set_info
from autopar.ir.program import Program

_RESHAPE = torch.ops.aten.reshape.default


def mark_module_outputs(program: Program) -> None:
    """Mark the outputs of modules, in a graph as it was captured."""
    order = {node: i for i, node in enumerate(program.graph.graph.nodes)}
    for (module, call), values in _leaving(program).items():
        # In the order of the graph, so that numbers are the same in every process.
        for number, node in enumerate(sorted(values, key=order.__getitem__)):
            _mark(node, ModuleOutput(module, call, number))


def _mark(node: fx.Node, *outputs: ModuleOutput) -> None:
    """Add module outputs to those that a node makes."""
    set_info(node, replace(info(node), module_outputs=(*info(node).module_outputs, *outputs)))


def _leaving(program: Program) -> dict[tuple[str, str], set[fx.Node]]:
    """Of each call of a module, what forward operators outside read, or the caller of the model."""
    found: dict[tuple[str, str], set[fx.Node]] = defaultdict(set)
    for user, value in _read(program):
        inside = () if user is None else module_calls(user)
        for call in module_calls(value):
            if call not in inside:
                found[call].add(value)
    return found


def _read(program: Program) -> Iterator[tuple[fx.Node | None, fx.Node]]:
    """Values that forward operators read, with who does; None for the caller of the model."""
    for node in program.sources:
        if not is_backward(node):
            yield from ((node, value) for value in node.all_input_nodes)
    for output, value in zip(program.outputs, program.output_values, strict=True):
        # What the model returns is read by its caller, outside of all modules.
        if output.kind == "result" and value is not None:
            yield None, value


def pass_on(node: fx.Node, to: fx.Node) -> None:
    """Mark ``to`` with the module outputs of a node that it replaces."""
    known = info(to).module_outputs
    _mark(to, *(m for m in dict.fromkeys(info(node).module_outputs) if m not in known))


def mark_viewed(graph: fx.Graph) -> None:
    """Mark what a module makes and returns as a reshape of it: others may read it without that."""
    for node in graph.nodes:
        source = node.args[0] if node.target is _RESHAPE else None
        # Canonical views are reshapes of what is under them, so one step back is enough.
        if isinstance(source, fx.Node):
            calls, shape = module_calls(source), tuple(node.meta["val"].shape)
            own = [m._replace(shape=shape) for m in info(node).module_outputs if (m.module, m.call) in calls]
            if own:
                _mark(source, *own)


def module_outputs(program: Program) -> dict[str, list[tuple[Value, ModuleOutput]]]:
    """The values that are each output of a module, in all of its calls, by the module's name.

    Of several outputs each has its number after the name: ``layers.0.attn:1``.
    """
    key = ("module_outputs",)
    if key not in program.memo:
        found: dict[tuple[str, int], list[tuple[Value, ModuleOutput]]] = defaultdict(list)
        for node in program.graph.graph.nodes:
            value = producer(node)
            for mark in info(node).module_outputs if value[0] in program.sources and not is_backward(node) else ():
                found[mark.module, mark.number].append((value, mark))
        # A module of one output is named without a number.
        several = {module for module, number in found if number}
        program.memo[key] = {f"{m}:{i}" if m in several else m: found[m, i] for m, i in sorted(found)}
    named: dict[str, list[tuple[Value, ModuleOutput]]] = program.memo[key]
    return named


def find_module_outputs(program: Program, pattern: str) -> list[str]:
    """Names of the module outputs that a name or pattern is for: of modules within one another the outermost.

    Raises:
        ValueError: a module returns several tensors, and the pattern has no number.
    """
    wanted, _, number = pattern.partition(":")
    found = [name for name in module_outputs(program) if fnmatchcase(name.partition(":")[0], wanted)]
    modules = {name.partition(":")[0] for name in found}
    # ``layers.*`` also matches the modules inside of each layer.
    outer = [name for name in found if modules.isdisjoint(_around(name))]
    several = [name for name in outer if ":" in name]
    if several and not number:
        module = several[0].partition(":")[0]
        names = ", ".join(n for n in several if n.partition(":")[0] == module)
        raise ValueError(f"module {module} returns several tensors; name one: {names}")
    return [name for name in outer if number in ("", name.partition(":")[2] or "0")]


def _around(name: str) -> list[str]:
    """The modules that a module is in."""
    parts = name.partition(":")[0].split(".")
    return [".".join(parts[:i]) for i in range(1, len(parts))]


def placement_in(placement: Placement | None, type_: TensorType, mark: ModuleOutput, ways: int = 1) -> Placement | None:
    """A placement of a module output as one of the value that stands for it.

    Args:
        placement: in terms of the shape in which the module returns it.
        type_: of the value.
        mark: of the module output.
        ways: into how many microbatches the batch has been split.

    Raises:
        ValueError: the one is no placement of the other.
    """
    if mark.shape is None or not isinstance(placement, Split):
        return placement
    positions = _positions(mark.shape, type_, ways)
    if placement.dim >= len(positions) or placement.factor >= len(positions[placement.dim]):
        raise ValueError(f"{placement} is no placement of the shape {list(mark.shape)}")
    return positions[placement.dim][placement.factor]


def _positions(shape: Sequence[int], type_: TensorType, ways: int) -> list[list[Split]]:
    """For each dim of a shape its factors, as positions in a type with the same elements."""
    # The shape is that of the whole batch; in a microbatch, one of its dims is smaller.
    options = [shape] + [[n // ways if d == i else n for i, n in enumerate(shape)] for d in range(len(shape))]
    for option in options:
        factors = [(Split(d, j), factor.size) for d, dim in enumerate(type_.dims) for j, factor in enumerate(dim)]
        found: list[list[Split]] = []
        for size in option:
            found.append([])
            # Factors are in the order of the elements in both shapes: each dim takes the next ones, up to its size.
            while size > 1 and factors and size % factors[0][1] == 0:
                position, n = factors.pop(0)
                found[-1].append(position)
                size //= n
            if size > 1:
                break
        else:
            if not factors:
                return found
    raise ValueError(f"the shape {list(shape)} does not fit {type_}")
