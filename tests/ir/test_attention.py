"""Our attention operator computes what torch's does: values, gradients, random numbers, on kernels of every kind."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch.nn.functional import scaled_dot_product_attention

from autopar.ir.ops import attention as ours
from autopar.ir.ops import attention_kernels as kernels
from autopar.ir.ops.random import same_numbers
from tests.strategies import stand_ins

Shape = tuple[int, ...]

# Heads of keys, dropout, whether causal, bias, scale, elements of a value.
CASES: dict[str, tuple[int, float, bool, Shape | None, float | None, int]] = {
    "plain": (4, 0.0, False, None, None, 8),
    "causal, grouped": (2, 0.0, True, None, 0.3, 8),
    "biased": (4, 0.0, False, (2, 1, 5, 6), None, 8),
    "biased by keys, grouped": (2, 0.0, False, (2, 1, 1, 6), None, 8),
    "values of their own size": (4, 0.0, False, None, None, 4),
    "dropping": (4, 0.3, False, None, None, 8),
    "dropping, causal, one key's head": (1, 0.3, True, None, None, 8),
    "dropping, biased": (2, 0.3, False, (5, 6), None, 4),
}


def tensors(name: str, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    heads, _, causal, bias, _, size = CASES[name]
    keys, generator = 5 if causal else 6, torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, generator=generator).requires_grad_()

    made = drawn(2, 4, 5, 8), drawn(2, heads, keys, 8), drawn(2, heads, keys, size)
    return *made, None if bias is None else drawn(*bias)


def torchs(name: str, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Tensor:
    heads, dropout, causal, _, scale, _ = CASES[name]
    k, v = (t.repeat_interleave(4 // heads, 1) for t in (k, v))
    return scaled_dot_product_attention(q, k, v, bias, dropout, causal, scale=scale)


def own(name: str, *given: Any) -> Tensor:
    _, dropout, causal, _, scale, _ = CASES[name]
    return ours.scaled_dot_product(*given, dropout, causal, scale)


def close(a: Tensor, b: Tensor, rtol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", CASES)
def test_values_gradients_and_numbers_are_torchs(name: str) -> None:
    given = tensors(name)
    with same_numbers(1):
        expected, state = torchs(name, *given), torch.get_rng_state()
    with same_numbers(1):
        found = own(name, *given)
        assert torch.equal(torch.get_rng_state(), state)
    close(found, expected)
    inputs = [t for t in given if t is not None]
    grad = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(t, inputs, grad) for t in (found, expected)), strict=True):
        close(a, b)


@pytest.mark.parametrize("name", [n for n in CASES if n.startswith("dropping")])
def test_gradients_of_gradients(name: str) -> None:
    """Which torch has where it computes attention by its formula, too."""
    given = tensors(name)
    inputs = [t for t in given if t is not None]
    results = []
    for function in (torchs, own):
        with same_numbers(1):
            out = function(name, *given)
        first = torch.autograd.grad(out, inputs, torch.ones_like(out), create_graph=True)
        results.append(torch.autograd.grad(sum(g.square().sum() for g in first), inputs))
    for a, b in zip(*results, strict=True):
        close(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_half_precision(dtype: torch.dtype) -> None:
    given = tensors("dropping, biased", dtype)
    with same_numbers(1):
        expected = torchs("dropping, biased", *(None if t is None else t.float() for t in given))
    with same_numbers(1):
        found = own("dropping, biased", *given)
    assert found.dtype == dtype
    close(found.float(), expected, rtol=2e-2 if dtype.itemsize == 2 else 1e-5)


def test_a_query_that_sees_nothing_gives_zeros() -> None:
    q = torch.randn(1, 2, 3, 8, dtype=torch.float64)
    bias = torch.zeros(3, 3, dtype=torch.float64)
    bias[1] = -torch.inf
    kept = torch.ones(1, 2, 3, 3, dtype=torch.bool)
    for mask in (None, kept):
        out, total = ours.attention(q, q, q, bias, mask, 0.0, False, None)
        assert torch.equal(out[:, :, 1], torch.zeros(1, 2, 8, dtype=torch.float64))
        made = ours.attention_backward(torch.ones_like(q), q, q, q, bias, mask, out, total, 0.0, False, None, True)
        assert not any(t.isnan().any() for t in made)


# --- kernels of GPUs, computed by what stands in for them here


class Recorder:
    """Torch's operators, those of GPUs replaced; keeps their names."""

    def __init__(self) -> None:
        self.called: list[str] = []

    def __getattr__(self, name: str) -> Any:
        operator = getattr(torch.ops.aten, name)
        stand_in = stand_ins.STAND_INS.get(operator.default)

        def default(*args: Any, scale: float = 0.0, return_debug: bool = False) -> Any:
            self.called.append(name)
            return stand_in(*_without_flag(name, args))  # type: ignore[misc]

        return operator if stand_in is None else type("Stand", (), {"default": staticmethod(default)})


def _without_flag(name: str, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Stand-ins know no ``return_debug_mask``."""
    if name in ("_scaled_dot_product_flash_attention", "_scaled_dot_product_cudnn_attention"):
        assert args[-1] is False
        return args[:-1]
    return args


@pytest.mark.parametrize("kernel", [kernels.FLASH, kernels.EFFICIENT, kernels.CUDNN])
@pytest.mark.parametrize("grouped", [False, True])
@pytest.mark.parametrize("biased", [False, True])
def test_kernels_of_gpus(kernel: str, grouped: bool, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward give and take one form, whatever the kernel's; heads are repeated where it wants that."""
    if biased and kernel != kernels.EFFICIENT:
        return
    name = "biased by keys, grouped" if biased and grouped else "biased" if biased else "plain"
    q, k, v, bias = (t if t is None else t.detach() for t in tensors(name))
    k, v = (t[:, :2] for t in (k, v)) if grouped else (k, v)
    recorder = Recorder()
    monkeypatch.setattr(kernels, "aten", recorder)
    monkeypatch.setattr(kernels, "choose", lambda *_: (kernel, grouped and kernel != kernels.FLASH))
    out, total, seed, offset = kernels.forward(q, k, v, bias, 0.0, False, None)
    grad = torch.randn_like(out)
    made = kernels.backward(grad, q, k, v, bias, out, total, seed, offset, 0.0, False, None, biased)
    assert len(recorder.called) == 2 and recorder.called[1] == recorder.called[0] + "_backward"
    expected = kernels.math(q, k, v, bias, None, 0.0, False, None)
    close(out, expected[0])
    close(total, expected[1])
    again = kernels.math_backward(grad, q, k, v, bias, None, *expected, 0.0, False, None, biased)
    for a, b in zip(made, again, strict=True):
        close(a, b)


def test_a_kernel_is_chosen_once_for_a_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backward must not take another kernel than its forward, whatever the user's settings are by then."""
    monkeypatch.setattr(kernels, "_chosen", {})
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 3, 8)
    first = kernels.choose(q, k, k, None, 0.0, False)
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        assert kernels.choose(q, k, k, None, 0.0, False) == first == (kernels.CPU, False)
        assert kernels.choose(q, q, q, None, 0.0, True) == (kernels.MATH, False)
    assert not kernels.draws(q, k, k, None, 0.1, False)  # on a CPU


@pytest.mark.parametrize(("taken", "found"), [((0, 1, 2), True), ((0, 3), False), ((), False)])
def test_torchs_kernel_stands_in_only_where_its_three_gradients_are_all_that_is_taken(
    taken: tuple[int, ...], found: bool
) -> None:
    """A stage graph may return the tuple as a whole: then a later graph takes from it."""
    graph, query = fx.Graph(), torch.empty(2, 4, 5, 8, device="meta")
    values = [query, query, query, query, query, torch.empty(2, 4, 5, device="meta")]
    inputs = [graph.placeholder(f"x{i}") for i in range(len(values))]
    for node, value in zip(inputs, values, strict=True):
        node.meta["val"] = value
    grad, q, k, v, out, logsumexp = inputs
    arguments = (grad, q, k, v, None, None, out, logsumexp, 0.0, False, None, False)
    backward = graph.call_function(ours.attention_backward, arguments)
    graph.output(tuple(graph.call_function(operator.getitem, (backward, i)) for i in taken) or (backward,))
    assert (ours.kernel_call(backward, torch.device("cpu")) is not None) == found
