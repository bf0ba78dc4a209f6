"""canonicalize_attention: graphs that were traced on different devices are the same."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn.functional import scaled_dot_product_attention

import autopar.strategies  # noqa: F401  registers every rule
from autopar.capture import capture
from autopar.ir.program import Program
from autopar.passes.canonicalize import canonical

aten = torch.ops.aten
OURS = torch.ops.autopar


class Attention(nn.Module):
    """Attention, perhaps with a bias or dropout."""

    def __init__(self, dropout: float, biased: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.qkv, self.dropout, self.biased = nn.Linear(16, 48), dropout, biased

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        rest: Any = {"attn_mask": bias} if self.biased else {"is_causal": True}
        return scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, **rest).square().mean()


def captured(dropout: float = 0.0, biased: bool = False) -> Program:
    return capture(Attention(dropout, biased), (torch.randn(4, 8, 16), torch.randn(4, 2, 8, 8)))


def as_on_a_gpu(program: Program, variant: str) -> Program:
    """The program with attention as that variant is traced: fake tensors stand for what only GPUs compute."""
    graph = program.graph.graph
    (forward,) = (n for n in graph.nodes if n.target is OURS.attention.default)
    (backward,) = (n for n in graph.nodes if n.target is OURS.attention_backward.default)
    q, k, v, bias, kept, p, causal, _ = forward.args
    grad = backward.args[0]
    out, total = (next(u for u in forward.users if u.args[1] == i) for i in (0, 1))
    value = out.meta["val"]
    state = value.new_empty(2, dtype=torch.int64)
    forms = {
        "flash": (
            aten._scaled_dot_product_flash_attention, (q, k, v, p, causal), total.meta["val"], (6, 7),
            lambda a, b: (grad, q, k, v, out, total, None, None, 8, 8, p, causal, a, b),
        ),
        "efficient": (
            aten._scaled_dot_product_efficient_attention, (q, k, v, bias, True, p, causal),
            value.new_empty((4, 2, 32), dtype=torch.float32), (2, 3),
            lambda a, b: (grad, q, k, v, bias, out, total, a, b, p, [True, True, True, False], causal),
        ),
        "cudnn": (
            aten._scaled_dot_product_cudnn_attention, (q, k, v, bias, True, p, causal),
            value.new_empty((4, 2, 8, 1), dtype=torch.float32), (6, 7),
            lambda a, b: (grad, q, k, v, out, total, a, b, bias, None, None, 8, 8, p, causal),
        ),
    }  # fmt: skip
    target, args, logarithms, positions, of_backward = forms[variant]
    made: list[Any] = [None] * 9
    made[0], made[1], made[positions[0]], made[positions[1]] = value, logarithms, state, state
    # Flash attention is told the scale that is the default.
    forward.target, forward.args, forward.kwargs = target.default, args, {"scale": 8**-0.5}
    forward.meta["val"], total.meta["val"] = tuple(made), logarithms
    states = []
    for position in positions:
        with graph.inserting_after(total):
            states.append(graph.call_function(operator.getitem, (forward, position)))
        states[-1].meta.update(forward.meta, val=state)
    name = target.__name__ + "_backward"
    backward.target, backward.args = getattr(aten, name).default, of_backward(*states)
    backward.kwargs = {"scale": 8**-0.5}
    if isinstance(kept, fx.Node):
        graph.erase_node(kept)
    graph.lint()
    return program


@pytest.mark.parametrize(
    ("variant", "dropout", "biased"),
    [
        ("flash", 0.0, False), ("flash", 0.1, False), ("efficient", 0.0, True), ("efficient", 0.1, True),
        ("efficient", 0.1, False), ("cudnn", 0.0, False), ("cudnn", 0.1, True),
    ],
)  # fmt: skip
def test_fingerprints_do_not_depend_on_the_device(variant: str, dropout: float, biased: bool) -> None:
    expected = canonical(captured(dropout, biased))
    traced = as_on_a_gpu(captured(dropout, biased), variant)
    assert any(variant in str(n.target) for n in traced.graph.graph.nodes)
    found = canonical(traced)
    assert not any("scaled_dot" in str(n.target) for n in found.graph.graph.nodes)
    assert found.fingerprint == expected.fingerprint


def test_what_reads_a_random_state_keeps_its_operator() -> None:
    program = as_on_a_gpu(captured(0.1), "flash")
    (state,) = (n for n in program.graph.graph.nodes if n.target is operator.getitem and n.args[1] == 6)
    with program.graph.graph.inserting_after(state):
        read = program.graph.graph.call_function(aten.clone.default, (state,))
    read.meta.update(state.meta)
    output = program.output_node
    output.args = ([*output.args[0][:-1], read],)  # type: ignore[index, misc]
    found = canonical(program)
    assert any("scaled_dot_product_flash_attention." in str(n.target) for n in found.graph.graph.nodes)


def test_the_operator_of_cpus_by_its_name() -> None:
    class ByName(Attention):
        def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            out, _ = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, True, scale=8**-0.5)
            return out.square().mean()

    batch = (torch.randn(4, 8, 16), torch.randn(4, 2, 8, 8))
    found, expected = (canonical(capture(kind(0.0, False), batch)) for kind in (ByName, Attention))
    assert found.fingerprint == expected.fingerprint
