"""One operator of torch's own sample database: traced, its rules looked up, and each proven on real values."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from autopar.errors import CaptureError, InvalidRuleError, MissingRuleError
from autopar.ir.graph import is_operator, map_nodes, static_arguments, tensor_arguments, values_of
from autopar.rules.oracle.randomness import check_random
from autopar.rules.oracle.sharding import check_rule
from autopar.rules.rule import Rule, find_rule
from autopar.sharding.candidates import strategies
from autopar.sharding.dims import Dims, analyze
from autopar.verify.coverage.trace import TracedSample, trace

SAMPLES = 2
"""Of each operator; up to three times as many while none can be split."""

LONGEST_LIST = 40
MOST_ELEMENTS = 20_000

PARTS = (2, 3, 5)
"""Torch's samples have dims of 5 and 10 more often than of 4: each is cut by what divides it."""

PRECISE, ROUGH = 1e-9, 1e-3
"""Tolerances of the oracle, in float64 and where float32 occurs."""

SPLIT, DISCOVERED, REPLICATED = "written", "discovered", "replicated"
NOTHING, MISSING, UNTRACED = "nothing to split", "no rule", "not captured"


@dataclass(frozen=True)
class OperatorCoverage:
    """What came of one operator in one dtype.

    Attributes:
        name: of the operator, with its variant.
        dtype: of its samples.
        status: ``written``: some sample's graph, forward and backward, has a way to split at every node that computes
            from tensors of more than one element, all by written rules; ``discovered``: the same with discovered ones;
            ``replicated``: no sample's graph has; ``nothing to split``: no such nodes; ``no rule``; ``not captured``.
        reason: why not.
        differentiable: a backward pass was traced.
        overloads: each operator overload of the graphs, and the best that any call of it has.
        traced: overloads before the graphs were made canonical.
        checks: strategies that the oracle proved.
        failures: strategies that it refuted.
    """

    name: str
    dtype: str
    status: str
    reason: str = ""
    differentiable: bool = False
    overloads: dict[str, str] = field(default_factory=dict)
    traced: tuple[str, ...] = ()
    checks: int = 0
    failures: tuple[str, ...] = ()


def examine(op: Any, dtype: torch.dtype) -> OperatorCoverage | None:
    """Examine an entry of torch's operator database; None if it does not know the dtype."""
    if dtype not in op.supported_dtypes("cpu"):
        return None
    gradients = bool(op.supports_autograd) and dtype in op.supported_backward_dtypes("cpu")
    name, kind = op.formatted_name, str(dtype).removeprefix("torch.")
    found: list[OperatorCoverage] = []
    reasons: list[str] = []
    with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        # Samples are random: so an operator has the same ones in every run, whichever process examines it.
        torch.manual_seed(0)
        try:
            samples = _samples(op, dtype, gradients)
        except Exception as e:
            return OperatorCoverage(name, kind, UNTRACED, f"its samples fail: {type(e).__name__}")
        for i, sample in enumerate(samples):
            # Many samples are of shapes that nothing can be split of, such as scalars: go on to larger ones.
            if i >= SAMPLES and any(o.status in (SPLIT, DISCOVERED) for o in found):
                break
            try:
                traced = trace(op.op, (sample.input, *sample.args), sample.kwargs, gradients)
            except Exception as e:
                # Of any type: an operator may fail in torch's tracer, in functionalization, or in itself.
                reasons.append(reason_of(e))
                continue
            found.append(_examine(name, kind, traced))
    return (
        _together(found) if found else OperatorCoverage(name, kind, UNTRACED, next(iter(reasons), "it has no samples"))
    )


def _samples(op: Any, dtype: torch.dtype, gradients: bool) -> list[Any]:
    """A few samples: the one with the most dims longer than one, the first, then others with many."""
    first = itertools.islice(op.sample_inputs("cpu", dtype, requires_grad=gradients), LONGEST_LIST)
    small = [s for s in first if sum(t.numel() for t in _tensors(s)) <= MOST_ELEMENTS]

    def dims(sample: Any) -> int:
        return sum(n > 1 for t in _tensors(sample)[:1] for n in t.shape)

    order = sorted(range(len(small)), key=lambda i: -dims(small[i]))
    # The first sample of the database is the plainest call, which many dims alone would pass over.
    order = [i for i in order if i in order[:1] or i == 0] + [i for i in order[1:] if i != 0]
    return [small[i] for i in order[: 3 * SAMPLES]]


def _tensors(sample: Any) -> list[torch.Tensor]:
    every = fx.node.map_aggregate
    found: list[torch.Tensor] = []
    every((sample.input, sample.args, sample.kwargs), lambda a: found.append(a) if isinstance(a, torch.Tensor) else a)
    return found


# Words in torch's errors, of which many have no type of their own. "parse" is in "sparse" with either capital.
_REASONS = {
    "DataDependent": "its control flow depends on data",
    "DynamicOutputShape": "the shape of its output depends on data",
    "data-dependent": "its control flow depends on data",
    "data dependent": "its control flow depends on data",
    "erroring out": "its control flow depends on data",
    "parse": "sparse tensors",
    "nested": "nested tensors",
    "jagged": "nested tensors",
    "should not be batched": "it cannot be functionalized",
}


def reason_of(error: Exception) -> str:
    """Why an operator cannot be traced, in a few words."""
    if isinstance(error, CaptureError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    known = next((reason for word, reason in _REASONS.items() if word in text), None)
    return known or (text.splitlines()[0][:120] if text else "")


def _examine(name: str, dtype: str, traced: TracedSample) -> OperatorCoverage:
    overloads = tuple(str(o) for o in traced.overloads)
    common: dict[str, Any] = {"differentiable": traced.differentiable, "traced": overloads}
    try:
        dims = analyze(traced.program)
    except MissingRuleError as e:
        # Without the node: reasons are counted over all operators.
        return OperatorCoverage(name, dtype, MISSING, str(e).split(" (node")[0], **common)
    except InvalidRuleError as e:
        return OperatorCoverage(name, dtype, REPLICATED, failures=(str(e),), **common)
    counted = [(str(node.target), kind) for node in dims.operators if (kind := _kind(node, dims))]
    kinds: dict[str, str] = {}
    for target, kind in counted:
        kinds[target] = _best(kinds.get(target), kind)
    # A graph is as good as its worst node; an overload, as its best call.
    status = max((kind for _, kind in counted), key=_ORDER.index, default=NOTHING)
    blocking = ", ".join(dict.fromkeys(target for target, kind in counted if kind == REPLICATED))
    checks, failures = _prove(traced, dims)
    return OperatorCoverage(name, dtype, status, blocking, overloads=kinds, checks=checks, failures=failures, **common)


_ORDER = [SPLIT, DISCOVERED, REPLICATED]


def _best(a: str | None, b: str) -> str:
    return b if a is None else min(a, b, key=_ORDER.index)


def _kind(node: fx.Node, dims: Dims) -> str:
    """How a node can be split; empty if there is nothing to split: no input, no output, or single numbers alone."""
    inputs = [
        values_of(a)[0] if is_operator(a) or a.op != "call_function" else a.meta["val"] for a in tensor_arguments(node)
    ]
    sizes = [t.numel() for t in (*inputs, *values_of(node)) if isinstance(t, torch.Tensor)]
    computes = any(v is not None for v in values_of(node))
    if not inputs or not computes or max(sizes, default=0) <= 1:
        return ""
    if not any(s.splits for s in strategies(dims.operators[node])):
        return REPLICATED
    return SPLIT if find_rule(node.target) else DISCOVERED


def _together(outcomes: list[OperatorCoverage]) -> OperatorCoverage:
    """One outcome for several samples: the best status, everything else added up."""
    # Nothing to split comes last: a sample that says more is preferred, even that a rule is missing.
    order = [SPLIT, DISCOVERED, REPLICATED, MISSING, NOTHING]
    best = min(outcomes, key=lambda o: order.index(o.status))
    kinds: dict[str, str] = {}
    for outcome in outcomes:
        for name, kind in outcome.overloads.items():
            kinds[name] = _best(kinds.get(name), kind)
    return OperatorCoverage(
        best.name,
        best.dtype,
        best.status,
        best.reason,
        any(o.differentiable for o in outcomes),
        kinds,
        tuple(dict.fromkeys(t for o in outcomes for t in o.traced)),
        sum(o.checks for o in outcomes),
        tuple(dict.fromkeys(f for o in outcomes for f in o.failures)),
    )


_proven: set[Any] = set()
"""Operators with their arguments and shapes for which rules have been checked, by this process."""


def _prove(traced: TracedSample, dims: Dims) -> tuple[int, tuple[str, ...]]:
    """Check the rule of each distinct call on the values that reach it; how many strategies hold, and which do not."""
    checks, failures = 0, []
    for node, args, kwargs in _calls(traced):
        tensors = [t for t in _flat(args, kwargs) if isinstance(t, torch.Tensor)]
        key = (node.target, static_arguments(node), tuple((t.shape, t.dtype) for t in tensors))
        rtol = _tolerance([*tensors, *(v for v in values_of(node) if v is not None)])
        finite = all(bool(t.isfinite().all()) for t in tensors if t.is_floating_point() or t.is_complex())
        # Infinite or undefined inputs prove nothing: NaN hides whatever else is wrong.
        if key in _proven or not finite or rtol is None:
            continue
        _proven.add(key)
        for parts in PARTS:
            try:
                if dims.operators[node].rule.random:
                    checks += len(check_random(node.target, args, kwargs, parts=parts))
                    continue
                rule = _reachable(dims.operators[node].rule, tensors)
                checks += len(check_rule(node.target, args, kwargs, parts=parts, pairs=False, rule=rule, rtol=rtol))
            except InvalidRuleError as e:
                failures.append(str(e))
    return checks, tuple(failures)


def _reachable(rule: Rule, tensors: list[torch.Tensor]) -> Rule:
    """The rule without partial booleans, which no plan has: their sum is no boolean."""
    return replace(rule, linear=tuple(s for s in rule.linear if all(tensors[i].dtype != torch.bool for i in s)))


def _tolerance(tensors: list[torch.Tensor]) -> float | None:
    """None for half precision: rounding cannot be told from a wrong rule."""
    finest = [torch.finfo(t.dtype).eps for t in tensors if t.is_floating_point() or t.is_complex()]
    coarse = max(finest, default=0.0)
    return None if coarse > ROUGH / 4 else ROUGH if coarse > PRECISE else PRECISE


def _flat(args: Any, kwargs: Any) -> list[Any]:
    found: list[Any] = []
    fx.node.map_aggregate((args, kwargs), found.append)
    return found


def _calls(traced: TracedSample) -> Iterator[tuple[fx.Node, tuple[Any, ...], dict[str, Any]]]:
    """Every operator node with its real arguments, in order."""
    graph = traced.program.graph
    environment: dict[fx.Node, Any] = dict(zip(traced.program.placeholders, traced.values, strict=True))
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            environment[node] = getattr(graph, str(node.target))
        if node.op != "call_function":
            continue
        args, kwargs = map_nodes((node.args, node.kwargs), environment.__getitem__)
        if is_operator(node):
            yield node, args, kwargs
        with torch.no_grad():
            environment[node] = node.target(*args, **kwargs)
