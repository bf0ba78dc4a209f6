"""Are programs of one operator of torch's database right under random plans?

Each sample becomes a module: parameters times the arguments, the operator, a weighted sum of its results, which are
returned, too. `autopar.verify` compares loss, gradients and results with eager mode on an emulated mesh. Samples are
made with the database's sizes replaced: by 4 and 8, which axes of 2 and 4 divide, and by 7 and 14, for which plans pad
parameters. One dtype a run, all of it in 64 bits.

    python benchmarks/operators.py --samples 1 --plans 1 --json
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import autopar
from autopar._torch_compat import operator_database
from autopar.errors import AutoparError, CertificateError, InvalidRuleError, PassError

SIZES = {"divisible": (4, 8, 12), "padded": (7, 14, 21)}
"""The sizes S, M and L of the database's samples."""

MESHES = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
BOUND = 1e-7
MOST_ELEMENTS = 20_000

UNDEFINED = ("empty", "new_empty", "_segment_reduce")
"""What returns memory as it is, and what reads past its arguments with other sizes than the database's."""


@dataclass(frozen=True)
class Place:
    """Stands for tensor number ``index`` among the arguments."""

    index: int


def replaced(value: Any, kind: type, function: Callable[[Any], Any]) -> Any:
    """Arguments with what ``function`` makes of each instance of ``kind``."""
    if isinstance(value, kind):
        return function(value)
    if isinstance(value, dict):
        return {k: replaced(v, kind, function) for k, v in value.items()}
    if isinstance(value, list | tuple):  # results have classes of their own, which are tuples
        made = [replaced(v, kind, function) for v in value]
        return made if isinstance(value, list) else tuple(made)
    return value


def tensors_of(value: Any) -> list[torch.Tensor]:
    """All tensors in arguments or results."""
    found: list[torch.Tensor] = []
    replaced(value, torch.Tensor, found.append)
    return found


class Program(nn.Module):
    """The operator between parameters and a weighted sum.

    Attributes:
        weights: of ones, for each argument that has a gradient.
    """

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, Any]) -> None:
        super().__init__()
        tensors = tensors_of(arguments)
        numbers = iter(range(len(tensors)))
        self.function, self.arguments = function, replaced(arguments, torch.Tensor, lambda _: Place(next(numbers)))
        ones = {str(i): torch.ones_like(t.detach()) for i, t in enumerate(tensors) if t.requires_grad}
        self.weights = nn.ParameterDict({i: nn.Parameter(w) for i, w in ones.items()})
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))

    def results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the operator returns, flat."""

        def given(place: Place) -> torch.Tensor:
            i, t = str(place.index), tensors[place.index]
            return t * self.weights[i] if i in self.weights else t

        args, kwargs = replaced(self.arguments, Place, given)
        return tensors_of(self.function(*args, **kwargs))

    def forward(self, tensors: Sequence[torch.Tensor], probes: Sequence[torch.Tensor]) -> Any:
        """The loss, and the results."""
        results = self.results(tensors)
        loss: Any = 0.0
        for r, p in zip(results, probes, strict=True):
            term = (r * p).real if r.is_complex() else r.double() * p
            loss = loss + term.sum()
        return loss * self.scale, results


def programs(operator: Any, dtype: torch.dtype, size: str, most: int) -> Iterator[tuple[Program, tuple[Any, Any]]]:
    """Programs of an operator's first samples, and their batches."""
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal")]:
        for name, n in zip("SML", SIZES[size], strict=True):
            if isinstance(vars(module).get(name), int):
                setattr(module, name, n)
    torch.manual_seed(0)
    gradients = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
    samples = list(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=gradients), 40))
    # Those with the most dims to split first.
    samples.sort(key=lambda s: -sum(n > 1 for t in tensors_of(s.input)[:1] for n in t.shape))
    for sample in samples[:most]:
        arguments = ((sample.input, *sample.args), sample.kwargs)
        tensors = [t.detach() for t in tensors_of(arguments)]
        if any(t.layout != torch.strided for t in tensors) or sum(t.numel() for t in tensors) > MOST_ELEMENTS:
            continue
        post = sample.output_process_fn_grad
        program = Program(lambda *a, _f=operator.op, _p=post, **k: _p(_f(*a, **k)), arguments)
        with torch.no_grad():
            made = program.results([t.clone() for t in tensors])
        probes = [torch.randn(r.shape, dtype=r.dtype if r.is_complex() else torch.float64) for r in made]
        yield program, (tensors, probes)


def outcome(program: Program, batch: tuple[Any, Any], axes: dict[str, int], seed: int) -> tuple[str, str]:
    """What came of a program, and what was said.

    ``right``; ``wrong``; ``refused``, a clear error; ``indivisible``, nothing that the mesh could split; ``drawn``, the
    sample seeds numbers of its own; ``crashed``, any other error.
    """
    try:
        report = autopar.verify(program, batch, axes, plan="random", seed=seed)
    except AutoparError as e:
        if "no operator can be split" in str(e):
            return "indivisible", str(e)
        internal = isinstance(e, PassError | InvalidRuleError | CertificateError)
        return "crashed" if internal else "refused", str(e)
    except Exception as e:  # of any type: that is what is looked for
        return "crashed", f"{type(e).__name__}: {e}"
    if "other random numbers" in report.note:
        return "drawn", report.note
    right = report.max_error <= BOUND and not report.capture_error > BOUND
    return ("right", "") if right else ("wrong", f"{report.worst}: {report.max_error:.2g}, {report.first_difference}")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--samples", type=int, default=2, help="of each operator and size")
    parser.add_argument("--plans", type=int, default=2, help="of each sample")
    parser.add_argument("--part", default="0/1", help="1/2: every second operator, from the second one on")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dtype, counts, operators, bad = getattr(torch, options.dtype), Counter[str](), set(), []
    part, parts = map(int, options.part.split("/"))
    for operator in operator_database()[part::parts]:
        name = operator.formatted_name
        known = dtype in operator.supported_dtypes("cpu") and not name.startswith(UNDEFINED)
        for size in SIZES if known and options.only in name else ():
            try:
                made = list(programs(operator, dtype, size, options.samples))
            except Exception:  # the database's samples of an operator may not exist in these sizes
                continue
            for (program, batch), k in itertools.product(made, range(options.plans)):
                axes = MESHES[sum(counts.values()) % 3]
                kind, said = outcome(program, batch, axes, 2 * k + (size == "padded"))  # plans of odd seeds pad
                counts[kind] += 1
                operators.add(name)
                if kind in ("wrong", "crashed"):
                    bad.append({"operator": name, "size": size, "axes": axes, "outcome": kind, "said": said})
                    print(bad[-1], flush=True)
    found = {"operators": len(operators), "programs": sum(counts.values()), **counts}
    print(json.dumps({**found, "bad": bad}, indent=1) if options.json else found)


if __name__ == "__main__":
    main()
