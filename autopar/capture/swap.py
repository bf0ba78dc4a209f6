"""`swapped`: fake tensors in place of a model's own while it is traced, in the model itself.

The model is not copied: what hooks and closures refer to is what is traced. Plain tensors among the attributes become
buffers meanwhile, so that the graph has them as inputs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from autopar.capture.state.slots import own_attributes, promoted, state_tensors, tensor_attributes
from autopar.capture.state.values import DEEPEST, Step, children
from autopar.errors import CaptureError
from autopar.ir.signature.subclasses import refuse_own_functions

Reference = tuple[Any, Step, torch.Tensor, str]
"""A container and what in it is which parameter or buffer, with its name."""

Fake = Callable[[torch.Tensor, torch.dtype | None], torch.Tensor]


def refuse_opaque(model: nn.Module) -> None:
    """Scripted modules are no Python that can be traced, and a graph knows nothing of what a tensor's class does.

    Raises:
        CaptureError: there is one; names it.
    """
    refuse_own_functions(
        (f"{kind} {name!r}", tensor)
        for kind, own in (("parameter", dict(model.named_parameters())), ("buffer", state_tensors(model)))
        for name, tensor in own.items()
    )
    for name, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise CaptureError(
                f"module {name or type(model).__name__!r} is scripted (torch.jit.script or trace), which cannot be "
                "traced; use the module that was scripted"
            )


@contextmanager
def swapped(
    model: nn.Module, fake: Fake, training: bool, compute: torch.dtype | None, promote: bool
) -> Iterator[tuple[list[str], list[Reference]]]:
    """While it lasts, parameters and buffers are fake; shared ones stay shared. Afterwards all is as it was.

    Args:
        model: is changed and restored.
        fake: makes a fake tensor of a tensor, in a dtype.
        training: parameters that require gradients do.
        compute: dtype of floating parameters.
        promote: plain tensors among the attributes become buffers.

    Yields:
        Names of the attributes that have become buffers; and where else in attributes the model holds parameters or
        buffers, such as the list of an ``nn.LSTM``'s weights.
    """
    made: dict[int, Any] = {}
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    removed: list[tuple[nn.Module, dict[str, torch.Tensor]]] = []
    names: list[str] = []

    def fake_of(tensor: torch.Tensor) -> torch.Tensor:
        # One fake tensor for each real one: tied parameters stay tied.
        if id(tensor) not in made:
            if isinstance(tensor, nn.Parameter):
                made[id(tensor)] = nn.Parameter(fake(tensor.detach(), compute), tensor.requires_grad and training)
            else:
                made[id(tensor)] = fake(tensor.detach(), None).requires_grad_(tensor.requires_grad and training)
            vars(made[id(tensor)]).update(tensor_attributes(tensor))
        found: torch.Tensor = made[id(tensor)]
        return found

    # Before the swap: references are found by the identity of the real tensors.
    references = references_of(model)
    for path, module in model.named_modules():
        for table in (module._parameters, module._buffers):
            tables.append((table, dict(table)))
            table.update({name: fake_of(t) for name, t in table.items() if t is not None})
        attributes = promoted(module) if promote else {}
        removed.append((module, attributes))
        names += [f"{path}.{name}" if path else name for name in attributes]
        for name, tensor in attributes.items():
            del vars(module)[name]
            module._buffers[name] = fake_of(tensor)
    try:
        yield names, references
    finally:
        for table, before in tables:
            # In place: the tables are the modules' own, and keep their order.
            table.clear()
            table.update(before)
        for module, attributes in removed:
            vars(module).update(attributes)


def references_of(model: nn.Module) -> list[Reference]:
    """Lists, dicts, objects and modules that are no submodules, among the attributes, with parameters or buffers."""
    named = {id(t): (n, t) for n, t in [*model.named_buffers(), *model.named_parameters()]}
    submodules = set(map(id, model.modules()))
    found: list[Reference] = []
    seen: set[int] = set()
    # The nearest first: what is too deep along one path may be less deep along another.
    left = deque((m, [(("attr", n), v) for n, v in own_attributes(m).items()], 0) for m in model.modules())
    while left:
        container, inner, depth = left.popleft()
        for step, value in inner:
            if id(value) in named and named[id(value)][1] is value:
                found.append((container, step, value, named[id(value)][0]))
            # Submodules are visited by themselves.
            elif id(value) not in seen and id(value) not in submodules and depth < DEEPEST:
                seen.add(id(value))
                left += [(owner, items, depth + 1) for owner, items in _inside(value)]
    return found


def _inside(value: Any) -> list[tuple[Any, list[tuple[Step, Any]]]]:
    """Containers that a value is, each with what it holds: of a module its tables, too."""
    if not isinstance(value, nn.Module):
        return [(value, children(value) or [])]
    own: list[tuple[Step, Any]] = [(("attr", n), v) for n, v in own_attributes(value).items()]
    tables = (value._parameters, value._buffers, value._modules)
    return [(value, own), *((table, [(("item", n), v) for n, v in table.items()]) for table in tables)]


def put_reference(container: Any, step: Step, tensor: torch.Tensor) -> bool:
    """Put a tensor in a container; False: it cannot be changed."""
    kind, key = step
    # Tuples, closures and the like stay as they are.
    if isinstance(container, list | dict) and kind == "item":
        container[key] = tensor
        return True
    if kind == "attr" and hasattr(container, "__dict__"):
        vars(container)[key] = tensor
        return True
    return False
