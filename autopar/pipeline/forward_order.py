"""Position of every node along the forward pass: the order in which a pipeline is cut into stages.

Forward nodes have the order of the graph; what is computed from parameters alone, such as their casts, comes first in
the graph, and has the position of its first use. A node of the backward pass has the position of the forward node that
it differentiates; a sum that autograd makes has the earliest position of its terms.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import fx

from autopar.errors import PlanError
from autopar.ir.graph import computed_from, dependent_on, module_path
from autopar.ir.program import Program, is_hoisted


def forward_nodes(program: Program) -> set[fx.Node]:
    """Forward outputs and forward-tagged nodes, and all that these are computed from."""
    # What depends on a tangent is of the backward pass, whatever its tag says.
    backward = dependent_on(program.graph.graph, program.inputs_of("tangent"))
    nodes = [n for n in program.graph.graph.nodes if n.op != "output"]
    # Graphs without gradients are not tagged: an unused draw of random numbers must stay before the next one.
    early = (lambda n: n.meta.get("partitioner_tag") == "is_forward") if program.training else (lambda n: True)
    tagged = [n for n in nodes if n not in backward and early(n)]
    return computed_from([*tagged, *(v for v in program.output_values[: program.forward_outputs] if v is not None)])


def positions(program: Program, forward: set[fx.Node]) -> dict[fx.Node, int]:
    """Position of every operator along the forward pass."""
    calls = [n for n in program.graph.graph.nodes if n.op == "call_function"]
    found = {n: i for i, n in enumerate(_in_order(program, forward))}
    last = len(found) - 1
    by_number: dict[tuple[str, int | None], int] = {}
    by_path: dict[str, int] = {}
    for node, i in found.items():
        if "seq_nr" in node.meta:
            by_number.setdefault((module_path(node), node.meta["seq_nr"]), i)
        by_path[module_path(node)] = i
    # Backwards, so that users have their position first.
    for node in reversed(calls):
        if node in forward and node not in found:
            found[node] = min((found[u] for u in node.users if u in found), default=last)
    backward = [n for n in calls if n not in forward]
    for node in backward:
        path = module_path(node)
        # torch gives an operator and its derivative the same seq_nr, within a module.
        terms = [found[a] for a in node.all_input_nodes if a in found and a not in forward]
        if _has_stack(node):
            found[node] = by_number.get((path, node.meta.get("seq_nr")), by_path.get(path, last))
        elif terms:
            # A sum of gradients has no module: it is complete in the stage that comes last in the backward pass.
            found[node] = min(terms)
    for node in reversed(backward):
        # What is computed from tangents alone, such as the gradient of a mean, goes where it is used first.
        if node not in found:
            found[node] = max((found[u] for u in node.users if u in found), default=last)
    return found


def _has_stack(node: fx.Node) -> bool:
    return bool(node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack"))


def starts(program: Program, forward: set[fx.Node]) -> dict[str, int]:
    """Position of the first operator of every module, by path; the model itself is ``""``."""
    found: dict[str, int] = {}
    for position, path in _paths(program, forward):
        found.setdefault(path, position)
    return found


def ends(program: Program, forward: set[fx.Node]) -> dict[str, int]:
    """The position after the last operator of every module, by path."""
    return {path: position + 1 for position, path in _paths(program, forward)}


def _paths(program: Program, forward: set[fx.Node]) -> Iterator[tuple[int, str]]:
    """Position of every forward operator and each module that it is in, the outermost first."""
    for position, node in enumerate(_in_order(program, forward)):
        parts = module_path(node).split(".") if module_path(node) else []
        for length in range(len(parts) + 1):
            yield position, ".".join(parts[:length])


def _in_order(program: Program, forward: set[fx.Node]) -> Iterator[fx.Node]:
    """The forward operators that have a position of their own: not those of parameters and buffers alone."""
    invariant = program.inputs_of("parameter", "buffer")
    for node in program.graph.graph.nodes:
        if node.op != "call_function" or node not in forward:
            continue
        # A node without inputs, such as arange, has the position at which the model creates it.
        if is_hoisted(node) or (node.all_input_nodes and invariant.issuperset(node.all_input_nodes)):
            invariant.add(node)
        else:
            yield node


def cuts_at(program: Program, forward: set[fx.Node], modules: Sequence[str]) -> list[int]:
    """Positions at which the stages after the first begin.

    Args:
        program: the program.
        forward: its forward nodes.
        modules: the first module of each of these stages.

    Raises:
        PlanError: a module does not exist or computes nothing, or the modules are not in the order of the forward
            pass.
    """
    first = starts(program, forward)
    unknown = [m for m in modules if m not in first]
    if unknown:
        raise PlanError(
            f"a stage of the plan begins at {unknown[0]!r}, which is no module of the model that computes anything; "
            "plan again"
        )
    cuts = [first[m] for m in modules]
    if sorted({0, *cuts}) != [0, *cuts]:
        raise PlanError(
            f"stages of the plan begin at {', '.join(modules)}, which is not the order in which the model computes "
            "them; plan again"
        )
    return cuts
