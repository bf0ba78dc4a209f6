"""`torch.nn.attention.flex_attention` by what there is: attention under a mask or a bias, or its formula.

Its functions of one score are called once, with indices of queries and keys that broadcast, which is the same as long
as they do nothing but compute with numbers and look numbers up. Of a mask, and of a score to which something is
added, the mask's function is found again by `autopar.passes.canonicalize.masks`; a score may be capped before, by a
multiple of ``tanh`` of a multiple. Any other function of the score is applied to all scores, as torch does where it
compiles no kernel.

Before::

    flex_attention(q, k, v, block_mask=create_block_mask(lambda b, h, i, j: (i >= j) & (ids[b, i] == ids[b, j]), ...))

After::

    scaled_dot_product_attention(q, k, v, (at >= of) & (ids[b, at] == ids[b, of]))     # at [1, 1, queries, 1]
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from autopar._torch_compat import flex_attention_as, is_traced, traced_graph
from autopar.errors import CaptureError
from autopar.ir.ops.attention_kernels import wide_dtype
from autopar.ir.ops.formula.attention_logarithm import attention_with_logarithm
from autopar.ir.ops.formula.attention_rows import attention_rows

_ELEMENTWISE = frozenset(
    "abs add bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp clip cos detach div divide double eq exp "
    "exp2 expm1 float floor floor_divide floordiv fmod ge greater greater_equal gt half int invert le less less_equal "
    "log log1p log2 logical_and logical_not logical_or logical_xor long lt masked_fill maximum minimum mod mul "
    "multiply ne neg negative not_equal or and xor pow reciprocal relu remainder round rsqrt sigmoid sign sin "
    "softplus sqrt square sub subtract tanh to true_divide truediv trunc type type_as where full_like ones_like "
    "zeros_like".split()
)
"""Functions of numbers, each element by itself: names without underscores, and without an `r` for reversed ones."""

_NUMBERS = frozenset("new_full new_ones new_tensor new_zeros tensor full ones zeros scalar_tensor".split())
"""Functions that may make a number."""


def by_parts() -> AbstractContextManager[None]:
    """While it lasts, `flex_attention` is computed by `flex_attention` here."""
    return flex_attention_as(flex_attention)


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: Any = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: Any = None,
    *,
    return_aux: Any = None,
) -> Any:
    """What torch's function of this name computes; its arguments.

    Raises:
        CaptureError: a function of scores does more than compute with numbers.
        ValueError: shapes do not fit.
    """
    del kernel_options  # of torch's own kernels
    if return_lse and return_aux is not None:
        raise ValueError("flex_attention: return_lse and return_aux are two ways to ask for the same; give one of them")
    sizes = (query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    if query.ndim != 4 or query.shape[1] % key.shape[1] or (not enable_gqa and query.shape[1] != key.shape[1]):
        raise ValueError(
            f"flex_attention: queries of shape {list(query.shape)} and keys of {list(key.shape)}; give both four dims, "
            "and as many heads, or with enable_gqa=True a multiple"
        )
    indices = [_index(i, n, query.device) for i, n in enumerate(sizes)]
    shown = None
    if block_mask is not None:
        _check_mask(block_mask, sizes)
        shown = _Called(block_mask.mask_mod, "mask_mod", indices)(*indices)
    call = None if score_mod is None else _Called(score_mod, "score_mod", indices)
    asked = AuxRequest(lse=return_lse) if return_aux is None else return_aux
    out, log = _attention(query, key, value, shown, scale, enable_gqa, call, with_logarithm=asked.lse)
    if not return_lse and return_aux is None:
        return out
    if return_aux is None:
        return out, log
    most = None
    if asked.max_scores:
        with torch.no_grad():  # torch has no gradient of it
            most = _scores(query, key, shown, scale, call).amax(-1)
    return out, AuxOutput(log, most)


def _attention(
    query: Tensor, key: Tensor, value: Tensor, shown: Tensor | None, scale: float | None, enable_gqa: bool,
    call: _Called | None, *, with_logarithm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """The result, and the logarithms if they are asked for."""
    bias = None
    if call is not None:
        # Of no score, which shows what is added.
        bias = call(torch.zeros((1, 1, 1, 1), dtype=query.dtype, device=query.device), *call.indices)
        if not call.adds and call.cap is None:
            return _formula(query, key, value, shown, scale, call, with_logarithm)
        bias = bias.to(query.dtype)
        bias = bias if shown is None else torch.where(shown, bias, -math.inf)
        bias = bias.expand(*bias.shape[:2], query.shape[2], key.shape[2])
    elif with_logarithm and shown is not None:
        bias = torch.where(shown, query.new_full((), 0.0), -math.inf)
        bias = bias.expand(*bias.shape[:2], query.shape[2], key.shape[2])
    cap = None
    if call is not None and call.cap is not None:
        factor, cap = call.cap
        scale = factor * cap * (query.shape[-1] ** -0.5 if scale is None else scale)
    if with_logarithm:
        return attention_with_logarithm(query, key, value, bias, scale, cap)
    if cap is not None:
        return attention_rows(query, key, value, bias, None, 0.0, scale, cap, False)[0], None
    mask = shown if bias is None else bias
    return scaled_dot_product_attention(query, key, value, mask, scale=scale, enable_gqa=enable_gqa), None


def _formula(
    query: Tensor, key: Tensor, value: Tensor, shown: Tensor | None, scale: float | None, call: _Called,
    with_logarithm: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    scores = _scores(query, key, shown, scale, call)
    # A query that sees no key gets zeros.
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    weights = torch.softmax(scores.masked_fill(nothing, 0.0), -1).masked_fill(nothing, 0.0)
    out = (weights @ _of_each_head(value, query)).to(query.dtype)
    if not with_logarithm:
        return out, None
    return out, scores.masked_fill(nothing, 0.0).logsumexp(-1).masked_fill(nothing.squeeze(-1), -math.inf)


def _scores(query: Tensor, key: Tensor, shown: Tensor | None, scale: float | None, call: _Called | None) -> Tensor:
    """All scores, minus infinity where they are hidden."""
    factor = query.shape[-1] ** -0.5 if scale is None else scale
    scores = query.to(wide_dtype(query)) @ _of_each_head(key, query).transpose(2, 3) * factor
    scores = scores if call is None else call(scores, *call.indices)
    return scores if shown is None else scores.masked_fill(shown.logical_not(), -math.inf)


def _of_each_head(tensor: Tensor, query: Tensor) -> Tensor:
    """Keys or values of each head of the queries."""
    shared = query.shape[1] // tensor.shape[1]
    return (tensor.repeat_interleave(shared, 1) if shared > 1 else tensor).to(wide_dtype(query))


def _index(dim: int, size: int, device: torch.device) -> Tensor:
    shape = [1] * 4
    shape[dim] = size
    return torch.arange(size, device=device).reshape(shape)


def _check_mask(block_mask: Any, sizes: tuple[int, ...]) -> None:
    """Refuse a mask that was made for another shape, as torch does."""
    made = tuple(block_mask.shape)
    fits = len(made) == 4 and all(n in (1, m) for n, m in zip(made[:2], sizes[:2], strict=True))
    # Torch's mask that hides nothing has one block of any size.
    if not fits or (made[2:] != sizes[2:] and min(block_mask.BLOCK_SIZE) < 2**30):
        raise ValueError(
            f"flex_attention: the block mask is of shape {made}, and the scores are of {sizes}; make it for these "
            "lengths, with create_block_mask in forward"
        )


_TIMES, _OVER = ("mul", "multiply", "rmul"), ("div", "divide", "true_divide", "truediv")


@dataclass(frozen=True)
class _Form:
    """A tensor that is ``outer * tanh(inner * score)`` with something added, or ``inner * score``."""

    tensor: Tensor
    inner: float
    outer: float | None = None
    added: bool = False

    @property
    def cap(self) -> tuple[float, float] | None:
        """The numbers, if there is a cap."""
        return None if self.outer is None else (self.inner, self.outer)


class _Called(TorchFunctionMode):
    """A function of one score, called for all of them at once."""

    def __init__(self, function: Callable[..., Tensor], kind: str, indices: list[Tensor]) -> None:
        super().__init__()
        self.function, self.indices, self.adds = function, indices, False
        code = getattr(function, "__code__", None)
        place = "" if code is None else f" at {code.co_filename}:{code.co_firstlineno}"
        self.name = f"{kind} {getattr(function, '__qualname__', function)}{place} of flex_attention"
        self._scores: list[Tensor] = []
        self._forms: list[_Form] = []
        self.cap: tuple[float, float] | None = None

    def __call__(self, *args: Tensor) -> Tensor:
        """The function's value, four dims that broadcast; notes whether it adds to the score, and how it caps it.

        Of ``cap * tanh(factor * score)`` with something added, ``cap`` is (factor, cap).
        """
        self._scores = list(args[: len(args) - 4])
        self._forms = [_Form(t, 1.0) for t in self._scores]
        self.adds = bool(self._scores)
        with self:
            value: Any = self.function(*args)
        if not isinstance(value, Tensor):
            value = torch.full((), value, device=args[-1].device)
        self.adds = self.adds and self._is_score(value)
        self.cap = next((f.cap for f in self._forms if f.tensor is value and f.outer is not None), None)
        made: Tensor = value.reshape((1,) * (4 - value.ndim) + value.shape)
        return made

    def _is_score(self, value: Any) -> bool:
        return any(value is t for t in self._scores)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Refuse what does not compute each element by itself."""
        kwargs, name = kwargs or {}, getattr(func, "__name__", str(func))
        if name == "__get__":  # a shape, or a dtype
            return func(*args, **kwargs)
        plain = name.strip("_")
        known = plain in _ELEMENTWISE or (plain[:1] == "r" and plain[1:] in _ELEMENTWISE)
        if plain == "getitem":
            self._check_lookup(*args)
        elif not known and plain not in _NUMBERS:
            raise CaptureError(
                f"{self.name} calls {name}, which does not compute each score by itself; compute what it gives before, "
                "outside of the function, and look it up by its indices"
            )
        self._check_tensors(args)
        result = func(*args, **kwargs)
        if plain in _NUMBERS and result.ndim:
            raise CaptureError(
                f"{self.name} makes a tensor of shape {list(result.shape)}; make it outside of the function"
            )
        if (form := self._form(plain, args, kwargs, result)) is not None:
            self._forms.append(form)
        if self.adds and any(self._is_score(a) for a in (*args, *kwargs.values())):
            if self._adds(plain, args, kwargs, [self._is_score(a) for a in args]):
                self._scores.append(result)
            else:
                self.adds = False
        return result

    def _form(self, name: str, args: Any, kwargs: Any, result: Tensor) -> _Form | None:
        """A call's result as a form of the score; None: it is another function of it, or none."""
        forms = [next((f for f in self._forms if f.tensor is a), None) for a in args]
        found = [f for f in forms if f is not None]
        if len(found) != 1 or kwargs:
            return None
        (form,), rest = found, [a for a, f in zip(args, forms, strict=True) if f is None]
        if name == "tanh" and form.outer is None:
            return replace(form, tensor=result, outer=1.0)
        if name in _TIMES or (name in _OVER and forms[0] is form):
            number = rest[0] if rest and isinstance(rest[0], int | float) else 0.0
            if form.added or not number or not math.isfinite(number):
                return None
            factor = float(number) if name in _TIMES else 1.0 / number
            if form.outer is None:
                return replace(form, tensor=result, inner=form.inner * factor)
            return replace(form, tensor=result, outer=form.outer * factor)
        if form.outer is not None and self._adds(name, args, kwargs, [f is not None for f in forms]):
            return replace(form, tensor=result, added=True)
        return None

    def _adds(self, name: str, args: Any, kwargs: Any, scores: list[bool]) -> bool:
        """Whether a call's result is a score with something added, or with minus infinity in some places."""
        if kwargs or sum(scores) != 1:
            return False
        if name in ("add", "radd") or (name in ("sub", "subtract") and scores[0]):
            return True
        if name == "masked_fill":
            return bool(scores[0] and args[2] == -math.inf)
        others = [a for a, is_score in zip(args[1:], scores[1:], strict=True) if not is_score]
        return bool(name == "where" and not scores[0] and isinstance(others[0], float) and others[0] == -math.inf)

    def _check_lookup(self, table: Tensor, places: Any) -> None:
        places = places if isinstance(places, tuple) else (places,)
        if len(places) != table.ndim or not all(isinstance(p, Tensor | int) for p in places):
            raise CaptureError(
                f"{self.name} takes a part of a tensor of {table.ndim} dims by {len(places)} indices, which is no "
                "number; give an index, an integer tensor or a number, for each dim"
            )
        for d, place in enumerate(places):
            for index in self.indices:
                if place is index and index.numel() > table.shape[d]:
                    raise CaptureError(
                        f"{self.name} looks up {index.numel()} elements in dim {d} of a tensor of shape "
                        f"{list(table.shape)}; give it a tensor of the length of the sequence"
                    )

    def _check_tensors(self, args: Any) -> None:
        """Refuse tensors that are no part of the model or the batch: another batch would be masked by this one's."""
        if traced_graph() is None:
            return
        for a in args:
            if isinstance(a, Tensor) and a.ndim and not is_traced(a):
                raise CaptureError(
                    f"{self.name} closes over a tensor of shape {list(a.shape)} that is no argument, parameter or "
                    "buffer of the model, so that other batches would have the mask of this one; pass it to the model, "
                    "or register it as a buffer, and make the mask in forward, with create_block_mask"
                )
