"""Our cross-entropy operator: values and gradients of torch's, of all classes or of some, in blocks of any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from autopar.ir.ops import cross_entropy as ours

ROWS, CLASSES = 7, 12


def drawn(dtype: torch.dtype = torch.float64, *shape: int) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, targets, and a gradient of each row's result."""
    g, shape = torch.Generator().manual_seed(0), shape or (ROWS,)
    logits = 5 * torch.randn(*shape, CLASSES, generator=g, dtype=torch.float64)
    target = torch.randint(CLASSES, (*shape, 1), generator=g)
    return logits.to(dtype), target, torch.randn(*shape, 1, generator=g, dtype=torch.float64)


def expected(logits: Tensor, target: Tensor, grad: Tensor) -> tuple[Tensor, Tensor]:
    """The logarithm of the softmax at the targets, and the gradient of the logits, by torch in float64."""
    x = logits.double().requires_grad_()
    picked = torch.log_softmax(x, -1).gather(-1, target)
    picked.backward(grad.double())
    assert x.grad is not None
    return picked.detach(), x.grad


@pytest.mark.parametrize("block", [1, 3 * CLASSES * 8, 2**20])
@pytest.mark.parametrize("shape", [(ROWS,), (2, 3)])
def test_values_and_gradients(monkeypatch: pytest.MonkeyPatch, block: int, shape: tuple[int, ...]) -> None:
    monkeypatch.setitem(ours.BLOCK_BYTES, "cpu", block)
    logits, target, grad = drawn(torch.float64, *shape)
    picked, total = ours.cross_entropy(logits, target, None)
    found = ours.cross_entropy_backward(grad, logits, target, total, None, torch.float64)
    value, gradient = expected(logits, target, grad)
    torch.testing.assert_close(picked - total, value, rtol=0, atol=1e-13)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_of_16_bits_are_computed_in_32(dtype: torch.dtype) -> None:
    logits, target, grad = drawn(dtype)
    picked, total = ours.cross_entropy(logits, target, None)
    assert picked.dtype == total.dtype == torch.float32
    found = ours.cross_entropy_backward(grad.float(), logits, target, total, None, dtype)
    assert found.dtype == dtype
    value, gradient = expected(logits, target, grad)
    torch.testing.assert_close((picked - total).double(), value, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gradient.to(dtype), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("parts", [2, 3])
def test_blocks_of_classes_add_up(parts: int) -> None:
    """One block is minus infinity in every row, as padding is."""
    logits, target, grad = drawn()
    size = CLASSES // parts
    target = target % (CLASSES - size)
    logits[:, CLASSES - size :] = -torch.inf
    blocks = [(i * size, logits[:, i * size : (i + 1) * size]) for i in range(parts)]
    made = [ours.cross_entropy(block, target, start) for start, block in blocks]
    assert all(torch.isfinite(picked).all() for picked, _ in made)
    total = torch.stack([t for _, t in made]).logsumexp(0)
    value, gradient = expected(logits, target, grad)
    torch.testing.assert_close(sum(picked for picked, _ in made) - total, value, rtol=0, atol=1e-13)
    found = [ours.cross_entropy_backward(grad, block, target, total, start, torch.float64) for start, block in blocks]
    torch.testing.assert_close(torch.cat(found, 1), gradient, rtol=0, atol=1e-13)


@pytest.mark.parametrize("wrong", [-1, CLASSES])
def test_a_target_that_is_no_class_is_an_error(wrong: int) -> None:
    logits, target, _ = drawn()
    target[2] = wrong
    with pytest.raises(IndexError, match="out of bounds"):
        ours.cross_entropy(logits, target, None)


def test_what_is_infinite_is_so_in_torch() -> None:
    """Rows of infinities have no softmax."""
    logits, target, grad = drawn()
    logits[0], logits[1, 3], logits[2, int(target[2])] = -torch.inf, torch.inf, -torch.inf
    picked, total = ours.cross_entropy(logits, target, None)
    value, gradient = expected(logits, target, grad)
    torch.testing.assert_close(picked - total, value, rtol=0, atol=1e-13, equal_nan=True)
    found = ours.cross_entropy_backward(grad, logits, target, total, None, torch.float64)
    torch.testing.assert_close(found, gradient, rtol=0, atol=1e-13, equal_nan=True)


def test_shapes_without_data() -> None:
    logits, target, grad = (t.to("meta") for t in drawn(torch.bfloat16))
    made = ours.cross_entropy(logits, target, 3)
    assert [(t.shape, t.dtype) for t in made] == [((ROWS, 1), torch.float32)] * 2
    found = ours.cross_entropy_backward(grad, logits, target, made[1], None, torch.bfloat16)
    assert (found.shape, found.dtype) == (logits.shape, torch.bfloat16)
