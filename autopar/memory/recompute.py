"""What a plan recomputes in the backward pass, and what it saves for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from autopar.ir.graph import Value, is_backward, producer
from autopar.ir.plan import EVERY, PER_USE, Plan
from autopar.ir.program import Program

Ranges = Mapping[str, tuple[tuple[int, int], ...]]
"""Of a plan: the members of each class that it names."""

ROUNDING = 1e-9
"""So much of a member more than a whole one is none."""


@dataclass(frozen=True)
class Recompute:
    """What the backward pass recomputes instead of taking what the forward pass has saved.

    Attributes:
        nodes: forward operators that run again.
        late: those of ``nodes`` that then need not run in the forward pass.
        values: forward values that are recomputed or re-gathered, for the backward pass alone.
        apart: those of ``values`` that are re-gathered per use, and views of such, with how many uses there are.
    """

    nodes: frozenset[fx.Node] = frozenset()
    late: frozenset[fx.Node] = frozenset()
    values: frozenset[Value] = frozenset()
    apart: Mapping[Value, int] = field(default_factory=dict)

    def times(self, node: fx.Node) -> int:
        """How often an operator runs again."""
        return self.apart.get((node, 0), 1) if node in self.nodes else 0


NOTHING_RECOMPUTED = Recompute()


def find_recomputed(
    program: Program,
    relayed: Collection[Value],
    operators: Collection[fx.Node],
    consumer_layouts: Collection[Value],
    each: Collection[Value] = (),
    is_view: Callable[[fx.Node], bool] = lambda node: False,
) -> Recompute:
    """Find what is recomputed, of all that may be: only what the backward pass needs.

    Args:
        program: the program, nothing in it repeated yet.
        relayed: values that are brought to one layout for all their users.
        operators: forward operators whose results are not kept.
        consumer_layouts: of the values that are relayed, those whose moved form is not kept.
        each: of these, those that each operator of the backward pass moves for itself, where they need not be made.
        is_view: whether an operator only shows what it takes.
    """
    if not operators and not consumer_layouts:
        return Recompute()
    kept = set(relayed) - set(consumer_layouts)
    nodes: set[fx.Node] = set()
    seen: dict[Value, bool] = {}
    waiting = _taken_by_backward(program)
    while waiting:
        value = waiting.pop()
        node = value[0]
        if value in seen or is_backward(node):
            continue
        seen[value] = value not in kept and (value in consumer_layouts or node in operators)
        if seen[value] and node in operators and node not in nodes:
            nodes.add(node)
            waiting += program.sources[node]
    made_again = frozenset(value for value, repeated in seen.items() if repeated)
    saved = [value for value, repeated in seen.items() if not repeated or value[0] not in nodes]
    finals = [producer(v) for v in program.output_values[: program.forward_outputs] if v is not None]
    early = _computed_from(program, [*saved, *finals])
    found = Recompute(frozenset(nodes), frozenset(nodes - early), made_again)
    return replace(found, apart=_apart(program, found, each, is_view)) if each else found


def _apart(
    program: Program, again: Recompute, each: Collection[Value], is_view: Callable[[fx.Node], bool]
) -> dict[Value, int]:
    """Values that each operator moves for itself and what is shown of them, with how many operators do."""
    apart = {value for value in each if value in again.values and value[0] not in again.nodes}
    for node, sources in program.sources.items():
        if node in again.nodes and is_view(node) and len(sources) == 1 and apart.issuperset(sources):
            apart.add((node, 0))
    count = dict.fromkeys(apart, 0)
    for node, sources in reversed(program.sources.items()):  # users before what they take
        copies = count.get((node, 0), 1) if node in again.nodes else int(is_backward(node))
        for value in apart.intersection(sources):
            count[value] += copies
    for value in apart.intersection(producer(v) for v in program.output_values[program.forward_outputs :] if v):
        count[value] += 1
    return count


def _taken_by_backward(program: Program) -> list[Value]:
    """Values that operators of the backward pass take, or that gradients are; each once."""
    taken = [s for node, sources in program.sources.items() if is_backward(node) for s in sources]
    later = program.output_values[program.forward_outputs :]
    taken += [producer(v) for v in later if v is not None]
    return list(dict.fromkeys(taken))


def _computed_from(program: Program, values: Iterable[Value]) -> set[fx.Node]:
    """The nodes that these values are computed by, from the first on."""
    found: set[fx.Node] = set()
    waiting = [node for node, _ in values]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [source for source, _ in program.sources.get(node, ())]
    return found


def uniform(plan: Plan, count: Mapping[str, int]) -> list[tuple[float, Plan]]:
    """A plan that treats members of a class unlike, as plans that treat all of them alike, each with its share of them.

    Args:
        plan: whose ranges are the first members of each class, those behind them, and so on.
        count: members of each class.
    """
    ends = _ends(plan, count)
    if len(ends) == 1:
        return [(1.0, plan)]

    def own(table: Ranges, start: float) -> Ranges:
        """What is named of the members from there on."""
        found = {}
        for name, ranges in table.items():
            members = count[class_of(name)]
            first = min(math.ceil(start * members - ROUNDING), members - 1)
            if any(a <= first < b for a, b in ranges):
                found[name] = EVERY
        return found

    starts = [0.0, *ends[:-1]]
    return [
        (end - start, replace(plan, recompute=own(plan.recompute, start), offload=own(plan.offload, start)))
        for start, end in zip(starts, ends, strict=True)
    ]


def _ends(plan: Plan, count: Mapping[str, int]) -> list[float]:
    """Shares of the members at which ranges end, the last of which is 1.

    Classes of few members round up; those of more say what the share is.
    """
    every = [*plan.recompute.items(), *plan.offload.items()]
    cuts = {(count[class_of(name)], cut) for name, ranges in every for pair in ranges for cut in pair}
    found = [1.0]
    for members, cut in sorted(cuts, key=lambda c: (-c[0], c[1])):
        if 0 < cut < members and not any(math.ceil(end * members - ROUNDING) == cut for end in found):
            found.append(cut / members)
    return sorted(found)


def weighted(parts: Sequence[tuple[float, Any]]) -> Any:
    """The sum of numbers, or of mappings to numbers, each by its share; of whole numbers it is one."""
    if isinstance(parts[0][1], Mapping):
        empty: dict[str, Any] = {k: {} if isinstance(v, Mapping) else 0 for _, part in parts for k, v in part.items()}
        return {k: weighted([(share, part.get(k, none)) for share, part in parts]) for k, none in empty.items()}
    total = sum(share * value for share, value in parts)
    return round(total) if all(isinstance(value, int) for _, value in parts) else total


def class_of(name: str) -> str:
    """The class that an entry of a plan's recomputation speaks of: a relay's has the number of an output behind it."""
    name = name.removeprefix(PER_USE)
    return name.removeprefix("consumer ").rpartition(" ")[0] if name.startswith("consumer ") else name


def ranges(members: Collection[int], count: int) -> tuple[tuple[int, int], ...]:
    """Members of a class as an entry of a plan's recomputation."""
    if len(members) == count:
        return EVERY
    starts = sorted(i for i in members if i - 1 not in members)
    stops = sorted(i + 1 for i in members if i + 1 not in members)
    return tuple(zip(starts, stops, strict=True))
