"""`activations`: which tensors a plan saves for the backward pass, recomputes or offloads, and why.

A tensor that the backward pass needs is saved, which takes memory; offloaded, which takes two copies over the host
link; or recomputed, which runs its kernel and the redistribution of its arguments once more, and needs these arguments.
The search compares the three at the shadow price of memory, and this module repeats that comparison tensor by tensor.
"""

from __future__ import annotations

import difflib
import math
import re
from collections import defaultdict
from dataclasses import dataclass, replace

from torch import fx

from autopar.compiler import for_devices
from autopar.explain.activation_states import GATHERED, OPERATOR, REDISTRIBUTED, ActivationStates, Form
from autopar.ir.graph import is_backward, module_path, producer, without_indices
from autopar.ir.plan import Certificate, Plan
from autopar.ir.plan_table import format_seconds
from autopar.ir.program import Program
from autopar.memory.recompute import uniform
from autopar.passes import as_planned
from autopar.sharding.dims import analyze
from autopar.sharding.layer_classes import layer_classes

NOT_SAVED, SAVED, OFFLOADED, RECOMPUTED = "not saved", "saved", "offloaded", "recomputed"
AGAIN = {GATHERED: "re-gathered", REDISTRIBUTED: "redistributed in the backward pass"}

STATE = -2
"""In place of an output's number: a parameter's optimizer state."""

TIE = 0.01
"""Two costs within this relative difference count as equal."""

EQUAL_COST = "equal cost at this price: the rest of the budget decides"
WORTH_LESS = "its bytes are worth less"


@dataclass(frozen=True)
class Activation:
    """An operator's result in the forward pass, or one output in its consumer layout; equal ones are counted.

    With offloaded optimizer state, a parameter's optimizer state, too.

    Attributes:
        name: module and operator, without the numbers of repeated blocks; with ``gathered`` or ``redistributed``.
        node: name of the first one's node in the graph.
        state: ``not saved`` (the backward pass does not use it), ``saved``, ``offloaded``, ``recomputed``,
            ``re-gathered`` or ``redistributed in the backward pass``.
        count: how many there are like this, in this state.
        size: bytes of one on a device.
        seconds: to recompute one from arguments that are there; infinite for optimizer state.
        copied: seconds to copy one to the host and back; infinite without a host link.
        worth: seconds that its bytes are worth at the shadow price of memory.
        why: what decided the state.
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
    """The state of the tensors of a module, an operator or a parameter, in the order of the forward pass.

    Args:
        program: canonical program, of the whole model or with repeated layers captured from three.
        plan: of it.
        name: a module (or the end of its path, ``mlp.act``), a node of the graph, ``result.N``, or a parameter or
            ``batch.N``, which stands for its consumer layout and what is computed from it alone.

    Raises:
        ValueError: nothing has that name; lists some names that exist.
    """
    program = as_planned(for_devices(program, plan.cluster.device, dict(plan.axes), deterministic=False), plan)
    dims = analyze(program)
    classes = layer_classes(program, dims)
    # Names are looked up in the padded program, whose nodes are those that the plan speaks of.
    chosen = named(program, name)
    # Repeated layers may be split between two choices: each share of them is read as a plan of its own.
    parts = [(1.0, plan)] if program.repeat is None else uniform(plan, classes.count)
    found: dict[tuple[str, int], dict[tuple[str, str], Activation]] = defaultdict(dict)
    count: dict[Activation, float] = defaultdict(float)
    for share, part in parts:
        states = ActivationStates(program, dims, part, classes)
        reasons = _Reasons(states, plan.certificate)
        described = [(f, reasons.tensor(f)) for f in states.forms if f[0] in chosen]
        described += [((n, STATE), reasons.optimizer_state(n)) for n in states.state_offloaded if n in chosen]
        for (node, number), one in described:
            of = classes.key[node]
            # Members of a layer class that have the same state for the same reason are one line of the table.
            first = found[of, number].setdefault((one.state, one.why), one)
            # Of captured layers each stands for several: a member counts as many times.
            count[first] += share * classes.count[of] / len(classes.members[of])
    every = [one for alike in found.values() for one in alike.values()]
    return [replace(one, count=round(count[one])) for one in every if round(count[one])]


def named(program: Program, name: str) -> set[fx.Node]:
    """Nodes of the forward pass and inputs that a name stands for, see `activations`.

    Raises:
        ValueError: there are none.
    """
    own = program.aliases.get(name, name)
    names = set(program.repeat.alike(own)) if program.repeat else {own}
    inputs = {
        node: spec.name if spec.kind == "parameter" else f"batch.{spec.name}"
        for node, spec in zip(program.placeholders, program.inputs, strict=True)
        if spec.kind in ("parameter", "batch")
    }
    chosen = {node for node, text in inputs.items() if text in names}
    if chosen:
        # A parameter is asked for as it is used: cast, transposed or gathered.
        return _with_derived(program, chosen)
    forward = [n for n in program.sources if not is_backward(n)]
    found = _results(program, own) or {n for n in forward if n.name == own}
    if found:
        return found
    # A module that is called several times has the number of the call in its path.
    path = {n: re.sub(r"@\d+", "", module_path(n)) for n in forward}
    path |= {n: text.rpartition(".")[0] for n, text in inputs.items() if not text.startswith("batch.")}
    found = {n for n, p in path.items() if any(f"{p}.".startswith(f"{m}.") for m in names)}
    # A part of a path is enough: mlp.act means that of every layer.
    found = found or {n for n, p in path.items() if f".{own}." in f".{p}."}
    if not found:
        known = sorted({*inputs.values(), *filter(None, path.values())})
        close = difflib.get_close_matches(own, known, n=3) or known[:3]
        raise ValueError(f"no parameter, module, batch.N or operator is called {name!r}; there are {', '.join(close)}")
    return found


def _with_derived(program: Program, inputs: set[fx.Node]) -> set[fx.Node]:
    """Inputs and what is computed from them alone, such as a cast."""
    found = set(inputs)
    for node, sources in program.sources.items():
        if not is_backward(node) and sources and all(source in found for source, _ in sources):
            found.add(node)
    return found


def _results(program: Program, name: str) -> set[fx.Node]:
    """The producer of ``result.N``."""
    results = zip(program.outputs, program.output_values, strict=True)
    return {
        producer(value)[0]
        for output, value in results
        if value is not None and output.kind == "result" and name == f"result.{output.name}"
    }


class _Reasons:
    """Names of forms, and what decided their states."""

    def __init__(self, states: ActivationStates, certificate: Certificate) -> None:
        self.states = states
        # What the search may have missed: a smaller advantage proves nothing against the plan.
        self.gap = certificate.objective - certificate.lower_bound
        self.program = states.program
        inputs = zip(self.program.placeholders, self.program.inputs, strict=True)
        self.inputs = {node: spec.name if spec.kind == "parameter" else f"batch.{spec.name}" for node, spec in inputs}
        self.missing = self._missing()

    def _missing(self) -> dict[Form, float]:
        """For each form that the backward pass lacks: the least seconds, in time or in memory's worth, to have it."""
        states = self.states
        found: dict[Form, float] = {}
        for form in states.forms:  # in the order of execution: the sources of a form come first
            if not states.available(form):
                # A chain: what a form is recomputed from may have to be recomputed first.
                recompute = states.seconds(form) + sum(found.get(source, 0.0) for source in states.inputs(form))
                found[form] = min(states.bytes(form) * states.memory_price, states.offload_seconds(form), recompute)
        return found

    def tensor(self, form: Form) -> Activation:
        """The state, costs and reason of one form."""
        states = self.states
        size, seconds, copied = states.bytes(form), states.seconds(form), states.offload_seconds(form)
        state, worth = self.state(form), size * states.memory_price
        # An offloaded tensor frees its bytes but pays the copies: recomputing competes with the cheaper of the two.
        why = self.why(form, state, seconds, min(worth, copied) if state == OFFLOADED else worth)
        return Activation(self.name(form), form[0].name, state, 1, size, seconds, copied, worth, why)

    def optimizer_state(self, node: fx.Node) -> Activation:
        """The state, costs and reason of a parameter's optimizer state."""
        states, name = self.states, without_indices(self.inputs[node], self.program.blocks)
        size, state = states.state_bytes(node), OFFLOADED if states.state_offloaded[node] else SAVED
        copied, worth = states.copy_seconds(size), size * states.memory_price
        why = WORTH_LESS if copied > worth else EQUAL_COST
        why = "except during the optimizer step" if state == OFFLOADED else why
        return Activation(f"{name}, optimizer state", node.name, state, 1, size, math.inf, copied, worth, why)

    def state(self, form: Form) -> str:
        """One of the states of `Activation`."""
        states = self.states
        if form in states.recomputed:
            return RECOMPUTED if form[1] == OPERATOR else AGAIN.get(states.origin(form), RECOMPUTED)
        if form in states.offloaded:
            return OFFLOADED
        return SAVED if form in states.saved else NOT_SAVED

    def name(self, form: Form) -> str:
        """Module and operator, or parameter; with ``gathered`` or ``redistributed`` in its consumer layout."""
        node = form[0]
        if node in self.inputs:
            text = without_indices(self.inputs[node], self.program.blocks)
        else:
            operator = str(node.target).removeprefix("aten.").partition(".")[0].strip("_")
            text = f"{without_indices(module_path(node), self.program.blocks) or '(model)'} ({operator})"
        return text if form[1] == OPERATOR else f"{text}, {self.states.origin(form)}"

    def why(self, form: Form, state: str, seconds: float, worth: float) -> str:
        """What decided a state.

        Args:
            form: what the state is of.
            state: its state.
            seconds: to recompute it from arguments that are there.
            worth: of its memory, in seconds; of an offloaded form at most what the copies take.
        """
        if state == NOT_SAVED:
            return "the backward pass does not use it"
        if state not in (SAVED, OFFLOADED):
            return self.sources_of(form)
        if not self.states.memory_price:
            return "memory is not short"
        if seconds > (1 + TIE) * worth:
            return "copying it takes less" if state == OFFLOADED else WORTH_LESS
        return self.why_not_recomputed(form, seconds, worth)

    def sources_of(self, form: Form) -> str:
        """What a recomputed form is computed from."""
        states = self.states
        how = []
        for source in self.activation_inputs(form):
            state = OFFLOADED if source in states.offloaded else SAVED if source in states.saved else RECOMPUTED
            how.append(f"{self.name(source)}, which is {state}")
        return f"from {' and '.join(how)}" if how else "from parameters or the batch"

    def why_not_recomputed(self, form: Form, seconds: float, worth: float) -> str:
        """Why a form is saved although its own kernel takes less time than its memory is worth."""
        not_there = [s for s in self.activation_inputs(form) if self.missing.get(s)]
        total = seconds + sum(self.missing[s] for s in not_there)
        if total > (1 + TIE) * worth:
            names = " and ".join(map(self.name, not_there))
            return f"recomputing it needs {names}, which {'is' if len(not_there) == 1 else 'are'} not saved"
        if total >= (1 - TIE) * worth:
            return EQUAL_COST
        classes = self.states.classes
        saving = format_seconds((worth - total) * classes.count[classes.key[form[0]]])
        if (worth - total) * classes.count[classes.key[form[0]]] <= self.gap:
            return f"recomputing it would save {saving} per step, which is within the plan's gap"
        return f"recomputing it would save {saving} per step, but the plan's space does not have it"

    def activation_inputs(self, form: Form) -> list[Form]:
        """The inputs of a form other than parameters and the batch, which are always there."""
        return [s for s in self.states.inputs(form) if s[1] != OPERATOR or s[0] in self.program.sources]
