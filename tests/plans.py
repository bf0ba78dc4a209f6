"""Plans written by hand, and programs as text: what the tests of passes compare."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

import autopar.strategies  # noqa: F401  registers every rule
from autopar.cluster import Cluster
from autopar.collective import Collective
from autopar.compiler import program_of
from autopar.dims import Dims, analyze
from autopar.layout import Layout, describe, parse_placement, replicated
from autopar.plan import Certificate, Plan
from autopar.program import Program, fingerprint, is_operator
from autopar.search.quotient import quotient

NOTHING = Certificate(0.0, 0.0, "written by hand", "none")


def layout(text: str) -> Layout:
    """``"R S(0.0)"``: one placement an axis."""
    return tuple(parse_placement(t) for t in text.split())


def hand_plan(
    program: Program,
    axes: Mapping[str, int],
    choices: Mapping[str, str] | None = None,
    relays: Mapping[str, str] | None = None,
    **boundary: Mapping[str, str],
) -> Plan:
    """A plan in which everything is replicated but what is named.

    Args:
        program: canonical program.
        axes: name and size of each mesh axis.
        choices: name of a node to its strategies, ``"m.0 R"``.
        relays: name of a node to the layout its users get it in.
        boundary: ``parameters``, ``batch``, ``results``: name to layout.
    """
    whole = replicated(len(axes))
    classes = quotient(program, analyze(program))
    names = {n: f"{k} @{n.name}" for n, k in classes.key.items() if is_operator(n)}
    said = dict(choices or {})
    unknown = set(said) - {n.name for n in names}
    assert not unknown, f"no node {unknown}; there are {[n.name for n in names]}"
    kinds = {"parameters": "parameter", "batch": "batch", "results": "result"}
    layouts = {}
    for table, kind in kinds.items():
        every = [i.name for i in program.inputs if i.kind == kind] + [o.name for o in program.outputs if o.kind == kind]
        layouts[table] = {
            name: layout(boundary.get(table, {})[name]) if name in boundary.get(table, {}) else whole for name in every
        }
    return Plan(
        axes=tuple(axes.items()),
        cluster=Cluster.preset("cpu"),
        **layouts,
        choices={k: tuple(said.get(n.name, "R " * len(axes)).split()) for n, k in names.items()},
        relays={f"{classes.key[n]} 0": layout(relays[n.name]) for n in classes.key if relays and n.name in relays},
        optimizer="adamw",
        fingerprint=fingerprint(program),
        torch=str(torch.__version__),
        certificate=NOTHING,
    )


class Tiny(nn.Module):
    """``relu(x @ w)``."""

    def __init__(self, hidden: int = 8, ffn: int = 4) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.w = nn.Parameter(torch.randn(hidden, ffn, generator=generator))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x @ self.w)


def tiny(training: bool = False) -> tuple[Program, Dims]:
    """Program and dims of `Tiny` on a batch ``[4, 8]``."""
    model = Tiny()
    program = program_of(model, (torch.ones(4, 8),), training=training)
    return program, analyze(program)


def show(program: Program) -> str:
    """The graph in a format of our own: a line a node, layouts behind it where nodes have some.

    ``name = operator(arguments)  # inputs -> layout``
    """
    axes = tuple(program.graph.meta.get("axes", {}))
    return "\n".join(_line(n, axes) for n in program.graph.graph.nodes if n.op != "get_attr")


def _line(node: fx.Node, axes: tuple[str, ...]) -> str:
    if node.op == "output":
        return f"return {_text(node.args[0])}"
    call = f"{node.name}" if node.op == "placeholder" else f"{node.name} = {_target(node)}({_arguments(node)})"
    info = node.meta.get("collective")
    if isinstance(info, Collective):
        call += f"  # {info.kind} {info.axis} {info.bytes:g} bytes" + (
            f", {info.members} together" if info.members > 1 else ""
        )
    if not axes or "layouts" not in node.meta or node.meta.get("internal"):
        return call
    pairs = zip(node.meta["types"], node.meta["layouts"], strict=True)
    return call + "  # " + ", ".join("-" if t is None else describe(t, x, axes) for t, x in pairs)


def _target(node: fx.Node) -> str:
    name = (
        str(getattr(node.target, "__name__", node.target)) if not hasattr(node.target, "_schema") else str(node.target)
    )
    return name.replace("_c10d_functional.", "").removeprefix("aten.").removesuffix(".default")


def _arguments(node: fx.Node) -> str:
    named = [f"{k}={_text(v)}" for k, v in node.kwargs.items() if k not in ("device", "pin_memory", "layout")]
    return ", ".join([*map(_text, node.args), *named])


def _text(value: Any) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_text, value)) + "]"
    return repr(value) if isinstance(value, str) else str(value)
