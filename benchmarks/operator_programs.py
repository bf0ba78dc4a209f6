"""Programs of one operator or module of torch's databases, for `operators.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

SIZES = {"divisible": (4, 8, 12), "padded": (7, 14, 21), "ones": (1, 8, 4), "empty": (0, 8, 4)}
"""The sizes S, M and L of the database's samples."""

MOST_ELEMENTS = 20_000

Function = Callable[..., Any]


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


def _column_major(t: torch.Tensor) -> torch.Tensor:
    dims = tuple(reversed(range(t.dim())))
    return t.permute(dims).contiguous().permute(dims)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": _column_major,
    "strided": lambda t: torch.stack([t, t], -1)[..., 0],
    "sliced": lambda t: torch.cat([t, t])[len(t) :] if t.dim() else t,
    "expanded": lambda t: t[:1].expand(t.shape) if t.dim() and len(t) else t,
}
"""How the arguments lie in memory. An expanded one has the first row's values in all."""


def _in_place(operator: Any, *args: Any, **kwargs: Any) -> Any:
    own = args[0].clone()
    return operator.inplace_variant(own, *args[1:], **kwargs), own


def _of_a_view(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """In place on every second element of a tensor, which is returned, too."""
    base = torch.stack([args[0], args[0]], -1)
    return operator.inplace_variant(base[..., 0], *args[1:], **kwargs), base


def _written(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """What the operator returns is written to, which its argument shows if it is a view."""
    own = replaced(list(args), torch.Tensor, torch.clone)
    results = operator.op(*own, **kwargs)
    for r in tensors_of(results):
        r.copy_(r.detach().logical_not() if r.dtype == torch.bool else r * 2)
    return results, own[0]


def _out(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Into tensors that are given, which has no gradient."""
    args, kwargs = replaced((args, kwargs), torch.Tensor, torch.Tensor.detach)
    made = operator.op(*args, **kwargs)
    out = replaced(made, torch.Tensor, torch.zeros_like)
    operator.op(*args, **kwargs, out=out)
    return out


def _differentiable(operator: Any, args: Any, kwargs: Any) -> tuple[list[torch.Tensor], Function]:
    """Arguments that have gradients, and the operator as a function of them, to differentiable results."""
    tensors = tensors_of((args, kwargs))
    inputs = [t for t in tensors if t.requires_grad]
    numbers = {id(t): i for i, t in enumerate(inputs)}

    def function(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a, k = replaced((args, kwargs), torch.Tensor, lambda t: given[numbers[id(t)]] if id(t) in numbers else t)
        made = tensors_of(operator.op(*a, **k))
        return tuple(r for r in made if r.is_floating_point() or r.is_complex())

    return inputs, function


def _penalty(operator: Any, *args: Any, **kwargs: Any) -> Any:
    """Results, and gradients of their sum that have gradients of their own."""
    inputs, function = _differentiable(operator, args, kwargs)
    results = [r for r in function(*inputs) if r.requires_grad]
    whole = [(r * r.detach().cos()).sum() for r in results]
    gradients = torch.autograd.grad(
        whole, inputs, [torch.ones_like(w) for w in whole], create_graph=True, allow_unused=True
    )
    return results, [g for g in gradients if g is not None]


def _jvp(operator: Any, *args: Any, **kwargs: Any) -> Any:
    inputs, function = _differentiable(operator, args, kwargs)
    return torch.func.jvp(function, tuple(inputs), tuple(t.detach().cos() for t in inputs))


def _vjp(operator: Any, *args: Any, **kwargs: Any) -> Any:
    inputs, function = _differentiable(operator, args, kwargs)
    results, backward = torch.func.vjp(function, *inputs)
    return results, backward(tuple(r.detach().cos() for r in results))


def _vmap(operator: Any, *args: Any, **kwargs: Any) -> Any:
    inputs, function = _differentiable(operator, args, kwargs)
    return torch.func.vmap(function, randomness="different")(*(torch.stack([t, t], t.dim()) for t in inputs))


CALLS: dict[str, Function] = {
    "function": lambda operator, *a, **k: operator.op(*a, **k),
    "method": lambda operator, *a, **k: operator.method_variant(*a, **k),
    "inplace": _in_place,
    "view": _of_a_view,
    "written": _written,
    "out": _out,
    "penalty": _penalty,
    "jvp": _jvp,
    "vjp": _vjp,
    "vmap": _vmap,
}
"""How the operator is called."""

VARIANTS = tuple([*CALLS, *FORMS])


def has_variant(operator: Any, variant: str) -> bool:
    """Whether an operator can be called so."""
    return {
        "method": operator.method_variant is not None,
        "inplace": operator.inplace_variant is not None,
        "view": operator.inplace_variant is not None,
        "out": operator.supports_out,
        "penalty": operator.supports_gradgrad,
        "jvp": operator.supports_forward_ad,
    }.get(variant, True)


class Program(nn.Module):
    """The operator between parameters and a weighted sum.

    Attributes:
        weights: of ones, for each argument that has a gradient.
    """

    def __init__(self, function: Function, arguments: tuple[Any, Any], form: str = "") -> None:
        super().__init__()
        tensors = tensors_of(arguments)
        numbers = iter(range(len(tensors)))
        self.function, self.arguments = function, replaced(arguments, torch.Tensor, lambda _: Place(next(numbers)))
        ones = {str(i): torch.ones_like(t.detach()) for i, t in enumerate(tensors) if t.requires_grad}
        self.weights = nn.ParameterDict({i: nn.Parameter(w) for i, w in ones.items()})
        self.scale = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
        self.form = FORMS.get(form, lambda t: t)

    def results(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """What the operator returns, flat."""

        def given(place: Place) -> torch.Tensor:
            i, t = str(place.index), tensors[place.index]
            return self.form(t * self.weights[i] if i in self.weights else t)

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


Batch = tuple[list[torch.Tensor], list[torch.Tensor]]


def _with_probes(program: Program, tensors: list[torch.Tensor], gradients: bool) -> tuple[Program, Batch]:
    """The batch of a program. Raises what eager mode raises, in the forward or backward pass."""
    with torch.set_grad_enabled(gradients):
        made = program.results([t.clone() for t in tensors])
    probes = [torch.randn(r.shape, dtype=r.dtype if r.is_complex() else torch.float64) for r in made]
    if gradients:
        program([t.clone() for t in tensors], probes)[0].backward()
        program.zero_grad()
    return program, (tensors, probes)


def programs(operator: Any, dtype: torch.dtype, size: str, variant: str, most: int) -> Iterator[tuple[Program, Batch]]:
    """Programs of an operator's first samples, and their batches; what eager mode does not run is left out."""
    for module in [m for name, m in sys.modules.items() if name.startswith("torch.testing._internal")]:
        for name, n in zip("SML", SIZES[size], strict=True):
            if isinstance(vars(module).get(name), int):
                setattr(module, name, n)
        if hasattr(module, "wrapper_set_seed"):  # random operators, which would draw the same numbers always
            module.wrapper_set_seed = lambda function, *args, **kwargs: function(*args, **kwargs)
    torch.manual_seed(0)
    gradients = operator.supports_autograd and dtype in operator.supported_backward_dtypes("cpu")
    samples = list(itertools.islice(operator.sample_inputs("cpu", dtype, requires_grad=gradients), 40))
    # Those with the most dims to split first.
    samples.sort(key=lambda s: -sum(n > 1 for t in tensors_of(s.input)[:1] for n in t.shape))
    call = CALLS.get(variant, CALLS["function"])
    for sample in samples[:most]:
        arguments = ((sample.input, *sample.args), sample.kwargs)
        tensors = [t.detach() for t in tensors_of(arguments)]
        if any(t.layout != torch.strided for t in tensors) or sum(t.numel() for t in tensors) > MOST_ELEMENTS:
            continue
        post = sample.output_process_fn_grad
        # The sample's own choice of results is of what the operator returns, not of what else a variant does.
        post = post if call is CALLS["function"] else lambda results: results
        program = Program(lambda *a, _p=post, **k: _p(call(operator, *a, **k)), arguments, variant)
        try:
            yield _with_probes(program, tensors, gradients)
        except Exception:  # an operator may refuse such arguments; what torch refuses is nothing to compare
            continue


class Layer(Program):
    """A module of torch's database in the operator's place."""

    def __init__(self, layer: nn.Module, arguments: tuple[Any, Any]) -> None:
        super().__init__(lambda *a, **k: layer(*a, **k), arguments)
        self.layer = layer
        self.function = lambda *a, **k: self.layer(*a, **k)


def layers(info: Any, dtype: torch.dtype, most: int, training: bool) -> Iterator[tuple[Program, Batch]]:
    """Programs of a module's first samples, and their batches."""
    torch.manual_seed(0)
    samples = info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training)
    for sample in itertools.islice(samples, most):
        given = sample.constructor_input
        torch.manual_seed(0)
        layer = info.module_cls(*given.args, **given.kwargs).to(dtype).train(training)
        arguments = (tuple(sample.forward_input.args), dict(sample.forward_input.kwargs))
        tensors = [t.detach() for t in tensors_of(arguments)]
        try:
            yield _with_probes(Layer(layer, arguments), tensors, training)
        except Exception:
            continue


def named(arguments: Mapping[str, Any]) -> str:
    """Of a program: what was chosen for it, in a line."""
    return " ".join(f"{k}={v}" for k, v in arguments.items())
