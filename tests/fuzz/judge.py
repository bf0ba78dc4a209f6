"""Run a case with eager PyTorch and with autopar, and say how the two compare."""

from __future__ import annotations

import gc
import linecache
import re
import sys
import time
import traceback
import types
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import torch

import autopar
from autopar.errors import AutoparError, CertificateError, InvalidRuleError, PassError
from autopar.runtime.compiled.backend import Compile
from autopar.verify.compare import EquivalenceReport
from tests.fuzz import prelude
from tests.fuzz.case import Case
from tests.fuzz.render import source

BOUND = 1e-9
RELATIVE = 1e-7
"""Of what `verify` says, which is relative to each tensor: a gradient that is zero but for rounding has a large one."""

ROUNDING = 1e-13
"""Off by less, a gradient that cancels is right: a wrong one is off by what it is."""

HERE = str(Path(autopar.__file__).resolve().parent.parent)
OWN = tuple(f"{HERE}/{name}/" for name in ("autopar", "passes", "strategies"))
INTERNAL = (PassError, InvalidRuleError, CertificateError)
"""Errors that speak of faults of autopar's own."""

LOWER = frozenset(("down and up", "autocast"))
"""Features that compute in a lower precision."""

COMPILE: dict[str, Compile] = {"one": None, "regions": lambda graph, values: graph.forward, "compiled": True}
"""What ``compile=`` is on one device, by mode."""

MESHES = ({"a": 2}, {"a": 2, "b": 2}, {"a": 4})


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        kind: ``equal``; ``error``, a clear one; ``unclear``, an error in the tracer's words; ``wrong``, a silent
            difference; ``crash``, any other exception; ``invalid``, eager fails, too; ``ill``, rounding decides.
        detail: by which outcomes of a kind are counted.
        text: what was seen.
        seconds: that it took.
    """

    kind: str
    detail: str = ""
    text: str = ""
    seconds: float = 0.0

    @property
    def bad(self) -> bool:
        return self.kind in ("wrong", "crash")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def loaded(case: Case) -> types.ModuleType:
    """The case's program as a module, of which `inspect` can read the source."""
    text = source(case)
    name = f"<case {case.seed}>"
    module = sys.modules["fuzzed"] = types.ModuleType("fuzzed")
    vars(module).update({k: v for k, v in vars(prelude).items() if not k.startswith("__")}, autopar=autopar)
    linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
    exec(compile(text, name, "exec"), vars(module))
    return module


def judge(case: Case, mode: str = "one") -> Outcome:
    """The outcome of a case on one device (keys of `COMPILE`) or with a random plan on an emulated mesh (``plans``)."""
    started = time.perf_counter()
    torch.set_default_dtype(torch.float32)  # which the case before may have changed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        outcome = _plans(case) if mode == "plans" else _one(case, COMPILE[mode])
    linecache.cache.pop(f"<case {case.seed}>", None)
    return replace(outcome, seconds=time.perf_counter() - started)


def eager(program: types.ModuleType, shaken: bool = False) -> dict[str, Any]:
    """What eager PyTorch gives; from weights that differ in the last digits if ``shaken``."""
    model = program.build()
    if shaken:
        _shake(model)
    record: dict[str, Any] = program.drive(model, model)
    return record


def _shake(model: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.data.mul_(1 + 1e-14 * noise.to(p.dtype))


def _one(case: Case, compile: Compile) -> Outcome:
    program = loaded(case)
    try:
        expected = eager(program)
    except Exception as e:
        return Outcome("invalid", category(e), traceback.format_exc())
    try:
        given = program.build()
        found = program.drive(autopar.parallelize(given, None, compile=compile), given)
    except Exception as e:
        return explained(e)
    return compared(program, expected, found)


def compared(program: types.ModuleType, expected: dict[str, Any], found: dict[str, Any]) -> Outcome:
    """Of two records."""
    wrong = prelude.differences(expected, found, BOUND)
    if not wrong:
        return Outcome("equal")
    if prelude.differences(expected, eager(program, shaken=True), BOUND / 10):
        return Outcome("ill", text=wrong[0])
    kind = re.sub(
        r"call \d+: |\[.*|:type.*| of .*", "", wrong[0].split(": only")[0].split(": differs")[0].split(": eager")[0]
    )
    return Outcome("wrong", kind.split(" ")[0], "\n".join(wrong[:8]))


def plan_of(case: Case) -> tuple[dict[str, int], bool, int]:
    """Axes of a case's mesh, whether the loss is a ``loss_fn``, and the plan's seed."""
    random = Random(f"plan {case.seed}")
    return random.choice(MESHES), random.random() < 0.5, random.randrange(10**6)


def _plans(case: Case) -> Outcome:
    program = loaded(case)
    axes, function, seed = plan_of(case)
    function = function or case.output != "scalar"
    try:
        expected = _first_gradients(program)
    except Exception as e:
        return Outcome("invalid", category(e), traceback.format_exc())
    loss_fn = (lambda out, _: program.value_of(out)) if function else None
    try:
        report = autopar.verify(program.build(), program.batch(), axes, loss_fn=loss_fn, plan="random", seed=seed)
    except Exception as e:
        return explained(e)
    if max(report.max_error, report.capture_error) > RELATIVE and _is_ill(program, expected):
        return Outcome("ill", text=f"{report.worst}: {report.max_error:.2g} on {axes}, plan seed {seed}")
    if report.max_error > RELATIVE and _is_rounding(report):
        return Outcome("ill", text=f"values of 1 cancel in {report.worst}: {report.max_error:.2g} on {axes}")
    if report.max_error > RELATIVE:
        return Outcome("wrong", "plan", f"{report.worst}: {report.max_error:.2g} on {axes}, plan seed {seed}")
    if report.capture_error > RELATIVE:
        return Outcome("wrong", "capture", f"capture error {report.capture_error:.2g}")
    if report.loss is None:  # tangents are drawn: attributes that the model writes carry gradients, too
        return Outcome("equal")
    found = {n: report.gradients.get(n) for n in expected}
    bound = 1e-2 if LOWER & set(case.features) else BOUND  # verify computes all in float64
    wrong = prelude.differences(expected, {n: g for n, g in found.items() if g is not None}, bound)
    if wrong and not _is_ill(program, expected):
        return Outcome("wrong", "gradient", "\n".join(wrong[:8]))
    return Outcome("equal")


def _is_ill(program: types.ModuleType, expected: dict[str, torch.Tensor]) -> bool:
    """Whether rounding alone changes eager's gradients."""
    return bool(prelude.differences(expected, _first_gradients(program, shaken=True), BOUND / 10))


def _is_rounding(report: EquivalenceReport) -> bool:
    """Whether all gradients and results are off by no more than digits that values of 1 have lost: 1 less the
    probability of a class that a saturated loss is sure of. Shaken parameters do not show it, as eager loses the same
    digits."""
    pairs = ((report.gradients, report.reference_gradients), (report.results, report.reference_results))
    known = {*report.gradients, *(f"result {name}" for name in report.results)}
    # Of the second call only errors are known, and it begins where the first one ends.
    off = {name.split(" of the second call")[0] for name, error in report.errors.items() if error > RELATIVE}
    apart = [(found[name] - right[name]).abs().max() for found, right in pairs for name in found]
    return off <= known and all(float(a) < ROUNDING for a in apart)


def _first_gradients(program: types.ModuleType, shaken: bool = False) -> dict[str, torch.Tensor]:
    """Eager's gradients of the first call."""
    model, batch = program.build(), program.batch()
    if shaken:
        _shake(model)
    prelude.seed(0)
    program.value_of(model(**batch) if isinstance(batch, dict) else model(*batch)).backward()
    return {
        n: p.grad.to_dense() if p.grad.is_sparse else p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def explained(error: BaseException) -> Outcome:
    """An exception of autopar's as an outcome: clear, unclear, or a crash."""
    text, message = "".join(traceback.format_exception(error)), str(error)
    if isinstance(error, AutoparError) and not isinstance(error, INTERNAL):
        if "capture is wrong" in message:
            return Outcome("wrong", "capture", message)
        unclear = message.startswith("cannot capture the model")
        return Outcome("unclear" if unclear else "error", category(error), text)
    frames = traceback.extract_tb(error.__traceback__)
    inside = bool(frames) and frames[-1].filename.startswith(OWN) and (frames[-1].line or "").startswith("raise")
    if isinstance(error, ValueError | TypeError) and inside:
        return Outcome("error", category(error), text)
    return Outcome("crash", category(error), text)


def category(error: BaseException) -> str:
    """An exception's message without what differs between cases."""
    text = " ".join(str(error).split())
    text = re.sub(r"at <case \d+>:\d+:.*?: ", "at LINE: ", text)
    text = re.sub(r"(?:/[\w.+-]+)+", "PATH", text)
    text = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", text)
    text = re.sub(r"\b[a-z_]*\d[\w.]*\b|\b\d+\b", "N", text)
    text = re.sub(r"[\[(][N, x]*[\])]", "[N]", text)
    return f"{type(error).__name__}: {text}"[:140]


def settle() -> None:
    """What is loaded by now stays: the collector, and whoever asks it for objects, need not look at it again."""
    gc.collect()
    gc.freeze()
    gc.disable()
