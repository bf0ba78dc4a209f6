"""The oracle: a rule is true if sharding, running and reassembling gives what the operator gives.

Every strategy of a rule, alone and two at a time on a mesh of two axes, is run on real tensors: inputs are cut (or
written as a sum of random terms), each rank runs the operator (or its lowering) on its part with local sizes, and the
outputs are put together and compared with the operator on the whole.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autopar.errors import InvalidRuleError
from autopar.ir.ops.balanced_attention import swapped
from autopar.ir.ops.sequence.send_block import MIRROR, NEXT, PREVIOUS, sent
from autopar.rules.oracle.call import RuleCall, Tensors, Tree, compare, map_tensors, outputs_of, wide
from autopar.rules.rule import Dims, Rule, entries

Rank = tuple[int, ...]

TIMEOUT = 60.0
"""Seconds that a rank waits for the others in a lowering's reduction."""

_Tolerance = tuple[str, float]


AxisStrategy = str | tuple[int, ...]
"""What one mesh axis does: the letter that it splits (or letters), or the inputs in which `Partial` passes through."""


def check_rule(
    target: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    parts: int = 2,
    rtol: float = 1e-9,
    pairs: bool = True,
    rule: Rule | None = None,
    run: Callable[..., Any] | None = None,
) -> list[str]:
    """Prove every strategy of the operator's rule on one call; returns them as text: ``"m: S,R->S"``.

    Args:
        target: an operator overload.
        args: its positional arguments, floating tensors in float64.
        kwargs: its keyword arguments.
        parts: how many devices an axis has.
        rtol: largest difference, relative to the largest entry of the tensor (at least 1).
        pairs: also check two strategies at once, on a mesh of two axes.
        rule: check this rule instead of the registered one.
        run: computes the operator, where it has no kernel itself.

    Raises:
        InvalidRuleError: the equation does not fit the shapes, or a strategy is false.
    """
    call = _SplitCall.make(target, args, kwargs, rule, run)
    proven = []
    for count in (1, 2) if pairs else (1,):
        # With replacement: one letter over both axes of the mesh, too, whose blocks nest.
        for chosen in itertools.combinations_with_replacement(_strategies(call.rule), count):
            if not call.exists(chosen, parts):
                continue
            try:
                call.check(chosen, parts, rtol)
            except InvalidRuleError:
                raise
            except Exception as error:
                where = f"{target} ({call.rule.equation}), {_join(chosen)}"
                raise InvalidRuleError(f"{where}: the local run fails: {error}") from error
            proven.append(f"{_join(chosen)}: {call.describe(chosen)}")
    return proven


def _join(chosen: Sequence[AxisStrategy]) -> str:
    return " x ".join(s if isinstance(s, str) else f"linear{list(s)}" for s in chosen)


def _split(chosen: Sequence[AxisStrategy], parts: int) -> dict[str, int]:
    """Into how many parts each letter is cut."""
    letters = [c for s in chosen if isinstance(s, str) for c in s]
    return {c: parts ** letters.count(c) for c in letters}


def _cut(chosen: Sequence[AxisStrategy], parts: int, dims: Dims) -> dict[str, int]:
    """The same in one tensor: of letters that are split together the first one that it has."""
    return _split([_own_letter(s, dims) for s in chosen if isinstance(s, str)], parts)


def _strategies(rule: Rule) -> list[AxisStrategy]:
    """Those that one call can prove: not along letters of which each device has an order of its own."""
    skipped = (*rule.blocked, *rule.routed, *rule.counts)
    return [*(c for c in rule.letters if c not in skipped), *rule.joint, *rule.linear]


class _SplitCall(RuleCall):
    """A call, split over mesh axes."""

    def placement(self, strategy: AxisStrategy, output: int) -> str | None:
        """``S``, ``P`` or ``R``: how an output is placed along an axis; None if the strategy does not exist."""
        dims = self.rule.outputs[output]
        if not isinstance(strategy, str):
            return "P"
        if _own_letter(strategy, dims or ()):
            return "S"
        if any(c in self.rule.reduce for c in strategy):
            return "P"
        return "R" if strategy in self.rule.keep else None

    def input_placement(self, strategy: AxisStrategy, i: int) -> str:
        """``S``, ``P`` or ``R``: how an input is placed along an axis."""
        if not isinstance(strategy, str):
            return "P" if i in strategy else "R"
        return "S" if _own_letter(strategy, self.rule.inputs[i]) else "R"

    def exists(self, chosen: Sequence[AxisStrategy], parts: int) -> bool:
        """Whether sizes divide as kernels need them, every output has a layout, and one lowering at most is needed."""
        present = [j for j, t in enumerate(self.outputs) if t is not None]
        split = _split(chosen, parts)
        divided = all(self.sizes[c] % (n * self.rule.multiples.get(c, 1)) == 0 for c, n in split.items())
        lowered = [s for s in chosen if isinstance(s, str) and s in self.rule.lower]
        single = len({id(self.rule.lower[s]) for s in lowered}) <= 1
        taken = all(
            self.rule.lower[s].takes(self.sizes[c] // parts ** lowered.count(s), lowered.count(s))
            for s in lowered for c in s
        )  # fmt: skip
        return divided and taken and single and all(self.placement(s, j) for s in chosen for j in present)

    def describe(self, chosen: Sequence[AxisStrategy]) -> str:
        """``S,R->S``, with one letter for each axis: ``SR,RS->SP``."""
        left = ("".join(self.input_placement(s, i) for s in chosen) for i in range(len(self.inputs)))
        present = [j for j, t in enumerate(self.outputs) if t is not None]
        right = ("".join(self.placement(s, j) or "" for s in chosen) for j in present)
        return f"{','.join(left)}->{','.join(right)}"

    def check(self, chosen: Sequence[AxisStrategy], parts: int, rtol: float) -> None:
        """Shard, run, reassemble, compare."""
        ranks = list(itertools.product(range(parts), repeat=len(chosen)))
        scattered = [self._scatter(i, chosen, parts) for i in range(len(self.inputs))]
        split = dict.fromkeys(self.rule.letters, 1) | _split(chosen, parts)
        local = {r: self._arguments([s[r] for s in scattered], split) for r in ranks}
        results = self._run(chosen, parts, local)
        for j, expected in enumerate(self.outputs):
            if expected is None:
                continue
            pieces = {r: outputs[j] for r, outputs in results.items()}
            where = f"{self.target} ({self.rule.equation}), {_join(chosen)}: {self.describe(chosen)}, output {j}"
            actual = self._gather(j, chosen, parts, pieces, (where, rtol), ())
            if self.has_values:
                summed = any(self.placement(s, j) == "P" for s in chosen)
                # Large terms that cancel: their rounding errors are as large as theirs, not as the sum's.
                rounded = max(0.0 if t is None else _largest(t) for t in pieces.values()) if summed else 0.0
                _compare(actual.reshape(expected.shape), expected, rtol, where, rounded)

    def _local_sizes(self, split: Mapping[str, int]) -> dict[str, int]:
        return {c: n // split.get(c, 1) for c, n in self.sizes.items()}

    def _scatter(self, i: int, chosen: Sequence[AxisStrategy], parts: int) -> dict[Rank, torch.Tensor]:
        """The local tensor of input ``i`` on every rank."""
        dims, x = self.rule.inputs[i], self.inputs[i]
        # The same terms in every run, others for each input.
        generator = torch.Generator().manual_seed(0x5EED + i)
        # A dim for each letter: cutting one is then cutting a dim, whatever its position in a group.
        blocks: dict[Rank, torch.Tensor] = {(): x.reshape(_fine(dims, self.sizes, tuple(x.shape)))}
        for strategy in chosen:
            kind = self.input_placement(strategy, i)
            whole, blocks = blocks, {}
            for rank, block in whole.items():
                cut: Sequence[torch.Tensor] = (block,) * parts
                if kind == "S":
                    cut = block.chunk(parts, _position(dims, _own_letter(str(strategy), dims)))
                if kind == "P":
                    # Random terms, not equal shares: a nonlinear operator must not pass by symmetry.
                    cut = _terms(block, parts, generator)
                blocks |= {(*rank, k): piece for k, piece in enumerate(cut)}
        # Back to one dim for each group, as the operator knows them.
        shape = _coarse(dims, self.sizes, _cut(chosen, parts, dims), tuple(x.shape))
        return {rank: _alone(block.reshape(shape)) for rank, block in blocks.items()}

    def _arguments(self, tensors: Sequence[torch.Tensor], split: Mapping[str, int]) -> Tree:
        """The call's arguments on one rank: local tensors, local sizes."""
        remaining = iter(tensors)
        # In order, as the rule's equation names them.
        args, kwargs = map_tensors(self.arguments, lambda _: next(remaining))
        values: dict[int | str, Any] = dict([*enumerate(args), *kwargs.items()])
        for key, letters in self.rule.scaled.items():
            if key in values:
                values[key] = entries(values[key], letters, lambda n, own: _scale(n, math.prod(split[c] for c in own)))
        first, whole = self.rule.outputs[0], self.outputs[0]
        for position in self.rule.shapes:
            if first is not None and whole is not None:
                values[position] = list(_coarse(first, self.sizes, split, tuple(whole.shape)))
        return tuple(values[i] for i in range(len(args))), {k: values[k] for k in kwargs}

    def _run(self, chosen: Sequence[AxisStrategy], parts: int, local: Mapping[Rank, Tree]) -> dict[Rank, Tensors]:
        """Each rank's outputs; with a lowering all ranks run in lock step, one thread each."""
        lowered = [k for k, s in enumerate(chosen) if isinstance(s, str) and s in self.rule.lower]
        if not lowered:
            return {r: outputs_of(self.rule, self.run(*a, **k)) for r, (a, k) in local.items()}
        build = self.rule.lower[str(chosen[lowered[0]])].build
        local_sizes = self._local_sizes(_split(chosen, parts))
        count = parts ** len(lowered)
        # Ranks that differ only along the lowered axes reduce with one another.
        groups: dict[Rank, tuple[threading.Barrier, dict[int, torch.Tensor]]] = {}
        contexts = {}
        for r in local:
            others = tuple(i for k, i in enumerate(r) if k not in lowered)
            if others not in groups:
                groups[others] = threading.Barrier(count, timeout=TIMEOUT), {}
            index = 0
            for k in lowered:
                index = index * parts + r[k]
            contexts[r] = OracleContext(index, count, len(lowered), *groups[others], local_sizes, self.sizes)
        return {r: outputs_of(self.rule, y) for r, y in _lock_step(build, contexts, local).items()}

    def _gather(
        self,
        j: int,
        chosen: Sequence[AxisStrategy],
        parts: int,
        pieces: Mapping[Rank, Any],
        tolerance: _Tolerance,
        rank: Rank,
    ) -> torch.Tensor:
        """Output ``j`` put together over the axes from number ``len(rank)`` on, letter by letter."""
        dims, expected = self.rule.outputs[j], self.outputs[j]
        assert dims is not None and expected is not None
        where, rtol = tolerance
        # One rank's output: its shape must be what the layout says.
        if len(rank) == len(chosen):
            piece: torch.Tensor | None = pieces[rank]
            split = _cut(chosen, parts, dims)
            shape = _coarse(dims, self.sizes, split, tuple(expected.shape))
            if piece is None or tuple(piece.shape) != shape or piece.dtype != expected.dtype:
                got = None if piece is None else (tuple(piece.shape), piece.dtype)
                raise InvalidRuleError(f"{where}: local output is {got}, expected {(shape, expected.dtype)}")
            return piece.reshape(_fine(dims, self._local_sizes(split), shape))
        strategy = chosen[len(rank)]
        blocks = [self._gather(j, chosen, parts, pieces, tolerance, (*rank, k)) for k in range(parts)]
        kind = self.placement(strategy, j)
        if kind == "S":
            return torch.cat(blocks, _position(dims, _own_letter(str(strategy), dims)))
        # Replicas: complete on every device, so all must be equal.
        if kind == "R":
            for other in blocks[1:]:
                if self.has_values:
                    _compare(other, blocks[0], rtol, f"{where}, replicas")
            return blocks[0]
        if expected.dtype == torch.bool:
            raise InvalidRuleError(f"{where}: a boolean output cannot be partial")
        return torch.stack(blocks).sum(0)


@dataclass(frozen=True)
class OracleContext:
    """What a `Lowering` sees of its device, for ranks that are threads.

    Attributes:
        index: this device's number along the split.
        parts: how many devices share it.
        axis_count: over how many axes.
        barrier: at which these wait for one another.
        slots: what each of them reduces, by its number; they share one dict.
        local: sizes of letters on this device.
        whole: sizes of letters in the whole.
    """

    index: int
    parts: int
    axis_count: int
    barrier: threading.Barrier
    slots: dict[int, torch.Tensor]
    local: Mapping[str, int]
    whole: Mapping[str, int]

    @property
    def steps(self) -> int:
        """Steps of a ring: one for each device."""
        return self.parts

    def each_step(self) -> Iterable[int]:
        """Their numbers."""
        return range(self.parts)

    def axis_index(self) -> int:
        """This device's number along the split."""
        return self.index

    def local_size(self, letter: str) -> int:
        """Size of a letter on this device."""
        return self.local[letter]

    def global_size(self, letter: str) -> int:
        """Size of a letter in the whole."""
        return self.whole[letter]

    def all_reduce(self, x: torch.Tensor, op: str, joined: bool = False) -> torch.Tensor:
        """Sum or maximum over the devices of the split."""
        stacked = torch.stack(self._of_all(x))
        return {"sum": lambda: stacked.sum(0), "max": lambda: stacked.amax(0)}[op]()

    def swap_blocks(self, blocks: torch.Tensor, back: bool) -> torch.Tensor:
        """The two blocks that balance, or back."""
        return swapped(self._of_all(blocks), back)[self.index]

    def shift(self, x: torch.Tensor, back: bool = False) -> torch.Tensor:
        """What the device before this one has, or the one after it; around the ends."""
        return sent(self._of_all(x), PREVIOUS if back else NEXT)[self.index]

    def start_shift(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin a shift."""
        came = self.shift(x)
        return lambda: came

    def mirror(self, x: torch.Tensor) -> torch.Tensor:
        """What the device opposite has."""
        return sent(self._of_all(x), MIRROR)[self.index]

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """What each device has, ``[parts, ...]``."""
        return torch.stack(self._of_all(x))

    def _of_all(self, x: torch.Tensor) -> list[torch.Tensor]:
        self.slots[self.index] = x
        self.barrier.wait()
        found = [self.slots[i] for i in range(self.parts)]
        # Nobody writes the next term before all have read this one.
        self.barrier.wait()
        return found


def _lock_step(
    build: Callable[..., Any], contexts: Mapping[Rank, OracleContext], local: Mapping[Rank, Tree]
) -> dict[Rank, Any]:
    """Run a lowering on all ranks at once, one thread each; raises the first error of any."""
    results: dict[Rank, Any] = {}
    errors: list[Exception] = []

    def run(rank: Rank) -> None:
        args, kwargs = local[rank]
        try:
            results[rank] = build(contexts[rank], *args, **kwargs)
        except Exception as error:
            errors.append(error)
            # The others wait for this rank, and would do so until the timeout.
            for context in contexts.values():
                context.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in contexts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        # The others' broken barriers follow from the first error.
        raise next((e for e in errors if not isinstance(e, threading.BrokenBarrierError)), errors[0])
    return results


def _letters(dims: Dims, shape: tuple[int, ...]) -> Iterator[tuple[str, int]]:
    """Letters in order, with ``""`` and its size for a dim without."""
    for dim, size in zip(dims, shape, strict=True):
        yield from ((c, 0) for c in dim) if dim else [("", size)]


def _fine(dims: Dims, sizes: Mapping[str, int], shape: tuple[int, ...]) -> list[int]:
    """The shape with a dim of its own for every letter."""
    return [sizes[c] if c else n for c, n in _letters(dims, shape)]


def _coarse(dims: Dims, sizes: Mapping[str, int], split: Mapping[str, int], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The local shape."""
    return tuple(
        math.prod(sizes[c] // split.get(c, 1) for c in dim) if dim else n for dim, n in zip(dims, shape, strict=True)
    )


def _own_letter(letters: str, dims: Dims) -> str:
    """Which of the letters of a strategy a tensor has; empty if none."""
    return next((c for c in letters if any(c in dim for dim in dims)), "")


def _position(dims: Dims, letter: str) -> int:
    """Where a letter's own dim is in the fine shape."""
    return [c for c, _ in _letters(dims, (0,) * len(dims))].index(letter)


def _alone(block: torch.Tensor) -> torch.Tensor:
    """A copy that shares no storage with other parts; what a kernel reads past its end is not a number."""
    if not (block.is_floating_point() or block.is_complex()):
        return block.clone(memory_format=torch.contiguous_format)
    room = block.new_full((2 * block.numel() + 1,), math.nan)
    own = room[: block.numel()].view(block.shape)
    return own.copy_(block)


def _terms(x: torch.Tensor, parts: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Random tensors that add up to ``x``."""
    if x.dtype == torch.bool:
        raise InvalidRuleError("a boolean input cannot be partial; leave it out of linear")
    kind = x.dtype if x.dtype.is_floating_point or x.dtype.is_complex else torch.float64
    # Larger than the tensor's own entries: whoever adds only some of them is seen.
    terms = [(9 * torch.randn(x.shape, dtype=kind, generator=generator)).to(x.dtype) for _ in range(parts - 1)]
    return [*terms, x - sum(terms)]


def _scale(value: Any, parts: int) -> Any:
    """A local number of elements."""
    if value is None:
        return None
    if value % parts:
        raise InvalidRuleError(f"a size argument of {value} cannot be cut into {parts} parts")
    return value // parts


def _largest(x: torch.Tensor) -> float:
    """The largest magnitude among finite entries; 0 where there are none."""
    whole = wide(x)
    finite = whole[whole.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _compare(actual: torch.Tensor, expected: torch.Tensor, rtol: float, where: str, rounded: float = 0.0) -> None:
    """Compare relative to the largest entry: where terms cancel, small entries carry the rounding of large ones.

    ``rounded``: the largest of the terms, which may be larger than their sum.
    """
    if expected.dtype.is_floating_point or expected.dtype.is_complex:
        # Results in half precision cannot be closer than its spacing.
        rtol = max(rtol, 16 * torch.finfo(expected.dtype).eps)
    compare(actual, expected, where, rtol=0.0, atol=rtol * max(1.0, rounded, _largest(expected)))
