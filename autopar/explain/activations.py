"""`activations`: which tensors are saved for the backward pass, where, which are recomputed instead, and why.

A tensor that the backward pass needs is kept, which takes memory; kept on the host, which takes two copies; or made
again, which takes its kernel and the moves of its arguments once more, and needs these arguments. The search weighs
them at the price of memory; so does this.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace

from torch import fx

from autopar.explain.activation_states import MADE, Form, States
from autopar.ir.graph import is_backward, module_path, without_indices
from autopar.ir.plan import Certificate, Plan
from autopar.ir.plan_table import format_seconds
from autopar.ir.program import Program, producer
from autopar.memory.recompute import uniform
from autopar.passes.pad_dims import pad
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

PASSING, KEPT, AGAIN, AWAY = "passing", "kept", "made again", "on the host"

STATE = -2
"""In place of an output's number: a parameter's optimizer state."""

TIE = 0.01
"""Relative difference of two costs that are about the same."""


@dataclass(frozen=True)
class Activation:
    """What an operator of the forward pass makes, or what one of its outputs is moved to; all that are alike.

    Where optimizer state lies on the host, that of a parameter, too.

    Attributes:
        name: module and operator, numbers of repeated blocks left out; with ``moved`` or ``gathered``.
        node: the first one's node in the graph.
        state: ``passing`` (the backward pass does not take it), ``kept``, ``on the host`` until then, ``made again``,
            ``moved again`` or ``gathered again``.
        count: how many there are like this, in this state.
        size: bytes of one on a device.
        seconds: that making one again takes, from arguments that are there; infinite of optimizer state.
        copied: seconds that sending it to the host and back takes; infinite where there is no way.
        worth: seconds that its bytes are worth at the price of memory.
        why: what decides.
    """

    name: str
    node: str
    state: str
    count: int
    size: float
    seconds: float
    copied: float
    worth: float
    why: str


def activations(program: Program, plan: Plan, name: str) -> list[Activation]:
    """What becomes of the tensors of a module, an operator or a parameter, in the order of the forward pass.

    Args:
        program: canonical program, of the whole model or with blocks left out.
        plan: of it.
        name: of a module (or the end of its name, ``mlp.act``), of a node of the graph, ``result.N``, or of a parameter
            or ``batch.N``, of which it is the moved form, and what is computed from it alone.

    Raises:
        ValueError: there is nothing of that name; names some that there are.
    """
    program = pad(program, plan.padding)
    dims = analyze(program)
    classes = layer_classes(program, dims)
    chosen = named(program, name)
    # Of blocks that are left out, some may be in other states than the rest.
    parts = [(1.0, plan)] if program.repeat is None else uniform(plan, classes.count)
    found: dict[tuple[str, int], dict[tuple[str, str], Activation]] = defaultdict(dict)
    count: dict[Activation, float] = defaultdict(float)
    for share, part in parts:
        reasons = _Reasons(States(program, dims, part, classes), plan.certificate)
        for form in (f for f in reasons.states.forms if f[0] in chosen):
            one, of = reasons.tensor(form), classes.key[form[0]]
            first = found[of, form[1]].setdefault((one.state, one.why), one)
            count[first] += share * classes.count[of] / len(classes.members[of])
        for node in (n for n in reasons.states.optimizer if n in chosen):
            one, of = reasons.optimizer(node), classes.key[node]
            first = found[of, STATE].setdefault((one.state, one.why), one)
            count[first] += share * classes.count[of] / len(classes.members[of])
    every = [one for alike in found.values() for one in alike.values()]
    return [replace(one, count=round(count[one])) for one in every if round(count[one])]


def named(program: Program, name: str) -> set[fx.Node]:
    """Nodes of the forward pass, and inputs, that a name speaks of, see `activations`.

    Raises:
        ValueError: there are none.
    """
    own = program.aliases.get(name, name)
    names = set(program.repeat.alike(own)) if program.repeat else {own}
    named: dict[fx.Node, str] = {}
    for node, spec in zip(program.placeholders, program.inputs, strict=True):
        if spec.kind in ("parameter", "batch"):
            named[node] = spec.name if spec.kind == "parameter" else f"batch.{spec.name}"
    found = {node for node, text in named.items() if text in names}
    if found:
        for node, sources in program.sources.items():  # what is computed from it alone, such as a cast
            if not is_backward(node) and sources and all(source in found for source, _ in sources):
                found.add(node)
        return found
    results = zip(program.outputs, program.output_values, strict=True)
    found = {producer(v)[0] for o, v in results if v is not None and own == f"{o.kind}.{o.name}" and o.kind == "result"}
    forward = [n for n in program.sources if not is_backward(n)]
    found = found or {n for n in forward if n.name == own}
    if found:
        return found
    path = {n: re.sub(r"@\d+", "", module_path(n)) for n in forward}
    path |= {n: text.rpartition(".")[0] for n, text in named.items() if not text.startswith("batch.")}
    found = {n for n, p in path.items() if any(f"{p}.".startswith(f"{m}.") for m in names)}
    found = found or {n for n, p in path.items() if f".{own}." in f".{p}."}
    if not found:
        known = sorted({*named.values(), *filter(None, path.values())})
        close = difflib.get_close_matches(own, known, n=3) or known[:3]
        raise ValueError(f"no parameter, module, batch.N or operator is called {name!r}; there are {', '.join(close)}")
    return found


class _Reasons:
    """Names of forms, and what decides on their states."""

    def __init__(self, states: States, certificate: Certificate) -> None:
        self.states = states
        self.gap = certificate.objective - certificate.lower_bound
        self.program = states.program
        inputs = zip(self.program.placeholders, self.program.inputs, strict=True)
        self.inputs = {node: spec.name if spec.kind == "parameter" else f"batch.{spec.name}" for node, spec in inputs}
        self.missing = self._missing()

    def _missing(self) -> dict[Form, float]:
        """Seconds, in time or in memory's worth, that it would take to have in the backward pass what is not there."""
        states = self.states
        found: dict[Form, float] = {}
        for form in states.forms:
            if not states.available(form):
                again = states.seconds(form) + sum(found.get(source, 0.0) for source in states.inputs(form))
                found[form] = min(states.bytes(form) * states.price, states.copied(form), again)
        return found

    def tensor(self, form: Form) -> Activation:
        """All about one form."""
        states = self.states
        size, seconds = states.bytes(form), states.seconds(form)
        if form in states.again:
            state = AGAIN if form[1] == MADE else f"{states.word(form)} again"
        else:
            state = AWAY if form in states.away else KEPT if form in states.kept else PASSING
        copied, worth = states.copied(form), size * states.price
        why = self.why(form, state, seconds, min(worth, copied) if state == AWAY else worth)
        return Activation(self.name(form), form[0].name, state, 1, size, seconds, copied, worth, why)

    def optimizer(self, node: fx.Node) -> Activation:
        """All about a parameter's optimizer state."""
        states, name = self.states, without_indices(self.inputs[node], self.program.blocks)
        size, state = states.state_bytes(node), AWAY if states.optimizer[node] else KEPT
        copied, worth = states.copied_once(size), size * states.price
        why = "its bytes are worth less" if copied > worth else "as good at this price: the budget's rest decides"
        why = "but for the optimizer's step" if state == AWAY else why
        return Activation(f"{name}, optimizer state", node.name, state, 1, size, math.inf, copied, worth, why)

    def held(self, form: Form) -> str:
        """How the backward pass has what it takes."""
        return AWAY if form in self.states.away else KEPT if form in self.states.kept else "there again"

    def name(self, form: Form) -> str:
        """Module and operator, or parameter; with what is done to it."""
        node = form[0]
        if node in self.inputs:
            text = without_indices(self.inputs[node], self.program.blocks)
        else:
            operator = str(node.target).removeprefix("aten.").partition(".")[0].strip("_")
            text = f"{without_indices(module_path(node), self.program.blocks) or '(model)'} ({operator})"
        return text if form[1] == MADE else f"{text}, {self.states.word(form)}"

    def why(self, form: Form, state: str, seconds: float, worth: float) -> str:
        """What decides on a state; of what is on the host, ``worth`` is at most what that takes."""
        states = self.states
        if state == PASSING:
            return "the backward pass does not take it"
        sources = [s for s in states.inputs(form) if s[1] != MADE or s[0] in self.program.sources]
        if state not in (KEPT, AWAY):
            held = [f"{self.name(s)}, which is {self.held(s)}" for s in sources]
            return f"from {' and '.join(held)}" if held else "from what is held anyway"
        if not states.price:
            return "memory is not short"
        if seconds > (1 + TIE) * worth:
            return "sending it takes less" if state == AWAY else "its bytes are worth less"
        gone = [s for s in sources if self.missing.get(s)]
        total = seconds + sum(self.missing[s] for s in gone)
        if total > (1 + TIE) * worth:
            return f"that needs {' and '.join(map(self.name, gone))}, which is gone"
        if total >= (1 - TIE) * worth:
            return "as good at this price: the budget's rest decides"
        saved = (worth - total) * self.states.classes.count[self.states.classes.key[form[0]]]
        if saved <= self.gap:
            return f"that would save {format_seconds(saved)} a step, which is within the plan's gap"
        return f"that would save {format_seconds(saved)} a step, but the plan's space does not have it"
