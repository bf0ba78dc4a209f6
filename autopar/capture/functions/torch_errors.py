"""What errors of torch mean that end a trace, in the user's terms: their line, the reason, the remedy."""

from __future__ import annotations

import re
import traceback

from autopar.capture.functions.refused import ONLY_DENSE
from autopar.errors import CaptureError

_OURS = r"[/\\]torch[/\\]|[/\\]autopar[/\\]"
"""Files whose lines say nothing to the user."""

_ASKS = frozenset(("is_compiling", "is_torchdynamo_compiling"))
"""Functions that say whether a model is compiled."""

_SPARSE = ("layout_impl is only", "compressed tensor instance", "tensors do not have strides")
"""What torch says of tensors of compressed rows or columns."""

_REASONS = (
    (
        "requires_grad flags of leaf variables",
        "it sets requires_grad of a parameter, which is a computed tensor while the model is traced; set it outside of "
        "the model, between calls, or detach() in forward",
    ),
    (
        "Cannot backprop through mirrored meta",
        "it calls backward(); take torch.autograd.grad(loss, tensors, create_graph=True) of what the call computes",
    ),
    (
        "appears to not have been used in the graph",
        "it takes a gradient for a tensor that the result was not computed of; in an autograd function that saves "
        "parameters and computes anew, what it calls has others: use torch.utils.checkpoint.checkpoint(function, x, "
        "use_reentrant=False), or compute with the saved ones (torch.func.functional_call)",
    ),
    (
        "mutating a non-functional tensor",
        "a backward pass writes to a tensor of the model in place; do that in forward, under torch.no_grad()",
    ),
    ("set_ on a graph input", "it gives a tensor other memory (set_); assign a new tensor to the attribute"),
    ("Attempted to resize", "it resizes a tensor (resize_); assign a new tensor to the attribute, of torch.cat, say"),
    (
        "cannot assign 'torch.",
        "it replaces a parameter; do that outside of the model, or write to it under torch.no_grad()",
    ),
    (
        "Cannot assign non-leaf Tensor to parameter",
        "it registers a parameter, or puts one in the place of another; call the model once before parallelize() if "
        "only its first call does that, else do it outside of the model",
    ),
    (
        "registered for HigherOrderOperator",
        "it calls a loop of torch's own (while_loop, scan, map); write the loop in Python, of a fixed number of steps, "
        "or use torch.cond, torch.func.vmap or cumsum",
    ),
    (
        "nested_tensor",
        "it makes a nested tensor, of which no layout is known; pad the sequences to one length and mask what is "
        "padded, or put them in one row and let scaled_dot_product_attention's attn_mask keep them apart",
    ),
    *((part, f"it has a sparse tensor: {ONLY_DENSE}") for part in _SPARSE),
    ("OpaqueTensorImpl", f"it makes a tensor of oneDNN's layout (to_mkldnn): {ONLY_DENSE}"),
    ("its data is not allocated", "it makes a new tensor of a list that has tensors in it; use torch.stack"),
    (
        "Cannot access data pointer",
        "it asks where a tensor lies (data_ptr), or hands it to a kernel that is no operator; "
        "make that a torch.library.custom_op",
    ),
    (".numpy() is not supported", "it hands a tensor to numpy, whose values are not known; compute with torch"),
    ("unsupported format string", "it makes a text of a tensor, whose values are not known; keep the tensor itself"),
)
"""Texts of torch's errors, and what they mean to the user; texts change between versions, and then its own is shown."""


_GROUPED = "set config._experts_implementation to 'grouped_mm', which loops over none; or "
_STACKED = (
    "stack the experts' weights and multiply tokens, sorted by expert, by groups (torch._grouped_mm), or all tokens by "
    "all experts; or "
)

_OF_EXPERTS = re.compile(r"[Ee]xpert|M[oO]E|Moe|\bmoe")
"""Names of what is, or calls, a mixture of experts."""

_REMEDIES = {
    "lstsq": "solve the normal equations, torch.linalg.solve(a.mT @ a, a.mT @ b), or use torch.linalg.pinv(a) @ b; or ",
    "repeat_interleave": "pass output_size=, the sum of the repeats; or ",
    "bincount": "count with one_hot(values, n).sum(0), or with index_add; or ",
}
"""Functions of torch that look at values for a length, and what to write instead."""


def explained(error: Exception) -> CaptureError:
    """A tracing failure in the user's terms: their line, the reason, the remedy."""
    text = str(error)
    # The user's innermost frame: torch's and autopar's say nothing to them.
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not re.search(_OURS, f.filename)]
    line = f" at {frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else ""
    kind = type(error).__name__
    # By name and text: these errors have no public class, and their texts change between versions of torch.
    dynamic = "DataDependent" in kind or "DynamicOutputShape" in kind or "data-dependent" in text.lower()
    if dynamic or "Could not guard" in text or "_local_scalar_dense" in text:
        # A framework's loop over the experts that have tokens; it has other forms, too.
        stack = traceback.extract_tb(error.__traceback__)
        called = {f.name for f in stack}
        chosen = any(re.search(r"transformers[/\\]integrations[/\\]moe\.py", f.filename) for f in stack)
        code = [f.f_code for f, _ in traceback.walk_tb(error.__traceback__)]
        names = [line, *(c.co_qualname for c in code if not re.search(_OURS, c.co_filename))]
        remedy = "" if not any(_OF_EXPERTS.search(n) for n in names) else _GROUPED if chosen else _STACKED
        # Who takes a number out of a tensor may have computed that by any function.
        looked = called if re.search(r"\.(tolist|item)\(", line) else {*called, *re.findall(r"(\w+)\(", line)}
        remedy = next((r for name, r in _REMEDIES.items() if name in looked), remedy)
        return CaptureError(
            f"control flow that depends on data{line}: one graph must serve every batch; {remedy}"
            "use torch.where(mask, a, b) or torch.cond, or move the decision out of the model"
        )
    # The second is torch 2.11's.
    if ("DeviceMismatch" in kind or "FakeTensor Device Propagation" in text) and "meta" in text:
        return CaptureError(
            f"a tensor on the meta device that is no parameter, buffer or batch tensor{line}: its values would become "
            "constants of the graph; make it with register_buffer, or on a real device"
        )
    if "Unexpected fake buffer" in text:
        return CaptureError(
            "the model keeps a tensor from one call to the next in a place that is no attribute of a module "
            "(parametrize.cached(), functools.lru_cache, a global dict), where a trace cannot undo that: call it "
            "outside of cached(); keep it in an attribute or buffer; or clear the cache and run it before parallelize()"
        )
    functions = " ".join(f.name for f in traceback.extract_tb(error.__traceback__))
    for part, reason in _REASONS:
        if part in text or part in functions:
            return CaptureError(f"cannot capture the model{line}: {reason}")
    return CaptureError(
        f"cannot capture the model{line}: {kind}: {text.splitlines()[0] if text else ''}{_other_way(error)}"
    )


def _other_way(error: Exception) -> str:
    """Which of the functions that were called asks whether it is compiled, as a trace says, and does less then."""
    asking = [
        frame.f_code
        for frame, _ in traceback.walk_tb(error.__traceback__)
        if _ASKS.intersection(frame.f_code.co_names) and not re.search(_OURS, frame.f_code.co_filename)
    ]
    if not asking:
        return ""
    code = asking[-1]
    return (
        f"; {code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) leaves out what it does in eager mode where "
        "torch.compiler.is_compiling(): pass what it makes then, such as attention_mask"
    )
