"""States at the ends of chunks (Mamba2 and its kin, written in torch) are a linear recurrence over the chunks.

T. Dao and A. Gu ("Transformers are SSMs", 2024, listing 1) multiply all states by how much of each is left at all later
ones, a matrix of chunks times chunks. Where chunks are split that takes the states of all of them on every device, and
in memory as many as there are pairs. As a recurrence a device needs one of those before it.

Before::

    decay = torch.exp(segment_sum(F.pad(logs, (1, 0)))).transpose(1, 3)
    before = torch.einsum("bzch,bzhpn->bchpn", decay, torch.cat([torch.zeros_like(states[:, :1]), states], 1))[:, :-1]

After::

    after = linear_scan(logs.exp().permute(0, 2, 1)[..., None, None].expand_as(states), states, 1)
    before = F.pad(after[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.functional import pad
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import traced_graph, traced_node
from autopar.capture.functions.calls import Calls, OtherError, name_of
from autopar.ir.ops.sequence.linear_scan import scanned

_STEPS = frozenset(
    "exp masked_fill cumsum expand getitem pad cat zeros_like tril ones invert transpose".split()
)  # fmt: skip
"""Names of functions that the decay of states consists of."""


class ChunkStates(TorchFunctionMode):
    """Makes a recurrence of states that are multiplied by their decay, while a model is traced."""

    def __init__(self) -> None:
        """Nothing is known yet."""
        super().__init__()
        self._calls = Calls(_STEPS)
        self._found: dict[fx.Node, tuple[Tensor, int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the function, or the recurrence in its place."""
        kwargs = kwargs or {}
        name, found = name_of(func), None
        if name == "einsum" and traced_graph() is not None and not kwargs:
            found = self._recurrence(args)
        elif name == "getitem" and self._found:
            found = self._without_last(*args)
        result = func(*args, **kwargs) if found is None else found
        self._calls.note(func, args, kwargs, result)
        return result

    def _recurrence(self, args: Sequence[Any]) -> Tensor | None:
        """States after the first one and after each chunk, of their product with the decay; None: it is another."""
        match = re.fullmatch(r"(\w+),(\w+)->(\w+)", args[0].replace(" ", "")) if isinstance(args[0], str) else None
        if match is None or len(args) != 3 or not all(isinstance(t, Tensor) for t in args[1:]):
            return None
        try:
            first, states, d = self._states(args[2])
            logs, of_logs = self._logs(args[1], match[1])
            to, since = of_logs[-2], of_logs[-1]
        except OtherError:
            return None
        given, made, rest = match[2], match[3], of_logs[:-2]
        if since != given[d] or made != given.replace(since, to) or to in given or len({*given}) != len(given):
            return None
        if not {*rest} <= {*given} or logs.dtype != states.dtype or since in rest:
            return None
        # The logarithms of a chunk's decay, with dims as those of its states.
        names = rest + since
        order = [names.index(c) for c in given if c in names]
        shape = [n if c in names else 1 for c, n in zip(given, states.shape, strict=True)]
        factors = logs.permute(order).exp().reshape(shape).expand_as(states)
        after = scanned(factors, states, d)
        whole = torch.cat([first, after], d)
        self._found[traced_node(whole)] = after, d
        return whole

    def _states(self, tensor: Tensor) -> tuple[Tensor, Tensor, int]:
        """The state before all chunks, which is zero, those that the chunks add, and the dim of the chunks."""
        call = self._calls.of(tensor, "cat")
        parts, d = call.args[0], call.argument("dim", 1, 0)
        if len(parts) != 2 or not isinstance(d, int) or parts[0].shape[d] != 1 or not parts[1].is_floating_point():
            raise OtherError
        self._calls.of(parts[0], "zeros_like")
        return parts[0], parts[1], d % tensor.ndim

    def _logs(self, decay: Tensor, names: str) -> tuple[Tensor, str]:
        """The logarithms of what each chunk leaves, and names of their dims, with the two of pairs of chunks last."""
        if len(names) != decay.ndim or len({*names}) != len(names):
            raise OtherError
        call, letters = self._calls.of(decay, "exp", "transpose"), list(names)
        if call.name == "transpose":
            if len(call.args) != 3:
                raise OtherError
            one, other = (d % decay.ndim for d in call.args[1:3])
            letters[one], letters[other] = letters[other], letters[one]
            call = self._calls.of(call.args[0], "exp")
        total = self._masked(call.args[0], 0, -math.inf)
        call = self._calls.of(total, "cumsum")
        if call.argument("dim", 1) not in (-2, total.ndim - 2):
            raise OtherError
        repeated = self._masked(call.args[0], -1, 0)
        call = self._calls.of(repeated, "expand")
        call = self._calls.of(call.args[0], "getitem")
        if call.args[1] != (..., None):
            raise OtherError
        call = self._calls.of(call.args[0], "pad")
        if tuple(call.argument("pad", 1)) != (1, 0) or call.argument("value", 3) not in (None, 0):
            raise OtherError
        if call.argument("mode", 2, "constant") != "constant" or call.args[0].shape[-1] + 1 != total.shape[-1]:
            raise OtherError
        return call.args[0], "".join(letters)

    def _masked(self, tensor: Tensor, diagonal: int, number: float) -> Tensor:
        """What is masked but in the triangle under a diagonal."""
        call = self._calls.of(tensor, "masked_fill")
        if call.argument("value", 2) != number:
            raise OtherError
        triangle = self._calls.of(self._calls.of(call.args[1], "invert").args[0], "tril")
        self._calls.of(triangle.args[0], "ones")
        if triangle.argument("diagonal", 1, 0) != diagonal or triangle.args[0].shape != tensor.shape[-2:]:
            raise OtherError
        source: Tensor = call.args[0]
        return source

    def _without_last(self, tensor: Any, index: Any) -> Tensor | None:
        """All states but the last one: those after the chunks, one further."""
        known = self._found.get(traced_node(tensor)) if isinstance(tensor, Tensor) else None
        if known is None:
            return None
        after, d = known
        if index != (*[slice(None)] * d, slice(None, -1)):
            return None
        return pad(after, [0, 0] * (after.ndim - 1 - d) + [1, -1])
