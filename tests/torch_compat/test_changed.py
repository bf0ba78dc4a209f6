"""Contracts: functions that other ones take the place of while a model is traced."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Generator
from typing import Any

import pytest
import torch
from torch._dispatch.python import enable_python_dispatcher
from torch.fx.experimental.proxy_tensor import make_fx
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from autopar import _torch_compat as compat

aten = torch.ops.aten


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_is_replaced_under_every_name(reentrant: bool) -> None:
    """One is imported, one is bound by `partial`; afterwards torch's own is back."""
    calls: list[str] = []

    def first(function: Any, preserve_rng_state: bool, *args: Any) -> Any:
        calls.append("reentrant")
        return function(*args)

    def other(function: Any, preserve: bool, context_fn: Any, *rest: Any, **kwargs: Any) -> Generator[None]:
        assert len(context_fn()) == 2
        calls.append("other")
        yield
        calls.append("left")

    bound, x = functools.partial(checkpoint, use_reentrant=reentrant), torch.ones(2, requires_grad=True)
    with compat.checkpoint_replaced(first, other):
        assert torch.equal(bound(torch.exp, x), x.exp())
        assert torch.equal(checkpoint_sequential([torch.exp, torch.exp], 2, x, reentrant), x.exp().exp())
    assert calls == (["reentrant"] * 2 if reentrant else ["other", "left"] * 2)
    bound(torch.exp, x).sum().backward()
    assert torch.equal(x.grad, x.detach().exp())


def test_dispatch_is_restored_behind_an_error_that_is_kept() -> None:
    """Where printing a tensor ends in an error, torch's guard lives in the traceback."""
    before = torch._C._dispatch_tls_local_exclude_set()

    class Unprinted(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            raise RuntimeError("not known")

    with pytest.raises(RuntimeError, match="not known") as kept, compat.dispatch_restored():
        torch._tensor_str._str(torch.ones(2).as_subclass(Unprinted))
    assert kept.value.__traceback__ is not None
    assert torch._C._dispatch_tls_local_exclude_set() == before


def test_without_step_hooks() -> None:
    """The optimizer's own are not called, and are there again after it; those of all optimizers are called."""
    optimizer, called = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1), []
    optimizer.register_step_pre_hook(lambda *_: called.append("own, before"))
    optimizer.register_step_post_hook(lambda *_: called.append("own, after"))
    everywhere = register_optimizer_step_pre_hook(lambda *_: called.append("of all"))
    with compat.without_step_hooks(optimizer):
        optimizer.step()
    assert called == ["of all"]
    everywhere.remove()
    optimizer.step()
    assert called == ["of all", "own, before", "own, after"]


def test_selective_policy() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE

    assert compat.selective_policy(create_selective_checkpoint_contexts(policy)[0]) is policy
    of_list = compat.selective_policy(create_selective_checkpoint_contexts([aten.mm.default])[0])
    assert of_list(None, aten.mm.default) is CheckpointPolicy.MUST_SAVE
    assert of_list(None, aten.add.Tensor) is CheckpointPolicy.PREFER_RECOMPUTE
    assert compat.selective_policy(contextlib.nullcontext()) is None


def test_dropout_between_recurrent_layers() -> None:
    """That torch's decomposition has none says when ours is not needed any more."""
    model, gru = torch.nn.GRU(2, 2, 3, dropout=0.5), aten.gru.input
    rest = [list(model.parameters()), True, 3, 0.5, True, False, False]

    def draws() -> bool:
        before = torch.get_rng_state()
        compat.get_decompositions([gru])[gru](torch.ones(2, 2, 2), torch.zeros(3, 2, 2), *rest)
        return not torch.equal(before, torch.get_rng_state())

    assert not draws()
    with compat.recurrent_dropout():
        assert draws()


def test_masks_as_they_are() -> None:
    causal = torch.nn.Transformer.generate_square_subsequent_mask(3)
    detect = torch.nn.modules.transformer._detect_is_causal_mask
    with compat.masks_as_they_are():
        found = torch.nn.modules.transformer._detect_is_causal_mask
        assert [found(causal), found(causal, None, 3), found(causal, is_causal=True), found(None)] == [
            False, False, True, False,
        ]  # fmt: skip
    assert torch.nn.modules.transformer._detect_is_causal_mask is detect and detect(causal)


def test_resampling_as_operators() -> None:
    def traced() -> set[Any]:
        def sizes(x: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.interpolate(x, scale_factor=2.0, mode="bilinear")

        with enable_python_dispatcher():
            return {n.target for n in make_fx(sizes)(torch.ones(1, 1, 2, 2, requires_grad=True)).graph.nodes}

    assert aten.upsample_bilinear2d.default not in traced()
    with compat.resampling_as_operators():
        assert aten.upsample_bilinear2d.default in traced()
    assert aten.upsample_bilinear2d.default not in traced()


def test_dropout_of_nothing() -> None:
    def traced(p: float, train: bool) -> set[Any]:
        with enable_python_dispatcher():
            graph = make_fx(lambda x: torch.nn.functional.dropout(x, p, train))(torch.ones(2, requires_grad=True))
        return {n.target for n in graph.graph.nodes if n.op == "call_function"}

    assert traced(0.5, False) == {aten.clone.default}
    with compat.dropout_of_nothing():
        assert traced(0.5, False) == traced(0.0, True) == {aten.alias.default}
        assert aten.alias.default not in traced(0.5, True)
    assert traced(0.5, False) == {aten.clone.default}


def test_flex_attention_as() -> None:
    """Also where its name was imported to, and where it is compiled; its signature is torch's."""
    from torch.nn.attention.flex_attention import flex_attention

    calls: list[Any] = []
    with compat.flex_attention_as(lambda *args, **kwargs: calls.append((args, kwargs))):
        flex_attention("q", "k", "v", scale=2.0)  # type: ignore[call-overload]
    assert calls == [(("q", "k", "v", None, None, 2.0, False, False, None), {"return_aux": None})]
    q = torch.ones(1, 1, 4, 8)
    assert torch.equal(flex_attention(q, q, q), q)


def test_associative_scan_as() -> None:
    """Where its name was imported to; what is no answer is torch's own, whose signature it has."""
    from torch._higher_order_ops.associative_scan import associative_scan

    x, calls = torch.arange(5.0), list[Any]()
    with compat.associative_scan_as(lambda *args: calls.append(args)):
        made = associative_scan(torch.add, x, 0, combine_mode="generic")
    assert torch.equal(made, x.cumsum(0)) and calls == [(torch.add, x, 0, False)]
    with compat.associative_scan_as(lambda *args: "found"):
        assert associative_scan(torch.add, x, dim=0, reverse=True) == "found"
    assert torch.equal(associative_scan(torch.add, x, 0, True, "generic"), x.flip(0).cumsum(0).flip(0))


def test_compiling() -> None:
    """A bool, also where its name was imported to, and in this thread alone; within itself, too."""
    from torch.compiler import is_compiling

    def elsewhere() -> list[bool]:
        found = list[bool]()
        thread = threading.Thread(target=lambda: found.append(is_compiling()))
        thread.start()
        thread.join()
        return found

    with compat.compiling():
        with compat.compiling():
            assert is_compiling() is True and elsewhere() == [False]
        assert is_compiling() is True and elsewhere() == [False]
    assert is_compiling() is False
