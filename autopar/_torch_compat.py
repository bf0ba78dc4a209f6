"""Every private torch import, in one place. Each name has a contract test in tests/test_torch_compat.py."""

from __future__ import annotations

import linecache
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from functools import wraps
from types import SimpleNamespace
from typing import Any

import torch
from torch._decomp import get_decompositions
from torch._guards import TracingContext, tracing
from torch._ops import OpOverload
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.distributed_c10d import _set_pg_timeout as set_group_timeout
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.graph import _BoxedCodeGen as BoxedCodeGen
from torch.fx.graph_module import _loader as _sources
from torch.nn.attention import SDPBackend
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.utils import _pytree
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "BatchNorm",
    "BoxedCodeGen",
    "DTensorSpec",
    "FakeTensor",
    "FakeTensorMode",
    "LazyGraphModule",
    "OpOverload",
    "StridedShard",
    "TensorMeta",
    "TorchDispatchMode",
    "TracingContext",
    "aot_export_joint_with_descriptors",
    "attention_kernel",
    "below_autograd",
    "budget_partition",
    "checkpoint_replaced",
    "compiling",
    "convert_assigned",
    "default_partition",
    "dtensor_overloads",
    "flex_attention_as",
    "forget_fake_results",
    "forget_source_with",
    "get_decompositions",
    "hooks_of_all_modules",
    "inductor",
    "inductor_lacks",
    "interpreted",
    "interpreter_takes",
    "interpreting",
    "interrupt_gloo",
    "is_all_true",
    "is_boxed",
    "is_traced",
    "is_transformed",
    "local_shape_of",
    "masks_as_they_are",
    "new_fake_results",
    "number_of_groups",
    "operator_database",
    "pipeline_runtime",
    "put_around_collectives",
    "pytree_node",
    "recurrent_dropout",
    "redistributed",
    "reduce_found_inf_over_every_gradient",
    "refuse_items_of_unreduced",
    "said_by_kernel",
    "scaled_mm",
    "selective_policy",
    "set_group_timeout",
    "spec_in",
    "storage_id",
    "suggest_memory_format",
    "take_in_foreach",
    "torch_schedule",
    "traced_graph",
    "traced_node",
    "traced_root",
    "tracing",
    "without_modes",
    "without_ordered_effects",
]

below_autograd = torch._C._AutoDispatchBelowAutograd
"""While one is entered, operators run without the part of torch that would record them for derivatives."""

is_all_true = torch._is_all_true
"""What `torch.distributions` asks of the values that it is given."""


def hooks_of_all_modules() -> list[Callable[..., Any]]:
    """Hooks that are called at every call of any module, as `register_module_forward_hook` registers them."""
    from torch.nn.modules import module

    tables = (module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks,
              module._global_backward_pre_hooks)  # fmt: skip
    return [hook for table in tables for hook in table.values()]


def storage_id(tensor: torch.Tensor) -> int:
    """A number of the memory that a tensor lies in, on the meta device too: views of it have the same."""
    found: int = tensor.untyped_storage()._cdata
    return found


def attention_kernel(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    shared: bool,
) -> SDPBackend:
    """The kernel that torch takes for attention in training; ``shared``: several heads of queries share a key."""
    if isinstance(query, FakeTensor):
        # Torch cannot be asked about tensors that are being traced; it asks for no values.
        with without_modes():
            query, key, value = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (query, key, value))
            bias = None if bias is None else torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
            return attention_kernel(query, key, value, bias, dropout_p, is_causal, shared)
    with torch.enable_grad():
        # Kernels may take other sizes where there is nothing to differentiate.
        q, k, v = (t.detach().requires_grad_() for t in (query, key, value))
        found: int = torch._fused_sdp_choice(q, k, v, bias, dropout_p, is_causal, enable_gqa=shared)
    return SDPBackend(found)


def scaled_mm(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """``(a * scale_a) @ (b * scale_b)`` of float8 matrices, ``a`` row-major and ``b`` column-major, summed in float32.

    Args:
        a: ``[rows, depth]``.
        b: ``[depth, columns]``.
        scale_a: float32, ``[1, 1]`` or ``[rows, 1]``.
        scale_b: float32, ``[1, 1]`` or ``[1, columns]``.
        dtype: of the result.
    """
    # Without fast accumulation: tensor cores of Hopper add up some products in fewer bits with it.
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=False)


def pytree_node(kind: type) -> Any:
    """How torch's pytrees take an instance of a class apart (``flatten_fn``, ``unflatten_fn``); None: they do not."""
    return _pytree.SUPPORTED_NODES.get(kind)


def aot_export_joint_with_descriptors(*arguments: Any, **options: Any) -> Any:
    """Torch's function of this name, imported on its first use: that takes longer than all of autopar and torch."""
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors as export

    # The graph is rewritten before anything runs: no Python code is made of it.
    with _use_lazy_graph_module(True):
        return export(*arguments, **options)


def default_partition(*arguments: Any, **options: Any) -> Any:
    """Torch's function of this name, imported on its first use as well."""
    from torch._functorch.partitioners import default_partition as partition

    # Python code is made of what it returns, once, when that runs first; not of every graph in between.
    with _use_lazy_graph_module(True):
        return partition(*arguments, **options)


def budget_partition(joint: Any, outputs: int, budget: float, solver: str) -> Any:
    """Torch's own choice of what to recompute, to compare with: forward and backward graph; ``joint`` is changed.

    Args:
        joint: a joint graph as torch captures it.
        outputs: how many of its outputs are the forward pass's.
        budget: share of the memory for activations, 0 to 1.
        solver: ``dp``, ``greedy`` or ``ilp``.
    """
    from torch._functorch import config
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with config.patch(activation_memory_budget=budget, activation_memory_budget_solver=solver):
        return min_cut_rematerialization_partition(joint, None, num_fwd_outputs=outputs)


def inductor(graph: Any, values: Sequence[torch.Tensor], decompositions: dict[Any, Any]) -> Any:
    """A function from a list, which it empties, to what a graph of operators returns, with the strides of the graph.

    Args:
        graph: a `GraphModule` on tensors that are not differentiated; it is changed.
        values: like its inputs; of their strides, too, the function depends.
        decompositions: of operators, besides inductor's own.
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner
    from torch._inductor.decomposition import select_decomp_table

    made: list[Any] = []

    def inner(*args: Any, **kwargs: Any) -> Any:
        made.append(compile_fx_inner(*args, **kwargs))
        return made[-1]

    with torch.no_grad(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(v.detach(), static_shapes=True) for v in values]
    with torch.no_grad():
        compile_fx(graph, fakes, inner_compile=inner, decompositions={**select_decomp_table(), **decompositions})
    # What is around it binds views of outputs to their bases, for autograd, in every call.
    (found,) = made
    return found


def inductor_lacks(device: torch.device) -> str:
    """What is not installed that inductor needs for a device; empty: nothing."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return "" if has_triton() else "triton (pip install triton)"
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except InvalidCxxCompiler:
        return "a C++ compiler (apt-get install g++, or the path of one in CXX)"
    return ""


_CONSTANTS: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "SymInt": (int,),
    "float": (int, float),
    "bool": (bool,),
    "number": (int, float, complex),
    "ScalarType": (torch.dtype, int),
    "Layout": (torch.layout, int),
    "MemoryFormat": (torch.memory_format, int),
    "Device": (torch.device,),
    "str": (str,),
}
"""Types of constant arguments, as schemas call them, and what they are in Python; numbers of formats in defaults."""


def _argument(schema_type: str, value: Any) -> Any:
    """An argument as torch's interpreter takes it: nodes as they are, constants of the type of the schema.

    Raises:
        TypeError: it has no such constants.
    """
    optional = schema_type.startswith("Optional[")
    kind = schema_type.removeprefix("Optional[").removesuffix("]") if optional else schema_type
    if value is None and optional:
        return None
    if kind.startswith("List[") and isinstance(value, list | tuple):
        return [_argument(kind.removeprefix("List[").removesuffix("]"), v) for v in value]
    if isinstance(value, torch.fx.Node):
        if kind == "Tensor":
            return value
    elif kind in _CONSTANTS and isinstance(value, _CONSTANTS[kind]) and (kind == "bool" or not isinstance(value, bool)):
        constant: Any = value
        return float(constant) if kind == "float" else constant
    raise TypeError(f"{value!r} is no constant of type {schema_type}")


def _call(node: Any) -> tuple[OpOverload, list[tuple[str, Any]]]:
    """The operator that a node calls, and type and value of each argument, defaults included.

    Raises:
        TypeError: torch's interpreter cannot be given one of them.
    """
    operator = node.target
    numbers = [a for a, s in zip(node.args, operator._schema.arguments, strict=False)
               if str(s.real_type) == "Tensor" and isinstance(a, int | float | complex)]  # fmt: skip
    if numbers:  # Python wraps them in a tensor of its own kind; the same operator on numbers does that, too
        if not hasattr(operator.overloadpacket, "Scalar"):
            raise TypeError(f"{operator} of the number {numbers[0]}")
        operator = operator.overloadpacket.Scalar
    positions = dict(enumerate(node.args))
    found = []
    for number, argument in enumerate(operator._schema.arguments):
        if argument.default_value is None and not (number in positions or argument.name in node.kwargs):
            value = None
        else:
            value = positions.get(number, node.kwargs.get(argument.name, argument.default_value))
        kind = str(argument.real_type)
        found.append((kind, _argument(kind, value)))
    return operator, found


def interpreter_takes(node: Any) -> bool:
    """Whether torch's interpreter can run the operator of an `fx.Node` with its constants."""
    try:
        _call(node)
    except TypeError:
        return False
    return True


def interpreted(graph: Any, boxed: int) -> Callable[..., tuple[Any, ...]]:
    """What an `fx.Graph` computes, run by torch's interpreter in C++: the same kernels in the same order.

    Args:
        graph: of operators that the interpreter takes, and of `operator.getitem` of their results; its placeholders
            are tensors, and it returns a tuple of tensors.
        boxed: how many placeholders, the first ones, come in a list, which is emptied: each of these is freed after
            its last use, as values of the graph are. Others are passed one by one, which takes less time.

    Returns:
        A function of the list (if ``boxed``) and of the other tensors, to be called while `interpreting`.

    Raises:
        TypeError: the interpreter has no such operator, or would run another one in its place.
    """
    try:
        run: Callable[..., tuple[Any, ...]] = torch._C._create_function_from_graph(
            "run", _Interpreted(graph, boxed).made
        )
    except RuntimeError as e:
        raise TypeError(f"the interpreter refuses the graph: {e}") from e
    one = [torch.empty(0)]

    def from_list(values: list[torch.Tensor], *others: torch.Tensor) -> tuple[Any, ...]:
        # Of one tensor, and then of all: it looks at the type of each that it is made of, which takes long.
        given = torch._C.ScriptList(one)
        given.clear()
        given.extend(values)
        values.clear()
        return run(given, *others)

    return from_list if boxed else run


class _Interpreted:
    """A graph of torch's interpreter, made from an `fx.Graph` as for `interpreted`."""

    def __init__(self, graph: Any, boxed: int) -> None:
        self.made: Any = torch._C.Graph()
        self.known: dict[Any, Any] = {}
        self.tensor, number = torch._C.TensorType.get(), torch._C.IntType.get()
        self.numbers = {"int": number, "SymInt": number, "float": torch._C.FloatType.get(),
                        "bool": torch._C.BoolType.get()}  # fmt: skip
        inputs = [n for n in graph.nodes if n.op == "placeholder"]
        given = [self._input(torch._C.ListType(self.tensor))] if boxed else []
        self.known |= {n: self._input(self.tensor) for n in inputs[boxed:]}
        for node in reversed(inputs[:boxed]):
            (self.known[node],) = self._insert("aten::pop", [*given, self._argument("int", -1)], [self.tensor])
        for node in graph.nodes:
            if node.op == "output":
                values = [self.known[v] for v in node.args[0]]
                kind = torch._C.TupleType([v.type() for v in values])
                self.made.registerOutput(self._insert("prim::TupleConstruct", values, [kind])[0])
            elif node.op == "call_function":
                self.known[node] = self._called(node) if isinstance(node.target, OpOverload) else self._item(node)

    def _input(self, kind: Any) -> Any:
        found = self.made.addInput("")
        found.setType(kind)
        return found

    def _insert(self, name: str, values: list[Any], results: list[Any]) -> list[Any]:
        node = self.made.insertNode(self.made.create(name, values, len(results)))
        for output, kind in zip(node.outputs(), results, strict=True):
            output.setType(kind)
        return list(node.outputs())

    def _called(self, node: Any) -> Any:
        """The result of an operator, or the list of its results."""
        operator, arguments = _call(node)
        returns = [r.type for r in operator._schema.returns]
        outputs = self._insert(operator._schema.name, [self._argument(*a) for a in arguments], returns)
        # It chooses among overloads by the types of the arguments.
        chosen = outputs[0].node().schema()
        if chosen != str(operator._schema):
            raise TypeError(f"for {operator} the interpreter takes {chosen}")
        return outputs[0] if len(outputs) == 1 else outputs

    def _item(self, node: Any) -> Any:
        """One of several results, or an element of a list of tensors."""
        source, position = self.known[node.args[0]], node.args[1]
        if isinstance(source, list):
            return source[position]
        return self._insert("aten::__getitem__", [source, self._argument("int", position)], [self.tensor])[0]

    def _argument(self, kind: str, argument: Any) -> Any:
        if isinstance(argument, torch.fx.Node):
            return self.known[argument]
        if not isinstance(argument, list) or (argument and "Tensor" not in kind):
            return self.made.insertConstant(argument)
        inner = kind.removeprefix("Optional[").removeprefix("List[").removesuffix("]")
        optional = torch._C.OptionalType(self.tensor)
        element = optional if inner.startswith("Optional") else self.numbers.get(inner, self.tensor)
        parts = [self._argument("Tensor", a) for a in argument]
        return self._insert("prim::ListConstruct", parts, [torch._C.ListType(element)])[0]


def said_by_kernel(error: RuntimeError) -> str:
    """What a kernel said that failed while torch's interpreter ran it, without what the interpreter says around it."""
    return str(error).rsplit("RuntimeError: ", 1)[-1].strip()


@contextmanager
def interpreting() -> Iterator[None]:
    """While it lasts, torch's interpreter runs what it is given as it is: it would profile calls, and compile."""
    before = torch._C._get_graph_executor_optimize()
    torch._C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        torch._C._set_graph_executor_optimize(before)


def is_boxed(graph: Any) -> bool:
    """Whether the code of an `fx.Graph` takes one list, which it empties."""
    return isinstance(graph._codegen, BoxedCodeGen)


@contextmanager
def checkpoint_replaced(reentrant: Callable[..., Any], other: Callable[..., Any]) -> Iterator[None]:
    """While it lasts, `torch.utils.checkpoint.checkpoint` calls these, whatever other names it has been bound to.

    Args:
        reentrant: ``(function, preserve_rng_state, *args)`` to the function's results.
        other: ``(function, preserve_rng_state, context_fn, ...)`` to a generator, which yields once: torch calls the
            function then.
    """
    from torch.utils import checkpoint as module

    before = module._checkpoint_without_reentrant_generator
    module._checkpoint_without_reentrant_generator = other
    module.CheckpointFunction.apply = staticmethod(reentrant)  # type: ignore[method-assign]
    try:
        yield
    finally:
        module._checkpoint_without_reentrant_generator = before
        del module.CheckpointFunction.apply  # what it inherits is back


def selective_policy(context: Any) -> Callable[..., Any] | None:
    """The policy function of a context that `create_selective_checkpoint_contexts` made; None for any other."""
    from torch.utils.checkpoint import _CachingTorchDispatchMode

    return context.policy_fn if isinstance(context, _CachingTorchDispatchMode) else None


def traced_graph() -> Any:
    """The `fx.Graph` that is being traced now; None: none is."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def is_traced(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's code is one that is being traced, and not one with values."""
    from torch._subclasses.functional_tensor import FunctionalTensor

    return isinstance(tensor, FunctionalTensor | FakeTensor) or torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def is_transformed(tensor: torch.Tensor) -> bool:
    """Whether a tensor of the user's code is one of a function that `torch.func` transforms."""
    return bool(torch._C._functorch.is_functorch_wrapped_tensor(tensor))


def traced_node(tensor: torch.Tensor) -> Any:
    """The `fx.Node` that computes a tensor of the user's code in the graph that is being traced; None: none does."""
    from torch._subclasses.functional_tensor import FunctionalTensor
    from torch.fx.experimental.proxy_tensor import get_proxy_mode, get_proxy_slot

    mode = get_proxy_mode()
    if mode is None:
        return None
    inner = tensor.from_functional() if isinstance(tensor, FunctionalTensor) else tensor
    return get_proxy_slot(inner, mode.tracer, None, lambda found: found.proxy.node)


def traced_root() -> Any:
    """The module that holds the constants of the graph that is being traced."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    return None if mode is None else getattr(mode.tracer, "root")  # noqa: B009  not every tracer's type has it


@contextmanager
def without_modes() -> Iterator[None]:
    """While it lasts, operators compute with real values, whatever is traced around it."""
    from torch.utils._python_dispatch import _disable_current_modes

    with torch._C.DisableTorchFunction(), _disable_current_modes():
        yield


@contextmanager
def without_ordered_effects() -> Iterator[None]:
    """While it lasts, checks of `torch.linalg` are traced as plain operators, not in an order that tokens keep."""
    import torch._higher_order_ops.effects  # noqa: F401  registers them
    from torch._library.simple_registry import singleton

    entry: Any = singleton.find("aten::_linalg_check_errors").effect
    before, entry._effect = entry._effect, None
    try:
        yield
    finally:
        entry._effect = before


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
    """While it lasts, `flex_attention` is another function, wherever its name was imported to.

    A model that has it has imported it: else this does nothing, since the import takes long.
    """
    module = sys.modules.get("torch.nn.attention.flex_attention")
    if module is None or hasattr(module, "_autopar_function"):
        yield
        return

    def stand_in(
        query: Any, key: Any, value: Any, score_mod: Any = None, block_mask: Any = None, scale: Any = None,
        enable_gqa: Any = False, return_lse: Any = False, kernel_options: Any = None, *, return_aux: Any = None,
    ) -> Any:  # fmt: skip
        found = globals()["_autopar_function"]
        options = (score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options)
        return found(query, key, value, *options, return_aux=return_aux)

    # Its code, not its name: others have the function itself.
    target, module._autopar_function = module.flex_attention, function  # type: ignore[attr-defined]
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


@contextmanager
def compiling() -> Iterator[None]:
    """While it lasts, `torch.compiler.is_compiling` says yes: models leave out checks that look at values."""
    import torch.compiler as module

    before = module._is_compiling_flag
    module._is_compiling_flag = True
    try:
        yield
    finally:
        module._is_compiling_flag = before


def operator_database() -> list[Any]:
    """Torch's operators with sample inputs, an `OpInfo` each; importing them takes seconds.

    Raises:
        ValueError: a package that torch's tests need is missing.
    """
    try:
        from torch.testing._internal.common_methods_invocations import op_db
    except ModuleNotFoundError as e:
        raise ValueError(f"torch's operator samples need {e.name}: pip install {e.name}") from e
    return list(op_db)


def local_shape_of(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> tuple[int, ...]:
    """Shape of this rank's part of a DTensor, as torch cuts it."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    return tuple(compute_local_shape_and_global_offset(tuple(shape), mesh, tuple(placements))[0])


def dtensor_overloads() -> frozenset[str]:
    """Names of the operator overloads for which `torch.distributed.tensor` has a sharding rule."""
    from torch.distributed.tensor import DTensor

    rules = DTensor._op_dispatcher.sharding_propagator
    tables = ("op_to_rules", "op_strategy_funcs", "op_single_dim_strategy_funcs")
    return frozenset(str(op) for table in tables for op in getattr(rules, table, ()))


def reduce_found_inf_over_every_gradient() -> None:
    """Make `torch.amp.GradScaler` skip a step on every rank if a gradient overflows on one.

    Torch reduces what it found over the axes on which the first of several DTensor gradients is split, and over no
    others: where layouts differ, or replicas do, some ranks would skip the step and others take it.
    """
    from torch.distributed.tensor import DTensor, Partial

    unscale = torch.ops.aten._amp_foreach_non_finite_check_and_unscale_.default
    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers

    def every_gradient(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        gradients, found, scale = args
        call([g._local_tensor if isinstance(g, DTensor) else g for g in gradients], found, scale, **kwargs)
        for mesh in dict.fromkeys(g.device_mesh for g in gradients if isinstance(g, DTensor)):
            own = DTensor.from_local(found, mesh, [Partial("max")] * mesh.ndim, run_check=False)
            found.copy_(own.full_tensor())

    handlers[unscale] = every_gradient


def take_in_foreach(kind: type[torch.Tensor]) -> None:
    """Let ``torch.optim`` and `torch.nn.utils.clip_grad_norm_` take a class of tensors in lists, as they do DTensors.

    They go by the exact class: one that is in none of torch's lists gets a loop over single tensors, and no fused step.
    Once: a later call changes nothing.
    """
    from torch.optim.optimizer import _foreach_supported_types as of_optimizers
    from torch.utils._foreach_utils import _foreach_supported_types as of_norms

    lists: tuple[list[Any], ...] = (of_optimizers, of_norms)
    for known in lists:
        if kind not in known:
            known.append(kind)


def spec_in(mesh: Any, placements: Sequence[Any], meta: TensorMeta | None) -> DTensorSpec:
    """The metadata of a DTensor whose `StridedShard` say which factor of a dim is split.

    Torch would take them for the order of two splits of one dim; 2.11 fails where they are not.
    """
    return DTensorSpec(mesh, tuple(placements), tensor_meta=meta, use_strided_shard_as_shard_order=False)


def redistributed(tensor: Any, mesh: Any, placements: Sequence[Any]) -> Any:
    """A DTensor in other placements, without autograd; a collective call. As ``DTensor.redistribute``, by `spec_in`."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._redistribute import redistribute_local_tensor

    meta = tensor._spec.tensor_meta
    own, target = spec_in(mesh, tensor.placements, meta), spec_in(mesh, placements, meta)
    local = redistribute_local_tensor(tensor._local_tensor, own, target)
    return DTensor(local, target, requires_grad=False)  # type: ignore[no-untyped-call]


def convert_assigned(convert: Callable[[Any, torch.Tensor, str], torch.Tensor | None]) -> None:
    """Let ``convert(tensor, value, name)`` say what is assigned to ``.data`` and ``.grad`` of a DTensor.

    Torch takes any tensor of the global shape for ``.data`` and leaves the local tensor, and so the values, as they
    were; a plain tensor as ``.grad`` fails in the next operator on it, or is taken for this rank's part.

    Args:
        convert: None for a tensor that is to be assigned as torch does.
    """
    from torch.distributed.tensor import DTensor

    data: Any = torch.Tensor.data
    grad: Any = torch.Tensor.grad

    def set_data(tensor: Any, value: torch.Tensor) -> None:
        converted = convert(tensor, value, "data")
        if converted is None or converted.dtype != tensor.dtype:
            data.__set__(tensor, value if converted is None else converted)
        if converted is not None:
            tensor._local_tensor, tensor._spec = converted._local_tensor, converted._spec  # type: ignore[attr-defined]

    def set_grad(tensor: Any, value: torch.Tensor | None) -> None:
        converted = None if value is None else convert(tensor, value, "grad")
        grad.__set__(tensor, value if converted is None else converted)

    DTensor.data = property(data.__get__, set_data)  # type: ignore[assignment]
    DTensor.grad = property(grad.__get__, set_grad, grad.__delete__)  # type: ignore[assignment]


def refuse_items_of_unreduced() -> None:
    """Make ``item()`` of a DTensor that is still to be reduced an error.

    Torch gives each rank its own term: ``gradient.norm().item()`` of a gradient that is split is silently wrong.
    """
    from torch.distributed.tensor import DTensor

    def item(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        (tensor,) = args
        sizes = tensor.device_mesh.shape
        if any(p.is_partial() and n > 1 for p, n in zip(tensor.placements, sizes, strict=True)):
            raise RuntimeError(
                f"item() of a tensor that lies as {tensor.placements} would be this rank's term of it: call "
                "full_tensor() first, on all ranks"
            )
        return call(tensor._local_tensor, **kwargs)

    handlers: dict[Any, Any] = DTensor._op_dispatcher._custom_op_handlers
    handlers[torch.ops.aten._local_scalar_dense.default] = item


def number_of_groups() -> int:
    """How many process groups this process has: names of groups that only their ranks make are counted by it."""
    return len(torch.distributed.distributed_c10d._world.pg_names)


def interrupt_gloo(group: Any) -> None:
    """End all waits of this process in a process group, if it is Gloo's: its connections are closed for good.

    Gloo closes all connections of a group when one receipt times out; its ``abort()`` does not end waits.
    """
    if "cpu:gloo" not in str(torch.distributed.get_backend_config(group)):
        return
    backend = group._get_backend(torch.device("cpu"))
    for other in range(group.size()):
        if other != group.rank():
            try:
                backend.recv([torch.empty(1)], other, _UNUSED_TAG).wait(timedelta(milliseconds=1))
            except RuntimeError as e:
                if "Timed out" in str(e):  # of any other error only the connection to this rank would know
                    return


_UNUSED_TAG = 0x7FFF1234
"""Of messages that nobody sends."""


def put_around_collectives(around: Callable[[str], AbstractContextManager[None]]) -> None:
    """Have ``around(what)`` entered where torch waits for others: operators of DTensors, and checkpoints.

    Once: a later call changes nothing.
    """
    from torch.distributed import _functional_collectives as functional
    from torch.distributed.checkpoint.utils import _DistWrapper

    def wrapped(original: Callable[..., Any], what: str) -> Callable[..., Any]:
        @wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            with around(what):
                return original(*args, **kwargs)

        call.is_put_around = True  # type: ignore[attr-defined]
        return call

    for owner, names, what in (
        (functional, ("wait_tensor",), "an operator of DTensors"),
        (_DistWrapper, ("broadcast_object", "gather_object", "all_gather_object", "scatter_object", "barrier"),
         "torch.distributed.checkpoint"),
    ):  # fmt: skip
        for name in names:
            original = getattr(owner, name)
            if not getattr(original, "is_put_around", False):
                setattr(owner, name, wrapped(original, what))


def torch_schedule(name: str, devices: int, microbatches: int, virtual: int) -> list[list[tuple[int, str, int]]]:
    """Stage, kind (``F``, ``B``, ``I`` or ``W``) and microbatch of what each device does, in order.

    Args:
        name: of the schedule in `torch.distributed.pipelining`.
        devices: of the pipeline.
        microbatches: of a step.
        virtual: stages on each device.
    """
    from torch.distributed.pipelining.schedules import get_schedule_class

    stages = [
        SimpleNamespace(num_stages=devices * virtual, group_size=devices, group_rank=0, stage_index=i, submod=None)
        for i in range(virtual)
    ]
    schedule: Any = get_schedule_class(name)(stages, microbatches)
    rows = []
    for device in range(devices):
        actions = [a for a in schedule.pipeline_order[device] if a is not None]
        parts = [p for a in actions for p in (a.sub_actions or (a,))]
        rows.append([(p.stage_index, p.computation_type.value, p.microbatch_index) for p in parts])
    return rows


def pipeline_runtime(
    stages: Sequence[Any], rows: Sequence[Sequence[tuple[int, str, int]]], device_of: Sequence[int], microbatches: int
) -> Callable[[], None]:
    """Torch's runtime of pipelines: what it returns works through a device's actions once.

    Args:
        stages: of this device; with the methods of torch's stages that computation and communication call.
        rows: stage, kind and microbatch of what each device does, in order; kinds are torch's.
        device_of: the device of each stage.
        microbatches: how many there are.
    """
    from torch.distributed.pipelining import schedules

    make: Any = schedules._PipelineScheduleRuntime
    runtime = make(list(stages), microbatches, backward_requires_autograd=False)
    runtime.stage_index_to_group_rank = dict(enumerate(device_of))
    runtime.pipeline_order_with_comms = {
        device: [schedules._Action(s, schedules._ComputationType(kind), n) for s, kind, n in row]
        for device, row in enumerate(rows)
    }
    runtime._stages_forward_initialized = True  # the stages know their shapes

    def work() -> None:
        runtime._step_microbatches([()] * microbatches, [{}] * microbatches)

    return work


def forget_source_with(graph: torch.fx.GraphModule) -> None:
    """When a graph is gone, the text of its code goes, too, which torch keeps for tracebacks as long as it runs."""
    weakref.finalize(graph, _forget_source, type(graph)).atexit = False


def _forget_source(kind: type[torch.fx.GraphModule]) -> None:
    # Each graph has a class of its own, whose code is compiled when it first runs.
    code = getattr(vars(kind).get("forward"), "__code__", None)
    if code is not None and _sources.eval_cache.pop(code.co_filename, None) is not None:
        linecache.cache.pop(code.co_filename, None)


@contextmanager
def new_fake_results() -> Iterator[list[Any]]:
    """The keys under which torch caches results of operators on fake tensors within, which are there at the end."""
    count = len(FakeTensorMode.cache)
    keys: list[Any] = []
    yield keys
    # In the order in which they came. A list first: the collector may take some out while they are gone through.
    keys += list(FakeTensorMode.cache)[count:]


def forget_fake_results(keys: Iterable[Any]) -> None:
    """Take results out of torch's cache, which keeps all; who asks for them next recomputes them."""
    for key in keys:
        FakeTensorMode.cache.pop(key, None)


def context_parallel_internals() -> Any:
    """The module of torch's ``context_parallel``: its rings, the table of its kernels, and how keys go round."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    return _attention
