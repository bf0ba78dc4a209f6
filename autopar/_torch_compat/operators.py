"""Operators, modules and trees: what torch knows of them and tells nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch._library.custom_ops import CustomOpDef
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.attention import SDPBackend
from torch.utils import _pytree

from autopar._torch_compat.changed import without_modes

below_autograd = torch._C._AutoDispatchBelowAutograd
"""While one is entered, operators run without the part of torch that would record them for derivatives."""

is_all_true = torch._is_all_true
"""What `torch.distributions` asks of the values that it is given."""

asserts = torch._assert
"""Raises ``AssertionError`` where a tensor or a value is not true: a Python function of torch."""

are_all_true = torch.Tensor._is_all_true
"""What ``torch._check_tensor_all`` asks of its condition, as a tensor."""


def tensors_in(value: Any) -> list[torch.Tensor]:
    """The tensors among arguments, or results, of an operator, in their order."""
    return [t for t in _pytree.tree_leaves(value) if isinstance(t, torch.Tensor)]


def traced_functions(value: Any) -> list[Any]:
    """Python functions of a `torch.library.custom_op` that run while it is traced: of its derivative."""
    if not isinstance(value, CustomOpDef):
        return []
    found: list[Any] = [value._backward_fn, value._setup_context_fn]
    return [f for f in found if f is not None]


def map_tensors(function: Callable[[torch.Tensor], Any], value: Any) -> Any:
    """The same arguments with ``function`` of each tensor."""
    return _pytree.tree_map_only(torch.Tensor, function, value)


_WRITE_STATISTICS = ("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm")
"""Operators whose schemas do not say that they write."""


def written_by(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operator writes to, among its arguments."""
    arguments = op._schema.arguments
    names = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
    if op.overloadpacket.__name__ in _WRITE_STATISTICS:
        names |= {"running_mean", "running_var"}
    named = [*zip((a.name for a in arguments), args, strict=False), *kwargs.items()]
    return tensors_in([value for name, value in named if name in names])


def _tables_of_all_modules() -> tuple[dict[int, Any], ...]:
    from torch.nn.modules import module

    return (module._global_forward_hooks, module._global_forward_pre_hooks, module._global_backward_hooks,
            module._global_backward_pre_hooks)  # fmt: skip


def hooks_of_all_modules() -> list[Callable[..., Any]]:
    """Hooks that are called at every call of any module, as `register_module_forward_hook` registers them."""
    return [hook for table in _tables_of_all_modules() for hook in table.values()]


@contextmanager
def without_trackers() -> Iterator[None]:
    """While it lasts, torch's own hooks on all modules are not called: those that count, by module, what is run."""
    tables = [(table, dict(table)) for table in _tables_of_all_modules()]
    try:
        for table, before in tables:
            for number, hook in before.items():
                if (getattr(hook, "__module__", None) or "").startswith("torch."):
                    del table[number]
        yield
    finally:
        for table, before in tables:
            table.clear()
            table.update(before)


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
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype,
    out: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """``(a * scale_a) @ (b * scale_b)`` of float8 matrices, ``a`` row-major and ``b`` column-major, summed in float32.

    Args:
        a: ``[rows, depth]``.
        b: ``[depth, columns]``.
        scale_a: float32, ``[1, 1]`` or ``[rows, 1]``.
        scale_b: float32, ``[1, 1]`` or ``[1, columns]``.
        dtype: of the result.
        out: where it is written, row-major; by default new memory.
    """
    # Without fast accumulation: tensor cores of Hopper add up some products in fewer bits with it.
    try:
        return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype, use_fast_accum=False, out=out)
    except RuntimeError:
        if a.device.type != "cpu":
            raise
        # On CPUs torch 2.11 has one scale for a matrix only.
        found = (torch.mm(a.float(), b.float()) * scale_a * scale_b).to(dtype)
        return found if out is None else out.copy_(found)


@torch.library.register_fake("aten::_grouped_mm")  # type: ignore[untyped-decorator]
def _grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """A grouped product of fake tensors, of all dtypes that kernels take, with their errors and strides.

    Torch's own takes bfloat16 alone, and says of a CPU's result that its rows follow one another. There is one for the
    whole process: `torch.compile` and `torch.export` of other models have this one, too.
    """
    names = {torch.float64: "Double", torch.int32: "Int", torch.int64: "Long"}
    got = names.get(mat_a.dtype, str(mat_a.dtype))
    taken = mat_a.dtype in (torch.float32, torch.bfloat16, torch.float16)
    _require(taken, f"Expected mat_a to be Float32, BFloat16 or Float16 matrix, got {got}")
    _require(mat_a.dtype == mat_b.dtype, "expected m1 and m2 to have the same dtype")
    _require(mat_a.ndim in (2, 3) and mat_b.ndim in (2, 3), "mat_a and mat_b have to be 2 or 3d")
    # Of two matrices the groups are parts of what is summed over, of one of rows or columns.
    joint, ragged = mat_a.ndim == mat_b.ndim, 2 in (mat_a.ndim, mat_b.ndim)
    said = "Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d"
    _require((offs is not None) == ragged, said)
    _require(offs is None or offs.dtype == torch.int32, "Offsets have to be int32")
    _require(bias is None, "Bias not supported yet")
    _require(out_dtype in (None, mat_a.dtype), "Grouped gemm output dtype must match `mat_a` dtype")
    same = (ragged and joint) or mat_a.shape[-1] == mat_b.shape[-2]
    _require(same, "contraction dimension of mat_a and mat_b must match")
    groups = [t.shape[0] for t in (mat_a, mat_b, offs) if t is not None and (t.ndim == 3 or t is offs)]
    unequal = "matrix batch sizes have to match" if ragged else "batched dimension has to match"
    _require(all(n == groups[0] for n in groups), unequal)
    for mat in (mat_a, mat_b):
        _check_rows(mat)
    rows, columns, aligned = mat_a.shape[-2], mat_b.shape[-1], 16 // mat_a.element_size()
    padded = (columns + aligned - 1) // aligned * aligned
    shape, strides = (groups[:1], [rows * padded]) if joint else ([], [])
    return mat_a.new_empty_strided([*shape, rows, columns], [*strides, padded, 1])


def _check_rows(mat: torch.Tensor) -> None:
    """As kernels do: rows or columns are whole, and each begins at a multiple of 16 bytes."""
    (rows, columns), (down, along) = mat.shape[-2:], mat.stride()[-2:]
    whole = (down == 1 and along >= max(1, rows)) or (along == 1 and down >= max(1, columns))
    _require(whole, f"Invalid strides/sizes, got {[*mat.stride()]} for strides and {[*mat.shape]} for sizes")
    longer = along if down == 1 and along >= max(1, rows) else down
    _require(longer * mat.element_size() % 16 == 0, "strides should be multiple of 16 bytes")


def _require(met: bool, said: str) -> None:
    if not met:
        raise RuntimeError(said)


def operators_where(holds: Callable[[Any], bool]) -> list[Any]:
    """ATen's operator overloads whose schemas are such; a tenth of a second for all 4,000."""
    # Other schemas are TorchScript's own.
    known = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("aten::")}
    found = []
    for schema in torch._C._jit_get_all_schemas():
        overload = schema.overload_name
        if (f"{schema.name}.{overload}" if overload else schema.name) in known and holds(schema):
            packet = getattr(torch.ops.aten, schema.name.removeprefix("aten::"))
            found.append(getattr(packet, overload or "default"))
    return found


def pytree_node(kind: type) -> Any:
    """How torch's pytrees take an instance of a class apart (``flatten_fn``, ``unflatten_fn``); None: they do not."""
    return _pytree.SUPPORTED_NODES.get(kind)


def operator_database() -> list[Any]:
    """Torch's operators with sample inputs, an `OpInfo` each; importing them takes seconds.

    Raises:
        ValueError: a package that torch's tests need is missing.
    """
    return _database("common_methods_invocations", "op_db")


def module_database() -> list[Any]:
    """Torch's modules with sample inputs, a `ModuleInfo` each.

    Raises:
        ValueError: a package that torch's tests need is missing.
    """
    return _database("common_modules", "module_db")


def _database(module: str, name: str) -> list[Any]:
    try:
        return list(getattr(import_module(f"torch.testing._internal.{module}"), name))
    except ModuleNotFoundError as e:
        raise ValueError(f"torch's samples need {e.name}: pip install {e.name}") from e
