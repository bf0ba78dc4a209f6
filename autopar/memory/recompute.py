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
"""A share of members that exceeds a whole number by no more than this is that number."""


@dataclass(frozen=True)
class Recompute:
    """What the backward pass recomputes instead of reading what the forward pass has saved.

    Attributes:
        nodes: forward operators that are recomputed.
        backward_only: those of ``nodes`` that then need not run in the forward pass.
        values: forward values that are recomputed or re-gathered, for the backward pass alone.
        per_use: those of ``values`` that are re-gathered per use, and views of such, with how many uses there are.
    """

    nodes: frozenset[fx.Node] = frozenset()
    backward_only: frozenset[fx.Node] = frozenset()
    values: frozenset[Value] = frozenset()
    per_use: Mapping[Value, int] = field(default_factory=dict)

    def times(self, node: fx.Node) -> int:
        """How often the backward pass runs an operator."""
        return self.per_use.get((node, 0), 1) if node in self.nodes else 0


NOTHING_RECOMPUTED = Recompute()


def find_recomputed(
    program: Program,
    relaid: Collection[Value],
    not_saved: Collection[fx.Node],
    not_saved_relaid: Collection[Value],
    per_use: Collection[Value] = (),
    is_view: Callable[[fx.Node], bool] = lambda node: False,
) -> Recompute:
    """Find what is recomputed, of all that may be: only what the backward pass needs.

    Args:
        program: the program, before anything is recomputed.
        relaid: values that are brought to a consumer layout.
        not_saved: forward operators whose results are not saved.
        not_saved_relaid: those of ``relaid`` that are not saved in their consumer layout.
        per_use: those of ``not_saved_relaid`` that each operator of the backward pass re-gathers for itself, where
            the value itself is saved.
        is_view: whether an operator only shows its argument's memory.
    """
    if not not_saved and not not_saved_relaid:
        return Recompute()
    saved_relaid = set(relaid) - set(not_saved_relaid)
    nodes: set[fx.Node] = set()
    repeated: dict[Value, bool] = {}
    # Backwards from what the backward pass reads: a chain of operators that are not saved ends at what is saved.
    pending = _read_by_backward(program)
    while pending:
        value = pending.pop()
        node = value[0]
        if value in repeated or is_backward(node):
            continue
        repeated[value] = value not in saved_relaid and (value in not_saved_relaid or node in not_saved)
        if repeated[value] and node in not_saved and node not in nodes:
            nodes.add(node)
            pending += program.sources[node]
    values = frozenset(value for value, is_repeated in repeated.items() if is_repeated)
    # Of a value that is re-gathered only, the operator's own result is saved: it must run in the forward pass.
    saved = [value for value, is_repeated in repeated.items() if not is_repeated or value[0] not in nodes]
    results = [producer(v) for v in program.output_values[: program.forward_outputs] if v is not None]
    in_forward = _ancestors(program, [*saved, *results])
    found = Recompute(frozenset(nodes), frozenset(nodes - in_forward), values)
    return replace(found, per_use=_per_use(program, found, per_use, is_view)) if per_use else found


def _per_use(
    program: Program, recompute: Recompute, allowed: Collection[Value], is_view: Callable[[fx.Node], bool]
) -> dict[Value, int]:
    """Values that each operator re-gathers for itself and views of them, with how many operators do."""
    found = {value for value in allowed if value in recompute.values and value[0] not in recompute.nodes}
    for node, sources in program.sources.items():
        # A view of what is gathered per use is recomputed with it; shared, it would keep the gathered tensor.
        if node in recompute.nodes and is_view(node) and len(sources) == 1 and found.issuperset(sources):
            found.add((node, 0))
    count = dict.fromkeys(found, 0)
    for node, sources in reversed(program.sources.items()):  # users before their arguments: a view's count is known
        copies = count.get((node, 0), 1) if node in recompute.nodes else int(is_backward(node))
        for value in found.intersection(sources):
            count[value] += copies
    for value in found.intersection(producer(v) for v in program.output_values[program.forward_outputs :] if v):
        count[value] += 1
    return count


def _read_by_backward(program: Program) -> list[Value]:
    """Values that operators of the backward pass read, or that are gradients; each once."""
    read = [s for node, sources in program.sources.items() if is_backward(node) for s in sources]
    gradients = program.output_values[program.forward_outputs :]
    read += [producer(v) for v in gradients if v is not None]
    return list(dict.fromkeys(read))  # in order: sets of nodes would differ from process to process


def _ancestors(program: Program, values: Iterable[Value]) -> set[fx.Node]:
    """The nodes that these values are computed by, from the first on."""
    found: set[fx.Node] = set()
    pending = [node for node, _ in values]
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            pending += [source for source, _ in program.sources.get(node, ())]
    return found


def uniform(plan: Plan, count: Mapping[str, int]) -> list[tuple[float, Plan]]:
    """A plan that treats members of a class differently, as plans that treat all of them alike, each with its share.

    Args:
        plan: whose ranges are the first members of each class, those after them, and so on.
        count: members of each class.
    """
    ends = _ends(plan, count)
    if len(ends) == 1:
        return [(1.0, plan)]

    def own(table: Ranges, start: float) -> Ranges:
        """The entries that name the first member of this share."""
        found = {}
        for name, ranges in table.items():
            members = count[class_of(name)]
            # The first member of this share stands for the others, which its ranges treat alike.
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

    Classes of few members round up; those of many members decide what the share is.
    """
    every = [*plan.recompute.items(), *plan.offload.items()]
    cuts = {(count[class_of(name)], cut) for name, ranges in every for pair in ranges for cut in pair}
    found = [1.0]
    # The largest classes first: their shares are the finest, and a smaller class that rounds to one of them adds none.
    for members, cut in sorted(cuts, key=lambda c: (-c[0], c[1])):
        if 0 < cut < members and not any(math.ceil(end * members - ROUNDING) == cut for end in found):
            found.append(cut / members)
    return sorted(found)


def weighted(parts: Sequence[tuple[float, Any]]) -> Any:
    """The sum of numbers, or of mappings to numbers, each by its share; of whole numbers it is one."""
    if isinstance(parts[0][1], Mapping):
        # An entry that one part lacks counts as 0 there.
        empty: dict[str, Any] = {k: {} if isinstance(v, Mapping) else 0 for _, part in parts for k, v in part.items()}
        return {k: weighted([(share, part.get(k, none)) for share, part in parts]) for k, none in empty.items()}
    total = sum(share * value for share, value in parts)
    return round(total) if all(isinstance(value, int) for _, value in parts) else total


def class_of(name: str) -> str:
    """The class that an entry of a plan's recomputation names: that of a consumer layout ends in an output's number."""
    name = name.removeprefix(PER_USE)
    return name.removeprefix("consumer ").rpartition(" ")[0] if name.startswith("consumer ") else name


def ranges(members: Collection[int], count: int) -> tuple[tuple[int, int], ...]:
    """Members of a class as an entry of a plan's recomputation."""
    if len(members) == count:
        return EVERY
    # Runs of consecutive members.
    starts = sorted(i for i in members if i - 1 not in members)
    stops = sorted(i + 1 for i in members if i + 1 not in members)
    return tuple(zip(starts, stops, strict=True))
