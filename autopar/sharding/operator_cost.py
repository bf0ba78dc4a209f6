"""What an operator does on one device: operations, memory traffic and, of a matrix product, its sizes."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from autopar.costs.cluster import Device
from autopar.costs.kernels import ALIGNED, BATCHED, Work, kernel_seconds, stream
from autopar.ir.layout import ByExpert, Split, TensorType, TokensStay, imbalance_of
from autopar.rules.remembered import remembered
from autopar.sharding.candidates import BY_EXPERT, Candidates, candidates
from autopar.sharding.dims import Operator
from autopar.sharding.lowered.cost import lowered_cost
from autopar.sharding.redistribute.moves import Machine

Floats = NDArray[np.float64]


Product = tuple[str, str, str, str]
"""Letters of an operator that is a batch of matrix products: rows and columns of the result, depth, batch."""


def operator_work(operator: Operator, chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...] = ()) -> Work:
    """Work of the operator's own kernel under each candidate, on one device; all zero for a view.

    Args:
        operator: the bound operator.
        chosen: its candidates.
        sizes: of the mesh axes.
        load: of experts, see `autopar.ir.layout.imbalance_of`.
    """
    count = len(chosen.choice)
    if operator.rule.view:
        return stream(np.zeros(count))
    moved, parts, most = _moved(operator, chosen, sizes, load), _parts(chosen, sizes), _imbalance(chosen, sizes, load)
    if operator.rule.between and operator.fused is None and not any(t.drawn for t in operator.inputs):
        # Where tokens stay, what rows are added up from is whole on every device.
        whole = _owners(chosen, sizes, BY_EXPERT[TokensStay]) if operator.rule.positions else 1.0
        moved = moved + operator.rule.between / _product_of(parts, operator.rule.letters, count) * whole
    # The work is shared by as many devices as split any letter; along a replicated axis all do the same.
    flops = operator.rule.flops / _product_of(parts, operator.rule.letters, count) * most
    # Kernels of small or thin products are slower than their operations say: the cost model wants their shape.
    shape, rate = [np.zeros(count)] * 4, np.ones(count)
    found, grouped = product_letters(operator), grouped_letters(operator)
    if found is not None:
        length = _letter_sizes(operator)
        shape = [math.prod(length[c] for c in letters) / _product_of(parts, letters, count) for letters in found]
        rate = np.where(shape[3] > 1, BATCHED, 1.0)
    elif grouped is not None:
        shape = _grouped_shape(operator, grouped, chosen, sizes, load)
    rows, columns, depth, batch = shape
    launches = np.where((moved > 0) | (flops > 0), 1.0, 0.0)
    if operator.fused is not None and not operator.fused.launches:
        launches = np.zeros(count)
    return Work(flops, moved, rows, columns, depth, batch, rate, launches)


def copies_work(
    operator: Operator, chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...] = ()
) -> list[Work]:
    """Copies of arguments that have not the strides that the kernel asks for: read once and written once, each."""
    return [stream(2 * _bytes(operator.inputs[i], "inputs", i, chosen, sizes, load)) for i in operator.copied]


def emitted_kernels(operator: Operator, strategy: tuple[str, ...], machine: Machine) -> Work:
    """All kernels that are emitted for an operator under one strategy name an axis: its own, or its lowering's."""
    one = candidates(operator, machine.sizes, allowed=[[n] for n in strategy])
    lowered = lowered_cost(operator, strategy, machine)
    own = operator_work(operator, one, machine.sizes, machine.load) if lowered is None else lowered.kernels
    return Work.join([own, *copies_work(operator, one, machine.sizes, machine.load)])


def arithmetic_dtype(operator: Operator, device: Device) -> str:
    """The dtype at whose rate the operator computes."""
    if operator.rule.rate:
        # Where no kernel takes them, operands are widened first, at the least to float32.
        wide = ("float32", "float64")[operator.outputs[0] is not None and operator.outputs[0].dtype == "float64"]
        return operator.rule.rate if operator.rule.rate in device.flops else wide
    types = (t.dtype for t in (*operator.outputs, *operator.inputs) if t is not None)
    return next((dtype for dtype in types if dtype in device.flops), "float32")


@remembered(4096)
def product_letters(operator: Operator) -> Product | None:
    """How the operator is a matrix product; None if it is none."""
    rule = operator.rule
    # Products of float8 values take two scales besides.
    count = 2 if not rule.rate else 4
    if not rule.flops or not rule.reduce or len(rule.inputs) != count or len(operator.outputs) != 1:
        return None
    if any(len(dim) != 1 for tensor in (*rule.inputs[:2], *rule.outputs) for dim in tensor or ()):
        return None
    a, b, out = ({c for dim in tensor or () for c in dim} for tensor in (*rule.inputs[:2], *rule.outputs))

    def named(group: set[str]) -> str:
        return "".join(c for c in rule.letters if c in group)

    found = named(a & out - b), named(b & out - a), named((a & b) - out), named(a & b & out)
    length = _letter_sizes(operator)
    # Where the rule counts other operations than this product has, the operator does something else.
    multiplied = 2.0 * math.prod(length[c] for c in "".join(found))
    return found if multiplied == rule.flops else None


@remembered(4096)
def grouped_letters(operator: Operator) -> Product | None:
    """How the operator is a product for each group of rows, with the groups as its batch; None if it is none.

    One of its letters is ragged: counts say how many of it each group has.
    """
    rule = operator.rule
    if not rule.flops or len(rule.counts) != 1 or len(rule.inputs) < 3:
        return None
    ((ragged, (counts, *_)),) = rule.counts.items()
    (group,) = rule.inputs[counts][0]
    a, b = ({c for dim in tensor for c in dim} - {group} for tensor in rule.inputs[:2])
    # Rows and weights share what is summed over; of the gradient of weights that is the ragged letter.
    depth = a & b
    if len(a - depth) != 1 or len(b - depth) != 1 or len(depth) != 1 or ragged not in a | b:
        return None
    return (*a - depth, *b - depth, *depth, group)  # type: ignore[return-value]


def _grouped_shape(
    operator: Operator, letters: Product, chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...]
) -> list[Floats]:
    """Rows, columns, depth and number of the products of an operator for groups of rows, the mean of its groups.

    A group has as many rows whether devices split the experts or not; where they split tokens, it has the fewer. The
    device whose experts have most of the rows has larger groups.
    """
    count, length, parts = len(chosen.choice), _letter_sizes(operator), _parts(chosen, sizes)
    owners = _owners(chosen, sizes)
    (ragged,), group = operator.rule.counts, letters[3]
    groups = length[group] / owners
    found = []
    for c in letters[:3]:
        size = length[c] / _product_of(parts, c, count)
        if c == ragged:
            # Groups end anywhere: kernels take whole vectors of rows, and mask the last ones.
            size = ALIGNED * np.ceil(size / groups * _imbalance(chosen, sizes, load) / ALIGNED)
        found.append(size)
    # Both gradients in one kernel count as twice as many products.
    products = operator.rule.flops / (2.0 * math.prod(length[c] for c in letters[:3]))
    return [*found, groups * products]


def _owners(chosen: Candidates, sizes: tuple[int, ...], kinds: str = "".join(BY_EXPERT.values())) -> Floats:
    """Among how many devices each candidate splits the experts, by strategies whose names end so."""
    owned = np.array([s.owned > 0 and s.name[-1] in kinds for s in chosen.strategies])
    return np.asarray(np.where(owned[chosen.choice], np.array(sizes), 1).prod(axis=1), dtype=np.float64)


def _imbalance(chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...]) -> Floats:
    """How much more than the mean the device has to do that has most, under each candidate."""
    return np.array([imbalance_of(load, int(n)) for n in _owners(chosen, sizes)], dtype=np.float64)


def _letter_sizes(operator: Operator) -> dict[str, int]:
    """Global size of each letter that is a dim by itself."""
    tensors = zip((*operator.rule.inputs, *operator.rule.outputs), (*operator.inputs, *operator.outputs), strict=False)
    return {
        dim[0]: size
        for dims, type_ in tensors
        if dims is not None and type_ is not None
        for dim, size in zip(dims, type_.shape, strict=True)
        if len(dim) == 1
    }


def _parts(chosen: Candidates, sizes: tuple[int, ...]) -> dict[str, Floats]:
    """Into how many parts each candidate cuts each letter that a strategy can split."""
    # Of letters that are split together a device has a part of the first, and all of the others, one after another.
    letter = [s.factor[0][0] if s.factor is not None else "" for s in chosen.strategies]
    found = {}
    for c in dict.fromkeys(x for x in letter if x):
        uses = np.array([x == c for x in letter])
        found[c] = np.where(uses[chosen.choice], np.array(sizes), 1).prod(axis=1).astype(np.float64)
    return found


def _product_of(parts: dict[str, Floats], letters: str | tuple[str, ...], count: int) -> Floats:
    chosen = [parts[c] for c in letters if c in parts]
    return np.asarray(np.prod(chosen or [np.ones(count)], axis=0), dtype=np.float64)


def _moved(operator: Operator, chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...]) -> Floats:
    total = np.zeros(len(chosen.choice))
    fused = operator.fused
    for side, types, moved in (
        ("inputs", operator.inputs, None if fused is None else fused.reads),
        ("outputs", operator.outputs, None if fused is None else fused.writes),
    ):
        for i, type_ in enumerate(types):
            if type_ is not None and (moved is None or i in moved):
                total += _bytes(type_, side, i, chosen, sizes, load)
    return total


def _bytes(
    type_: TensorType, side: str, i: int, chosen: Candidates, sizes: tuple[int, ...], load: tuple[float, ...]
) -> Floats:
    """Bytes of a tensor of an operator on one device, under each candidate."""
    placed = [getattr(s, side)[i] for s in chosen.strategies]
    split = np.array([isinstance(p, Split) for p in placed])
    parts = np.where(split[chosen.choice], np.array(sizes), 1).prod(axis=1)
    found = np.asarray(type_.bytes / parts, dtype=np.float64)
    # Rows are more on some devices than on others; the experts' weights are not.
    return found * _imbalance(chosen, sizes, load) if any(isinstance(p, ByExpert) for p in placed) else found


def operator_seconds(operator: Operator, chosen: Candidates, machine: Machine) -> Floats:
    """Seconds of each candidate of one operator: all that is emitted for it, a lowering's collectives included."""
    dtype, device = arithmetic_dtype(operator, machine.device), machine.device
    seconds = kernel_seconds(operator_work(operator, chosen, machine.sizes, machine.load), dtype, device)
    for i in _lowered(operator, chosen) if operator.rule.lower else ():
        found = lowered_cost(operator, chosen.names(i), machine)
        if found is not None:
            seconds[i] = found.seconds(dtype, machine)
    for copies in copies_work(operator, chosen, machine.sizes, machine.load):
        seconds = seconds + kernel_seconds(copies, dtype, device)
    return seconds


def _lowered(operator: Operator, chosen: Candidates) -> list[int]:
    """Numbers of the candidates that split a letter with a lowering."""
    lowered = np.array([s.factor is not None and s.factor[0] in operator.rule.lower for s in chosen.strategies])
    return [int(i) for i in np.flatnonzero(lowered[chosen.choice].any(axis=1))]
