"""Kernels that read raw storage: what is computed does not depend on how tensors lie in memory."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from autopar.compiler import program_of, rewrite
from autopar.costs.cluster import Cluster
from autopar.errors import CaptureError
from autopar.ir.program import Program
from autopar.parallelize import parallelize
from autopar.passes import DETERMINISTIC_PASSES, with_any_strides
from autopar.search.random_plan import random_plan
from autopar.sharding.dims import analyze
from autopar.verify.verify import compare, global_values, verify
from tests.crossed import crossed

BOUND = 1e-10


class Views(nn.Module):
    """Layers, and a function that says how their tensors go through each other."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *batch: Tensor) -> Tensor:
        result = self.function(self, *batch)
        return (
            (result * torch.linspace(0.5, 1.5, result.numel(), dtype=result.dtype).view(result.shape)).square().mean()
        )


def norm_of_a_permutation(m: Any, x: Tensor) -> Tensor:
    return m.g(m.f(x).reshape(2, 3, 2, 4).permute(0, 3, 1, 2))


def norm_of_a_copy(m: Any, x: Tensor) -> Tensor:
    return m.g(m.f(x).transpose(1, 2).contiguous())


def block_behind_a_permutation(m: Any, x: Tensor) -> Tensor:
    h = m.f(x).permute(0, 3, 1, 2)
    return m.c(F.silu(m.g(h)))


def attention_of_channels(m: Any, x: Tensor) -> Tensor:
    b, _, n = x.shape
    q, k, v = m.f(x).reshape(b, 3, 2, 4, n).transpose(-1, -2).contiguous().unbind(1)
    return F.scaled_dot_product_attention(q, k, v)


def attention_of_chunks(m: Any, x: Tensor) -> Tensor:
    q, k, v = (t.transpose(1, 2).unflatten(1, (2, 4)).transpose(2, 3) for t in m.f(x.transpose(1, 2)).chunk(3, -1))
    return m.o(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


def attention_of_one_head(m: Any, x: Tensor) -> Tensor:
    """Keys and values of one head, expanded: a stride of zero."""
    q = m.f(x.transpose(1, 2)).unflatten(2, (3, 8)).transpose(1, 2)
    k, v = (t.unsqueeze(1).expand(-1, 3, -1, -1) for t in m.kv(x.transpose(1, 2)).chunk(2, -1))
    return F.scaled_dot_product_attention(q, k, v)


def rotation(m: Any, x: Tensor) -> Tensor:
    """Rotary embeddings of Meta's Llama, and attention by hand."""
    b, s, h = x.shape
    q, k, v = (t.view(b, s, 2, h // 2) for t in m.f(x).chunk(3, -1))
    angles = torch.polar(torch.ones(s, h // 4, dtype=x.dtype), torch.arange(s * h // 4, dtype=x.dtype).view(s, h // 4))

    def rotated(t: Tensor) -> Tensor:
        pairs = torch.view_as_complex(t.reshape(*t.shape[:-1], -1, 2))
        return torch.view_as_real(pairs * angles[None, :, None]).flatten(3)

    q, k, v = (t.transpose(1, 2) for t in (rotated(q), rotated(k), v))
    scores = torch.matmul(q, k.transpose(2, 3)) / (h // 2) ** 0.5
    return m.o(torch.matmul(scores.softmax(-1), v).transpose(1, 2).contiguous().view(b, s, -1))


def conjugates(m: Any, x: Tensor) -> Tensor:
    pairs = torch.view_as_complex(m.f(x).transpose(1, 2).unflatten(-1, (-1, 2)).contiguous())
    seen = torch.view_as_real(pairs.conj().resolve_conj())
    return seen + torch.view_as_real(pairs.conj() * (1 + 2j) + pairs)


def complex_of_a_slice(m: Any, x: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(m.f(x)[:, :, 1:].unflatten(-1, (-1, 2)).clone()).exp())


def exponential(m: Any, x: Tensor) -> Tensor:
    return torch.linalg.matrix_exp(m.f(x).transpose(0, 1) * 0.1)


def norms_of_views(m: Any, x: Tensor) -> Tensor:
    h = m.n(m.f(x.transpose(0, 1)).transpose(0, 2))
    return m.n(h.flip(0).transpose(1, 2).contiguous().transpose(1, 2).expand(3, *h.shape)[:, ::2])


def batch_norm_of_a_permutation(m: Any, x: Tensor) -> Tensor:
    return m.b(m.f(x).permute(0, 3, 1, 2)).transpose(1, 3).square()


def gradient_of_a_sum(m: Any, x: Tensor) -> Tensor:
    """Gradients that are expanded rows."""
    return m.g(m.f(x)).sum(2)[:, :4] + m.n(m.f(x)).sum(1)


def block_of_a_unet(m: Any, x: Tensor) -> Tensor:
    """Pictures come channels-last, attention looks at their pixels, and each norm at what the other has left."""
    h = m.c(F.silu(m.g(m.f(x).permute(0, 3, 1, 2))))
    b, c, *size = h.shape
    q, k, v = m.qkv(h.flatten(2)).reshape(b, 3, 2, c // 2, -1).transpose(-1, -2).contiguous().unbind(1)
    y = F.scaled_dot_product_attention(q, k, v).transpose(2, 3).reshape(b, c, *size)
    return m.n((h + y).transpose(2, 3).contiguous())


def linear(*sizes: int, bias: bool = True) -> nn.Module:
    return nn.Linear(*sizes, bias=bias)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "group norm of a permutation": (
        lambda: Views(norm_of_a_permutation, f=linear(4, 4), g=nn.GroupNorm(2, 4)), (2, 6, 4)),
    "group norm of a copy": (lambda: Views(norm_of_a_copy, f=linear(4, 4), g=nn.GroupNorm(2, 4)), (2, 6, 4)),
    "block behind a permutation": (
        lambda: Views(block_behind_a_permutation, f=linear(4, 8), g=nn.GroupNorm(4, 8),
                      c=nn.Conv2d(8, 8, 3, padding=1)), (2, 4, 6, 4)),
    "block of a unet": (
        lambda: Views(block_of_a_unet, f=linear(4, 8), g=nn.GroupNorm(4, 8), c=nn.Conv2d(8, 8, 3, padding=1),
                      qkv=nn.Conv1d(8, 24, 1), n=nn.GroupNorm(2, 8)), (2, 4, 4, 4)),
    "attention of channels": (lambda: Views(attention_of_channels, f=nn.Conv1d(8, 24, 1)), (2, 8, 6)),
    "attention of chunks": (
        lambda: Views(attention_of_chunks, f=linear(8, 24), o=linear(8, 8)), (2, 8, 6)),
    "attention of one head": (
        lambda: Views(attention_of_one_head, f=linear(8, 24), kv=linear(8, 16)), (2, 8, 6)),
    "rotation": (lambda: Views(rotation, f=linear(8, 24), o=linear(8, 8)), (2, 6, 8)),
    "conjugates": (lambda: Views(conjugates, f=linear(4, 4)), (2, 6, 4)),
    "complex of a slice": (lambda: Views(complex_of_a_slice, f=linear(4, 5)), (2, 6, 4)),
    "matrix exponential": (lambda: Views(exponential, f=linear(4, 4)), (4, 2, 4)),
    "layer norms of views": (lambda: Views(norms_of_views, f=linear(4, 6), n=nn.LayerNorm(6)), (2, 6, 4)),
    "batch norm of a permutation": (
        lambda: Views(batch_norm_of_a_permutation, f=linear(4, 8, bias=False), b=nn.BatchNorm2d(8)), (2, 4, 6, 4)),
    "gradient of a sum": (
        lambda: Views(gradient_of_a_sum, f=linear(4, 4), g=nn.GroupNorm(2, 6), n=nn.LayerNorm(4)), (2, 6, 4)),
}  # fmt: skip


def make(name: str) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    build, shape = CASES[name]
    model = build().double()
    return model, torch.randn(shape, dtype=torch.float64)


def eager(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    """The loss and every gradient of a plain copy."""
    model = copy.deepcopy(model)
    loss = model(*batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **{n: b for n, b in model.named_buffers() if b.is_floating_point()}}


def errors(expected: dict[str, Tensor], found: dict[str, Tensor]) -> dict[str, float]:
    assert expected.keys() == found.keys()
    scale = max(float(t.abs().max()) for t in expected.values())
    return {n: float((found[n] - t).abs().max()) / scale for n, t in expected.items()}


def one_device(model: nn.Module, *batch: Tensor) -> dict[str, Tensor]:
    """The same of what `parallelize` gives for one device."""
    loss = model(*batch)
    loss.backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found, **{n: b for n, b in model.named_buffers() if b.is_floating_point()}}


@pytest.mark.some(2)
@pytest.mark.parametrize("name", CASES)
def test_one_device(name: str) -> None:
    model, x = make(name)
    expected = eager(model, x)
    assert max(errors(expected, one_device(parallelize(copy.deepcopy(model), None), x)).values()) < BOUND


@cache
def captured(name: str) -> tuple[Program, Any, list[Tensor], dict[str, Tensor]]:
    model, x = make(name)
    program = program_of(model, (x,))
    return program, analyze(program), global_values(program, model, (x,)), eager(model, x)


def check_plan(name: str, axes: dict[str, int], seed: int, strided: bool) -> None:
    """A random plan computes what eager does; ``strided``: whatever strides tensors have."""
    program, dims, values, expected = captured(name)
    plan = random_plan(program, dims, axes, Cluster.preset("cpu"), seed, recompute=True, offload=True)
    plan = replace(plan, fingerprint=program.fingerprint)
    passes = DETERMINISTIC_PASSES
    if strided:
        passes = with_any_strides(passes)
    local = rewrite(program, plan, passes=passes)
    report = compare(program, local, plan, values, torch.float64, draw=random.Random(seed) if strided else None)
    assert report.max_error < BOUND, (seed, report.worst)
    found = {"loss": report.loss, **report.gradients}
    wanted = {n: t for n, t in expected.items() if n in found}
    assert max(errors(wanted, found).values()) < BOUND


OFTEN = ("group norm of a permutation", "block of a unet", "rotation", "batch norm of a permutation")
RARELY = [n for n in CASES if n not in OFTEN]


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("name", "strided", "seed"),
    [
        *crossed(OFTEN, [True, False], [1, 0]),
        *(pytest.param(n, s, seed, marks=pytest.mark.deep) for n in RARELY for s in (True, False) for seed in (0, 1)),
    ],
)
def test_random_plans(name: str, strided: bool, seed: int) -> None:
    check_plan(name, ({"a": 2}, {"a": 2, "b": 2})[seed], seed, strided)


def test_a_split_group_norm_reads_what_a_collective_brings() -> None:
    model, x = make("block behind a permutation")
    expected = eager(model, x)
    report = verify(model, (x,), {"a": 2}, pins={"g.weight": "S(0)"})
    assert max(errors(expected, {"loss": report.loss, **report.gradients}).values()) < BOUND


def test_verify_gives_random_strides() -> None:
    model, x = make("block behind a permutation")
    report = verify(model, (x,), {"a": 2}, plan="random", microbatches=2, random_strides=True)
    assert report.max_error < BOUND


def strided(x: Tensor, kind: int) -> Tensor:
    """The same batch in other places of memory."""
    if kind == 1:
        return x.to(memory_format=torch.channels_last)
    if kind == 2:
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    return x.repeat_interleave(2, 3)[..., ::2] if kind == 3 else x


def picture(m: Any, x: Tensor) -> Tensor:
    """No norm of the batch itself: eager's group norm crashes if it is channels-last and has no gradient."""
    return m.n(m.g(m.c(x)) + x.transpose(2, 3))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_batches_and_parameters_lie_as_they_like(layout: torch.memory_format) -> None:
    """The first batch is planned for; later ones of the same shape lie otherwise."""
    torch.manual_seed(0)
    model = Views(picture, g=nn.GroupNorm(2, 4), c=nn.Conv2d(4, 4, 3, padding=1), n=nn.LayerNorm(4)).double()
    model = model.to(memory_format=layout)
    model.n.weight = nn.Parameter(torch.randn(4, 2, dtype=torch.float64)[:, 1])  # eager's group norm misreads its own
    parallel = parallelize(copy.deepcopy(model), None)
    x = torch.randn(2, 4, 4, 4, dtype=torch.float64)
    for kind in (0, 1, 2, 3):
        parallel.zero_grad()
        found = one_device(parallel, strided(x, kind))
        assert max(errors(eager(model, strided(x, kind)), found).values()) < BOUND, kind


@torch.library.custom_op("strides_report::raw", mutates_args=())
def raw(x: Tensor) -> Tensor:
    """Three times a tensor whose storage is read row by row, whatever its strides: what careless kernels do."""
    strides = torch.empty(x.shape, device="meta").stride()
    return 3 * x.as_strided(x.shape, strides, x.storage_offset())


@raw.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


raw.register_autograd(lambda ctx, grad: raw(grad.contiguous()))


def test_an_operator_without_a_rule_is_given_row_major_tensors() -> None:
    torch.manual_seed(0)
    model = Views(lambda m, x: raw(m.f(x).transpose(1, 2).contiguous()).transpose(1, 2), f=linear(4, 4)).double()
    x = torch.randn(2, 6, 4, dtype=torch.float64)
    expected = eager(model, x)
    assert max(errors(expected, one_device(parallelize(copy.deepcopy(model), None), x)).values()) < BOUND
    report = verify(model, (x,), {"a": 2}, plan="random", random_strides=True)
    assert max(errors(expected, {"loss": report.loss, **report.gradients}).values()) < BOUND


READERS = {
    "branch": lambda m, x: m.f(x * 2 if x.is_contiguous() else x),
    "numbers": lambda m, x: m.f(x * x.stride(0)),
    "method": lambda m, x: m.f(x.as_strided(x.shape, (4, 1))),
    "function": lambda m, x: m.f(torch.as_strided(x, x.shape, (4, 1))),
}


@pytest.mark.parametrize("name", READERS)
def test_a_model_that_reads_strides_takes_contiguous_batches_alone(name: str) -> None:
    """Its graph holds what a contiguous batch gave; eager reads another branch, or other elements, of others."""
    torch.manual_seed(0)
    model = Views(READERS[name], f=linear(4, 4)).double()
    parallel = parallelize(copy.deepcopy(model), None)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert max(errors(eager(model, x), one_device(parallel, x)).values()) < BOUND
    with pytest.raises(
        CaptureError, match=r"reads strides at .*test_strides\.py:\d+, and batch tensor 0 .*not contiguous"
    ):
        parallel(x.t().contiguous().t())
