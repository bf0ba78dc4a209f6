"""What torch does otherwise while a model is traced."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import _DummyThread, current_thread, get_ident
from types import FunctionType
from typing import Any

import torch


@contextmanager
def checkpoint_replaced(reentrant: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `torch.utils.checkpoint.checkpoint` calls these, whatever other names it has been bound to.

    Args:
        reentrant: ``(function, preserve_rng_state, *args)`` to the function's results.
        other: ``(function, preserve_rng_state, context_fn, ...)`` to a generator, which yields once: torch calls the
            function then.
    """
    from torch.utils import checkpoint as module

    def with_own_arguments(function: Any, args: Any, kwargs: Any, *, preserve_rng_state: bool, **options: Any) -> Any:
        rest = (options["determinism_check"], options["debug"], options["early_stop"])
        return other(function, preserve_rng_state, options["context_fn"], *rest, *args, **kwargs)

    # Since 2.14 the former name is there, and not what `checkpoint` calls.
    name, stand_in = "_checkpoint_without_reentrant_generator_impl", with_own_arguments
    if not hasattr(module, name):
        name, stand_in = "_checkpoint_without_reentrant_generator", other
    before = getattr(module, name)
    setattr(module, name, stand_in)
    module.CheckpointFunction.apply = staticmethod(reentrant)  # type: ignore[method-assign]
    try:
        yield
    finally:
        setattr(module, name, before)
        del module.CheckpointFunction.apply  # what it inherits is back


def selective_policy(context: Any) -> Callable[..., Any] | None:
    """The policy function of a context that `create_selective_checkpoint_contexts` made; None for any other."""
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    return context.policy_fn if isinstance(context, _CachingTorchDispatchMode) else None


@contextmanager
def without_modes() -> Iterator[None]:
    """While it lasts, operators compute with real values, whatever is traced around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def dispatch_restored() -> Iterator[None]:
    """Behind it, operators are dispatched as before, even if an error is caught and kept.

    Where printing a tensor of `torch.func` fails, a guard that changes the dispatch lives as long as the traceback.
    """
    included, excluded = torch._C._dispatch_tls_local_include_set(), torch._C._dispatch_tls_local_exclude_set()
    with torch._C._ForceDispatchKeyGuard(included, excluded):
        try:
            yield
        except Exception as e:
            for frame, _ in traceback.walk_tb(e.__traceback__):
                if frame.f_code.co_filename == torch._tensor_str.__file__:
                    frame.clear()
            raise


@contextmanager
def without_step_hooks(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While it lasts, the optimizer's own hooks are not called at its steps; those of all optimizers are."""
    # One that wraps another need not have any.
    names = ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks")
    kept: list[tuple[dict[int, Any], dict[int, Any]]] = [
        (t, dict(t)) for n in names if (t := getattr(optimizer, n, {}))
    ]
    for table, _ in kept:
        table.clear()
    try:
        yield
    finally:
        for table, hooks in kept:
            table.update(hooks)


@contextmanager
def without_ordered_effects() -> Iterator[None]:
    """While it lasts, checks of `torch.linalg` are traced as plain operators, not in an order that tokens keep."""
    import torch._higher_order_ops.effects  # noqa: F401  registers them
    from torch._library.simple_registry import singleton

    entry: Any = getattr(singleton.find("aten::_linalg_check_errors"), "effect", None)
    if not hasattr(entry, "_effect"):
        yield
        return
    before, entry._effect = entry._effect, None
    try:
        yield
    finally:
        entry._effect = before


@contextmanager
def resampling_as_operators() -> Iterator[None]:
    """While it lasts, `interpolate` is traced as the operators that eager mode runs, not as indexing.

    The gradient of indexing adds up with ``index_put``, which takes many times as long as the operator's own.
    """
    kinds = ("nearest1d", "nearest2d", "nearest3d", "linear1d", "bilinear2d", "trilinear3d", "bicubic2d")
    names = [*(f"upsample_{k}" for k in kinds), *(f"_upsample_nearest_exact{n}d" for n in (1, 2, 3))]
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    taken: list[tuple[Any, dict[Any, Any]]] = []
    for name in names:
        packet = getattr(torch.ops.aten, name, None)
        operators: list[Any] = [getattr(packet, overload, None) for overload in ("default", "vec")]
        for operator in (o for o in operators if hasattr(o, "py_kernels") and hasattr(o, "_dispatch_cache")):
            taken.append((operator, {k: operator.py_kernels.pop(k) for k in keys if k in operator.py_kernels}))
            operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, kernels in taken:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


@contextmanager
def dropout_of_nothing() -> Iterator[None]:
    """While it lasts, dropout that drops nothing is traced as a view of its argument, which it is in eager mode.

    In torch's decomposition it is a copy, so that what a model writes to it would not be written to the argument. The
    view is a node, by which the module is known.
    """
    operator: Any = torch.ops.aten.dropout.default
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    taken = {key: operator.py_kernels[key] for key in keys if key in operator.py_kernels}

    def of(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def dropped(input: torch.Tensor, p: float, train: bool | None) -> Any:
            return kernel(input, p, train) if train and p and input.numel() else torch.ops.aten.alias.default(input)

        return dropped

    operator.py_kernels.update({key: of(kernel) for key, kernel in taken.items()})
    operator._dispatch_cache.clear()
    try:
        yield
    finally:
        operator.py_kernels.update(taken)
        operator._dispatch_cache.clear()


@contextmanager
def masks_as_they_are() -> Iterator[None]:
    """While it lasts, `nn.Transformer` does not look at the values of its masks, for whether they are causal."""
    import torch.nn.modules.transformer as module

    before = module._detect_is_causal_mask
    # It only picks a kernel: with False the mask itself is used, which says the same.
    module._detect_is_causal_mask = lambda mask, is_causal=None, size=None: is_causal is True
    try:
        yield
    finally:
        module._detect_is_causal_mask = before


@contextmanager
def flex_attention_as(function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `flex_attention` is another function, wherever its name was imported to."""
    import torch.nn.attention.flex_attention as module

    def stand_in(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        found = globals()["_autopar_function"]
        options = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        return found(query, key, value, *options, return_aux=return_aux)

    with _code_of(module, module.flex_attention, stand_in, function):
        yield


@contextmanager
def associative_scan_as(function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `associative_scan` is another function where that does not return None.

    Args:
        function: ``(combine_fn, xs, dim, reverse)`` to the result.
    """
    import torch._higher_order_ops.associative_scan  # noqa: F401  the package has a function of this name

    module = sys.modules["torch._higher_order_ops.associative_scan"]
    target: Any = module.associative_scan
    original = FunctionType(target.__code__, target.__globals__, target.__name__, target.__defaults__)

    def stand_in(combine_fn: Any, xs: Any, dim: Any, reverse: Any = False, combine_mode: Any = "pointwise") -> Any:
        return globals()["_autopar_function"](combine_fn, xs, dim, reverse, combine_mode)

    def either(combine_fn: Any, xs: Any, dim: int, reverse: bool, combine_mode: str) -> Any:
        found = function(combine_fn, xs, dim, reverse)
        return original(combine_fn, xs, dim, reverse, combine_mode) if found is None else found

    with _code_of(module, target, stand_in, either):
        yield


@contextmanager
def _code_of(module: Any, target: Any, stand_in: Any, function: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, a function of a module has the code of another, which calls ``_autopar_function`` there."""
    if hasattr(module, "_autopar_function"):
        yield
        return
    # Its code, not its name: others have the function itself.
    module._autopar_function = function
    before, target.__code__ = target.__code__, stand_in.__code__
    try:
        yield
    finally:
        target.__code__ = before
        del module._autopar_function


@contextmanager
def recurrent_dropout() -> Iterator[None]:
    """While it lasts, recurrent layers are traced with dropout between them, which torch's decomposition forgets."""
    # It asks for more layers than there are (``num_layers < i - 1``); the kernels that eager mode runs do drop.
    import torch._decomp.decompositions as module

    of_layers: Any = module._rnn_helper

    def layer_by_layer(
        input: torch.Tensor, hidden: Any, params: Any, has_biases: bool, num_layers: int, dropout: float, train: bool,
        bidirectional: bool, batch_first: bool, layer: Any,
    ) -> Any:  # fmt: skip
        input, last, each = input.transpose(0, 1) if batch_first else input, [], 1 + bidirectional
        for i in range(num_layers):
            own = slice(each * i, each * (i + 1))
            input, states = of_layers(
                input, hidden[own], params[own], has_biases, 1, 0.0, train, bidirectional, False, layer
            )
            last += states
            if dropout and train and i < num_layers - 1:
                input = torch.dropout(input, dropout, train=True)
        return input.transpose(0, 1) if batch_first else input, last

    module._rnn_helper = layer_by_layer
    try:
        yield
    finally:
        module._rnn_helper = of_layers


class _InThisThread:
    """A flag that is set in the thread that makes it, and in those of torch's, such as a backward pass's."""

    def __init__(self, elsewhere: object) -> None:
        self._thread, self._elsewhere = get_ident(), elsewhere

    def __bool__(self) -> bool:
        own = get_ident() == self._thread
        # Threads that Python has not started are torch's own.
        return own or isinstance(current_thread(), _DummyThread) or bool(self._elsewhere)


def _is_compiling() -> bool:
    """What `torch.compiler.is_compiling` is while models are traced: code of that module, whose globals it reads."""
    scripting = torch.jit.is_scripting()  # type: ignore[attr-defined]
    return not scripting and bool(globals()["_is_compiling_flag"])


@contextmanager
def compiling() -> Iterator[None]:
    """While it lasts, `torch.compiler.is_compiling` says yes: models leave out checks that look at values.

    In other threads it says what it did: an optimizer that steps there would go the ways of compiled ones halfway.
    """
    import torch.compiler as module

    before, code = module._is_compiling_flag, module.is_compiling.__code__
    module._is_compiling_flag = _InThisThread(before)  # type: ignore[assignment]
    # By its code, since others have imported the function: they are given a bool, which they keep and compute with.
    module.is_compiling.__code__ = _is_compiling.__code__
    try:
        yield
    finally:
        module._is_compiling_flag, module.is_compiling.__code__ = before, code
