"""Are programs of one operator of torch's database right under random plans?

Each sample becomes a module: parameters times the arguments, the operator, a weighted sum of its results, which are
returned, too. `autopar.verify` compares loss, gradients and results with eager mode on an emulated mesh. Samples are
made with the database's sizes replaced: by 4 and 8, which axes of 2 and 4 divide, and by 7 and 14, for which plans pad
parameters; ``--sizes ones,empty`` has one or none of the smallest. One dtype a run, all of it in 64 bits.

    python benchmarks/operators.py --samples 1 --plans 1 --json
    python benchmarks/operators.py --dtype complex128 --variants inplace,view,written,penalty,jvp,transposed
    python benchmarks/operators.py --database modules
    python benchmarks/operators.py --devices one --plans 1  # what `parallelize` runs, without a mesh
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

import autopar
from autopar._torch_compat import module_database, operator_database
from autopar.errors import AutoparError, CertificateError, InvalidRuleError, PassError
from benchmarks.operator_programs import SIZES, VARIANTS, Batch, Program, has_variant, layers, programs

MESHES = ({"a": 2}, {"a": 4}, {"a": 2, "b": 2})
BOUND = 1e-7

UNDEFINED = ("empty", "new_empty", "_segment_reduce")
"""What returns memory as it is, and what reads past its arguments with other sizes than the database's."""


def outcome(program: Program, batch: tuple[Any, Any], axes: dict[str, int], seed: int) -> tuple[str, str]:
    """What came of a program, and what was said.

    ``right``; ``wrong``; ``refused``, a clear error; ``indivisible``, nothing that the mesh could split; ``drawn``, the
    sample seeds numbers of its own; ``alone``, eager mode does not run in 64 bits; ``crashed``, any other error.
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
    if "does not run in" in report.note:
        return "alone", report.note
    right = report.max_error <= BOUND and not report.capture_error > BOUND
    return ("right", "") if right else ("wrong", f"{report.worst}: {report.max_error:.2g}, {report.first_difference}")


def on_one_device(program: Program, batch: tuple[Any, Any]) -> tuple[str, str]:
    """The same of the program as `autopar.parallelize` runs it on one device, in its own dtype, twice."""
    plain, own = copy.deepcopy(program), copy.deepcopy(program)
    try:
        parallel = autopar.parallelize(own, None, deterministic=True)
        found = [_step(parallel, batch) for _ in range(2)]
    except AutoparError as e:
        internal = isinstance(e, PassError | InvalidRuleError | CertificateError)
        return "crashed" if internal else "refused", str(e)
    except Exception as e:
        return "crashed", f"{type(e).__name__}: {e}"
    try:
        expected = [_step(plain, batch) for _ in range(2)]
    except Exception as e:
        return "alone", f"{type(e).__name__}: {e}"
    for a, b in zip(itertools.chain(*found), itertools.chain(*expected), strict=True):
        coarse = (a.is_floating_point() and a.dtype != torch.float64) or a.dtype == torch.complex64
        bound = 1e-3 if coarse else BOUND
        if a.shape != b.shape or a.dtype != b.dtype:
            return "wrong", f"{a.dtype} {list(a.shape)} for {b.dtype} {list(b.shape)}"
        if not torch.allclose(a, b, rtol=bound, atol=bound, equal_nan=True):
            return "wrong", f"differs by {float((a.double() - b.double()).abs().max()):.2g}"
    return "right", ""


def _step(model: Any, batch: tuple[Any, Any]) -> list[torch.Tensor]:
    """Loss, results and gradients of a call and its backward pass."""
    model.zero_grad()
    torch.manual_seed(0)
    tensors, probes = batch
    loss, results = model([t.clone() for t in tensors], probes)
    loss.backward()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return [loss.detach(), *(r.detach().resolve_conj().resolve_neg().clone() for r in results), *gradients]


Case = tuple[str, str, Iterator[tuple[Program, Batch]]]
"""Name of the operator, what was chosen for it, and its programs."""


def of_operators(options: argparse.Namespace) -> Iterator[Case]:
    """What is asked for of torch's database of operators."""
    dtype, variants = getattr(torch, options.dtype), options.variants.split(",")
    part, parts = map(int, options.part.split("/"))
    for operator in operator_database()[part::parts]:
        name = operator.formatted_name
        known = dtype in operator.supported_dtypes("cpu") and not name.startswith(UNDEFINED)
        if not known or options.only not in name:
            continue
        for size, variant in itertools.product(options.sizes.split(","), variants):
            if has_variant(operator, variant):
                yield name, f"{size} {variant}", programs(operator, dtype, size, variant, options.samples)


def of_modules(options: argparse.Namespace) -> Iterator[Case]:
    """The same of torch's database of modules, in training and evaluation."""
    dtype = getattr(torch, options.dtype)
    part, parts = map(int, options.part.split("/"))
    for info, training in itertools.product(module_database()[part::parts], (True, False)):
        if dtype in info.supported_dtypes("cpu") and options.only in info.name:
            yield info.name, "train" if training else "eval", layers(info, dtype, options.samples, training)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--database", default="operators", choices=("operators", "modules"))
    parser.add_argument("--only", default="", help="part of an operator's name")
    parser.add_argument("--dtype", default="float64")
    parser.add_argument("--sizes", default="divisible,padded", help=", ".join(SIZES))
    parser.add_argument("--variants", default="function", help=", ".join(VARIANTS))
    parser.add_argument("--devices", default="emulated", choices=("emulated", "one"))
    parser.add_argument("--samples", type=int, default=2, help="of each operator, size and variant")
    parser.add_argument("--plans", type=int, default=2, help="of each sample")
    parser.add_argument("--part", default="0/1", help="1/2: every second operator, from the second one on")
    parser.add_argument("--minutes", type=float, default=1e9, help="after which no operator is begun")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args(arguments)
    for name, known in (("sizes", SIZES), ("variants", VARIANTS)):
        if unknown := set(getattr(options, name).split(",")) - set(known):
            parser.error(f"--{name}: {sorted(unknown)} is none of {', '.join(known)}")
    return options


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the counts."""
    options = parsed(arguments)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    counts, operators, bad, refusals = Counter[str](), set(), [], Counter[str]()
    end = time.monotonic() + 60 * options.minutes
    for name, chosen, made in of_operators(options) if options.database == "operators" else of_modules(options):
        if time.monotonic() > end:
            print(f"the time is up before {name}", flush=True)
            break
        try:
            found = list(made)
        except Exception:  # the database's samples of an operator may not exist in these sizes
            continue
        for (program, batch), k in itertools.product(found, range(options.plans)):
            axes = MESHES[sum(counts.values()) % 3]
            seed = 2 * k + ("padded" in chosen)  # plans of odd seeds pad
            emulated = options.devices == "emulated"
            kind, said = outcome(program, batch, axes, seed) if emulated else on_one_device(program, batch)
            counts[kind] += 1
            operators.add(name)
            if kind == "refused":
                refusals[f"{name} {chosen}: {said}"] += 1
            if kind in ("wrong", "crashed"):
                bad.append({"operator": name, "chosen": chosen, "axes": axes, "outcome": kind, "said": said})
                print(bad[-1], flush=True)
    total = {"operators": len(operators), "programs": sum(counts.values()), **counts}
    print(json.dumps({**total, "bad": bad, "refusals": list(refusals)}, indent=1) if options.json else total)


if __name__ == "__main__":
    main()
