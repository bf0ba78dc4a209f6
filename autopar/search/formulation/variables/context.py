"""`BuildContext`: what variables are built from, and the facts about a program that several of them depend on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from torch import fx

from autopar.ir.graph import Value, is_backward, producer
from autopar.ir.program import Program
from autopar.search.formulation.memory_model import MemoryModel, block_boundary_activations, saved_for_backward
from autopar.search.formulation.pins import Restrictions
from autopar.search.formulation.variables.variable import Floats, Variable
from autopar.search.overlap.weights import Weights
from autopar.sharding.dims import Dims
from autopar.sharding.factor_kinds import from_parameters
from autopar.sharding.layer_classes import LayerClasses
from autopar.sharding.redistribute import Tables


@dataclass(frozen=True, eq=False)
class BuildContext:
    """What the variables of a layout problem are built from.

    Attributes:
        program: the canonical program.
        dims: its dimension analysis.
        classes: which nodes share a decision.
        tables: redistribution costs.
        memory: what counts as memory.
        restrictions: what is decided already.
        weights: prices of seconds by where they are spent, if collectives overlap kernels.
    """

    program: Program
    dims: Dims
    classes: LayerClasses
    tables: Tables
    memory: MemoryModel
    restrictions: Restrictions
    weights: Weights | None = None

    def kernel_prices(self, node: fx.Node) -> tuple[float, float, float]:
        """Price of a second of an operator's kernels where it first runs, is recomputed, or is hoisted."""
        return (1.0, 1.0, 1.0) if self.weights is None else self.weights.of_kernels(node)

    def move_prices(self, key: str, out: int, reader: str = "") -> Floats:
        """``[4, 2 + 3 axes]``: prices of a second of a move, see `autopar.search.overlap.weights.Weights.of_moves`.

        Rows: by when it is made, as `Variable.reads`.

        Args:
            key: of the class whose values are moved.
            out: which of its outputs.
            reader: the class that reads them, if it is the only one.
        """
        axes = len(self.sizes)
        if self.weights is None:
            return np.array([[1.0], [1.0], [2.0], [1.0]]) * np.ones(2 + 3 * axes)
        readers = self.classes.members.get(reader, (None,))
        first, second, once = self.weights.of_moves((self.classes.members[key][0], out), axes, readers[0])
        return np.array([first, second, first + second, once])

    def chunks(self, key: str, out: int) -> frozenset[str]:
        """Kinds of collectives of a class's values that chunks of products may hide."""
        if self.weights is None or not self.weights.chunks:
            return frozenset()
        return self.weights.step.regions.chunkable.get((self.classes.members[key][0], out), frozenset())

    @property
    def sizes(self) -> tuple[int, ...]:
        """Size of each mesh axis."""
        return self.tables.machine.sizes

    @cached_property
    def reads(self) -> defaultdict[str, dict[int, bool]]:
        """Of each class, the outputs that anybody reads, and whether the backward pass itself is among the readers."""
        found: defaultdict[str, dict[int, bool]] = defaultdict(dict)
        for (key, out), users in self.classes.uses.items():
            found[key][out] = any(self.is_backward_class(user) for user, _ in users)
        return found

    @cached_property
    def module_outputs(self) -> frozenset[fx.Node]:
        """Operators whose results the model returns: the caller holds those anyway."""
        outputs = self.program.output_values[: self.program.forward_outputs]
        return frozenset(producer(v)[0] for v in outputs if v is not None)

    @cached_property
    def regatherable(self) -> frozenset[fx.Node]:
        """Values that depend on parameters alone, where only these may be recomputed."""
        return frozenset(from_parameters(self.program)) if self.memory.recompute == "regather" else frozenset()

    @cached_property
    def block_boundaries(self) -> frozenset[fx.Node]:
        """Activations that are saved even where anything else may be recomputed."""
        if self.memory.recompute != "search":
            return frozenset()
        return block_boundary_activations(self.program, self.classes)

    @cached_property
    def saved_for_backward(self) -> frozenset[Value]:
        """Values that count as saved where nothing about saving is decided."""
        if not self.memory.activations or self.memory.decides_saving:
            return frozenset()
        return saved_for_backward(self.program, self.dims)

    @cached_property
    def differentiable(self) -> frozenset[str]:
        """Classes of batch tensors whose gradients the model returns."""
        inputs, wanted = zip(self.program.placeholders, self.program.inputs, strict=True), self.program.input_gradients
        return frozenset(self.classes.key[n] for n, i in inputs if i.kind == "batch" and i.name in wanted)

    def is_backward_class(self, key: str) -> bool:
        """Whether a class of users belongs to the backward pass."""
        # A result has no members; the members of a class are all of one pass.
        members = self.classes.members.get(key)
        return members is not None and members[0] in self.program.sources and is_backward(members[0])

    def is_view(self, node: fx.Node) -> bool:
        """Whether a node is an operator whose result is a view of its argument."""
        return node in self.dims.operators and self.dims.operators[node].rule.view

    def has_consumer_layout(self, key: str, out: int) -> bool:
        """Whether the values of a class have a layout of their own for all their readers."""
        users, node = self.classes.uses[key, out], self.classes.members[key][0]
        name = ("consumer", f"{key} {out}")
        # One reader takes the value as it needs it; several share a moved copy.
        forced = name in self.restrictions.placements or name in self.restrictions.layouts
        several = len(users) > 1 or max(users.values()) > self.classes.count[key]
        return forced or several or (node in self.program.microbatch_invariant and self._read_in_microbatches(users))

    def _read_in_microbatches(self, users: Mapping[tuple[str, int], int]) -> bool:
        """Whether the forward pass of each microbatch is a reader, so that all may share the moved value."""
        invariant = self.program.microbatch_invariant
        nodes = (members[0] for user, _ in users if (members := self.classes.members.get(user, ())))
        return any(n in self.program.sources and n not in invariant and not is_backward(n) for n in nodes)

    def bytes(self, variable: Variable, port: str, i: int) -> Floats:
        """Bytes of a tensor under each label, all members together."""
        type_ = variable.types[port, i]
        parts = self.tables.of(type_).parts[variable.ports[port, i]]
        return type_.bytes * variable.count / parts

    def most_saved(self, key: str, out: int, *, consumer: bool = False) -> float:
        """An upper limit to the bytes that a class counts for what it saves, at the program point of the constraint.

        Where a saved value is no longer live, it counts as its substitute in the smallest layout does.
        """
        point = self.memory.point
        if point is None:
            return np.inf
        substitutes = point.substitutes(key, out, self.classes.members[key], consumer=consumer)
        if substitutes is None:
            return 0.0
        types = [self.dims.types[value] for value in substitutes]
        least = (t.bytes / self.tables.of(t).parts.max() for t in types)
        # By the smallest substitute of any member, so that this limit holds for all of them.
        return self.classes.count[key] * min(least, default=np.inf)

    def share_of(self, variable: Variable) -> float:
        """The share of a saved value's bytes that counts, as a pipeline stage holds it."""
        return self.memory.state_share if variable.invariant else self.memory.activation_share
