"""Discovery: the rule of an operator that has none, found by running it on small random tensors.

Every dim, and every choice of equally long dims of several tensors, is cut in two; the shapes of what the operator
gives on one half say where the outputs are cut. What looks like a letter must pass the oracle on several
draws, at two sizes and at the real ones, both in consecutive and in alternating parts. What cannot be run is
replicated, which is always right.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.fx.node import map_aggregate

from autopar._torch_compat import OpOverload
from autopar.errors import InvalidRuleError, MissingRuleError
from autopar.rules.discover.isolate import CrashError, isolated
from autopar.rules.discover.trials import (
    LARGEST_RATIO,
    LEAST,
    DiscoveryCall,
    Sizes,
    Tree,
    Trial,
    capped,
    pattern,
    run,
    size_pairs,
    trials,
)
from autopar.rules.discover.write import Findings, JointDims, TensorDim, write_rule
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Rule, Spec

logger = logging.getLogger("autopar")

MOST_CHOICES = 512
"""Choices of dims that are cut together; an operator with more of them is replicated along the rest."""

SECONDS = 300.0
"""After which the search for a rule is given up; most take less than one."""


@dataclass(frozen=True)
class Discovery:
    """A rule that was discovered in this process."""

    target: str
    rule: Rule
    samples: int
    reason: str


_known: dict[Any, Findings] = {}
_discovered: dict[Any, Discovery] = {}


def discovered() -> tuple[Discovery, ...]:
    """Every rule that was discovered in this process, in order."""
    return tuple(_discovered.values())


def discover(call: DiscoveryCall) -> Rule:
    """Find the rule of an operator without one; the same in every process.

    Raises:
        MissingRuleError: it is random or writes to its arguments.
    """
    # Two caches: of rules by the very call, and of what was found by the pattern of its sizes, so that a longer
    # sequence is not searched again.
    exact = _key(call, {})
    if exact not in _discovered:
        _refuse(call.target)
        key = _key(call, pattern(call))
        findings, confirmed = _findings(call, _known.get(key))
        if not findings.exact:
            _known[key] = findings
        found = Discovery(str(call.target), _rule(call, confirmed), confirmed.samples, confirmed.reason)
        _discovered[exact] = found
        _log(found)
    return _discovered[exact].rule


def _log(found: Discovery) -> None:
    name = found.target.removesuffix(".default")
    if found.reason:
        logger.info("%s is replicated on every device: %s; see docs/rules.md", name, found.reason)
        return
    linear = ",".join(f"({','.join(map(str, s))})" for s in found.rule.linear)
    blocked = f" blocked {found.rule.blocked}" if found.rule.blocked else ""
    linear = f" linear {linear}" if linear else ""
    logger.info('discovered %s: "%s"%s%s on %d samples', name, found.rule.equation, blocked, linear, found.samples)


def _key(call: DiscoveryCall, sizes: Sizes) -> Any:
    """Structure, dtypes and plain arguments, with sizes as ``sizes`` maps them."""

    def text(t: Any) -> str:
        return f"{t.dtype}{[sizes.get(n, n) for n in t.shape]}" if isinstance(t, Spec) else repr(t)

    outputs = tuple(text(t) for t in call.outputs)
    return str(call.target), repr(map_aggregate(call.arguments, text)), outputs, call.device


def _refuse(target: Any) -> None:
    """Replicating is right only for what every device computes alike, from its arguments alone."""
    if not isinstance(target, OpOverload):
        raise MissingRuleError(f"no rule for {target}, which is no operator overload")
    # Every device would draw its own numbers, and a replicated result would not be one.
    if torch.Tag.nondeterministic_seeded in target.tags:
        raise MissingRuleError(f"no rule for {target}; it is random, and rules of such operators are not discovered")
    if target._schema.is_mutable:
        raise MissingRuleError(f"no rule for {target}; it writes to its arguments, such operators are not discovered")
    if "as_strided" in str(target):
        raise MissingRuleError(f"no rule for {target}; it looks at memory, such operators are not discovered")


def _findings(call: DiscoveryCall, known: Findings | None) -> tuple[Findings, Findings]:
    """What holds at any size, and what of it holds at the real ones.

    Parts of tensors are not what a kernel was written for: those of the CPU run in a process of their own, since some
    read and write past the end. What only runs where the model is runs in this one.
    """
    try:
        found: tuple[Findings, Findings] = isolated(_on, "cpu", call, known, seconds=SECONDS)
    except CrashError as e:
        found = (Findings(reason=f"its kernel {e} on parts of its tensors"),) * 2
    else:
        if not found[0].samples and call.device != "cpu":
            found = _on(call.device, call, known)
    return found


def _on(device: str, call: DiscoveryCall, known: Findings | None) -> tuple[Findings, Findings]:
    # An operator may draw without saying so; the user's stream of numbers must not change.
    with torch.random.fork_rng(devices=[]):
        found = known or _find(device, call)
        return found, _confirm(device, call, found)


def _find(device: str, call: DiscoveryCall) -> Findings:
    errors: list[str] = []
    made = _trials(device, call, errors)
    if not made:
        return Findings(reason=f"it cannot be run on small random tensors ({errors[-1] if errors else 'too large'})")
    _check_pure(call.target, made[0])
    shapes = _shape_arguments(call)
    # A constant output passes every check by accident: a clamp that saturates, say.
    floating = [j for j, t in enumerate(made[0].outputs) if t is not None and t.is_floating_point()]
    if any(_constant(made, j) for j in floating):
        return Findings(shapes=shapes, reason="it gives the same number for all random arguments")
    found = Findings(shapes=shapes, exact=all(t.real for t in made))
    for joint in _choices([t.shape for t in call.inputs]):
        used = {p for letter in found.letters for p in letter.inputs}
        # What no trial can cut in two would pass every check.
        even = all(t.inputs[i].shape[d] % 2 == 0 for t in made for i, d in joint)
        if even and used.isdisjoint(joint):
            letter = _letter(call, made, found, joint)
            found = replace(found, letters=(*found.letters, letter)) if letter else found
    # Without letters: linear sets are checked by themselves.
    sets = _operand_sets(call.inputs)
    found = replace(found, linear=tuple(s for s in sets if _holds(call, made, replace(found, letters=(), linear=(s,)))))
    found = _jointly(call, made, found)
    return replace(found, samples=len(made), reason="" if found.letters or found.linear else _UNSPLIT)


_UNSPLIT = "no way to split it was found"


def _trials(device: str, call: DiscoveryCall, errors: list[str]) -> list[Trial]:
    """Calls at two sizes; those whose outputs have the sizes expected of them are preferred."""
    second: list[Trial] = []
    # Double precision first, for the narrow tolerance; some kernels have none.
    for floating in (torch.float64, torch.float32):
        for pair, follow in itertools.product(size_pairs(call), (False, True)):
            each = [
                trials(call, sizes, i, errors, device=device, floating=floating, follow=follow)
                for i, sizes in enumerate(pair)
            ]
            made = [t for ts in each for t in ts]
            if min(map(len, each)) < LEAST or any(len(t.outputs) != len(call.outputs) for t in made):
                continue
            # A size that came out otherwise means that a number among the arguments should have followed, or not.
            if all(_expected(call, t) for t in made):
                return made
            second = second or made
        if second:
            break
    return second


def _expected(call: DiscoveryCall, trial: Trial) -> bool:
    return all(
        (a is None) == (b is None)
        and (a is None or b is None or tuple(b.shape) == tuple(trial.sizes.get(n, n) for n in a.shape))
        for a, b in zip(call.outputs, trial.outputs, strict=True)
    )


def _check_pure(target: Any, trial: Trial) -> None:
    """The same arguments give the same result, and are left as they are."""
    before = [t.clone() for t in trial.inputs]
    second = run(target, trial.arguments, [])
    if any(not torch.equal(a, b) for a, b in zip(before, trial.inputs, strict=True)):
        raise MissingRuleError(f"no rule for {target}; it writes to its arguments, such operators are not discovered")
    pairs = zip(trial.outputs, second or (), strict=False)
    if any(a is not None and b is not None and not torch.equal(a, b) for a, b in pairs):
        raise MissingRuleError(f"no rule for {target}; it is random, and rules of such operators are not discovered")


def _shape_arguments(call: DiscoveryCall) -> tuple[int, ...]:
    first = call.outputs[0] if call.outputs else None
    args = call.arguments[0]
    return tuple(i for i, a in enumerate(args) if first is not None and first.ndim and _is_shape(a, first.shape))


def _is_shape(argument: Any, shape: tuple[int, ...]) -> bool:
    return isinstance(argument, list | tuple) and tuple(argument) == tuple(shape)


def _choices(shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[TensorDim, ...]]:
    """Dims to cut together, one of a tensor at most: equally long ones first, and of many tensors first."""
    sizes = dict.fromkeys(n for shape in shapes for n in shape if n > 1)
    for ratio in (1, LARGEST_RATIO):
        found = dict.fromkeys(joint for size in sizes for joint in _joint_dims(shapes, size, ratio))
        yield from sorted(found, key=lambda joint: -len(joint))


def _joint_dims(shapes: Sequence[tuple[int, ...]], size: int, ratio: int) -> Iterator[tuple[TensorDim, ...]]:
    """Choices of dims that are as long as ``size``, at least one of them, or up to ``ratio`` times as long."""
    options = [
        [None, *((i, d) for d, n in enumerate(shape) if n % size == 0 and 0 < n // size <= ratio)]
        for i, shape in enumerate(shapes)
    ]
    # The first tensors vary fastest: should there be more choices than are tried, these are the operands.
    for choice in itertools.islice(itertools.product(*reversed(options)), MOST_CHOICES):
        joint = tuple(p for p in reversed(choice) if p is not None)
        if any(shapes[i][d] == size for i, d in joint):
            yield joint


def _letter(call: DiscoveryCall, made: list[Trial], found: Findings, joint: tuple[TensorDim, ...]) -> JointDims | None:
    """The letter of dims that are cut together, if there is one."""
    used = {p for letter in found.letters for p in letter.outputs}
    # One half suffices to see where outputs are cut; whether both halves make the whole, the oracle checks.
    for scaled, arguments in _halves(made[0], found, joint):
        outputs = run(call.target, arguments, [])
        cut = None if outputs is None else _cut_dims(outputs, made[0].outputs)
        if cut is None or not used.isdisjoint(cut):
            continue
        # Outputs without the cut are sums over it, or do not depend on it.
        complete = len(cut) == sum(t is not None for t in made[0].outputs)
        for absent in ("",) if complete else ("reduce", "keep"):
            letter = JointDims(joint, cut, absent, scaled)
            if _informative(made, letter) and _holds(call, made, replace(found, letters=(letter,))):
                return letter
    return None


def _halves(trial: Trial, found: Findings, joint: tuple[TensorDim, ...]) -> Iterator[tuple[int | str | None, Tree]]:
    """The first half along some dims; number arguments that may count elements along them are halved in turn."""
    dims_of = dict(joint)
    numbers = iter(range(len(trial.inputs)))

    def half(a: Any) -> Any:
        if not isinstance(a, torch.Tensor):
            return a
        i = next(numbers)
        return a.chunk(2, dims_of[i])[0].clone() if i in dims_of else a

    args, kwargs = map_aggregate(trial.arguments, half)
    size = min(trial.inputs[i].shape[d] for i, d in joint)
    first = trial.outputs[0]
    # An argument that is the output's shape must be halved along with it, and it is not known in which dim.
    for position in found.shapes:
        whole = list(first.shape) if first is not None else []
        for d in range(len(whole)):
            shape = [n // 2 if j == d else n for j, n in enumerate(whole)]
            yield None, ((*args[:position], shape, *args[position + 1 :]), kwargs)
    yield None, (args, kwargs)
    for i, value in enumerate(args):
        if type(value) is int and value == size:
            yield i, ((*args[:i], value // 2, *args[i + 1 :]), kwargs)
    for name, value in kwargs.items():
        if type(value) is int and value == size:
            yield name, (args, {**kwargs, name: value // 2})


def _cut_dims(
    halves: Sequence[torch.Tensor | None], whole: Sequence[torch.Tensor | None]
) -> tuple[TensorDim, ...] | None:
    """The one dim of each output that is half as long; None if a shape changed in another way."""
    found = []
    for j, (a, b) in enumerate(zip(halves, whole, strict=True)):
        if a is None or b is None or a.shape == b.shape:
            continue
        if a.ndim != b.ndim:
            return None
        changed = [d for d, (n, m) in enumerate(zip(a.shape, b.shape, strict=True)) if n != m]
        if len(changed) != 1 or 2 * a.shape[changed[0]] != b.shape[changed[0]]:
            return None
        found.append((j, changed[0]))
    return tuple(found)


def _constant(made: Sequence[Trial], j: int) -> bool:
    """Whether an output is one number in all trials, which any split would seem to leave alone."""
    flat = [t.outputs[j].reshape(-1).to(torch.complex128) for t in made]  # type: ignore[union-attr]
    values = torch.cat(flat)
    return values.numel() == 0 or bool((values == values[0]).all())


def _informative(made: Sequence[Trial], letter: JointDims) -> bool:
    """Outputs without the letter vary."""
    present = {j for j, _ in letter.outputs}
    every = [j for j, t in enumerate(made[0].outputs) if t is not None and j not in present]
    return not any(_constant(made, j) for j in every)


def _operand_sets(inputs: Sequence[Spec]) -> list[tuple[int, ...]]:
    """Floating operands in which an operator may be linear: each, each two, and all."""
    floating = [i for i, t in enumerate(inputs) if t.dtype.is_floating_point or t.dtype.is_complex]
    # Not all subsets: their number is exponential, and sums, products and concatenations are these.
    counts = dict.fromkeys((1, 2, len(floating)))
    return [s for count in counts for s in itertools.combinations(floating, count) if s]


def _holds(call: DiscoveryCall, made: Sequence[Trial], found: Findings, pairs: bool = False) -> bool:
    """Whether the oracle proves the findings on every trial, in consecutive and in alternating parts."""
    # Alternating elements tell a dim that is computed along (a sort, a scan) from one that is free: halves of it may
    # pass.
    for trial, alternating in itertools.product(made, (False, True) if found.letters else (False,)):
        outputs = [None if t is None else tuple(t.shape) for t in trial.outputs]
        try:
            rule = write_rule(found, [tuple(t.shape) for t in trial.inputs], outputs, alternating)
            args, kwargs = trial.arguments
            check_rule(call.target, args, kwargs, rule=rule, pairs=pairs and not alternating)
        except InvalidRuleError:
            return False
    return True


def _jointly(call: DiscoveryCall, made: Sequence[Trial], found: Findings) -> Findings:
    """The findings that also hold together, two at a time on a mesh of two axes."""
    few = made[:1]
    # Letters that are right one at a time need not be together: the mesh splits along several at once.
    if _holds(call, few, found, pairs=True):
        return found
    proven = replace(found, letters=(), linear=())
    for letter in found.letters:
        more = replace(proven, letters=(*proven.letters, letter))
        proven = more if _holds(call, few, more, pairs=True) else proven
    for operands in found.linear:
        more = replace(proven, linear=(*proven.linear, operands))
        proven = more if _holds(call, few, more, pairs=True) else proven
    return proven


def _confirm(device: str, call: DiscoveryCall, found: Findings) -> Findings:
    """Drop what does not hold at the real sizes, or the largest that can be run: kernels have constants in them."""
    if found.reason:
        return found
    sizes = capped(call)
    real = all(n == m for n, m in sizes.items())  # numbers among the arguments are then right as they are
    for floating, follow in itertools.product((torch.float64, torch.float32), (False, True)):
        made = trials(call, sizes, 2, [], device=device, floating=floating, follow=follow and not real)
        if made and all(len(t.outputs) == len(call.outputs) for t in made):
            break
    else:
        return found
    if not _holds(call, made, found):
        alone = replace(found, letters=(), linear=())
        letters = tuple(c for c in found.letters if _holds(call, made, replace(alone, letters=(c,))))
        linear = tuple(s for s in found.linear if _holds(call, made, replace(alone, linear=(s,))))
        found = replace(found, letters=letters, linear=linear)
    reason = "" if found.letters or found.linear else _UNSPLIT
    return replace(found, samples=found.samples + len(made), reason=reason)


def _rule(call: DiscoveryCall, found: Findings) -> Rule:
    shapes = [t.shape for t in call.inputs], [None if t is None else t.shape for t in call.outputs]
    try:
        return write_rule(found, *shapes)
    except InvalidRuleError:  # the equation does not fit the real sizes
        return write_rule(Findings(shapes=found.shapes), *shapes)
