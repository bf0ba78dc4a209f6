"""Candidates: on one axis every letter of a rule offers a strategy; on a mesh, every product of them that divides."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopar.ir.layout import ByExpert, Layout, Partial, Placement, Replicate, Split, TensorType, TokensStay, divides
from autopar.rules.remembered import remembered
from autopar.sharding.dims import Operator

REPLICATE = "R"


@dataclass(frozen=True)
class Strategy:
    """What one operator does on one mesh axis.

    Attributes:
        name: stable name: ``R``, a letter and its factor ``m.0``, ``qk.0`` where two letters are split together,
            ``s.0>`` where devices have the rows of their own experts, ``s.0=`` where these are of tokens that stay, or
            ``P0`` for linear set 0.
        inputs: placement of each tensor argument.
        outputs: placement of each output.
        factor: ``(letter, index of its factor)`` that is split, or None; several letters if these are split together.
        owned: how many experts devices have a part of each; 0 where they have all.
    """

    name: str
    inputs: tuple[Placement, ...]
    outputs: tuple[Placement, ...]
    factor: tuple[str, int] | None = None
    owned: int = 0

    @property
    def splits(self) -> bool:
        """Whether the devices along the axis share the operator's work."""
        return self.factor is not None

    @property
    def factors(self) -> tuple[tuple[str, int], ...]:
        """Every letter that is split, and the index of its factor."""
        return () if self.factor is None else tuple((c, self.factor[1]) for c in self.factor[0])


@remembered(4096)
def strategies(operator: Operator) -> tuple[Strategy, ...]:
    """Every strategy of an operator on one axis: replicate, each letter's factors, each linear set."""
    rule = operator.rule
    inputs, outputs = len(operator.inputs), len(operator.outputs)
    found = [Strategy(REPLICATE, (Replicate(),) * inputs, (Replicate(),) * outputs)]
    # Per axis, not per mesh: a mesh's candidates are products of these, see `candidates`.
    for letter in rule.letters:
        found += _letter_strategies(operator, letter)
    found += [s for letters in rule.joint if (s := _joint_strategy(operator, letters)) is not None]
    for i, linear in enumerate(rule.linear):
        if not _adds_up(operator, linear):
            continue
        # All sets at once, not their subsets: x + y is the sum of partial x and partial y, but not of partial x and
        # whole y.
        placements: list[Placement] = [Replicate()] * inputs
        for k in linear:
            placements[k] = Partial()
        found.append(Strategy(f"P{i}", tuple(placements), (Partial(),) * outputs))
    return tuple(found)


WRAPPING = frozenset(("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32"))
"""Dtypes whose sums may be too large for them: 64 bits are taken to hold every sum."""


def _adds_up(operator: Operator, linear: Sequence[int]) -> bool:
    """Whether terms of sums may pass: the sum of booleans is no boolean, and a term that wraps is one modulo 256, say.

    In its own dtype the sum of such terms is that of the whole; as a float it is not.
    """
    dtypes = {operator.inputs[k].dtype for k in linear}
    made = {t.dtype for t in operator.outputs if t is not None}
    return "bool" not in dtypes and (not dtypes & WRAPPING or made == dtypes)


def _letter_strategies(operator: Operator, name: str) -> list[Strategy]:
    rule, letter = operator.rule, operator.letters.get(name)
    if letter is None or name in rule.blocked:
        return []
    if any(operator.inputs[i].routed is None for i in rule.counts.get(name, ())):
        return []
    found = []
    for j, _ in enumerate(letter.factors):
        # Code of its own counts consecutive blocks of the whole letter.
        if j and name in rule.lower and not rule.lower[name].anywhere:
            continue
        inputs: list[Placement] = [Replicate()] * len(operator.inputs)
        for i in rule.counts.get(name, ()):
            inputs[i] = Partial()
        for i, d, start in letter.inputs:
            inputs[i] = Split(d, start + j)
        # An output without the letter is a term of a sum, or complete on every device; else the letter cannot be split.
        absent = Partial() if name in rule.reduce else Replicate() if name in rule.keep else None
        outputs: list[Placement | None] = [absent] * len(operator.outputs)
        for i, type_ in enumerate(operator.outputs):
            outputs[i] = Replicate() if type_ is None else outputs[i]
        for i, d, start in letter.outputs:
            outputs[i] = Split(d, start + j)
        complete = tuple(o for o in outputs if o is not None)
        if len(complete) == len(outputs):
            found.append(Strategy(f"{name}.{j}", tuple(inputs), complete, (name, j)))
    kinds = itertools.product(found, (ByExpert, TokensStay))
    return [*found, *(other for s, kind in kinds if (other := _by_expert(operator, name, s, kind)) is not None)]


def _joint_strategy(operator: Operator, letters: str) -> Strategy | None:
    """The strategy that splits several letters at once, each by its first factor; None if a tensor has two of them.

    That is split along the first one if the lowering says so, see `autopar.rules.rule.Lowering`. What has none of them
    is a term of a sum, if one of them is summed over.
    """
    # A letter of size 1 has no factors.
    if any(c not in operator.letters or not operator.letters[c].factors for c in letters):
        return None
    inputs: list[Placement | None] = [None] * len(operator.inputs)
    absent = Partial() if any(c in operator.rule.reduce for c in letters) else None
    outputs: list[Placement | None] = [Replicate() if t is None else None for t in operator.outputs]
    for c in letters:
        for placed, places in ((inputs, operator.letters[c].inputs), (outputs, operator.letters[c].outputs)):
            for i, d, start in places:
                if placed[i] is not None and not operator.rule.lower[letters].first:
                    return None
                placed[i] = placed[i] or Split(d, start)
    outputs = [absent if o is None else o for o in outputs]
    if any(o is None for o in outputs):
        return None
    given, made = (tuple(p or Replicate() for p in side) for side in (inputs, outputs))
    return Strategy(f"{letters}.0", given, made, (letters, 0))


BY_EXPERT: dict[type[ByExpert], str] = {ByExpert: ">", TokensStay: "="}
"""What names of strategies end in that split rows by expert: of tokens that come from all devices, or that stay."""


def _by_expert(operator: Operator, name: str, strategy: Strategy, kind: type[ByExpert]) -> Strategy | None:
    """The strategy that splits rows by the experts that devices have, beside one that splits them by tokens."""
    rule, letter = operator.rule, operator.letters[name]
    experts = {operator.inputs[i].experts for i, d, _ in letter.inputs if d in (operator.inputs[i].routed or ())}
    # Positions of routed tokens are not among an expert's rows, unless every device has all tokens.
    placed = bool(rule.positions) and kind is TokensStay
    if len(experts) != 1 or 0 in experts or name in (*("" if placed else rule.routed), *rule.keep):
        return None
    # Numbers of rows are known when the graph runs only. Views take an open size; who counts elements, makes tensors of
    # sizes or emits other code for them does not.
    lowered = name in rule.lower or (rule.lower and not rule.view)
    if lowered or (rule.scaled and not placed) or (rule.shapes and not rule.view):
        return None
    inputs, outputs = list(strategy.inputs), list(strategy.outputs)
    counts = rule.counts.get(name, ())
    # Each device has the matrices of its experts, and makes those of their gradients.
    for side, types, all_dims in ((inputs, operator.inputs, rule.inputs), (outputs, operator.outputs, rule.outputs)):
        for i, (type_, dims) in enumerate(zip(types, all_dims, strict=True)):
            at = [d for d, group in enumerate(dims or ()) if any(c in rule.inputs[k][0] for k in counts for c in group)]
            here, made = side[i], types is operator.outputs
            if type_ is None or not dims:
                continue
            if isinstance(here, Split) and placed and here.dim not in (type_.routed or ()):
                side[i] = Partial() if made else Replicate()
            elif isinstance(here, Split):
                if not made and here.dim not in (type_.routed or ()):
                    return None
                side[i] = kind(here.dim, here.factor)
                # Of the factors of tokens that stay one stands for all.
                if kind is TokensStay and side[i] not in type_.by_expert:
                    return None
            elif at and not made and i in counts:
                side[i] = kind(0, 0)
            elif at:
                if len(type_.dims[at[0]]) != 1:
                    return None
                side[i] = Split(at[0], 0)
    return Strategy(f"{strategy.name}{BY_EXPERT[kind]}", tuple(inputs), tuple(outputs), strategy.factor, *experts)


@dataclass(frozen=True)
class Candidates:
    """All layouts of one operator over a mesh.

    Attributes:
        strategies: the operator's strategies on one axis.
        choice: ``[candidates, axes]``, index of the strategy on each axis.
    """

    strategies: tuple[Strategy, ...]
    choice: NDArray[np.int64]

    def names(self, index: int) -> tuple[str, ...]:
        """Strategy names of one candidate, axis by axis."""
        return tuple(self.strategies[s].name for s in self.choice[index])


def lowerable(operator: Operator, chosen: Sequence[Strategy], sizes: Sequence[int]) -> bool:
    """Whether the strategies of the first axes have one lowering at most, and leave each device what kernels need.

    Args:
        operator: the bound operator.
        chosen: a strategy an axis.
        sizes: of the mesh axes.
    """
    lower, by_key, cut = operator.rule.lower, dict[str, list[int]](), dict[str, int]()
    for strategy, size in zip(chosen, sizes, strict=False):
        if strategy.factor is None:
            continue
        if strategy.factor[0] in lower:
            by_key.setdefault(strategy.factor[0], []).append(size)
        cut |= {c: cut.get(c, 1) * size for c in strategy.factor[0]}
    # Two axes may lower an operator by the same code, not by two different ones.
    if len({id(lower[c]) for c in by_key}) > 1:
        return False
    whole = {c: math.prod(f.size for f in operator.letters[c].factors) for c in cut}
    if any(cut[c] > 1 and whole[c] // cut[c] % n for c, n in operator.rule.multiples.items() if c in cut):
        return False
    return all(
        lower[key].takes(whole[c] // math.prod(parts), sum(n > 1 for n in parts))
        for key, parts in by_key.items() for c in key
    )  # fmt: skip


def candidates(
    operator: Operator,
    sizes: Sequence[int],
    allowed: Sequence[Collection[str]] | None = None,
    padded: float = 1.0,
) -> Candidates:
    """Every combination of strategies over axes of ``sizes`` that splits each factor into equal parts.

    Args:
        operator: the bound operator.
        sizes: size of each mesh axis.
        allowed: names to choose from on each axis; None allows all.
        padded: parts are equal, too, where they are once a factor is at most this many times longer.
    """
    options = strategies(operator)
    per_axis = [
        [i for i, s in enumerate(options) if allowed is None or s.name in allowed[a]] for a in range(len(sizes))
    ]
    chosen = list(itertools.product(*per_axis))
    choice = np.array(chosen, dtype=np.int64).reshape(len(chosen), len(sizes))
    valid, inexact = np.ones(len(choice), dtype=bool), np.zeros(len(choice), dtype=bool)
    # Several axes may split one factor: its size must be divided by the product of them.
    for factor in dict.fromkeys(f for s in options for f in s.factors):
        uses = np.array([factor in s.factors for s in options])
        parts = np.where(uses[choice], np.array(sizes), 1).prod(axis=1)
        size = operator.letters[factor[0]].factors[factor[1]].size
        equal = size % parts == 0
        valid &= equal | (-(-size // parts) * parts <= padded * size)
        inexact |= ~equal
    if operator.rule.lower or operator.rule.multiples:
        able = [lowerable(operator, [options[s] for s in row], sizes) for row in choice]
        valid &= np.array(able, dtype=bool) | inexact
    for owned in {s.owned for s in options if s.owned}:
        parts = np.where(np.array([s.owned > 0 for s in options])[choice], np.array(sizes), 1).prod(axis=1)
        valid &= (owned % parts == 0) | (-(-owned // parts) * parts <= padded * owned)
    return Candidates(options, choice[valid])


@remembered(4096)
def combine(operator: Operator, names: tuple[str, ...]) -> tuple[tuple[Layout, ...], tuple[Layout, ...]]:
    """Layouts of tensor arguments and outputs under one named strategy an axis.

    Raises:
        KeyError: no strategy of that name.
    """
    by_name = {s.name: s for s in strategies(operator)}
    chosen = [by_name[n] for n in names]
    inputs = tuple(tuple(s.inputs[i] for s in chosen) for i in range(len(operator.inputs)))
    outputs = tuple(tuple(s.outputs[i] for s in chosen) for i in range(len(operator.outputs)))
    return inputs, outputs


@remembered(1024)
def layouts(type_: TensorType, sizes: tuple[int, ...], partial: bool = True) -> tuple[Layout, ...]:
    """Every layout of a tensor that divides, in a fixed order, the replicated one first."""
    options: list[Placement] = [Replicate(), *([Partial()] if partial else [])]
    options += [Split(d, j) for d, j in type_.positions if any(type_.dims[d][j].size % n == 0 for n in sizes)]
    options += type_.by_expert
    # Ties in the search are broken by this order: sorted otherwise, the same program would get another plan.
    every = itertools.product(options, repeat=len(sizes))
    return tuple(layout for layout in every if divides(type_, layout, sizes))


def split_parts(layout: Layout, sizes: Sequence[int]) -> int:
    """Into how many blocks a layout cuts its tensor."""
    return math.prod(n for p, n in zip(layout, sizes, strict=True) if isinstance(p, Split))


def letter_parts(names: Sequence[str], letters: str, sizes: Sequence[int]) -> int:
    """Into how many parts some letters are cut under one strategy name an axis, tokens that stay into one."""
    cut = [(name, n) for name, n in zip(names, sizes, strict=True) if name[-1] != BY_EXPERT[TokensStay]]
    split = [(n, name.partition(".")[0]) for name, n in cut if "." in name]
    return math.prod(n for n, key in split if any(c in letters for c in key))
